"""Work with a fitted search: measure its minima again, report on them, predict with the best."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import optuna
import pandas as pd
from sklearn import get_config
from sklearn.utils import get_tags
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from relflat_sk._warnings import warn
from relflat_sk.measures import find_measures, hold_functions
from relflat_sk.minima import mark_depth_band, rank_minima, shorten_parameters
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._remeasure import (
    check_same,
    find_trial,
    has_weights,
    provide,
    remeasure,
)
from relflat_sk.search._report import render, render_short
from relflat_sk.search._results import FlattestSoFar, candidate_table, check_table, cv_results
from relflat_sk.search._weights import last_prefix

# Predict with the best estimator of a search.


def _if_estimator_has(method: str) -> Any:
    """Make a method available if the search refits and its estimator has the method."""

    def _check(search: Any) -> bool:
        if not search.refit:
            raise AttributeError(
                f"{method} is not available in a search with refit=False, which keeps no "
                "estimator. Set refit=True and fit again."
            )
        getattr(getattr(search, "best_estimator_", search.estimator), method)
        return True

    return available_if(_check)


class BestEstimatorMixin:
    """Methods and attributes that a fitted search takes from its best estimator."""

    estimator: Any
    best_estimator_: Any

    def _best(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    def _from_best(self, name: str) -> Any:
        if not hasattr(self, "best_estimator_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name} before it is fitted with refit=True."
            )
        return getattr(self.best_estimator_, name)

    @property
    def classes_(self) -> Any:
        """Class labels, of a classifier."""
        return self._from_best("classes_")

    @property
    def n_features_in_(self) -> int:
        """Number of features in the data that `fit` was given."""
        return int(self._from_best("n_features_in_"))

    @property
    def feature_names_in_(self) -> Any:
        """Names of the features in the data frame that `fit` was given."""
        return self._from_best("feature_names_in_")

    @_if_estimator_has("predict")  # type: ignore[untyped-decorator]
    def predict(self, X: Any) -> Any:
        """Predict with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_outputs)
            Predicted labels or values.
        """
        return self._best().predict(X)

    @_if_estimator_has("predict_proba")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict class probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Probabilities, in the order of `classes_`.
        """
        return self._best().predict_proba(X)

    @_if_estimator_has("predict_log_proba")  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """Predict logarithms of class probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Natural logarithms of the probabilities, in the order of `classes_`.
        """
        return self._best().predict_log_proba(X)

    @_if_estimator_has("decision_function")  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Any:
        """Compute the decision function of the flattest minimum.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.

        Returns
        -------
        ndarray of shape (n,) or (n, n_classes)
            The estimator's decision function.
        """
        return self._best().decision_function(X)

    @_if_estimator_has("score")  # type: ignore[untyped-decorator]
    def score(self, X: Any, y: Any = None) -> float:
        """Score the flattest minimum with the estimator's own `score`.

        Parameters
        ----------
        X : array-like of shape (n, n_features)
            Samples, as the estimator takes them.
        y : array-like of shape (n,) or (n, n_outputs), optional
            True labels or values.

        Returns
        -------
        float
            Accuracy for classifiers, R2 for regressors, unless the estimator has another score.
        """
        return float(self._best().score(X, y))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags = inner.classifier_tags
        tags.regressor_tags = inner.regressor_tags
        tags.target_tags = inner.target_tags
        tags.input_tags = inner.input_tags
        return tags


# Route the arguments of a search's `fit` to its estimator, as scikit-learn's searches do.


class RoutingMixin:
    """A search whose `fit` passes arguments on to its estimator."""

    estimator: Any

    def get_metadata_routing(self) -> MetadataRouter:
        """Return which arguments of `fit` the estimator asks for.

        Returns
        -------
        sklearn.utils.metadata_routing.MetadataRouter
            For scikit-learn's metadata routing.
        """
        router = MetadataRouter(owner=self).add_self_request(self)
        mapping = MethodMapping().add(caller="fit", callee="fit")
        return router.add(estimator=self.estimator, method_mapping=mapping)


def route(search: Any, fit_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `fit` that are the estimator's."""
    if not get_config()["enable_metadata_routing"]:
        return dict(fit_params)
    return dict(process_routing(search, "fit", **fit_params).estimator.fit)


class FittedSearchMixin(BestEstimatorMixin):
    """Methods of a fitted search."""

    minima_: pd.DataFrame
    estimator: Any
    measure: Any
    storage: Any
    study_: optuna.Study
    depth_band: float | None

    def _make_objective(
        self, X: Any, y: Any, X_test: Any = None, y_test: Any = None, fit_params: Any = None
    ) -> MinimaObjective:
        raise NotImplementedError

    def _table(self, measures: Iterable[str]) -> pd.DataFrame:
        """Return the unranked table of candidates, with `comparable` and short parameter names.

        Measures that no candidate has are columns of nan.
        """
        table = shorten_parameters(candidate_table(self.study_), last_prefix(self.estimator))
        nowhere = {name: np.nan for name in measures if name not in table.columns}
        return mark_depth_band(table.assign(**nowhere), self.depth_band)

    def _objective_of(self, X: Any, y: Any, fit_params: Any) -> MinimaObjective:
        """Return the objective of `fit`, made again from the data if the search was unpickled."""
        check_is_fitted(self, "minima_")
        found: MinimaObjective | None = getattr(self, "_objective", None)
        if X is not None:
            found = self._make_objective(X, y, fit_params=route(self, fit_params))
        if found is None:
            raise ValueError("X and y are needed: a search that was pickled left its data behind.")
        return found

    def get_estimator(self, number: int, X: Any = None, y: Any = None, **fit_params: Any) -> Any:
        """Return the estimator of any minimum, fitted.

        Parameters
        ----------
        number : int
            Number of its trial, from the column ``trial`` of `minima_`.
        X : array-like of shape (n, n_features), optional
            The training data that `fit` was given; needed only if the search was unpickled.
        y : array-like of shape (n,) or (n, n_outputs), optional
            The labels or values that `fit` was given.
        **fit_params
            The other arguments that `fit` was given, such as `sample_weight`; with X only.

        Returns
        -------
        estimator
            With the predictions that it had. It is restored from its weights if they were saved
            (`artifact_store`). Otherwise it is trained again with the same seed; the same within
            rounding after a search with a `fleet`.

        Raises
        ------
        ValueError
            If no such trial was trained to its end, or training again leads to another training
            loss, as it may on another machine.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.linear_model import LogisticRegression
        >>> from relflat_sk import FlatMinimaSearch
        >>> X, y = load_iris(return_X_y=True)
        >>> search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.5, 1.0]})
        >>> search.fit(X, y).get_estimator(1).C
        1.0
        """
        objective = self._objective_of(X, y, fit_params)
        if number == self.minima_["trial"].iloc[0] and hasattr(self, "best_estimator_"):
            return self.best_estimator_
        trial = find_trial(self.study_, number)
        check_made_with(self.study_, objective)
        estimator = provide(objective, trial)
        check_same(objective, trial, estimator)
        return estimator

    def remeasure(
        self,
        measures: Sequence[Any],
        X: Any = None,
        y: Any = None,
        *,
        retrain: bool = False,
        **fit_params: Any,
    ) -> pd.DataFrame:
        """Measure the minima again from their saved weights, without training.

        Parameters
        ----------
        measures : sequence of str or callable
            Names of measures, see `get_measure_names`, or functions of model, X and y, see
            `register_measure`. A minimum that has a measure already is not measured again.
        X : array-like of shape (n, n_features), optional
            The training data that `fit` was given; needed only if the search was unpickled.
        y : array-like of shape (n,) or (n, n_outputs), optional
            The labels or values that `fit` was given.
        retrain : bool, default=False
            Whether to train minima again, with the same seed, whose weights were not saved or
            whose files are damaged; damaged files are replaced.
        **fit_params
            The other arguments that `fit` was given, such as `sample_weight`; with X only.

        Returns
        -------
        pandas.DataFrame
            `minima_`, with a column for each measure, nan for candidates without weights or with
            damaged ones, which a warning names. The study stores the measures, too.

        Raises
        ------
        ValueError
            If no weights were saved (the search had no `artifact_store` when it trained), a
            name is not a measure, or estimator or data are not those of the study.
        """
        objective = self._objective_of(X, y, fit_params)
        remeasure(self.study_, objective, measures, retrain=retrain)
        table = self._table(map(str, find_measures(measures)))
        self.minima_ = rank_minima(table, by=objective.names[0], depth_band=None)
        return self.minima_

    @overload
    def report(self) -> str: ...

    @overload
    def report(self, path: Any) -> Path: ...

    def report(self, path: Any = None) -> Path | str:
        """Write a report on the search: one HTML page that any browser opens.

        The page holds the goal, the depth of the minima, why candidates were left out, the table
        of minima, which a click sorts, plots, the correlation of every measure with the
        generalization gap (if `fit` was given held-out data), the settings, all parameters of
        the estimator and the versions of all libraries. It loads nothing from elsewhere.

        Parameters
        ----------
        path : str or path, optional
            The file to write, such as ``"minima.html"``, in a folder that exists.

        Returns
        -------
        pathlib.Path or str
            The file; without `path`, the page itself, as from pandas' `DataFrame.to_html`.

        Raises
        ------
        OSError
            If the folder of the file does not exist.
        ImportError
            If matplotlib is not installed.
        """
        check_is_fitted(self, "minima_")
        if path is None:
            return render(self)
        file = Path(path)
        if not file.parent.is_dir():
            raise OSError(f"cannot write {file.name}: there is no folder {str(file.parent)!r}.")
        file.write_text(render(self), encoding="utf-8")
        return file

    def _rank(self, objective: MinimaObjective, interrupted: bool) -> None:
        """Set the attributes that describe the candidates; refuse a table without any."""
        table = self._table(map(str, objective.measures))
        stored_as = None if self.storage is None else self.study_.study_name
        check_table(table, interrupted, objective.estimator, stored_as)
        by = objective.names[0]
        self.minima_ = rank_minima(table, by=by, depth_band=None)
        trials = self.study_.get_trials(deepcopy=False)
        best = int(self.minima_["trial"].iloc[0])
        self.cv_results_ = cv_results(table, self.minima_, by, objective.space, trials)
        self.best_index_ = int(np.flatnonzero(table["trial"] == best)[0])
        self.best_params_ = objective.space.values(trials[best])
        self.best_score_ = float(self.cv_results_["mean_test_score"][self.best_index_])

    def _refit(
        self, objective: MinimaObjective, flattest: FlattestSoFar, interrupted: bool
    ) -> None:
        """Set `best_estimator_`, trained again only if there is no other way.

        After Ctrl-C nothing is trained, and the search has no best estimator.
        """
        best = self.study_.get_trials(deepcopy=False)[int(self.minima_["trial"].iloc[0])]
        held = flattest.estimator(best.number)
        if held is not None:
            self.best_estimator_ = held
        elif interrupted and not has_weights(objective, best):
            warn(
                f"the interrupted search has no best_estimator_: an earlier session "
                f"trained the flattest minimum, of trial {best.number}, and saved no weights. Fit "
                f"again, or train it by get_estimator({best.number})."
            )
        else:  # an earlier session trained it
            self.best_estimator_ = provide(objective, best)
            try:
                check_same(objective, best, self.best_estimator_)
            except ValueError as error:
                warn(f"best_estimator_ is not the network of the table: {error}")

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Add the flattest minima to what notebooks show of an estimator."""
        bundle = super()._repr_mimebundle_(**kwargs)  # type: ignore[misc]
        if "text/html" in bundle and hasattr(self, "minima_"):
            bundle["text/html"] += render_short(self)
        return bundle

    def __getstate__(self) -> Any:
        state: Any = super().__getstate__()
        state = {name: value for name, value in state.items() if name != "_objective"}
        # a registered name is known in this process only
        return state | {"measure": hold_functions(self.measure)}

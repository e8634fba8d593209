"""Choose by score in searches of scikit-learn: with flatness beside it, or a flatness penalty."""

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import clone, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV, check_cv
from sklearn.utils import get_tags
from sklearn.utils.multiclass import type_of_target

from relflat_sk._checks import check_kind, check_number, warn
from relflat_sk._models.network_of import last_prefix
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.fleet._trainer import in_turns
from relflat_sk.search._recipe import check_fit_params
from relflat_sk.search._results import average, check_mean
from relflat_sk.search._space import describe
from relflat_sk.search._task import isolated
from relflat_sk.training._after_fit import measured_later
from relflat_sk.training._nets import RelativeFlatnessRegularizedClassifier
from relflat_sk.training._tasks import looks_like_values, to_array

# -- score and flatness --------------------------------------------------------------------------

PREFIX = "mean_test_"  # of the columns of cv_results_ that hold scores
SCORE, FLATNESS = PREFIX + "score", PREFIX + "flatness"
ROUNDING = 1e-12  # relative; far above float64's epsilon, far below any real difference


def flattest_within(
    tolerance: float, score: str = SCORE, flatness: str = FLATNESS
) -> "FlattestWithin":
    """Make a rule for ``GridSearchCV(refit=...)``: choose the flattest of the good candidates.

    A candidate is good if its score is at most `tolerance` below the best score. The rule works
    with every search of scikit-learn that takes a callable `refit` and several scorers, one of
    them a `FlatnessScorer`.

    Parameters
    ----------
    tolerance : float
        How far below the best score a candidate may be, in the unit of the score: 0.01 is
        one point of accuracy. With 0, flatness decides only between equal scores.
    score : str, default="mean_test_score"
        The column of ``cv_results_`` with the score, or the name of its scorer; greater is better.
        With ``scoring={"accuracy": ...}`` these are ``"mean_test_accuracy"`` and ``"accuracy"``.
        The default also stands for the only column beside the one with the flatness.
    flatness : str, default="mean_test_flatness"
        The column with the score of a `FlatnessScorer`, minus the flatness, or the scorer's name.

    Returns
    -------
    FlattestWithin
        A callable from ``cv_results_`` to the index of the chosen candidate. It can be pickled,
        copied and compared.

    Raises
    ------
    ValueError
        If `tolerance` is no finite number of at least 0, or both columns are the same. At the end
        of the search, if ``cv_results_`` has no such columns, or no candidate has a finite score.

    Warns
    -----
    FlatnessWarning
        At the end of the search, if no good candidate has a flatness.

    See Also
    --------
    FlatnessScorer : Scores candidates by their flatness.
    FlatMinimaSearch : Chooses by flatness alone, without holding data out.

    Notes
    -----
    A candidate without a finite score is never chosen. Among equally flat candidates the first is
    chosen. A good candidate has no flatness if it is not at a minimum. If that is so for all good
    candidates, the rule chooses the best score among the candidates with a flatness; if there are
    none, among all.

    scikit-learn calls the rule when all candidates are fitted, so that names cannot be checked
    before.

    The halving searches of scikit-learn take one scorer only and do not ask `refit` for their
    choice, so that the rule has no effect there.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.model_selection import GridSearchCV
    >>> from relflat_sk import FlatnessScorer
    >>> X, y = load_iris(return_X_y=True)
    >>> search = GridSearchCV(
    ...     LogisticRegression(max_iter=5000),
    ...     {"C": [0.1, 1, 10, 100]},
    ...     scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()},
    ...     refit=flattest_within(0.02),
    ... ).fit(X, y)
    >>> search.cv_results_["mean_test_accuracy"].round(3).tolist()
    [0.947, 0.973, 0.973, 0.98]
    >>> search.best_params_  # as good as C=100 within the tolerance, and flatter
    {'C': 1}

    With more scorers, say which of them to use:

    >>> rule = flattest_within(0.02, score="accuracy", flatness="kappa")
    >>> results = {
    ...     "mean_test_accuracy": [0.91, 0.95, 0.94],
    ...     "mean_test_kappa": [-1.0, -9.0, -4.0],
    ... }
    >>> rule(results)
    2
    """
    reason = "how far below the best score a candidate may be, in the unit of the score"
    check_number("tolerance", tolerance, positive=False, reason=reason)
    columns = [PREFIX + name.removeprefix(PREFIX) for name in (score, flatness)]
    if columns[0] == columns[1]:
        raise ValueError(f"score and flatness are both {score!r}, expected two columns.")
    return FlattestWithin(float(tolerance), *columns)


@dataclass(frozen=True)
class FlattestWithin:
    """The rule that `flattest_within` makes; see there for the parameters.

    Parameters
    ----------
    tolerance : float
        How far below the best score a candidate may be.
    score : str
        The column of ``cv_results_`` with the score.
    flatness : str
        The column with minus the flatness.
    """

    tolerance: float
    score: str
    flatness: str

    def __call__(self, cv_results: Mapping[str, Any]) -> int:
        """Return the index of the chosen candidate in ``cv_results_``."""
        score, column = self._columns(cv_results)
        scores = np.asarray(cv_results[score], dtype=np.float64)
        scored = np.isfinite(scores)
        if not scored.any():
            raise ValueError(f"No candidate has a finite {score!r}: the search's warnings say why.")
        flatness = np.asarray(cv_results[column], dtype=np.float64)
        known = scored & np.isfinite(flatness)
        best = scores[scored].max()
        # in floating point, 0.98 - 0.96 is more than 0.02
        rounding = ROUNDING * (abs(best) + self.tolerance)
        good = known & (best - scores <= self.tolerance + rounding)
        if good.any():
            return int(np.argmax(np.where(good, flatness, -np.inf)))  # the first of equal ones
        among = known if known.any() else scored
        chosen = int(np.argmax(np.where(among, scores, -np.inf)))
        warn(
            f"no candidate within {self.tolerance:g} of the best {score!r}, {best:g}, has a "
            f"finite {column!r}; {known.sum()} of {len(scores)} have both. Candidate {chosen} is "
            f"chosen, with {scores[chosen]:g}. FlatnessScorer(non_minimum='warn') scores all."
        )
        return chosen

    def _columns(self, cv_results: Mapping[str, Any]) -> tuple[str, str]:
        """Find the columns of score and flatness; the default may stand for the only other one."""
        columns = [key for key in cv_results if key.startswith(PREFIX)]
        score, flatness = self.score, self.flatness
        if score == SCORE and score not in columns and flatness in columns and len(columns) == 2:
            (score,) = set(columns) - {flatness}
        missing = [column for column in (score, flatness) if column not in columns]
        if missing:
            raise ValueError(
                f"cv_results_ has no column {' and no column '.join(map(repr, missing))}, but "
                f"{columns}. Name both scorers: flattest_within(..., score=..., flatness=...)."
            )
        return score, flatness


# -- the penalty ---------------------------------------------------------------------------------

_PENALTIES: tuple[dict[str, Any], ...] = (
    {"flatness_weight": 0.0},
    {"flatness_layer": -1, "flatness_weight": 1.0},
    {"flatness_layer": -1, "flatness_weight": 10.0},
    {"flatness_layer": "all", "flatness_weight": 0.3},
    {"flatness_layer": "all", "flatness_weight": 1.0},
    {"flatness_layer": "all", "flatness_weight": 3.0},
)
# the strength of weight decay that torch couples to the learning rate only
_DECAYS: tuple[dict[str, Any], ...] = (
    {"flatness_weight": 0.0, "optimizer__weight_decay": 1.0},
    {"flatness_weight": 0.0, "optimizer__weight_decay": 3.0},
    {"flatness_layer": "all", "flatness_weight": 1.0, "optimizer__weight_decay": 1.0},
)


class RelativeFlatnessPenaltyCV(GridSearchCV):
    """Choose layer and weight of the flatness penalty by cross-validation.

    On small and noisy tables, the penalty moves the accuracy by several points, up or down, and
    which layer and weight suit is a property of the data. This is scikit-learn's `GridSearchCV`
    over settings of the penalty, with weight decay among them. The networks of all settings and
    folds are trained together, see `fleet_training`.

    Parameters
    ----------
    estimator : estimator, optional
        A net of `relflat_sk`, alone, in a `Pipeline` or in another estimator that has its
        parameters. None is ``RelativeFlatnessRegularizedClassifier(verbose=0)``.
    penalties : sequence of dict, optional
        The settings to choose from: parameters of the net, without prefix. None takes no penalty;
        the last layer with the weights 1 and 10; all layers with 0.3, 1 and 3; and, if the
        optimizer is Adam or AdamW, AdamW's weight decay of 1 and 3 alone, and of 1 together with
        the penalty at all layers.
    cv : int, splitter or iterable, default=5
        The folds, as in `GridSearchCV`.
    scoring : str or callable, optional
        What the folds are judged by; greater is better. None is the net's `score`.
    refit : bool or "mean", default=True
        True trains a network with the best setting on all data. "mean" predicts with the mean of
        the folds' networks at the best setting, which need no further training. False chooses
        only.

    Attributes
    ----------
    best_params_ : dict
        The best setting. If several have the best score, the one with the smallest weights of
        penalty and decay.
    best_score_ : float
        Its mean score over the folds.
    best_estimator_ : estimator
        What predicts, unless `refit` is False. With ``refit="mean"`` a `VotingClassifier` or
        `VotingRegressor` of the folds' networks.
    cv_results_ : dict of str to ndarray
        Scores of each setting and fold, as in `GridSearchCV`.
    best_index_, scorer_, n_splits_, refit_time_, multimetric_ : object
        As in `GridSearchCV`.

    Raises
    ------
    ValueError
        From `fit`, if the estimator has no parameter `flatness_weight`, or more than one, if a
        setting names no parameter of the net, `refit` or `scoring` is none of the above, or with
        ``refit="mean"``, if predictions have no mean or a fold is trained without a class.
    TypeError
        From `fit`, if `penalties` is no list of dicts.

    See Also
    --------
    FlatMinimaSearch : Trains each candidate on all data, and holds nothing out.
    fleet_training : Trains the nets of any other search together.

    Notes
    -----
    Folds choose between settings that differ by a point or more. Smaller differences are within
    the noise of the folds.

    Networks that predict for their scores only are not measured. Warnings of how a training ended
    come from the network of the best setting, and, with ``refit="mean"`` or a `scoring` that is no
    name, from those of all folds.

    Examples
    --------
    >>> from sklearn.datasets import load_wine
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_wine(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(max_epochs=10, verbose=0, random_state=0)
    >>> penalties = [{"flatness_weight": 0}, {"flatness_layer": "all", "flatness_weight": 1}]
    >>> search = RelativeFlatnessPenaltyCV(make_pipeline(StandardScaler(), net), penalties, cv=3)
    >>> search.fit(X, y).score(X, y) > 0.9
    True
    """

    def __init__(
        self,
        estimator: Any = None,
        penalties: Sequence[Mapping[str, Any]] | None = None,
        cv: Any = 5,
        scoring: Any = None,
        refit: bool | str = True,
    ) -> None:
        super().__init__(estimator, None, scoring=scoring, refit=refit, cv=cv)
        self.penalties = penalties

    def fit(self, X: Any, y: Any = None, **params: Any) -> "RelativeFlatnessPenaltyCV":
        """Train the networks of all settings and folds, and choose a setting.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Training inputs.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Labels or values.
        **params
            Further arguments of the estimator's `fit`, such as `sample_weight`, as in
            `GridSearchCV`. They are split like X.

        Returns
        -------
        self
            The fitted search.

        Raises
        ------
        ValueError
            If a parameter is not valid, a classifier gets the targets of a regression, sample
            weights are wrong, or the estimator does not fit the data.
        """
        if self.refit not in (True, False, "mean"):
            raise ValueError(f"refit must be True, False or 'mean', got {self.refit!r}.")
        if isinstance(self.scoring, Iterable) and not isinstance(self.scoring, str):
            raise ValueError(f"scoring must be a single name or callable, got {self.scoring!r}.")
        search, averages = self._grid_search(), self.refit == "mean"
        _check_labels(search.estimator, y)
        weights = check_fit_params(X, params, last_prefix(search.estimator))["sample_weight"]
        scorer = check_scoring(search.estimator, self.scoring)
        search.scoring = judge = _Scorer(scorer, keeps=averages)
        if averages:
            check_mean("mean", search.estimator, y)
            if _learns_classes(search.estimator, y):
                search.cv = _FoldsOfAllClasses(check_cv(self.cv, y, classifier=True), weights)
        # a net that only predicts for its score need not be measured
        is_seen = averages or not isinstance(self.scoring, str | None)
        with (
            isolated(None),  # torch has one random state for all threads
            in_turns(within=nullcontext if is_seen else measured_later),
            warnings.catch_warnings(),
        ):
            # folds judge every setting, also one whose weight is too large to count
            warnings.filterwarnings("ignore", ".*at its limit", FlatnessWarning)
            search.fit(X, y, **params)
        for name, learned in vars(search).items():
            if name.endswith("_"):
                setattr(self, name, learned)
        self.best_index_ = _weakest_of_best(self.cv_results_)
        self.best_params_ = self.cv_results_["params"][self.best_index_]
        self.best_score_ = self.cv_results_[SCORE][self.best_index_]
        self.scorer_ = scorer
        if averages:
            started = time.perf_counter()
            names = sorted(set().union(*search.cv_results_["params"]))
            best = _values_of(clone(search.estimator).set_params(**self.best_params_), names)
            folds = [net for net in judge.estimators if _values_of(net, names) == best]
            self.best_estimator_ = average({f"fold{i}": net for i, net in enumerate(folds)}, y)
            if hasattr(self.best_estimator_, "feature_names_in_"):
                self.feature_names_in_ = self.best_estimator_.feature_names_in_
            self.refit_time_ = time.perf_counter() - started
        return self

    def _grid_search(self) -> GridSearchCV:
        """Return scikit-learn's search over the settings, from the weakest to the strongest."""
        estimator = self.estimator
        if estimator is None:
            estimator = RelativeFlatnessRegularizedClassifier(verbose=0)
        settings = _settings(estimator, self.penalties)
        grid = [{name: [value] for name, value in setting.items()} for setting in settings]
        refit = _weakest_of_best if self.refit and self.refit != "mean" else False
        return GridSearchCV(estimator, grid, scoring=self.scoring, refit=refit, cv=self.cv)

    def __getattr__(self, name: str) -> Any:
        """Find a method that `GridSearchCV` does not find in an estimator that is None."""
        own = vars(self)
        is_default = "estimator" in own and own["estimator"] is None
        if is_default and "best_estimator_" not in own and not name.startswith("_"):
            return getattr(clone(self).set_params(estimator=self._grid_search().estimator), name)
        return self.__getattribute__(name)  # raises

    def __sklearn_tags__(self) -> Any:
        return get_tags(self._grid_search().estimator)

    def get_metadata_routing(self) -> Any:
        """Return how metadata are routed, as in `GridSearchCV`.

        Returns
        -------
        MetadataRouter
            Of the estimator, the scorer and the folds.
        """
        return self._grid_search().get_metadata_routing()


def _settings(
    estimator: Any, penalties: Iterable[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return parameters of an estimator for each setting of its net, the weakest first."""
    known = estimator.get_params()
    names = [name for name in known if name.split("__")[-1] == "flatness_weight"]
    if len(names) != 1:
        raise ValueError(
            f"{type(estimator).__name__} has {len(names)} parameters flatness_weight, expected "
            "one: pass a RelativeFlatnessRegularizedNet, or a pipeline that ends in one."
        )
    prefix = names[0].removesuffix("flatness_weight")
    if penalties is None:
        penalties = list(_PENALTIES)
        optimizer = known[f"{prefix}optimizer"]
        if optimizer in (torch.optim.Adam, torch.optim.AdamW):
            penalties += [{"optimizer": torch.optim.AdamW} | setting for setting in _DECAYS]
    settings = list(penalties)
    are_settings = all(isinstance(setting, Mapping) for setting in settings)
    kind = "a list of dicts, such as list(ParameterGrid(...))"
    check_kind(are_settings, "penalties", penalties, kind)
    weights = ("flatness_weight", "optimizer__weight_decay")
    settings.sort(key=lambda setting: [setting.get(name, 0.0) for name in weights])
    return [{f"{prefix}{name}": value for name, value in setting.items()} for setting in settings]


def _weakest_of_best(cv_results: Mapping[str, Any]) -> int:
    """Return the index of the first setting whose score is the best one, but for rounding."""
    scores = np.nan_to_num(cv_results[SCORE], nan=-np.inf)
    return int(np.argmax(scores >= scores.max() - ROUNDING * abs(scores.max())))


def _check_labels(estimator: Any, y: Any) -> None:
    """Refuse the targets of a regression for a classifier, once before all folds."""
    if not _learns_classes(estimator, y):
        return
    labels = to_array(y)
    kind = type_of_target(labels, input_name="y")
    if kind == "continuous" or (kind == "multiclass" and looks_like_values(np.ravel(labels))):
        raise ValueError(
            f"Unknown label type: {kind}. {len(np.unique(labels))} different values in "
            f"{len(labels)} samples look like a regression: pass a "
            "RelativeFlatnessRegularizedRegressor, or for labels classes= to the net."
        )


def _learns_classes(estimator: Any, y: Any) -> bool:
    """Return whether a classifier learns from y which classes there are, without a list of them."""
    params = estimator.get_params()
    lists = any(params[name] is not None for name in params if name.split("__")[-1] == "classes")
    return is_classifier(estimator) and y is not None and not lists


def _values_of(estimator: Any, names: Iterable[str]) -> list[str]:
    """Describe the parameters of an estimator that settings vary."""
    params = estimator.get_params()
    return [describe(params.get(name)) for name in names]


class _Scorer:
    """A scorer of one number, which keeps the estimators of the folds if they are averaged."""

    def __init__(self, scorer: Any, *, keeps: bool) -> None:
        self.__wrapped__ = scorer
        self.keeps = keeps
        self.estimators: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Return what scikit-learn asks of a scorer, such as whether it takes weights."""
        return getattr(self.__wrapped__, name)

    def __call__(self, estimator: Any, *args: Any, **kwargs: Any) -> Any:
        if self.keeps:
            self.estimators.append(estimator)
        score = self.__wrapped__(estimator, *args, **kwargs)
        # scikit-learn refuses several scores where it expects one, at the first fold
        return {"scoring": score} if isinstance(score, Mapping) else score


@dataclass
class _FoldsOfAllClasses:
    """A splitter that refuses folds whose networks know other classes, and so have no mean."""

    cv: Any
    weights: NDArray[np.float64] | None  # (n,)

    def __getattr__(self, name: str) -> Any:
        """Return what scikit-learn asks of a splitter, such as the number of folds."""
        return getattr(self.cv, name)

    def split(self, X: Any, y: Any, **params: Any) -> list[Any]:
        """Split as the splitter does."""
        folds, labels = list(self.cv.split(X, y, **params)), np.ravel(to_array(y))
        counts = np.ones(len(labels), bool) if self.weights is None else self.weights > 0
        for number, (train, _) in enumerate(folds):
            missing = np.setdiff1d(labels[counts], labels[train][counts[train]])
            if len(missing):
                raise ValueError(
                    f"refit='mean' averages networks that know all classes, and fold {number} is "
                    f"trained without {missing.tolist()}. Use fewer or stratified folds, list all "
                    "classes (classes=) in the net, or set refit=True."
                )
        return folds

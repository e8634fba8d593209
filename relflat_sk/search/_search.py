"""Search for flat minima: train every candidate on all the data, rank them, keep the flattest."""

import copy
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
from joblib import effective_n_jobs
from optuna.samplers import NSGAIIISampler, NSGAIISampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial
from sklearn.base import BaseEstimator, MetaEstimatorMixin
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from tqdm import tqdm

from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.minima import STATES, is_converged, rank_minima, table_of_trials
from relflat_sk.search._remeasure import remeasure
from relflat_sk.search._report import render
from relflat_sk.search._results import cv_results, list_reasons
from relflat_sk.search._sharing import (
    CandidateSampler,
    Draws,
    Grid,
    Kept,
    Sweep,
    Wanted,
    check_resumable,
    give_up,
    in_memory,
    is_cut_short,
    log_level,
    open_storage,
    run_in_processes,
)
from relflat_sk.search._trial import ARTIFACT, MinimaObjective, Space

__all__ = ["FlatMinimaSearch"]


def _delegates(method: str) -> Any:
    def check(search: Any) -> bool:
        if not search.refit:
            raise AttributeError(
                f"{method} is not available in a search with refit=False, which keeps no network."
            )
        getattr(getattr(search, "best_estimator_", search.estimator), method)
        return True

    return available_if(check)


class FlatMinimaSearch(MetaEstimatorMixin, BaseEstimator):
    """Train candidates to convergence on all the data and keep the flattest minimum.

    Where `GridSearchCV` fits every candidate k times on parts of the data and once more on
    all of it, this fits each once, on all of it: no fold is held out.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes. It should train until convergence, for
        instance by a `StopAtLoss` callback: only minima can be ranked.
    space : dict
        By parameter name, a list of choices, an Optuna distribution or a function of the
        trial. Names that begin with ``data__`` vary the training data, see `MinimaObjective`.
    measure : str or sequence of str, default="relative_flatness"
        What to rank by, see `get_measure_names`; of several, the first ranks and the
        others are recorded. With `NSGAIISampler` or `NSGAIIISampler` the study has an objective
        for each, ``"train_loss"`` may be one, and the column `pareto` of `minima_` says which
        minima no other one beats in all of them.
    n_trials : int, optional
        How many candidates in all, those of a resumed study included; all combinations if
        None, which needs a space of choices.
    sampler : optuna sampler, optional
        Used as a copy. If None, the whole grid where the space is choices only and `n_trials`
        allows it, otherwise `TPESampler`, which then repeats no combination of choices.
    storage : str or optuna storage, optional
        Such as ``"sqlite:///minima.db"``; in memory if None.
    study_name : str, optional
        With a storage: an existing study of that name is resumed. What is finished, or has
        failed for a reason of its own, is not trained again; what was interrupted or killed is.
        If None, every `fit` is a new study.
    pruner : optuna pruner, optional
        Stops hopeless candidates by their training loss.
    n_jobs : int, optional
        Processes; None or 1 trains in this one. A `sampler` of one's own then draws without
        its seed.
    artifact_store : str, path or optuna artifact store, optional
        Where to keep the weights of every minimum, in a folder if it is a path: for
        `remeasure`, and to refit what an earlier session trained.
    lr_scaling : "linear", optional
        Scale learning rates in proportion to the batch size, relative to the estimator's own;
        what came out is the column ``param_scaled_...``.
    refit : bool, default=True
        Provide `best_estimator_`: the very network that was measured, or, if an earlier
        session trained it, one with its weights if they were kept, or else one trained again,
        which is the same if it is seeded.
    random_state : int, RandomState or None, default=None
        Seeds the sampler, every `random_state` of the estimator that is None, and torch while
        a candidate trains, so that plain skorch nets can be reproduced too.
    verbose : int, default=0
        1 shows a progress bar, 2 Optuna's log as well.

    Attributes
    ----------
    minima_ : DataFrame
        One row per candidate, flattest first: parameters, measures, `train_loss`,
        `test_loss`, `generalization_gap`, scores, `converged`, `seconds`, `reason`, `rank`.
    best_estimator_ : estimator
        The flattest minimum, trained on all of X.
    best_params_ : dict
    best_score_ : float
        Minus its flatness: greater is flatter, as in scikit-learn.
    best_index_ : int
        Its place in `cv_results_`.
    cv_results_ : dict
        As in scikit-learn's searches, with one fit per candidate: `mean_test_score` is minus
        the measure, on the training data, and nan for what is no minimum; `rank_test_score`,
        `params`, ``param_...``, `mean_fit_time`.
    study_ : optuna.Study
        Also holds what was interrupted, which the tables leave out.
    classes_, n_features_in_, feature_names_in_
        Those of `best_estimator_`.

    Raises
    ------
    ValueError
        From `fit`, if an argument is not valid, a study of that name is one of other data or
        another space, or no candidate could be trained; the reasons are listed.

    Notes
    -----
    A candidate that fails, diverges, runs out of memory or is no better than a constant is
    recorded as failed, with its reason, and one that did not reach its goal as not converged;
    both rank behind every minimum. What failed is not tried again; with `n_jobs`, a candidate
    whose process is killed is tried once more, on its own.

    Ctrl-C ends the search with what was finished. Searches with the same `storage` and
    `study_name` share the work, from one machine or several, and no candidate is trained twice.
    What a killed process was at is trained again by whoever comes next: of another machine one
    knows only through a heartbeat, ``RDBStorage(url, heartbeat_interval=60)``.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = load_iris(return_X_y=True)
    >>> search = FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.01, 1.0]})
    >>> search.fit(X, y).best_params_
    {'C': 0.01}
    """

    def __init__(  # noqa: PLR0913
        self,
        estimator: Any,
        space: Any,
        *,
        measure: Any = "relative_flatness",
        n_trials: int | None = None,
        sampler: Any = None,
        storage: Any = None,
        study_name: str | None = None,
        pruner: Any = None,
        n_jobs: int | None = None,
        artifact_store: Any = None,
        lr_scaling: str | None = None,
        refit: bool = True,
        random_state: Any = None,
        verbose: int = 0,
    ) -> None:
        self.estimator = estimator
        self.space = space
        self.measure = measure
        self.n_trials = n_trials
        self.sampler = sampler
        self.storage = storage
        self.study_name = study_name
        self.pruner = pruner
        self.n_jobs = n_jobs
        self.artifact_store = artifact_store
        self.lr_scaling = lr_scaling
        self.refit = refit
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None, X_test: Any = None, y_test: Any = None) -> Any:
        """Train and rank the candidates.

        Parameters
        ----------
        X, y : array-like
            Training data, all of which every candidate is trained on.
        X_test, y_test : array-like, optional
            Held-out data: recorded in `minima_`, never used to choose.

        Returns
        -------
        self
            After Ctrl-C too, with what was finished.
        """
        self.__dict__.pop("best_estimator_", None)
        rng = check_random_state(self.random_state)
        seeds = (None, None) if self.random_state is None else rng.randint(2**31 - 1, size=2)
        self._seed = seeds[1]
        objective = self._make_objective(X, y, X_test, y_test)
        self._check_arguments()
        wanted = self._wanted(objective.space)
        quiet = self.verbose < 2
        with log_level(quiet), tempfile.TemporaryDirectory() as folder:
            study = self._create_study(folder)
            check_resumable(study, objective, self._n_objectives())
            study.sampler = copy.deepcopy(self.sampler) or CandidateSampler(
                None if seeds[0] is None else int(seeds[0]), objective.space
            )
            sweep = Sweep(objective, wanted, quiet)
            interrupted, kept = self._optimize(study, sweep)
            if self.storage is None and self._processes() > 1:
                study = in_memory(study)  # the journal goes with the folder
        self.study_ = study
        self._objective = objective
        self._finish(objective, kept, interrupted)
        return self

    def _make_objective(
        self, X: Any, y: Any, X_test: Any = None, y_test: Any = None
    ) -> MinimaObjective:
        return MinimaObjective(
            self.estimator,
            X,
            y,
            self.space,
            measures=[self.measure] if isinstance(self.measure, str) else list(self.measure),
            X_test=X_test,
            y_test=y_test,
            artifact_store=self.artifact_store,
            lr_scaling=self.lr_scaling,
            random_state=self._seed,
        )

    def _check_arguments(self) -> None:
        if self.n_trials is not None and (
            isinstance(self.n_trials, bool)
            or not isinstance(self.n_trials, int | np.integer)
            or self.n_trials < 1
        ):
            raise ValueError(f"n_trials must be a positive integer or None, got {self.n_trials!r}.")
        for name, kind in (
            ("sampler", optuna.samplers.BaseSampler),
            ("pruner", optuna.pruners.BasePruner),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be an optuna {name} or None, got {value!r}.")
        if self._processes() > 1 and isinstance(self.storage, optuna.storages.InMemoryStorage):
            raise ValueError(
                f"n_jobs={self.n_jobs} processes cannot share a storage in memory: leave storage "
                "out, or give a file, such as 'sqlite:///minima.db'."
            )

    def _wanted(self, space: Space) -> Wanted:
        """Say what to train: all combinations if that is no more than was asked for."""
        grid = space.grid() if self.sampler is None else None
        if self.n_trials is None and grid is None:
            raise ValueError(
                "n_trials is needed with a sampler: say how many candidates."
                if self.sampler is not None
                else "n_trials is needed: the space has distributions or functions, so that there "
                "is no whole grid to train."
            )
        if self.n_trials is None or (grid is not None and self.n_trials >= len(grid)):
            return Grid(grid or [])
        return Draws(int(self.n_trials))

    def _processes(self) -> int:
        return 1 if self.n_jobs is None else int(effective_n_jobs(self.n_jobs))

    def _n_objectives(self) -> int:
        """Say how many measures the sampler trades against each other."""
        several = isinstance(self.sampler, NSGAIISampler | NSGAIIISampler)
        return len(self.measure) if several and not isinstance(self.measure, str) else 1

    def _create_study(self, folder: str) -> optuna.Study:
        storage = self.storage
        if storage is None and self._processes() > 1:
            storage = JournalStorage(JournalFileBackend(str(Path(folder) / "journal.log")))
        return optuna.create_study(
            directions=["minimize"] * self._n_objectives(),
            storage=open_storage(storage),
            pruner=self.pruner or optuna.pruners.NopPruner(),
            study_name=self.study_name,
            load_if_exists=self.study_name is not None,
        )

    def _optimize(self, study: optuna.Study, sweep: "Sweep") -> tuple[bool, "Kept"]:
        """Train what is missing; say whether Ctrl-C ended that, and what is worth keeping."""
        kept = Kept(self.refit)
        with tqdm(
            total=sweep.n_open(study), desc="minima", unit="net", disable=not self.verbose
        ) as bar:

            def keep(trial: FrozenTrial, estimator: Any) -> None:
                bar.total = bar.n + 1 + sweep.n_open(study)  # others may train, too, or die
                bar.update()
                kept.offer(trial, estimator)

            try:
                if self._processes() > 1:
                    run_in_processes(study, sweep, self._processes(), keep)
                else:
                    while sweep.run(study, keep):
                        pass
            except KeyboardInterrupt:
                # the processes that trained are gone, and so is what they were at
                give_up(study, sweep.has)
                return True, kept
        return False, kept

    def _finish(self, objective: MinimaObjective, kept: "Kept", interrupted: bool) -> None:
        trials = self.study_.get_trials(deepcopy=False)
        table = self._table()
        if interrupted and not table["state"].eq("complete").any():
            raise KeyboardInterrupt("before any candidate was finished.")
        if not table["state"].eq("complete").any():
            raise ValueError(
                f"none of {len(table)} candidates could be trained and measured:\n"
                + list_reasons(table)
            )
        if interrupted:
            warnings.warn(
                f"interrupted: the search ends with the {len(table)} candidates that were "
                "finished. To train the others, fit again with the same storage and study_name.",
                FlatnessWarning,
                stacklevel=3,
            )
        self.minima_ = rank_minima(table, by=objective.names[0])
        if not is_converged(table).any():
            warnings.warn(
                "no candidate converged, so that this is a ranking of networks on their way, not "
                "of minima: train longer (max_epochs), or to a goal within reach (StopAtLoss).\n"
                + list_reasons(table),
                FlatnessWarning,
                stacklevel=3,
            )
        best = int(self.minima_["trial"].iloc[0])
        self.cv_results_ = cv_results(
            table, self.minima_, objective.names[0], objective.space, trials
        )
        self.best_index_ = int(np.flatnonzero(table["trial"] == best)[0])
        self.best_params_ = objective.space.values(trials[best])
        self.best_score_ = float(self.cv_results_["mean_test_score"][self.best_index_])
        if not self.refit:
            return
        if kept.number == best:
            self.best_estimator_ = kept.estimator
        elif self.artifact_store is not None and ARTIFACT in trials[best].user_attrs:
            self.best_estimator_ = objective.restore(self.best_params_, trials[best])
        else:  # trained in an earlier session
            self.best_estimator_ = objective.train(self.best_params_, trials[best].params)

    def _table(self) -> pd.DataFrame:
        """Arrange what there is in the order of the trials."""
        trials = self.study_.get_trials(deepcopy=False)
        ended = [t for t in trials if t.state in STATES and not is_cut_short(t)]
        table = table_of_trials(ended, self.study_.user_attrs)
        if len(self.study_.directions) > 1:
            front = [trial.number for trial in self.study_.best_trials]
            table["pareto"] = table["trial"].isin(front)
        return table

    def remeasure(self, measures: Sequence[str], X: Any = None, y: Any = None) -> pd.DataFrame:
        """Take more measures of the minima found, by their weights, without training again.

        Parameters
        ----------
        measures : sequence of str
            See `get_measure_names`.
        X, y : array-like, optional
            The data that `fit` was given; not needed in the same session.

        Returns
        -------
        DataFrame
            `minima_`, in which they are now too, nan where there is no network. The study
            keeps them, and what was measured already is not measured again.

        Raises
        ------
        ValueError
            If no weights were kept: give the search an `artifact_store` before it trains.
        """
        check_is_fitted(self, "minima_")
        objective = getattr(self, "_objective", None) if X is None else self._make_objective(X, y)
        if objective is None:
            raise ValueError("X and y are needed: a search that was pickled left its data behind.")
        remeasure(self.study_, objective, measures)
        self.minima_ = rank_minima(self._table(), by=objective.names[0])
        return self.minima_

    def report(self, path: Any) -> Path:
        """Write the search down as one HTML page, to be opened in any browser.

        It holds the table of minima, which can be sorted, plots, the correlation of every
        measure with the gap (where held-out data were given to `fit`), the settings and the
        versions of all libraries, and loads nothing from elsewhere. It needs matplotlib.

        Parameters
        ----------
        path : str or path
            The file to write, such as ``"minima.html"``.

        Returns
        -------
        Path
        """
        check_is_fitted(self, "minima_")
        file = Path(path)
        file.write_text(render(self), encoding="utf-8")
        return file

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_objective"}

    # -- what the best estimator does --------------------------------------------------------

    def _best(self) -> Any:
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    @property
    def classes_(self) -> Any:
        """Class labels, of a classifier."""
        return self._learned("classes_")

    @property
    def n_features_in_(self) -> int:
        """Number of features seen in `fit`."""
        return int(self._learned("n_features_in_"))

    @property
    def feature_names_in_(self) -> Any:
        """Names of the features seen in `fit`, of data frames."""
        return self._learned("feature_names_in_")

    def _learned(self, name: str) -> Any:
        if not hasattr(self, "best_estimator_"):
            raise AttributeError(
                f"{type(self).__name__} has no {name} before it is fitted with refit=True."
            )
        return getattr(self.best_estimator_, name)

    @_delegates("predict")  # type: ignore[untyped-decorator]
    def predict(self, X: Any) -> Any:
        """Predict with the flattest minimum.

        Parameters
        ----------
        X : array-like

        Returns
        -------
        array
        """
        return self._best().predict(X)

    @_delegates("predict_proba")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like

        Returns
        -------
        array of shape (n, n_classes)
        """
        return self._best().predict_proba(X)

    @_delegates("predict_log_proba")  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """Predict logarithms of probabilities with the flattest minimum.

        Parameters
        ----------
        X : array-like

        Returns
        -------
        array of shape (n, n_classes)
        """
        return self._best().predict_log_proba(X)

    @_delegates("decision_function")  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> Any:
        """Compute the decision function of the flattest minimum.

        Parameters
        ----------
        X : array-like

        Returns
        -------
        array
        """
        return self._best().decision_function(X)

    @_delegates("score")  # type: ignore[untyped-decorator]
    def score(self, X: Any, y: Any = None) -> float:
        """Score the flattest minimum by the estimator's own score.

        Parameters
        ----------
        X, y : array-like

        Returns
        -------
        float
        """
        return float(self._best().score(X, y))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags = inner.classifier_tags
        tags.regressor_tags = inner.regressor_tags
        tags.target_tags = inner.target_tags
        tags.input_tags = inner.input_tags
        return tags

"""Sweep over minima: train every candidate on all the data, rank them by flatness."""

import signal
import tempfile
import threading
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import torch
from joblib import Parallel, delayed, effective_n_jobs
from optuna.artifacts import upload_artifact
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.base import BaseEstimator, MetaEstimatorMixin, clone
from sklearn.utils import check_random_state, get_tags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from skorch import NeuralNet
from skorch.callbacks import Callback
from tqdm import tqdm

from relflat_sk._estimators import DataOptions, final_estimator, to_network
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures import check_name, evaluate
from relflat_sk.minima import is_converged, minima_table, rank_minima
from relflat_sk.network import mean_loss
from relflat_sk.space import Space

__all__ = ["FlatMinimaSearch", "MinimaObjective"]

_DIRECTIONS = {"minimize": 1.0, "maximize": -1.0}


class MinimaObjective:
    """One trial, one minimum: for `optuna.Study.optimize`.

    Clones the estimator, sets the parameters that the trial suggests, trains on all of X
    (no fold is held out: the `train_split` of skorch nets is switched off), and records in
    ``trial.user_attrs`` what the table of minima shows: every measure, `train_loss`,
    `test_loss`, `generalization_gap`, scores, `converged`, `seconds`.

    Parameters
    ----------
    estimator : estimator
        Any model that `relative_flatness` takes; cloned for each trial.
    X, y : array-like
        Training data.
    space : dict
        By parameter name, a list of choices, an Optuna distribution or a function of the
        trial.
    measures : sequence of str, default=("relative_flatness",)
        What to measure, see `get_measure_names`; one objective for each.
    direction : {"minimize", "maximize"}, default="minimize"
        The direction of the study: "maximize" makes the objective minus the measure.
    X_test, y_test : array-like, optional
        Held-out data; recorded, never used to choose.
    artifact_store : optuna artifact store, optional
        Where to keep the weights of every minimum (a `state_dict` that
        ``torch.load(..., weights_only=True)`` reads); the trial's attribute `artifact_id`
        says which.
    random_state : int, RandomState or None, default=None
        Seeds every `random_state` of the estimator that is None, differently for each
        combination of parameters and the same when it is trained again.

    Raises
    ------
    ValueError
        If the space or a name in it is not valid, before anything is trained.

    Examples
    --------
    >>> import optuna
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.linear_model import LogisticRegression
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> X, y = load_iris(return_X_y=True)
    >>> objective = MinimaObjective(
    ...     LogisticRegression(max_iter=1000), X, y, {"C": [0.01, 1.0]}
    ... )
    >>> grid = optuna.samplers.GridSampler({"C": [0.01, 1.0]}, seed=0)
    >>> study = optuna.create_study(sampler=grid)
    >>> study.optimize(objective)
    >>> study.best_params
    {'C': 0.01}
    """

    def __init__(  # noqa: PLR0913
        self,
        estimator: Any,
        X: Any,
        y: Any,
        space: Mapping[str, Any],
        *,
        measures: Sequence[str] = ("relative_flatness",),
        direction: str = "minimize",
        X_test: Any = None,
        y_test: Any = None,
        artifact_store: Any = None,
        random_state: Any = None,
    ) -> None:
        if direction not in _DIRECTIONS:
            raise ValueError(f"direction must be one of {list(_DIRECTIONS)}, got {direction!r}.")
        if isinstance(measures, str) or not measures:
            raise ValueError(f"measures must be a sequence of names, got {measures!r}.")
        for name in measures:
            check_name(name)
        if (X_test is None) != (y_test is None):
            raise ValueError("X_test and y_test go together: give both or neither.")
        self.estimator = estimator
        self.X, self.y = X, y
        self.X_test, self.y_test = X_test, y_test
        self.space = Space(space)
        self.space.check(estimator)
        self.measures = tuple(measures)
        self.direction = direction
        self.artifact_store = artifact_store
        self.base_seed = (
            None
            if random_state is None
            else int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
        )

    def __call__(self, trial: optuna.Trial) -> float | tuple[float, ...]:
        """Train and measure one candidate.

        Parameters
        ----------
        trial : optuna.Trial

        Returns
        -------
        float, or tuple of float if there are several measures
        """
        return self.run(trial)[0]

    def run(self, trial: optuna.Trial) -> tuple[float | tuple[float, ...], Any]:
        """Train and measure one candidate, and hand the trained estimator over as well."""
        try:
            params = self.space.suggest(trial)
            estimator = self.candidate(params, trial.params, trial)
            started = time.perf_counter()
            with _interruptible():
                estimator.fit(self.X, self.y)
            trial.set_user_attr("seconds", time.perf_counter() - started)
            _detach_pruner(estimator)
            found = self._record(trial, estimator)
        except optuna.TrialPruned:
            raise
        except Exception as error:
            trial.set_user_attr("reason", f"{type(error).__name__}: {error}")
            raise
        values = tuple(_DIRECTIONS[self.direction] * value for value in found)
        return (values[0] if len(values) == 1 else values), estimator

    def candidate(
        self, params: Mapping[str, Any], drawn: Mapping[str, Any], trial: Any = None
    ) -> Any:
        """Clone the estimator for one combination of parameters, seeded, with all the data.

        Parameters
        ----------
        params : dict
            Values by parameter name.
        drawn : dict
            The same as Optuna knows them, from which seeds derive.
        trial : optuna.Trial, optional
            To report epochs to, for its study's pruner.

        Returns
        -------
        estimator
            Not fitted.
        """
        estimator = clone(self.estimator).set_params(**params)
        for net in _nets(estimator):
            net.set_params(train_split=None)
            if trial is not None and _prunes(trial):
                net.set_params(callbacks=[*(net.callbacks or []), _ReportToPruner(trial)])
        if self.base_seed is not None:
            seed = zlib.crc32(repr(sorted(drawn.items())).encode(), self.base_seed) >> 1
            unset = [
                name
                for name, value in estimator.get_params().items()
                if name.split("__")[-1] == "random_state" and value is None
            ]
            estimator.set_params(**dict.fromkeys(unset, seed))
        return estimator

    def _record(self, trial: optuna.Trial, estimator: Any) -> list[float]:
        found = {name: evaluate(name, estimator, self.X, self.y) for name in self.measures}
        first = found[self.measures[0]]
        for name, measured in found.items():
            trial.set_user_attr(name, measured.value)
        trial.set_user_attr("train_loss", first.risk)
        if self.X_test is not None:
            network = to_network(estimator, self.X_test, self.y_test, DataOptions())
            test_loss = mean_loss(network)
            trial.set_user_attr("test_loss", test_loss)
            trial.set_user_attr("generalization_gap", test_loss - first.risk)
        for name, data in (("train", (self.X, self.y)), ("test", (self.X_test, self.y_test))):
            if data[0] is not None and hasattr(estimator, "score"):
                trial.set_user_attr(f"{name}_score", float(estimator.score(*data)))
        reason = _why_no_minimum(estimator, first.risk, first.constant_risk())
        trial.set_user_attr("converged", not reason)
        trial.set_user_attr("reason", reason)
        if self.artifact_store is not None:
            trial.set_user_attr("artifact_id", self._keep_weights(trial, first.network.module))
        return [measured.value for measured in found.values()]

    def _keep_weights(self, trial: optuna.Trial, module: torch.nn.Module) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"minimum_{trial.number}.pt"
            torch.save(module.state_dict(), path)
            artifact: str = upload_artifact(
                artifact_store=self.artifact_store, file_path=str(path), study_or_trial=trial
            )
        return artifact


def _why_no_minimum(estimator: Any, risk: float, constant_risk: float) -> str:
    """Say why training did not end in a minimum; empty if it did, as far as one can tell."""
    if not np.isfinite(risk):
        return "the training loss is not finite"
    if risk >= constant_risk:
        return "the training loss is no better than a constant prediction's"
    if getattr(final_estimator(estimator), "converged_", True):
        return ""
    return "training stopped before its goal was reached"


def _nets(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets in an estimator, itself included."""
    return [part for part in [estimator, *estimator.get_params().values()] if _is_net(part)]


def _is_net(part: Any) -> bool:
    return isinstance(part, NeuralNet)


def _prunes(trial: optuna.Trial) -> bool:
    study = trial.study
    single = len(study.directions) == 1
    return single and not isinstance(study.pruner, optuna.pruners.NopPruner)


class _ReportToPruner(Callback):
    """Tell the study's pruner the training loss after each epoch."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        self.trial.report(net.history[-1, "train_loss"], len(net.history))
        if self.trial.should_prune():
            raise optuna.TrialPruned


def _detach_pruner(estimator: Any) -> None:
    """Drop the callback that holds on to the study."""
    for net in _nets(estimator):
        reporters = [c for c in net.callbacks or [] if isinstance(c, _ReportToPruner)]
        if reporters:
            others = [c for c in net.callbacks if c not in reporters]
            net.set_params(callbacks=others or None)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the sweep: skorch takes it for the end of one net's training."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = []
    before = signal.getsignal(signal.SIGINT)

    def remember(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _delegates(method: str) -> Any:
    def check(search: Any) -> bool:
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
        trial.
    measure : str or sequence of str, default="relative_flatness"
        What to rank by, see `get_measure_names`; of several, the first ranks and the
        others are recorded.
    n_trials : int, optional
        How many candidates; all combinations if None, which needs a space of choices.
    sampler : optuna sampler, optional
        The whole grid where the space is choices only and `n_trials` allows it, otherwise
        `TPESampler`.
    storage : str or optuna storage, optional
        Such as ``"sqlite:///minima.db"``; in memory if None.
    study_name : str, optional
        With a storage: an existing study of that name is resumed, what is finished is not
        trained again.
    pruner : optuna pruner, optional
        Stops hopeless candidates by their training loss.
    n_jobs : int, optional
        Processes; None or 1 trains in this one.
    refit : bool, default=True
        Provide `best_estimator_`.
    random_state : int, RandomState or None, default=None
        Seeds the sampler and every `random_state` of the estimator that is None.
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
        `params`, ``param_...``, `mean_test_score` (minus the measure, on the training data),
        `rank_test_score`, `mean_fit_time`.
    study_ : optuna.Study

    Raises
    ------
    ValueError
        From `fit`, if an argument is not valid or no candidate could be trained.

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
        measures = [self.measure] if isinstance(self.measure, str) else list(self.measure)
        rng = check_random_state(self.random_state)
        seeds = (None, None) if self.random_state is None else rng.randint(2**31 - 1, size=2)
        objective = MinimaObjective(
            self.estimator,
            X,
            y,
            self.space,
            measures=measures,
            X_test=X_test,
            y_test=y_test,
            random_state=seeds[1],
        )
        grid = self._grid(objective.space)
        # the first measure alone is the objective, so that samplers and pruners work
        first = _FirstMeasure(objective)
        with _quiet(self.verbose), tempfile.TemporaryDirectory() as folder:
            study = self._create_study(seeds[0], folder)
            n_missing = self._plan(study, grid)
            kept = self._optimize(study, first, n_missing)
            if self.storage is None and self._processes() > 1:
                study = _in_memory(study)  # the journal goes with the folder
        self.study_ = study
        self._finish(objective, measures[0], kept)
        if y is not None and hasattr(self, "best_estimator_"):
            for name in ("classes_", "n_features_in_", "feature_names_in_"):
                if hasattr(self.best_estimator_, name):
                    setattr(self, name, getattr(self.best_estimator_, name))
        return self

    def _grid(self, space: Space) -> list[dict[str, Any]] | None:
        if self.n_trials is not None and (
            isinstance(self.n_trials, bool)
            or not isinstance(self.n_trials, int | np.integer)
            or self.n_trials < 1
        ):
            raise ValueError(f"n_trials must be a positive integer or None, got {self.n_trials!r}.")
        if self.sampler is not None:
            if self.n_trials is None:
                raise ValueError("n_trials is needed with a sampler: say how many candidates.")
            return None
        grid = space.grid()
        if grid is None and self.n_trials is None:
            raise ValueError(
                "n_trials is needed: the space has distributions or functions, so that there is "
                "no whole grid to train."
            )
        if grid is not None and (self.n_trials is None or self.n_trials >= len(grid)):
            return grid
        return None

    def _processes(self) -> int:
        return 1 if self.n_jobs is None else int(effective_n_jobs(self.n_jobs))

    def _storage(self, folder: str) -> Any:
        if self.storage is None and self._processes() > 1:
            return JournalStorage(JournalFileBackend(str(Path(folder) / "journal.log")))
        return self.storage

    def _create_study(self, seed: Any, folder: str) -> optuna.Study:
        seed = None if seed is None else int(seed)
        return optuna.create_study(
            storage=self._storage(folder),
            sampler=self.sampler or optuna.samplers.TPESampler(seed=seed),
            pruner=self.pruner or optuna.pruners.NopPruner(),
            study_name=self.study_name,
            load_if_exists=self.study_name is not None,
        )

    def _plan(self, study: optuna.Study, grid: list[dict[str, Any]] | None) -> int:
        """Queue the grid's missing points; return how many candidates are to be trained."""
        finished = [t for t in study.get_trials(deepcopy=False) if t.state.is_finished()]
        if grid is None:
            assert self.n_trials is not None
            return max(0, int(self.n_trials) - len(finished))
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        done = [trial.params for trial in finished]
        queued = [trial.system_attrs.get("fixed_params") for trial in waiting]
        missing = [point for point in grid if point not in done]
        for point in missing:
            # what a killed process was at is neither finished nor waiting: trained again
            if point not in queued:
                study.enqueue_trial(point)
        return len(missing)

    def _optimize(
        self, study: optuna.Study, objective: "_FirstMeasure", n_trials: int
    ) -> dict[int, Any]:
        """Run the trials; return the flattest minimum's estimator by its trial number."""
        kept: dict[int, Any] = {}
        flattest = np.inf
        n_jobs = self._processes()
        if n_jobs == 1:
            results: Iterator[Any] = (_run_one(study, objective) for _ in range(n_trials))
        else:
            # processes: threads would race for torch's random state
            level = optuna.logging.get_verbosity()
            runs = (delayed(_run_apart)(study, objective, level) for _ in range(n_trials))
            results = Parallel(n_jobs=n_jobs, return_as="generator_unordered")(runs)
        bar = tqdm(total=n_trials, desc="minima", unit="net", disable=not self.verbose)
        try:
            with bar:
                for number, value, estimator in results:
                    bar.update()
                    if self.refit and estimator is not None and value < flattest:
                        flattest, kept = value, {number: estimator}
        except KeyboardInterrupt:
            warnings.warn(
                "interrupted: the search ends with the candidates that were finished.",
                FlatnessWarning,
                stacklevel=3,
            )
        return kept

    def _finish(self, objective: MinimaObjective, by: str, kept: dict[int, Any]) -> None:
        table = minima_table(self.study_)
        if not len(table) or not (table["state"] == "complete").any():
            reasons = sorted(set(table["reason"])) if len(table) else ["none was finished"]
            raise ValueError(f"no candidate could be trained and measured: {'; '.join(reasons)}")
        self.minima_ = rank_minima(table, by=by)
        if not is_converged(self.minima_).any():
            warnings.warn(
                "no candidate converged, so that this is a ranking of networks on their way, not "
                "of minima: train longer (max_epochs), or to a goal within reach (StopAtLoss). "
                f"Reasons: {sorted(set(self.minima_['reason']))}.",
                FlatnessWarning,
                stacklevel=3,
            )
        best = int(self.minima_["trial"].iloc[0])
        trial = self.study_.trials[best]
        self.cv_results_ = _cv_results(table, self.minima_, by, objective.space, self.study_)
        self.best_index_ = int(np.flatnonzero(table["trial"] == best)[0])
        self.best_params_ = objective.space.values(trial)
        self.best_score_ = -float(trial.user_attrs[by])
        if self.refit:
            if best in kept:
                self.best_estimator_ = kept[best]
            else:
                estimator = objective.candidate(self.best_params_, trial.params)
                self.best_estimator_ = estimator.fit(objective.X, objective.y)

    # -- what the best estimator does --------------------------------------------------------

    def _best(self) -> Any:
        check_is_fitted(self, "minima_")
        if not hasattr(self, "best_estimator_"):
            raise AttributeError(
                "there is no best_estimator_ to predict with: search again with refit=True."
            )
        return self.best_estimator_

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


class _FirstMeasure:
    """An objective with its first measure alone as the value; the others are recorded."""

    def __init__(self, objective: MinimaObjective) -> None:
        self.objective = objective

    def __call__(self, trial: optuna.Trial) -> float:
        value, self.estimator = self.objective.run(trial)
        return value if isinstance(value, float) else value[0]


def _run_apart(
    study: optuna.Study, objective: _FirstMeasure, verbosity: int
) -> tuple[int, float, Any]:
    """Run one trial in a worker process."""
    optuna.logging.set_verbosity(verbosity)  # the worker does not share this process's level
    study.sampler.reseed_rng()  # a copy of the sampler would draw what its siblings draw
    return _run_one(study, objective)


def _run_one(study: optuna.Study, objective: _FirstMeasure) -> tuple[int, float, Any]:
    """Run one trial in this process; return its number, value and trained estimator."""
    found: list[int] = []
    objective.estimator = None
    study.optimize(
        objective,
        n_trials=1,
        catch=(Exception,),
        callbacks=[lambda study, trial: found.append(trial.number)],
    )
    trial = study.trials[found[0]]
    if trial.state != TrialState.COMPLETE or not trial.user_attrs.get("converged"):
        return trial.number, np.inf, None
    return trial.number, float(trial.values[0]), objective.estimator


def _in_memory(study: optuna.Study) -> optuna.Study:
    copied = optuna.create_study(direction="minimize", sampler=study.sampler, pruner=study.pruner)
    copied.add_trials(study.get_trials())
    return copied


def _cv_results(
    table: pd.DataFrame, ranked: pd.DataFrame, by: str, space: Space, study: optuna.Study
) -> dict[str, Any]:
    """Arrange the table as scikit-learn's searches do, one entry per candidate."""
    ranks = ranked.set_index("trial")["rank"]
    results: dict[str, Any] = {
        "params": [space.values(study.trials[number]) for number in table["trial"]],
        "mean_fit_time": table["seconds"].to_numpy(dtype=float),
        "mean_test_score": -table[by].to_numpy(dtype=float),
        "rank_test_score": ranks.loc[table["trial"]].to_numpy(dtype=np.int32),
    }
    for name in table.columns:
        if name.startswith("param_"):
            results[name] = np.ma.array(table[name].to_numpy(dtype=object))
    return results


@contextmanager
def _quiet(verbose: int) -> Iterator[None]:
    """Borrow Optuna's log level."""
    before = optuna.logging.get_verbosity()
    try:
        if verbose < 2:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
    finally:
        optuna.logging.set_verbosity(before)

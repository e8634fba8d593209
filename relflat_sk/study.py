"""Sweep over minima: train every candidate on all the data, rank them by flatness."""

import copy
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import torch
from joblib import Parallel, delayed, effective_n_jobs
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.artifacts import upload_artifact
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
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
from relflat_sk.minima import NO_REASON, is_complete, is_converged, minima_table, rank_minima
from relflat_sk.network import mean_loss
from relflat_sk.space import Space

__all__ = ["FlatMinimaSearch", "MinimaObjective"]

_SIGNS = {"minimize": 1.0, "maximize": -1.0}


class MinimaObjective:
    """One trial, one minimum: for `optuna.Study.optimize`.

    Clones the estimator, sets the parameters that the trial suggests, trains on all of X
    (no fold is held out: the `train_split` of skorch nets and the `early_stopping` of
    scikit-learn's are switched off), and records in ``trial.user_attrs`` what the table of
    minima shows: every measure, `train_loss`, `test_loss`, `generalization_gap`, scores,
    `converged`, `seconds`, `reason`.

    A network that diverged or is no better than a constant fails its trial, without an
    exception. What training raises goes through: pass ``catch=(Exception,)`` to
    ``study.optimize`` for the study to go on.

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
        if direction not in _SIGNS:
            raise ValueError(f"direction must be one of {list(_SIGNS)}, got {direction!r}.")
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
            nan, with which Optuna marks the trial as failed and goes on, for a network that
            diverged or is no better than a constant: it is perfectly flat and useless.

        Raises
        ------
        ValueError
            If the study optimises in other directions.
        """
        self._check_directions(trial)
        return self.run(trial)[0]

    def run(self, trial: optuna.Trial) -> tuple[float | tuple[float, ...], Any]:
        """Train and measure one candidate, and hand the trained estimator over as well.

        Parameters
        ----------
        trial : optuna.Trial

        Returns
        -------
        (float or tuple of float, estimator)
        """
        try:
            params = self.space.suggest(trial)
            estimator = self.train(params, trial.params, trial)
            with _seeded(self._seed(trial.params)):  # loaders draw from torch's random state
                found = self._record(trial, estimator)
        except optuna.TrialPruned:
            trial.set_user_attr("reason", NO_REASON[TrialState.PRUNED])
            raise
        except Exception as error:
            trial.set_user_attr("reason", f"{type(error).__name__}: {error}")
            raise
        values = tuple(_SIGNS[self.direction] * value for value in found)
        return (values[0] if len(values) == 1 else values), estimator

    def train(self, params: Mapping[str, Any], drawn: Mapping[str, Any], trial: Any = None) -> Any:
        """Train the estimator with one combination of parameters, on all the data.

        Parameters
        ----------
        params : dict
            Values by parameter name.
        drawn : dict
            The same as Optuna knows them, from which seeds derive.
        trial : optuna.Trial, optional
            Is told the time, and each epoch for its study's pruner.

        Returns
        -------
        estimator
            A new one; the user's own stays as it is.
        """
        estimator = clone(self.estimator)
        estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
        _hold_nothing_out(estimator, params)
        seed = self._seed(drawn)
        if seed is not None:
            unset = [
                name
                for name, value in estimator.get_params().items()
                if name.split("__")[-1] == "random_state" and value is None
            ]
            estimator.set_params(**dict.fromkeys(unset, seed))
        started = time.perf_counter()
        try:
            with _interruptible(), _seeded(seed), _pruned(estimator, trial):
                estimator.fit(self.X, self.y)
        finally:
            if trial is not None:
                trial.set_user_attr("seconds", time.perf_counter() - started)
        return estimator

    def _check_directions(self, trial: Any) -> None:
        study = getattr(trial, "study", None)
        if study is None:  # a FixedTrial
            return
        directions = [direction.name.lower() for direction in study.directions]
        if directions != [self.direction] * len(self.measures):
            raise ValueError(
                f"the study's directions are {directions}, but this objective has "
                f"{len(self.measures)} measure(s), each to {self.direction}. Create the study "
                f"with directions={[self.direction] * len(self.measures)}."
            )

    def _seed(self, drawn: Mapping[str, Any]) -> int | None:
        """Derive a candidate's seed from its parameters: the same if it is trained again."""
        if self.base_seed is None:
            return None
        return zlib.crc32(repr(sorted(drawn.items())).encode(), self.base_seed) >> 1

    def _record(self, trial: optuna.Trial, estimator: Any) -> list[float]:
        """Write what the table of minima shows; return the measures, nan if there is nothing."""
        # a network that diverged need not be measurable, its loss always is
        train_loss = mean_loss(to_network(estimator, self.X, self.y, DataOptions()))
        trial.set_user_attr("train_loss", train_loss)
        trial.set_user_attr("converged", False)
        if not np.isfinite(train_loss):
            trial.set_user_attr("reason", "the training loss is not finite")
            return [np.nan] * len(self.measures)
        seed = self._seed(trial.params)
        found = {
            name: evaluate(name, estimator, self.X, self.y, random_state=seed)
            for name in self.measures
        }
        for name, measured in found.items():
            trial.set_user_attr(name, measured.value)
        self._record_held_out(trial, estimator, train_loss)
        first = found[self.measures[0]]
        if self.artifact_store is not None:
            trial.set_user_attr("artifact_id", self._keep_weights(trial, first.network.module))
        values = [measured.value for measured in found.values()]
        reason = ""
        if train_loss >= first.constant_risk():
            reason = "the training loss is no better than a constant prediction's"
            values = [np.nan] * len(values)
        elif not np.isfinite(values).all():
            reason = "a measure is not finite"
        elif not _has_converged(final_estimator(estimator)):
            reason = "training stopped before its goal was reached"
        trial.set_user_attr("converged", not reason)
        trial.set_user_attr("reason", reason)
        if hasattr(trial, "set_constraint"):  # optuna >= 5: samplers and best_trial look at it
            trial.set_constraint("converged", float(bool(reason)))
        return values

    def _record_held_out(self, trial: optuna.Trial, estimator: Any, train_loss: float) -> None:
        if self.X_test is not None:
            network = to_network(estimator, self.X_test, self.y_test, DataOptions())
            test_loss = mean_loss(network)
            trial.set_user_attr("test_loss", test_loss)
            trial.set_user_attr("generalization_gap", test_loss - train_loss)
        for name, X, y in (("train", self.X, self.y), ("test", self.X_test, self.y_test)):
            if y is not None and hasattr(estimator, "score"):
                trial.set_user_attr(f"{name}_score", float(estimator.score(X, y)))

    def _keep_weights(self, trial: optuna.Trial, module: torch.nn.Module) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"minimum_{trial.number}.pt"
            torch.save(module.state_dict(), path)
            artifact: str = upload_artifact(
                artifact_store=self.artifact_store, file_path=str(path), study_or_trial=trial
            )
        return artifact


def _has_converged(estimator: Any) -> bool:
    """Say whether training reached its goal, where the estimator tells."""
    n_iter, max_iter = getattr(estimator, "n_iter_", None), getattr(estimator, "max_iter", None)
    if n_iter is not None and max_iter is not None:  # scikit-learn's
        return bool(np.max(n_iter) < max_iter)
    return bool(getattr(estimator, "converged_", True))


def _hold_nothing_out(estimator: Any, params: Mapping[str, Any]) -> None:
    """Switch validation splits off: those of skorch, and scikit-learn's early stopping."""
    for net in _nets(estimator):
        net.set_params(train_split=None)
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True and name not in params:
            estimator.set_params(**{name: False})


def _nets(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets in an estimator, itself included."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


class _ReportToPruner(Callback):
    """Tell the study's pruner the training loss after each epoch."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def __deepcopy__(self, memo: Any) -> "_ReportToPruner":
        return self  # a copy of the trial would report to a copy of the study

    def __sklearn_clone__(self) -> "_ReportToPruner":
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        self.trial.report(net.history[-1, "train_loss"], len(net.history))
        if self.trial.should_prune():
            raise optuna.TrialPruned


@contextmanager
def _pruned(estimator: Any, trial: Any) -> Iterator[None]:
    """Let the study's pruner, if there is one, watch the nets of an estimator as they train."""
    study = getattr(trial, "study", None)
    if (
        study is None
        or len(study.directions) > 1
        or isinstance(study.pruner, optuna.pruners.NopPruner)
    ):
        yield
        return
    watched = [net for net in _nets(estimator) if net.callbacks != "disable"]
    for net in watched:
        net.set_params(callbacks=[*(net.callbacks or []), _ReportToPruner(trial)])
    yield
    if watched:  # what was fitted may be a copy, as in a TransformedTargetRegressor
        for net in [*watched, final_estimator(estimator)]:
            _forget_pruner(net)


def _forget_pruner(net: Any) -> None:
    """Drop the callback that holds on to the study."""
    others = [one for one in net.callbacks or [] if not isinstance(one, _ReportToPruner)]
    net.callbacks = others or None
    if hasattr(net, "callbacks_"):
        net.callbacks_ = [
            (name, one) for name, one in net.callbacks_ if not isinstance(one, _ReportToPruner)
        ]


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state, from which plain skorch nets draw, and give it back."""
    if seed is None:
        yield
        return
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the sweep: skorch takes it for the end of one net's training."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pressed = []

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
        trial.
    measure : str or sequence of str, default="relative_flatness"
        What to rank by, see `get_measure_names`; of several, the first ranks and the
        others are recorded.
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
    refit : bool, default=True
        Provide `best_estimator_`: the very network that was measured, or, if an earlier
        session trained it, one trained again, which is the same if it is seeded.
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
    A candidate that fails, diverges or is no better than a constant is recorded as failed,
    with its reason, and one that did not reach its goal as not converged; both rank behind
    every minimum. Ctrl-C ends the search with what was finished.

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
        self.__dict__.pop("best_estimator_", None)
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
        self._check_arguments()
        grid = self._grid(objective.space)
        quiet = self.verbose < 2
        with _log_level(quiet), tempfile.TemporaryDirectory() as folder:
            study = self._create_study(folder)
            _check_resumable(study, objective)
            _plan(study, grid)
            study.sampler = copy.deepcopy(self.sampler) or _CandidateSampler(
                None if seeds[0] is None else int(seeds[0]), objective.space
            )
            sweep = _Sweep(objective, None if grid else int(self.n_trials or 0), quiet)
            interrupted, kept = self._optimize(study, sweep)
            if self.storage is None and self._processes() > 1:
                study = _in_memory(study)  # the journal goes with the folder
        self.study_ = study
        self._finish(objective, kept, interrupted)
        return self

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

    def _grid(self, space: Space) -> list[dict[str, Any]] | None:
        """List the candidates if they are all combinations there are."""
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

    def _create_study(self, folder: str) -> optuna.Study:
        storage = self.storage
        if storage is None and self._processes() > 1:
            storage = JournalStorage(JournalFileBackend(str(Path(folder) / "journal.log")))
        return optuna.create_study(
            storage=storage,
            pruner=self.pruner or optuna.pruners.NopPruner(),
            study_name=self.study_name,
            load_if_exists=self.study_name is not None,
        )

    def _optimize(self, study: optuna.Study, sweep: "_Sweep") -> tuple[bool, "_Kept"]:
        """Train what is missing; say whether Ctrl-C ended that, and what is worth keeping."""
        n_trials = sweep.n_left(study)
        kept = _Kept(self.refit)
        with tqdm(total=n_trials, desc="minima", unit="net", disable=not self.verbose) as bar:

            def keep(trial: FrozenTrial, estimator: Any) -> None:
                bar.update()
                kept.offer(trial, estimator)

            try:
                if self._processes() == 1:
                    if n_trials:
                        sweep.run(study, n_trials, keep)
                    return False, kept
                while n_trials:
                    _run_in_processes(study, sweep, self._processes(), n_trials, keep)
                    n_trials = sweep.n_left(study)
            except KeyboardInterrupt:
                # the processes that trained are gone, and so is what they were at
                _give_up(study, lambda trial: trial.user_attrs.get("sweep") == sweep.name)
                return True, kept
        return False, kept

    def _finish(self, objective: MinimaObjective, kept: "_Kept", interrupted: bool) -> None:
        by = objective.measures[0]
        trials = self.study_.get_trials(deepcopy=False)
        cut_short = [trial.number for trial in trials if _is_cut_short(trial)]
        table = minima_table(self.study_)
        table = table[~table["trial"].isin(cut_short)].reset_index(drop=True)
        if interrupted and not table["state"].eq("complete").any():
            raise KeyboardInterrupt("before any candidate was finished.")
        if not table["state"].eq("complete").any():
            raise ValueError(
                f"none of {len(table)} candidates could be trained and measured:\n"
                + _list_reasons(table)
            )
        if interrupted:
            warnings.warn(
                f"interrupted: the search ends with the {len(table)} candidates that were "
                "finished. To train the others, fit again with the same storage and study_name.",
                FlatnessWarning,
                stacklevel=3,
            )
        self.minima_ = rank_minima(table, by=by)
        if not is_converged(table).any():
            warnings.warn(
                "no candidate converged, so that this is a ranking of networks on their way, not "
                "of minima: train longer (max_epochs), or to a goal within reach (StopAtLoss).\n"
                + _list_reasons(table),
                FlatnessWarning,
                stacklevel=3,
            )
        best = int(self.minima_["trial"].iloc[0])
        self.cv_results_ = _cv_results(table, self.minima_, by, objective.space, trials)
        self.best_index_ = int(np.flatnonzero(table["trial"] == best)[0])
        self.best_params_ = objective.space.values(trials[best])
        self.best_score_ = float(self.cv_results_["mean_test_score"][self.best_index_])
        if not self.refit:
            return
        if kept.number == best:
            self.best_estimator_ = kept.estimator
        else:  # trained in an earlier session
            self.best_estimator_ = objective.train(self.best_params_, trials[best].params)

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


class _CandidateSampler(TPESampler):
    """TPE that draws a candidate by its number, and no combination of choices twice.

    A draw depends on the seed, on how many candidates there are before and on their results,
    so that a sweep that was interrupted goes on as it would have. Of choices alone, the first
    draws are a random order of all combinations, whatever process asks for them.
    """

    n_random = 10

    def __init__(self, seed: int | None, space: Space) -> None:
        super().__init__(seed=seed, n_startup_trials=self.n_random)
        self.seed = seed
        self.points = space.grid()
        order = np.random.RandomState(seed).permutation(len(self.points or []))
        self.order = [int(index) for index in order]
        self.choices = space.distributions()

    def reseed_rng(self) -> None:
        """Keep the seed: no two trials share a number."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        earlier = study.get_trials(deepcopy=False)[: trial.number]
        self.number = sum(not _is_cut_short(one) for one in earlier)
        self.taken = [one.params for one in earlier if not _is_cut_short(one)]
        if self.seed is not None:
            seed = zlib.crc32(b"%d" % self.number, self.seed)
            super().__init__(seed=seed, n_startup_trials=self.n_random)
        super().before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        if self.points is None:
            return super().infer_relative_search_space(study, trial)
        return self.choices

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        if self.points is None:
            return super().sample_relative(study, trial, search_space)
        start = self.number if self.number < self.n_random else self.n_random
        in_order = [self.points[i] for i in (*self.order[start:], *self.order[:start])]
        taken = self.taken
        if self.number >= self.n_random:
            taken = [*taken, *in_order[len(in_order) - start :]]
            for _ in range(100):
                point = {
                    name: self.sample_independent(study, trial, name, search_space[name])
                    for name in search_space
                }
                if point not in taken:
                    return point
        return next((point for point in in_order if point not in taken), in_order[0])


class _Sweep:
    """The objective of a search: one value, and no candidate that another process has.

    Parameters
    ----------
    objective : MinimaObjective
    n_trials : int or None
        How many candidates there are to be; those in the study's queue if None.
    quiet : bool
        Whether Optuna's log is to be silent, in this process or another.
    """

    def __init__(self, objective: MinimaObjective, n_trials: int | None, quiet: bool) -> None:
        self.objective = objective
        self.n_trials = n_trials
        self.quiet = quiet
        self.name = uuid.uuid4().hex

    def n_left(self, study: optuna.Study) -> int:
        """How many candidates are to be trained."""
        trials = study.get_trials(deepcopy=False)
        if self.n_trials is None:
            return sum(trial.state == TrialState.WAITING for trial in trials)
        done = (not _is_cut_short(trial) for trial in trials if trial.state != TrialState.WAITING)
        return max(0, self.n_trials - sum(done))

    def __call__(self, trial: optuna.Trial) -> float:
        self.estimator = None
        if self.n_trials is None and _has_another(trial):
            raise _NothingLeftError
        trial.set_user_attr("process", [socket.gethostname(), os.getpid()])
        trial.set_user_attr("sweep", self.name)
        # the first measure alone is the value, so that any sampler and pruner works
        values, self.estimator = self.objective.run(trial)
        return values[0] if isinstance(values, tuple) else values

    def run(
        self, study: optuna.Study, n_trials: int, keep: Callable[[FrozenTrial, Any], None]
    ) -> None:
        """Train up to so many candidates in this process, handing over each."""

        def done(study: optuna.Study, trial: FrozenTrial) -> None:
            keep(trial, self.estimator)
            if not self.n_left(study):
                study.stop()

        study.optimize(self, n_trials=n_trials, catch=(Exception,), callbacks=[done])

    def run_one(self, study: optuna.Study) -> list[tuple[FrozenTrial, Any]]:
        """Train one candidate, if there is one left, in a process of its own."""
        found: list[tuple[FrozenTrial, Any]] = []
        study.sampler.reseed_rng()  # a copy would draw what the other processes draw
        with _log_level(self.quiet):
            if self.n_left(study):
                self.run(study, 1, lambda *result: found.append(result))
        # networks that cannot win need not travel
        return [(trial, one if _is_minimum(trial) else None) for trial, one in found]


class _NothingLeftError(Exception):
    """Another process was faster."""


class _Kept:
    """The flattest minimum so far, with its network."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.best = (np.inf, -1)  # equally flat ones rank in the order of their trials
        self.estimator: Any = None

    @property
    def number(self) -> int:
        return self.best[1]

    def offer(self, trial: FrozenTrial, estimator: Any) -> None:
        if self.wanted and _is_minimum(trial):
            assert trial.value is not None
            if (trial.value, trial.number) < self.best:
                self.best, self.estimator = (trial.value, trial.number), estimator


def _run_in_processes(
    study: optuna.Study,
    sweep: _Sweep,
    n_jobs: int,
    n_trials: int,
    keep: Callable[[FrozenTrial, Any], None],
) -> None:
    """Train in processes: threads would race for torch's random state."""
    runs = (delayed(sweep.run_one)(study) for _ in range(n_trials))
    try:
        for found in Parallel(n_jobs=n_jobs, return_as="generator_unordered")(runs):
            for result in found:
                keep(*result)
    except TerminatedWorkerError:
        _give_up(
            study,
            lambda trial: trial.user_attrs.get("sweep") == sweep.name,
            reason="a process that trained was killed, perhaps for lack of memory",
        )


def _is_minimum(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


def _is_cut_short(trial: FrozenTrial) -> bool:
    """Say whether a trial was interrupted or killed, so that it is to be trained again.

    What fails by itself says why.
    """
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs


def _has_another(trial: optuna.Trial) -> bool:
    """Say whether a trial of a grid got no point of it, or one that an earlier trial has."""
    trials = trial.study.get_trials(deepcopy=False)
    point = trials[trial.number].system_attrs.get("fixed_params")
    return point is None or any(
        not _is_cut_short(other)
        and (other.params == point or other.system_attrs.get("fixed_params") == point)
        for other in trials[: trial.number]
    )


def _is_abandoned(trial: FrozenTrial) -> bool:
    """Say whether the process that trained is gone; of other machines one cannot tell."""
    host, process = trial.user_attrs.get("process", [socket.gethostname(), os.getpid()])
    if host != socket.gethostname():
        return False
    if process == os.getpid() or os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def _give_up(
    study: optuna.Study, which: Callable[[FrozenTrial], bool], reason: str | None = None
) -> None:
    """Mark running trials as failed; without a reason they are to be trained again."""
    storage = study._storage
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if which(trial):
            if reason is not None:
                storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def _check_resumable(study: optuna.Study, objective: MinimaObjective) -> None:
    """Refuse to go on with a study of something else, whose minima cannot be compared."""
    name = study.study_name
    if study.directions != [StudyDirection.MINIMIZE]:
        raise ValueError(
            f"study {name!r} was not made by a search: its directions are "
            f"{[direction.name.lower() for direction in study.directions]}."
        )
    objective.space.check_study(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        lacking = [measure for measure in objective.measures if measure not in trial.user_attrs]
        if lacking:
            raise ValueError(
                f"trial {trial.number} of study {name!r} has no {lacking}, and its network is "
                "gone; give this search a study_name of its own."
            )
    digest = [_digest(objective.X), _digest(objective.y)]
    if study.user_attrs.get("data", digest) != digest:
        raise ValueError(
            f"study {name!r} was made with other data; give this search a study_name of its own. "
            "In cross-validation leave study_name out: every fold is a search of its own."
        )
    study.set_user_attr("data", digest)


def _digest(data: Any) -> str | None:
    """Return a short text that changes with the data; None for what is no array."""
    array = np.asarray(data) if hasattr(data, "__array__") or isinstance(data, list) else None
    if array is None or not array.ndim:
        return None
    if array.dtype == object:
        array = array.astype(str)
    return f"{array.shape} {zlib.crc32(np.ascontiguousarray(array).tobytes())}"


def _plan(study: optuna.Study, grid: list[dict[str, Any]] | None) -> None:
    """Queue what is missing of the grid, and what was being trained by a process that died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # of storages with a heartbeat
    _give_up(study, _is_abandoned)
    if grid is None:
        return
    trials = [trial for trial in study.get_trials(deepcopy=False) if not _is_cut_short(trial)]
    known = [trial.params for trial in trials]
    known += [trial.system_attrs.get("fixed_params", {}) for trial in trials]
    for point in grid:
        if point not in known:
            study.enqueue_trial(point)


def _in_memory(study: optuna.Study) -> optuna.Study:
    copied = optuna.create_study(
        study_name=study.study_name, sampler=study.sampler, pruner=study.pruner
    )
    copied.add_trials(study.get_trials())
    for name, value in study.user_attrs.items():
        copied.set_user_attr(name, value)
    return copied


def _list_reasons(table: pd.DataFrame) -> str:
    """Say how often what went wrong, most frequent first."""
    counts = table["reason"].value_counts().head(5)
    return "\n".join(f"  {count} x {str(reason)[:500]}" for reason, count in counts.items())


def _cv_results(
    table: pd.DataFrame,
    ranked: pd.DataFrame,
    by: str,
    space: Space,
    trials: Sequence[FrozenTrial],
) -> dict[str, Any]:
    """Arrange the table as scikit-learn's searches do, one entry per candidate."""
    minima = is_converged(table) & is_complete(table)
    counted = minima if minima.any() else is_complete(table)
    scores = np.where(counted, -table[by].to_numpy(dtype=float), np.nan)
    params = [space.values(trials[number]) for number in table["trial"].tolist()]
    results: dict[str, Any] = {
        "mean_fit_time": table["seconds"].to_numpy(dtype=float),
        "std_fit_time": np.zeros(len(table)),
    }
    for name in space.entries:
        values = np.ma.array(np.empty(len(table), dtype=object), mask=True)
        for index, drawn in enumerate(params):
            if name in drawn:
                values[index] = drawn[name]
        results[f"param_{name}"] = values
    results["params"] = params
    results["split0_test_score"] = scores
    results["mean_test_score"] = scores.copy()
    results["std_test_score"] = np.zeros(len(table))
    ranks = ranked.set_index("trial")["rank"]
    results["rank_test_score"] = ranks.loc[table["trial"]].to_numpy(dtype=np.int32)
    return results


@contextmanager
def _log_level(quiet: bool) -> Iterator[None]:
    """Borrow Optuna's log level."""
    before = optuna.logging.get_verbosity()
    try:
        if quiet:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
    finally:
        optuna.logging.set_verbosity(before)

"""Run the trials of a search: in one process or several, resumed, none twice, none lost."""

import os
import socket
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.objective import MinimaObjective
from relflat_sk.space import Space

__all__ = [
    "CandidateSampler",
    "Kept",
    "Sweep",
    "check_resumable",
    "give_up",
    "in_memory",
    "is_cut_short",
    "log_level",
    "plan",
    "run_in_processes",
]


class CandidateSampler(TPESampler):
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
        """Count the candidates before this one."""
        earlier = study.get_trials(deepcopy=False)[: trial.number]
        self.number = sum(not is_cut_short(one) for one in earlier)
        self.taken = [one.params for one in earlier if not is_cut_short(one)]
        if self.seed is not None:
            seed = zlib.crc32(b"%d" % self.number, self.seed)
            super().__init__(seed=seed, n_startup_trials=self.n_random)
        super().before_trial(study, trial)

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Draw the choices together, everything else as TPE does."""
        if self.points is None:
            return super().infer_relative_search_space(study, trial)
        return self.choices

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Draw a combination of choices that no other trial has."""
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


class Sweep:
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
        done = (not is_cut_short(trial) for trial in trials if trial.state != TrialState.WAITING)
        return max(0, self.n_trials - sum(done))

    def __call__(self, trial: optuna.Trial) -> float:
        """Train a candidate, unless another trial has the same choices."""
        self.estimator = None
        if self.n_trials is None and has_another(trial):
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

        try:
            study.optimize(self, n_trials=n_trials, catch=(Exception,), callbacks=[done])
        except ValueError as error:
            # SQLite locks no rows, so that two processes may take the same trial out of the
            # queue. What the slower one found is the same, by its seeds, and is dropped.
            if "Cannot tell a" not in str(error):
                raise

    def run_one(self, study: optuna.Study) -> list[tuple[FrozenTrial, Any]]:
        """Train one candidate, if there is one left, in a process of its own."""
        found: list[tuple[FrozenTrial, Any]] = []
        study.sampler.reseed_rng()  # a copy would draw what the other processes draw
        with log_level(self.quiet):
            if self.n_left(study):
                self.run(study, 1, lambda *result: found.append(result))
        # networks that cannot win need not travel
        return [(trial, one if is_minimum(trial) else None) for trial, one in found]


class _NothingLeftError(Exception):
    """Another process was faster."""


class Kept:
    """The flattest minimum so far, with its network."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.best = (np.inf, -1)  # equally flat ones rank in the order of their trials
        self.estimator: Any = None

    @property
    def number(self) -> int:
        """Return the number of its trial."""
        return self.best[1]

    def offer(self, trial: FrozenTrial, estimator: Any) -> None:
        """Keep the estimator if it is the flattest minimum so far."""
        if self.wanted and is_minimum(trial):
            assert trial.value is not None
            if (trial.value, trial.number) < self.best:
                self.best, self.estimator = (trial.value, trial.number), estimator


def run_in_processes(
    study: optuna.Study,
    sweep: Sweep,
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
        give_up(
            study,
            lambda trial: trial.user_attrs.get("sweep") == sweep.name,
            reason="a process that trained was killed, perhaps for lack of memory",
        )


def is_minimum(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


def is_cut_short(trial: FrozenTrial) -> bool:
    """Say whether a trial was interrupted or killed, so that it is to be trained again.

    What fails by itself says why.
    """
    return trial.state == TrialState.FAIL and "reason" not in trial.user_attrs


def has_another(trial: optuna.Trial) -> bool:
    """Say whether a trial of a grid got no point of it, or one that an earlier trial has."""
    trials = trial.study.get_trials(deepcopy=False)
    point = trials[trial.number].system_attrs.get("fixed_params")
    return point is None or any(
        not is_cut_short(other)
        and (other.params == point or other.system_attrs.get("fixed_params") == point)
        for other in trials[: trial.number]
    )


def is_abandoned(trial: FrozenTrial) -> bool:
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


def give_up(
    study: optuna.Study, which: Callable[[FrozenTrial], bool], reason: str | None = None
) -> None:
    """Mark running trials as failed; without a reason they are to be trained again."""
    storage = study._storage
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if which(trial):
            if reason is not None:
                storage.set_trial_user_attr(trial._trial_id, "reason", reason)
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def check_resumable(study: optuna.Study, objective: MinimaObjective) -> None:
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


def plan(study: optuna.Study, grid: list[dict[str, Any]] | None) -> None:
    """Queue what is missing of the grid, and what was being trained by a process that died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # of storages with a heartbeat
    give_up(study, is_abandoned)
    if grid is None:
        return
    trials = [trial for trial in study.get_trials(deepcopy=False) if not is_cut_short(trial)]
    known = [trial.params for trial in trials]
    known += [trial.system_attrs.get("fixed_params", {}) for trial in trials]
    for point in grid:
        if point not in known:
            study.enqueue_trial(point)


def in_memory(study: optuna.Study) -> optuna.Study:
    """Copy a study out of its storage."""
    copied = optuna.create_study(
        study_name=study.study_name, sampler=study.sampler, pruner=study.pruner
    )
    copied.add_trials(study.get_trials())
    for name, value in study.user_attrs.items():
        copied.set_user_attr(name, value)
    return copied


@contextmanager
def log_level(quiet: bool) -> Iterator[None]:
    """Borrow Optuna's log level."""
    before = optuna.logging.get_verbosity()
    try:
        if quiet:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
    finally:
        optuna.logging.set_verbosity(before)

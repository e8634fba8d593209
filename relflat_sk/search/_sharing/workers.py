"""Run the trials of a search: in one process or several, resumed, none twice, none lost."""

import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.minima import later
from relflat_sk.search._sharing.claims import (
    Wanted,
    claim,
    give_up,
    give_up_abandoned,
    is_cut_short,
    was_killed,
)
from relflat_sk.search._trial import MinimaObjective

__all__ = [
    "Kept",
    "Sweep",
    "check_data",
    "check_resumable",
    "in_memory",
    "log_level",
    "run_in_processes",
]

Keep = Callable[[FrozenTrial, Any], None]


class Sweep:
    """The objective of a search: one value, for the candidates that this process claims.

    Parameters
    ----------
    objective : MinimaObjective
    wanted : Wanted
        What is to be trained.
    quiet : bool
        Whether Optuna's log is to be silent, in this process or another.
    """

    def __init__(self, objective: MinimaObjective, wanted: Wanted, quiet: bool) -> None:
        self.objective = objective
        self.wanted = wanted
        self.quiet = quiet
        self.name = uuid.uuid4().hex

    def n_left(self, study: optuna.Study) -> int:
        """How many candidates are to be trained, now that this sweep is at none."""
        give_up_abandoned(study)
        return self.wanted.n_left(study.get_trials(deepcopy=False))

    def n_killed(self, study: optuna.Study) -> int:
        """How many trials of this sweep ended with their process."""
        trials = study.get_trials(deepcopy=False)
        return sum("killed" in trial.user_attrs and self.has(trial) for trial in trials)

    def n_open(self, study: optuna.Study) -> int:
        """How many candidates are to be trained, those included that this sweep is at."""
        trials = study.get_trials(deepcopy=False)
        running = sum(trial.state == TrialState.RUNNING and self.has(trial) for trial in trials)
        return self.wanted.n_left(trials) + running

    def has(self, trial: FrozenTrial) -> bool:
        """Say whether a trial is one of this sweep's."""
        return bool(trial.user_attrs.get("sweep") == self.name)

    def __call__(self, trial: optuna.Trial) -> Sequence[float]:
        """Train a candidate."""
        self.estimator = None
        found, self.estimator = self.objective.run(trial)
        values = found if isinstance(found, tuple) else (found,)
        # with one direction, the first measure alone, so that any sampler and pruner works
        return values[: len(trial.study.directions)]

    def run(self, study: optuna.Study, keep: Keep) -> bool:
        """Train one candidate in this process and hand it over, if there is one left."""
        claimed = claim(study, self.wanted, self.name)
        if claimed is None:
            return False
        try:
            claimed.optimize(
                self,
                n_trials=1,
                catch=(Exception,),
                callbacks=[lambda _, trial: keep(trial, self.estimator)],
            )
        except (ValueError, AssertionError):  # Optuna's word for a trial that is finished
            # This process was taken for dead (its machine slept, say), and the trial was given
            # up. Another one trains the candidate again, and what this one found is dropped.
            if not is_cut_short(study._storage.get_trial(claimed.trial_id)):
                raise
        if self.estimator is None:
            torch.cuda.empty_cache()  # for the next one, if this one ran out of memory
        return not claimed.stopped

    def run_one(self, study: optuna.Study) -> list[tuple[FrozenTrial, Any]]:
        """Train one candidate, if there is one left, in a process of its own."""
        found: list[tuple[FrozenTrial, Any]] = []
        study.sampler.reseed_rng()  # a copy would draw what the other processes draw
        with log_level(self.quiet):
            self.run(study, lambda *result: found.append(result))
        # networks that cannot win need not travel
        return [(trial, one if is_minimum(trial) else None) for trial, one in found]


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
            value = trial.values[0]
            if (value, trial.number) < self.best:
                self.best, self.estimator = (value, trial.number), estimator


def run_in_processes(study: optuna.Study, sweep: Sweep, n_jobs: int, keep: Keep) -> None:
    """Train in processes: threads would race for torch's random state."""
    while n_left := sweep.n_left(study):
        n_killed = sweep.n_killed(study)
        runs = (delayed(sweep.run_one)(study) for _ in range(n_left))
        try:
            for found in Parallel(n_jobs=n_jobs, return_as="generator_unordered")(runs):
                for result in found:
                    keep(*result)
        except TerminatedWorkerError:  # joblib has ended them all
            give_up(study, sweep.has, partial(_blame, trials=study.get_trials(deepcopy=False)))
            if sweep.n_killed(study) == n_killed:
                raise  # processes die by themselves


def _blame(trial: FrozenTrial, trials: list[FrozenTrial]) -> dict[str, Any]:
    """Try a candidate again when its process, or one beside it, was killed, but only once."""
    if not was_killed(trial, trials):
        return {"killed": True}
    reason = "a process that trained was killed, twice, perhaps for lack of memory"
    return {"killed": True, "reason": reason, "failed": True}


def is_minimum(trial: FrozenTrial) -> bool:
    return trial.state == TrialState.COMPLETE and bool(trial.user_attrs.get("converged"))


def check_resumable(study: optuna.Study, objective: MinimaObjective, n_objectives: int = 1) -> None:
    """Refuse to go on with a study of something else, whose minima cannot be compared."""
    name = study.study_name
    if study.directions != [StudyDirection.MINIMIZE] * n_objectives:
        raise ValueError(
            f"study {name!r} was not made by a search: its directions are "
            f"{[direction.name.lower() for direction in study.directions]}."
        )
    objective.space.check_study(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        found = trial.user_attrs | study.user_attrs.get(later(trial), {})
        lacking = [measure for measure in objective.measures if measure not in found]
        if lacking:
            raise ValueError(
                f"trial {trial.number} of study {name!r} has no {lacking}. Give this search a "
                "study_name of its own, or, if the weights were kept, have it measured: "
                f"remeasure({lacking}) of a search with the measures of that study."
            )
    check_data(study, objective)


def check_data(study: optuna.Study, objective: MinimaObjective) -> None:
    """Refuse data other than those that a study was made with."""
    name = study.study_name
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


def in_memory(study: optuna.Study) -> optuna.Study:
    """Copy a study out of its storage."""
    copied = optuna.create_study(
        directions=study.directions,
        study_name=study.study_name,
        sampler=study.sampler,
        pruner=study.pruner,
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

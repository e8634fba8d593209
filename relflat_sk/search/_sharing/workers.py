"""Train the candidates of a search, in this process or in several worker processes."""

import copy
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import optuna
import torch
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from relflat_sk.search._optuna_internals import TELL_ERRORS, read_trial
from relflat_sk.search._sharing.abandoned import give_up, give_up_abandoned
from relflat_sk.search._sharing.claims import (
    Plan,
    claim,
    is_cut_short,
)
from relflat_sk.search._sharing.fleet import train_together
from relflat_sk.search._sharing.in_processes import train_in_processes
from relflat_sk.search._sharing.processes import end_with_parent
from relflat_sk.search._sharing.progress import Progress
from relflat_sk.search._sharing.run import Run
from relflat_sk.search._sharing.stopping import Stopping
from relflat_sk.search._sharing.study import log_level
from relflat_sk.search._sharing.transfer import ByPath, ByValue, packed
from relflat_sk.search._trial import MinimaObjective

__all__ = ["Sweep", "train_all"]

OnFinished = Callable[[FrozenTrial, Any], None]


class Sweep:
    """One call of `FlatMinimaSearch.fit`: claims candidates and trains them.

    Worker processes hold copies of it, which share its name.
    """

    def __init__(
        self,
        objective: MinimaObjective,
        plan: Plan,
        quiet: bool,
        fleet: int | str | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self.fleet = fleet
        self.stopping = stopping or Stopping()
        self.objective = objective
        self.plan = plan
        self.quiet = quiet
        self.name = uuid.uuid4().hex
        self.process_id = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"objective": self.objective_to_send()}

    def objective_to_send(self) -> MinimaObjective:
        """Return the objective in the form in which other processes get it."""
        objective = copy.copy(self.objective)
        for name in ("estimator", "space"):
            setattr(objective, name, ByValue(getattr(objective, name)))
        # joblib maps large arrays into the memory of all workers, and so does ray
        for name in ("X", "y", "X_test", "y_test"):
            setattr(objective, name, ByPath.wrap(getattr(objective, name)))
        return objective

    def n_left(self, study: optuna.Study) -> int:
        """Count the candidates left, while no process of this sweep trains."""
        return self.plan.n_left(give_up_abandoned(study))

    def n_killed(self, study: optuna.Study) -> int:
        """Count the trials of this sweep whose process died."""
        trials = study.get_trials(deepcopy=False)
        return sum("killed" in trial.user_attrs and self.owns(trial) for trial in trials)

    def n_open(self, study: optuna.Study) -> int:
        """Count the candidates left and those that this sweep is training."""
        trials = study.get_trials(deepcopy=False)
        running = sum(trial.state == TrialState.RUNNING and self.owns(trial) for trial in trials)
        return self.plan.n_left(trials) + running

    def owns(self, trial: FrozenTrial) -> bool:
        """Return whether a trial belongs to this sweep."""
        return bool(trial.user_attrs.get("sweep") == self.name)

    def is_due(self, study: optuna.Study) -> bool:
        """Return whether the sweep is to end, although there are candidates left."""
        return self.stopping.is_due(study, self.name)

    def train_one(self, study: optuna.Study, on_finished: OnFinished) -> bool:
        """Claim a candidate and train it in this process."""
        claimed = None if self.is_due(study) else claim(study, self.plan, self.name)
        if claimed is None:
            return False
        run = Run(self.objective)
        try:
            claimed.optimize(
                run,
                n_trials=1,
                catch=(Exception,),
                callbacks=[lambda _, trial: on_finished(trial, run.estimator)],
            )
        except TELL_ERRORS:
            # Another process took this one for dead (its machine slept, say) and gave the trial
            # up. The candidate is trained again, and this result is dropped.
            if not is_cut_short(read_trial(study, claimed.trial_id)):
                raise
        if run.call_error is not None:
            raise run.call_error
        if run.estimator is None:
            torch.cuda.empty_cache()  # the next candidate may fit, if this one ran out of memory
        return not claimed.stopped

    def train_left(
        self, study: optuna.Study, on_finished: OnFinished, at_most: int | None = None
    ) -> None:
        """Train the candidates left in this process."""
        numbers = count() if at_most is None else iter(range(at_most))

        def train() -> bool:
            return next(numbers, None) is not None and self.train_one(study, on_finished)

        objective = self.objective
        train_together(train, study, objective.estimator, self.fleet, objective.n_threads)

    def train_some_in_worker(
        self, study: optuna.Study, n: int
    ) -> list[tuple[FrozenTrial, bytes | None]]:
        """Claim candidates and train them in a worker process."""
        end_with_parent(self.process_id)
        found: list[tuple[FrozenTrial, Any]] = []
        study.sampler.reseed_rng()  # otherwise every worker would draw the same values
        with log_level(self.quiet):
            self.train_left(study, lambda *result: found.append(result), n)
        return [(trial, packed(estimator)) for trial, estimator in found]


def train_all(
    study: optuna.Study, sweep: Sweep, n_jobs: int, on_finished: OnFinished, *, progress: bool
) -> bool:
    """Train all candidates left."""
    so_far = Progress(study.get_trials(deepcopy=False) if progress else ())
    with tqdm(total=sweep.n_open(study), desc="minima", unit="net", disable=not progress) as bar:

        def show(trial: FrozenTrial, estimator: Any) -> None:
            # other searches may train candidates of the same study, or give them up
            if progress:
                bar.total = bar.n + 1 + sweep.n_open(study)
            so_far.add(trial)
            bar.set_postfix_str(str(so_far), refresh=False)
            bar.update()
            on_finished(trial, estimator)
            sweep.stopping.call(study, trial, sweep.name)

        try:
            if n_jobs:
                train_in_processes(study, sweep, n_jobs, show)
            else:
                sweep.train_left(study, show)
        except KeyboardInterrupt:
            give_up(study, sweep.owns)  # the trials that were running
            return True
        except Exception:
            with suppress(Exception):  # the storage may be what failed
                give_up(study, sweep.owns)
            raise
    return False

"""Which process trains which candidate: one process each, and another one if it dies.

Nothing is queued. A process claims a candidate by creating its trial, which runs from its first
moment, and then looks at the study: of several trials for one candidate the first one counts,
and the others are withdrawn before anything is trained. This holds wherever Optuna keeps a
study, because trials are numbered as they appear: in SQLite under its write lock, in other
databases under a lock on the study's row, in a journal by the order of its lines. A process that
sees its own trial therefore sees every earlier one. (A queue of waiting trials would not do:
SQLite locks no rows, so that two processes can take the same trial out of it.)

A trial whose process is gone is given up, and its candidate is free again. The operating system
tells of processes on this machine (Windows does not); of others, Optuna's heartbeat does where
the storage has one (``RDBStorage(url, heartbeat_interval=60)``).
"""

import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import FrozenTrial, TrialState, create_trial

__all__ = [
    "Claimed",
    "Wanted",
    "claim",
    "give_up",
    "give_up_abandoned",
    "is_cut_short",
    "live",
    "was_killed",
]

POINT = "fixed_params"  # where Optuna itself looks for values that are not to be drawn
NUMBER = "candidate"  # which of the draws; a trial that takes over from another has the same


class Wanted(Protocol):
    """What a search is to train."""

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the candidates that nobody has trained or is training."""
        ...

    def free(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """Choose one of them, as the system attributes of its trial; None if there is none."""
        ...


class Claimed(optuna.Study):
    """A study that runs one trial: the one that this process has claimed."""

    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        super().__init__(study.study_name, study._storage, study.sampler, study.pruner)
        self.trial_id = trial_id
        self.stopped = False

    def _pop_waiting_trial_id(self) -> int:
        return self.trial_id

    def stop(self) -> None:
        """Remember that the sampler has nothing left to draw."""
        super().stop()
        self.stopped = True


def claim(study: optuna.Study, wanted: Wanted, sweep: str) -> Claimed | None:
    """Take a candidate that nobody else trains.

    Parameters
    ----------
    study : optuna.Study
    wanted : Wanted
    sweep : str
        Name of the sweep that this process is part of. Candidates that a process died of are
        trained one at a time within it, so that the next death tells which one it is.

    Returns
    -------
    Claimed
        Whose ``optimize(..., n_trials=1)`` trains it; None if there is nothing left to claim.
    """
    storage = study._storage
    while True:
        give_up_abandoned(study, except_of=sweep)
        trials = study.get_trials(deepcopy=False)
        found = wanted.free(study, trials)
        if found is None:
            return None
        template = create_trial(
            state=TrialState.RUNNING,
            user_attrs={"process": _this_process(), "sweep": sweep},
            system_attrs=found,
        )
        alone = was_killed(template, trials)
        if alone and _in_company(template, trials):
            return None
        trial_id = storage.create_new_trial(study._study_id, template)
        if isinstance(storage, BaseHeartbeat) and storage.get_heartbeat_interval() is not None:
            storage.record_heartbeat(trial_id)  # who dies before the first one is never missed
        number = storage.get_trial_number_from_id(trial_id)
        before = study.get_trials(deepcopy=False)[:number]
        if not any(_same(template, other) for other in live(before)) and not (
            alone and _in_company(template, before)
        ):
            return Claimed(study, trial_id)
        storage.set_trial_state_values(trial_id, TrialState.FAIL)


def live(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """List the trials that have a candidate: that are finished, have failed or are running."""
    return [
        trial for trial in trials if trial.state != TrialState.WAITING and not is_cut_short(trial)
    ]


def is_cut_short(trial: FrozenTrial) -> bool:
    """Say whether a trial was interrupted, killed or withdrawn: its candidate is free.

    A trial that failed by itself says so.
    """
    return trial.state == TrialState.FAIL and "failed" not in trial.user_attrs


def was_killed(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Say whether a process died while it trained this candidate."""
    return any("killed" in trial.user_attrs and _same(template, trial) for trial in trials)


def _same(one: FrozenTrial, other: FrozenTrial) -> bool:
    """Say whether two trials are for the same candidate: the same draw, or the same choices."""
    number, point = one.system_attrs.get(NUMBER), one.system_attrs.get(POINT)
    return (number is not None and number == other.system_attrs.get(NUMBER)) or (
        point is not None and point in (other.params, other.system_attrs.get(POINT))
    )


def _in_company(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Say whether the same sweep trains something else at the moment."""
    sweep = template.user_attrs["sweep"]
    return any(
        trial.state == TrialState.RUNNING and trial.user_attrs.get("sweep") == sweep
        for trial in trials
    )


def give_up(
    study: optuna.Study,
    which: Callable[[FrozenTrial], bool],
    because: Callable[[FrozenTrial], dict[str, Any]] = lambda trial: {},
) -> list[FrozenTrial]:
    """Mark running trials as failed.

    Parameters
    ----------
    study : optuna.Study
    which : callable
        Says of a running trial whether to give it up.
    because : callable
        Attributes of a trial that is given up.

    Returns
    -------
    list of optuna.trial.FrozenTrial
        What was given up.
    """
    storage = study._storage
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    found = [trial for trial in running if which(trial)]
    for trial in found:
        with suppress(UpdateFinishedTrialError):  # another process was faster
            for name, value in because(trial).items():
                storage.set_trial_user_attr(trial._trial_id, name, value)
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
    return found


def give_up_abandoned(study: optuna.Study, except_of: str = "") -> None:
    """Give up what was being trained by processes that are gone.

    Parameters
    ----------
    study : optuna.Study
    except_of : str, optional
        A sweep whose trials are left as they are. Of processes that train side by side, one is
        not to judge the other: when one dies, joblib ends them all, so that whatever this one
        claimed next would seem to be what it died of.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # of storages with a heartbeat
    give_up(
        study,
        lambda trial: trial.user_attrs.get("sweep") != except_of and _is_abandoned(trial),
        lambda trial: {"killed": True},
    )


def _this_process() -> list[Any]:
    return [socket.gethostname(), os.getpid(), _started(os.getpid()), threading.get_ident()]


def _is_abandoned(trial: FrozenTrial) -> bool:
    """Say whether the process that trained is gone; of other machines one cannot tell."""
    host, process, started, thread = trial.user_attrs.get("process", [None] * 4)
    if host != socket.gethostname():
        return False
    if process == os.getpid() and started == _started(process):
        others = {one.ident for one in threading.enumerate()} - {threading.get_ident()}
        return thread not in others  # this thread looks for something to train
    return not _is_alive(process) or started != _started(process)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # where asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _started(process: int) -> str | None:
    """Say when a process was started, as numbers of processes are used again; None if unknown."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]  # a zombie trains nothing

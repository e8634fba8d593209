"""Claim candidates, so that processes that share a study never train the same one.

There is no queue. A process claims a candidate by adding a trial for it, in state RUNNING from
the first moment, and then reads the study. If an earlier trial holds the same candidate, the
process withdraws its own trial before it trains anything. This works in every storage of Optuna,
because each numbers trials in the order in which they become visible: SQLite under its write
lock, other databases under a lock on the study's row, a journal by the order of its lines. A
process that sees its own trial therefore sees every earlier one. (A queue of waiting trials
would fail in SQLite, which cannot lock rows: two processes can take the same trial from it.)

If the process of a running trial is gone, the trial is given up and its candidate is free again.
The operating system tells about processes on the same machine (except on Windows). For other
machines Optuna's heartbeat does, if the storage has one:
``RDBStorage(url, heartbeat_interval=60)``. Who claims it next trains the same values.

User attributes of a trial that this package reads again:

=============  ========================================================================
attribute      meaning
=============  ========================================================================
``process``    which process and thread train the trial, see `this_process`
``sweep``      name of the sweep (one call of `FlatMinimaSearch.fit`) that the trial is of
``candidate``  number of the draw, as a text: a number would seem to be a measure
``failed``     training or measuring failed; the candidate is not tried again
``killed``     the process that trained the trial died
=============  ========================================================================
"""

import copy
import itertools
import os
import random
import socket
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

_RANDOM = random.SystemRandom()  # workers that are forked must not draw the same numbers


# -- processes ---------------------------------------------------------------------------------


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def is_gone(process: Sequence[Any]) -> bool:
    """Return whether a thread no longer exists, or is the calling thread itself."""
    host, process_id, started, thread = process
    if host != socket.gethostname():
        return False
    if started != _start_time(process_id):
        return True
    if process_id == os.getpid():
        others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
        return thread not in others
    if os.name == "posix":  # os.kill(..., 0) would end the process on Windows
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    return False


def _start_time(process_id: int) -> str | None:
    """Return when a process started, since ids are reused; None if unknown or a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


# -- what trials hold --------------------------------------------------------------------------


class Candidate(NamedTuple):
    """What a trial is to train: values of parameters, the number of a draw, or both."""

    params: dict[str, Any]
    number: int | None = None

    def is_held_by(self, trial: FrozenTrial) -> bool:
        """Return whether a trial holds the same values, or the same draw."""
        same_draw = self.number is not None and self.number == number_of(trial)
        return same_draw or (bool(self.params) and self.params == trial.params)


def number_of(trial: FrozenTrial) -> int | None:
    """Return the number of a draw, which a trial shares with the trial it replaces."""
    found = trial.user_attrs.get("candidate")
    return None if found is None else int(found)


def counted(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """List the trials that hold a candidate: finished, failed or running ones."""
    return [one for one in trials if one.state != TrialState.WAITING and not is_cut_short(one)]


def is_cut_short(trial: FrozenTrial) -> bool:
    """Whether a trial was interrupted, killed or withdrawn, so that its candidate is free."""
    return trial.state == TrialState.FAIL and "failed" not in trial.user_attrs


def failed_trials(trials: Iterable[FrozenTrial]) -> frozenset[int]:
    """Return the numbers of the trials whose training or measuring failed."""
    failed = (one for one in trials if one.state == TrialState.FAIL and not is_cut_short(one))
    return frozenset(trial.number for trial in failed)


def is_superseded(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a failed trial has a successor, which was told to train it again."""
    if trial.state != TrialState.FAIL:
        return False
    candidate = Candidate(trial.params, number_of(trial))
    later = (other for other in counted(trials[trial.number + 1 :]) if other.state.is_finished())
    return any(map(candidate.is_held_by, later))


# -- draws -------------------------------------------------------------------------------------


def _key(point: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return values in a form of which thousands are compared at once."""
    return frozenset(point.items())


def _keys(trials: Iterable[FrozenTrial]) -> set[frozenset[tuple[str, Any]]]:
    """Return the values of trials in this form."""
    return {_key(trial.params) for trial in trials}


class Draws:
    """Draws by TPE that repeat no combination of choices, and of which any can be repeated.

    A draw depends on the seed, its number and the results before it. A search that was
    interrupted therefore goes on as it would have. If the space has choices only, the first draws
    follow a random order of all combinations, whichever process asks for them.
    """

    n_random = 10

    def __init__(
        self,
        seed: int | None,
        choices: Mapping[str, BaseDistribution],
        points: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.seed = seed
        self.choices = choices
        self.points = [points[i] for i in np.random.RandomState(seed).permutation(len(points))]

    def sampler(self, number: int) -> TPESampler:
        """Make the sampler of a draw."""
        seed = None if self.seed is None else zlib.crc32(b"%d" % number, self.seed)
        return TPESampler(seed=seed, n_startup_trials=self.n_random)

    def point(
        self, study: optuna.Study, number: int, taken: set[frozenset[tuple[str, Any]]]
    ) -> dict[str, Any]:
        """Draw a combination of choices that no trial holds, from a space of choices only."""
        start = min(number, self.n_random)
        in_order = [*self.points[start:], *self.points[:start]]
        if number >= self.n_random:
            taken_or_reserved = taken | {_key(point) for point in self.points[:start]}
            tpe, trial = self.sampler(number), create_trial(state=TrialState.WAITING)
            for _ in range(100):
                drawn = {
                    name: tpe.sample_independent(study, trial, name, distribution)
                    for name, distribution in self.choices.items()
                }
                if _key(drawn) not in taken_or_reserved:
                    return drawn
        return next(point for point in in_order if _key(point) not in taken)


# -- plans -------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The candidates that a search is to train: all points of a grid, or a number of draws.

    Draws are numbered from 0.
    """

    choices: Mapping[str, BaseDistribution]
    points: Sequence[dict[str, Any]] | None = None
    n_trials: int = 0
    draws: Draws | None = None  # by Optuna's sampler of the study if None
    released: frozenset[int] = frozenset()  # trials that failed and are to be repeated

    def holders(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """List the trials that hold a candidate of this plan."""
        return [trial for trial in counted(trials) if trial.number not in self.released]

    def left(self, trials: Iterable[FrozenTrial]) -> list[Candidate]:
        """List the candidates that no trial holds."""
        holders = self.holders(trials)
        if self.points is not None:
            taken = _keys(holders)
            return [Candidate(point) for point in self.points if _key(point) not in taken]
        numbers = [number_of(trial) for trial in holders]
        # trials without a number are of a grid, or were made by something other than a search
        n_trials, held = self.n_trials - numbers.count(None), set(numbers)
        left = [Candidate({}, number) for number in range(n_trials) if number not in held]
        if self.draws is not None and self.draws.points:
            taken = _keys(holders)
            left = left[: sum(_key(point) not in taken for point in self.draws.points)]
        return left

    def begun(self, number: int, trials: Iterable[FrozenTrial]) -> FrozenTrial | None:
        """Return the trial of a draw whose values are to be trained again, if there is one."""
        again = [
            trial
            for trial in trials
            if (is_cut_short(trial) or trial.number in self.released)
            and (trial.params and number == number_of(trial))
            and all(self.choices.get(name, d) == d for name, d in trial.distributions.items())
        ]
        return again[-1] if again else None

    def split(self, trials: Sequence[FrozenTrial]) -> tuple[list[Candidate], list[Candidate]]:
        """List the candidates left, and separately those that a process died of."""
        left = self.left(trials)
        killed = [trial for trial in trials if "killed" in trial.user_attrs]
        suspects = [one for one in left if any(map(one.is_held_by, killed))]
        return [one for one in left if one not in suspects] if suspects else left, suspects


# -- claims ------------------------------------------------------------------------------------


def claim(
    study: optuna.Study, plan: Plan, sweep: str, *, suspects: bool = True
) -> optuna.Trial | None:
    """Claim a candidate for the calling process; those that a process died of come last."""
    for lost in itertools.count():
        trials = give_up_abandoned(study, except_of=sweep)
        fresh, suspected = plan.split(trials)
        left = fresh or (suspected if suspects else [])
        if not left:
            return None
        # processes that begin at once would otherwise all try the same candidate, then the next
        candidate = left[_RANDOM.randrange(2 ** min(lost, 10)) % len(left)]
        number, draws = candidate.number, plan.draws
        again = None if number is None else plan.begun(number, trials)
        if number is not None and draws is not None and draws.points:
            taken = _keys(plan.holders(trials))
            if again is not None and _key(again.params) in taken:
                again = None
            point = draws.point(study, number, taken) if again is None else again.params
            candidate = Candidate(point, number)
        own = _add_trial(study, plan, candidate, sweep, again)
        trials = study.get_trials(deepcopy=False)
        trial = max(
            (trial for trial in trials if trial.user_attrs.get("process") == own),
            key=attrgetter("number"),
        )
        if not any(map(candidate.is_held_by, plan.holders(trials[: trial.number]))):
            if draws is None:
                return optuna.Trial(study, id_of(trial))
            drawing = _with_sampler(
                study, draws.sampler(trial.number if number is None else number)
            )
            return optuna.Trial(drawing, id_of(trial))
        fail(study, trial)
    return None


def _add_trial(
    study: optuna.Study,
    plan: Plan,
    candidate: Candidate,
    sweep: str,
    again: FrozenTrial | None,
) -> list[Any]:
    """Add a running trial for a candidate, and return how its process is described.

    A trial that is to be trained again gives it its values, and what a sampler noted of them.
    """
    process = this_process()
    attributes = {"process": process, "sweep": sweep}
    if candidate.number is not None:
        attributes["candidate"] = str(candidate.number)
    values: dict[str, Any] = {
        "params": candidate.params,
        "distributions": {name: plan.choices[name] for name in candidate.params},
    }
    if again is not None:
        values = {name: getattr(again, name) for name in (*values, "system_attrs")}
    study.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=attributes, **values))
    return process


def id_of(trial: Any) -> int:
    """Return a trial's id in its storage, for which Optuna has no public name."""
    found: int = trial._trial_id
    return found


def _with_sampler(study: optuna.Study, sampler: BaseSampler) -> optuna.Study:
    """Return a view of a study with another sampler."""
    view = copy.copy(study)
    view.sampler = sampler
    return view


def fail(study: optuna.Study, trial: FrozenTrial, **attributes: Any) -> None:
    """Mark a running trial as failed, unless another process has finished it."""
    plain = _with_sampler(study, RandomSampler())  # which does not learn of the trial's end
    with suppress(UpdateFinishedTrialError):
        for name, value in attributes.items():
            optuna.Trial(plain, id_of(trial)).set_user_attr(name, value)
        plain.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)


def give_up(
    study: optuna.Study, which: Callable[[FrozenTrial], bool], **attributes: Any
) -> list[FrozenTrial]:
    """Mark running trials as failed, so that their candidates are free, and return them."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    given_up = [trial for trial in running if which(trial)]
    for trial in given_up:
        fail(study, trial, **attributes)
    return given_up


def give_up_abandoned(study: optuna.Study, except_of: str = "") -> list[FrozenTrial]:
    """Give up the running trials of processes that are gone, and return all trials."""

    def is_abandoned(trial: FrozenTrial) -> bool:
        process = trial.user_attrs.get("process")
        return (
            process is not None and trial.user_attrs.get("sweep") != except_of and is_gone(process)
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # in storages with a heartbeat
    give_up(study, is_abandoned, killed=True)
    return study.get_trials(deepcopy=False)

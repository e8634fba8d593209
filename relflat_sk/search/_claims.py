"""Claim candidates, so that processes that share a study never train the same one."""

import itertools
import multiprocessing
import os
import random
import socket
import threading
import time
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from joblib.externals.loky.backend.process import LokyProcess
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from relflat_sk.search._optuna_internals import FIXED_VALUES, add_trial, fail_trial, trial_id_of
from relflat_sk.search._optuna_reading import read_trials, trials_between
from relflat_sk.search._optuna_views import OneTrialStudy, with_trials
from relflat_sk.search._space import Space


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def is_gone(process: Sequence[Any]) -> bool:
    """Return whether a thread no longer exists, or is the calling thread itself."""
    host, process_id, started, thread = process
    if host != socket.gethostname():
        return False
    if process_id == os.getpid() and started == _start_time(process_id):
        others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
        return thread not in others
    return not _is_alive(process_id) or started != _start_time(process_id)


@cache  # one thread is enough
def end_with_parent(process_id: int) -> None:
    """Let the calling process, if it is a worker of joblib's, end soon after its parent.

    A process that is killed cannot end its workers. Without their parent, they would train their
    candidates to the end, for nobody. (On Windows, they still do.)
    """
    is_worker = isinstance(multiprocessing.current_process(), LokyProcess)
    if is_worker and process_id != os.getpid():
        threading.Thread(target=_watch_parent, args=(process_id,), daemon=True).start()


def _watch_parent(process_id: int) -> None:
    while os.getppid() == process_id:
        time.sleep(1)
    os._exit(1)


def _is_alive(process_id: int) -> bool:
    """Return whether a process of this machine runs; True where one cannot ask."""
    if os.name != "posix":  # os.kill(..., 0) would end the process on Windows
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_time(process_id: int) -> str | None:
    """Return when a process started, since ids are reused; None if unknown or a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


# Give up running trials, above all those of processes that are gone.


def give_up(
    study: optuna.Study,
    which: Callable[[FrozenTrial], bool],
    attributes: Callable[[FrozenTrial], dict[str, Any]] = lambda trial: {},
) -> list[FrozenTrial]:
    """Mark running trials as failed, so that their candidates are free again."""
    trials = read_trials(study)
    given_up = [one for one in trials if one.state == TrialState.RUNNING and which(one)]
    for trial in given_up:
        fail_trial(study, trial_id_of(trial), attributes(trial))
    return read_trials(study) if given_up else trials


def give_up_abandoned(study: optuna.Study, except_of: str = "") -> list[FrozenTrial]:
    """Give up the running trials of processes that are gone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # in storages with a heartbeat
    return give_up(
        study,
        lambda trial: trial.user_attrs.get("sweep") != except_of and _is_abandoned(trial),
        lambda trial: {"killed": True},
    )


def _is_abandoned(trial: FrozenTrial) -> bool:
    return "process" in trial.user_attrs and is_gone(trial.user_attrs["process"])


# Claim candidates, so that processes that share a study never train the same one.
#
# There is no queue. A process claims a candidate by creating a trial for it, in state RUNNING from
# the first moment, and then reads the study. If an earlier trial holds the same candidate, the
# process withdraws its own trial before it trains anything. This works in every storage of Optuna,
# because each numbers trials in the order in which they become visible: SQLite under its write
# lock, other databases under a lock on the study's row, a journal by the order of its lines. A
# process that sees its own trial therefore sees every earlier one. (A queue of waiting trials
# would fail in SQLite, which cannot lock rows: two processes can take the same trial from it.)
#
# If the process of a running trial is gone, the trial is given up and its candidate is free again.
# The operating system tells about processes on the same machine (except on Windows). For other
# machines Optuna's heartbeat does, if the storage has one:
# ``RDBStorage(url, heartbeat_interval=60)``.
#
# User attributes of a trial that this package reads again:
#
# ===========  ==========================================================================
# attribute    meaning
# ===========  ==========================================================================
# ``process``  which process and thread train the trial, see `processes.this_process`
# ``sweep``    name of the sweep (one call of `FlatMinimaSearch.fit`) that the trial is of
# ``failed``   training or measuring failed; the candidate is not tried again
# ``killed``   the process that trained the trial died
# ===========  ==========================================================================

# system attribute: the number of a draw, which a trial shares with the trial it replaces
NUMBER = "candidate"

_RANDOM = random.SystemRandom()  # workers that are forked must not draw the same numbers


class Plan(ABC):
    """The candidates that a search is to train."""

    choices: Mapping[str, BaseDistribution]
    released: frozenset[int] = frozenset()

    def counted(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """List the trials that hold a candidate of this plan."""
        return [trial for trial in counted(trials) if trial.number not in self.released]

    @abstractmethod
    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the candidates that no trial holds."""

    @abstractmethod
    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose a candidate that no trial holds."""

    def values(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], candidate: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values that the trial of a candidate has from the beginning."""
        return dict(candidate.get(FIXED_VALUES, {}))


def claim(study: optuna.Study, plan: Plan, sweep: str) -> OneTrialStudy | None:
    """Claim a candidate for the calling process.

    A candidate that a process died of is claimed only while its sweep trains nothing else, so
    that another death can only be its own.
    """
    for lost in itertools.count():
        trials = give_up_abandoned(study, except_of=sweep)
        # processes that begin at once would otherwise all try the same candidate, then the next
        candidate = plan.next_candidate(study, trials, skip=_RANDOM.randrange(2 ** min(lost, 10)))
        if candidate is None:
            return None
        point = plan.values(study, trials, candidate)
        values = {name: value for name, value in point.items() if name in plan.choices}
        template = create_trial(
            state=TrialState.RUNNING,
            params=values,
            distributions={name: plan.choices[name] for name in values},
            user_attrs={"process": this_process(), "sweep": sweep},
            system_attrs=candidate,
        )
        alone = is_suspect(template, trials)
        if alone and _sweep_is_busy(template, trials):
            return None
        others = trials_between(study, trials, trial_id := add_trial(study, template))
        taken = any(_same_candidate(template, other) for other in plan.counted(others))
        if not taken and not (alone and _sweep_is_busy(template, others)):
            return OneTrialStudy(study, trial_id)
        fail_trial(study, trial_id)
    return None


def counted(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """List the trials that hold a candidate: finished, failed or running ones."""
    return [one for one in trials if one.state != TrialState.WAITING and not is_cut_short(one)]


def is_cut_short(trial: FrozenTrial) -> bool:
    """Whether a trial was interrupted, killed or withdrawn, so that its candidate is free."""
    return trial.state == TrialState.FAIL and not _has_failed(trial)


def _has_failed(trial: FrozenTrial) -> bool:
    return "failed" in trial.user_attrs


def failed_trials(trials: Iterable[FrozenTrial]) -> frozenset[int]:
    """Return the numbers of the trials whose training or measuring failed."""
    return frozenset(
        trial.number for trial in trials if trial.state == TrialState.FAIL and _has_failed(trial)
    )


def is_superseded(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a failed trial has a successor, which was told to train it again."""
    if trial.state != TrialState.FAIL:
        return False
    later = (other for other in counted(trials[trial.number + 1 :]) if other.state.is_finished())
    return any(_same_candidate(other, trial) for other in later)


def is_suspect(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Return whether a process died while it trained the candidate of a trial."""
    return any(
        "killed" in trial.user_attrs and _same_candidate(template, trial) for trial in trials
    )


def _same_candidate(one: FrozenTrial, other: FrozenTrial) -> bool:
    """Return whether two trials hold the same draw, or the same combination of choices."""
    number, point = one.system_attrs.get(NUMBER), one.system_attrs.get(FIXED_VALUES)
    return (number is not None and number == other.system_attrs.get(NUMBER)) or (
        point is not None and point in (other.params, other.system_attrs.get(FIXED_VALUES))
    )


def _sweep_is_busy(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Return whether the sweep of a trial trains another candidate at the moment."""
    sweep = template.user_attrs["sweep"]
    return any(
        trial.state == TrialState.RUNNING and trial.user_attrs.get("sweep") == sweep
        for trial in trials
    )


# Plan what a search trains: all combinations of its choices, or a number of draws.

_SPACE_LOCK = threading.Lock()  # of no sampler, as samplers are pickled


class Grid(Plan):
    """The plan to train all combinations of choices."""

    def __init__(
        self, points: list[dict[str, Any]], choices: Mapping[str, BaseDistribution] | None = None
    ) -> None:
        self.points = points
        self.choices = choices or {}

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the combinations that no trial holds."""
        return len(self._missing(trials))

    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose the first combination left; those that a process died of come last."""
        candidates = [{FIXED_VALUES: point} for point in self._missing(trials)]
        return _suspects_last(candidates, trials, skip)

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
        taken = _keys(_points(self.counted(trials)))
        return [point for point in self.points if _key(point) not in taken]


class Draws(Plan):
    """The plan to train a number of draws, which are numbered from 0."""

    def __init__(
        self, n_trials: int, choices: Mapping[str, BaseDistribution] | None = None
    ) -> None:
        self.n_trials = n_trials
        self.choices = choices or {}

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the draws that no trial holds."""
        return len(self._missing(trials))

    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose the first draw left; those that a process died of come last.

        A `CandidateSampler` over choices draws the values now.
        """
        candidates = [{NUMBER: number} for number in self._missing(trials)]
        found = _suspects_last(candidates, trials, skip)
        sampler = study.sampler
        if found is None or not isinstance(sampler, CandidateSampler) or sampler.points is None:
            return found
        taken = _points(self.counted(trials))
        return found | sampler.point(with_trials(study, trials), found[NUMBER], taken)

    def values(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], candidate: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values that the trial of a candidate has; a `CandidateSampler` draws them."""
        if FIXED_VALUES in candidate or not isinstance(study.sampler, CandidateSampler):
            return super().values(study, trials, candidate)
        return study.sampler.draw(with_trials(study, trials), candidate[NUMBER])

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[int]:
        numbers = [trial.system_attrs.get(NUMBER) for trial in self.counted(trials)]
        # trials without a number are of a grid, or were made by something other than a search
        n_trials, taken = self.n_trials - numbers.count(None), set(numbers)
        return [number for number in range(n_trials) if number not in taken]


def _points(trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
    """List the values that trials have drawn, or are going to draw."""
    return [
        values
        for trial in trials
        for values in (trial.params, trial.system_attrs.get(FIXED_VALUES, {}))
        if values
    ]


def _key(point: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the values in a form of which thousands are compared at once."""
    return frozenset(point.items())


def _keys(points: Iterable[Mapping[str, Any]]) -> set[frozenset[tuple[str, Any]]]:
    return set(map(_key, points))


def _suspects_last(
    candidates: list[dict[str, Any]], trials: Sequence[FrozenTrial], skip: int
) -> dict[str, Any] | None:
    """Return the first candidate that no process died of, or else the first one."""
    if candidates:
        skip %= len(candidates)
        candidates = [*candidates[skip:], *candidates[:skip]]
    killed = [trial for trial in trials if "killed" in trial.user_attrs]
    if not killed:
        return next(iter(candidates), None)

    def died_of(candidate: dict[str, Any]) -> bool:
        template = create_trial(state=TrialState.WAITING, system_attrs=candidate)
        return is_suspect(template, killed)

    return min(candidates, key=died_of, default=None)


class CandidateSampler(TPESampler):
    """TPE that repeats no combination of choices and can repeat any draw by its number.

    A draw depends on the seed, its number and the results before it. A search that was
    interrupted therefore goes on as it would have, and if the process of a draw dies, the same
    values are drawn again. If the space has choices only, the first draws follow a random order
    of all combinations, whichever process asks for them.
    """

    n_random = 10

    def __init__(self, seed: int | None, space: Space) -> None:
        super().__init__(seed=seed, n_startup_trials=self.n_random)
        self.seed = seed
        # never draws: looks at each trial once to learn which parameters all trials have
        self.space_of_trials = self._tpe(0)
        self.points = space.grid()
        order = np.random.RandomState(seed).permutation(len(self.points or []))
        self.order = [int(index) for index in order]
        self.choices = space.distributions()
        self.draws_all = len(self.choices) == len(space.entries)  # and no function of the trial

    def reseed_rng(self) -> None:
        """Do nothing: every draw has a seed of its own, in every process."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start from the seed and the number of the draw."""
        if self.seed is not None:
            number = trial.system_attrs.get(NUMBER, trial.number)
            TPESampler.__init__(self, seed=self._seed_of(number), n_startup_trials=self.n_random)
        super().before_trial(study, trial)

    def _seed_of(self, number: int) -> int | None:
        return None if self.seed is None else zlib.crc32(b"%d" % number, self.seed)

    def _tpe(self, number: int) -> TPESampler:
        """Return a sampler for one draw, which threads can make at the same time."""
        return TPESampler(seed=self._seed_of(number), n_startup_trials=self.n_random)

    def point(
        self, study: optuna.Study, number: int, taken: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Draw a combination of choices that no trial holds, from a space of choices only."""
        start, keys = min(number, self.n_random), _keys(taken)
        points = self.points or []
        in_order = [points[i] for i in (*self.order[start:], *self.order[:start])]
        if number >= self.n_random:
            reserved = in_order[len(in_order) - start :]  # for the draws before this one
            drawn = self._draw(study, number, keys | _keys(reserved))
            if drawn is not None:
                return {FIXED_VALUES: drawn}
        return {FIXED_VALUES: next(point for point in in_order if _key(point) not in keys)}

    def draw(self, study: optuna.Study, number: int) -> dict[str, Any]:
        """Draw the values of a trial as it would draw them itself, but without its storage."""
        if not self.draws_all:
            return {}
        tpe, trial = self._tpe(number), create_trial(state=TrialState.WAITING)
        varied = {name: one for name, one in self.choices.items() if not one.single()}
        with _SPACE_LOCK:
            known = self.space_of_trials.infer_relative_search_space(study, trial)
        same = {name: one for name, one in known.items() if varied.get(name) == one}
        together = tpe.sample_relative(study, trial, same)
        alone = [name for name in varied if name not in together]
        drawn = together | {
            name: tpe.sample_independent(study, trial, name, varied[name]) for name in alone
        }
        return {name: drawn[name] for name in varied}

    def _draw(
        self, study: optuna.Study, number: int, taken: Container[frozenset[tuple[str, Any]]]
    ) -> dict[str, Any] | None:
        """Draw by TPE until a combination is not taken; None after 100 attempts."""
        tpe, trial = self._tpe(number), create_trial(state=TrialState.WAITING)
        choices: dict[str, BaseDistribution] = self.choices
        for _ in range(100):
            point = {
                name: tpe.sample_independent(study, trial, name, choices[name]) for name in choices
            }
            if _key(point) not in taken:
                return point
        return None

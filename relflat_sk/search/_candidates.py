"""Which candidates to train: asked for in one process, which tells the study what became of them.

A trial that is running, but whose process is gone, was killed: its candidate is free. So is that
of a trial that failed without the attribute ``failed``: it was interrupted.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._failures import CallError, StorageFailedError, blame_storage
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._space import labels_of
from relflat_sk.search._task import STOPPED, Trained

Point = Mapping[str, Any]


class Candidate(NamedTuple):
    """What a worker gets of a trial."""

    number: int
    params: dict[str, Any]
    seed: int
    problem: str = ""  # why there are no parameters


class SearchStudy(optuna.Study):
    """A second object for a study, whose `stop` says that a search is to end.

    Callbacks and samplers call it outside of `Study.optimize`, where Optuna's own raises.
    """

    def __init__(self, study: optuna.Study, storage: BaseStorage) -> None:
        super().__init__(study.study_name, storage, study.sampler, study.pruner)
        self.stopped = False

    def stop(self) -> None:
        """End the search after the candidates that are in training."""
        self.stopped = True


class _Fixed(RandomSampler):
    """Gives a trial the values of a point."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        self.point = point

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if name in self.point:
            return self.point[name]
        return super().sample_independent(study, trial, name, distribution)


def _key(point: Point) -> frozenset[tuple[str, Any]]:
    """Return values in a form of which thousands are compared at once."""
    return frozenset(point.items())


# -- the owner of a study ------------------------------------------------------------------------

OWNER = "owner"  # user attribute of a study and of a trial


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def is_gone(owner: Sequence[Any] | None) -> bool:
    """Return whether a thread no longer exists, is the calling thread itself, or is not known."""
    if not owner:
        return True
    host, process_id, started, thread_id = owner
    if host != socket.gethostname():
        return False
    if started != _start_time(process_id):
        return True
    if process_id == os.getpid():
        alive = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return thread_id not in alive
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


def name_owner(owner: Sequence[Any]) -> str:
    """Name a process in a message."""
    return f"process {owner[1]} on {owner[0]}"


@contextmanager
def owned(study: optuna.Study) -> Iterator[tuple[list[Any], list[FrozenTrial]]]:
    """Own a study for a while; yields the name of the owner, and trials whose process was killed.

    A study, or a running trial, of a process that is alive is refused.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    owners = [study.user_attrs.get(OWNER), *(trial.user_attrs.get(OWNER) for trial in running)]
    alive = next((owner for owner in owners if not is_gone(owner)), None)
    if alive is not None:
        raise ValueError(
            f"study {study.study_name!r} belongs to {name_owner(alive)}, which is training. Wait "
            "until it ends; processes share a study by study.optimize(MinimaObjective(...)). If "
            f"another machine's process is gone: study.set_user_attr({OWNER!r}, None), and for "
            "each running trial study.tell(number, state=TrialState.FAIL)."
        )
    owner = this_process()
    study.set_user_attr(OWNER, owner)
    for trial in running:
        study.tell(trial.number, state=TrialState.FAIL)
    try:
        yield owner, running
    except StorageFailedError:  # nothing can be written, and who comes next finds no owner
        raise
    except BaseException:
        _release(study, owner)
        raise
    _release(study, owner)


def _release(study: optuna.Study, owner: list[Any]) -> None:
    with blame_storage(study):
        if study.user_attrs.get(OWNER) == owner:
            study.set_user_attr(OWNER, None)


def is_interrupted(trial: FrozenTrial) -> bool:
    """Return whether a trial was interrupted or killed, so that its candidate is free."""
    return trial.state == TrialState.FAIL and not trial.user_attrs.get("failed")


def failed(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """List the trials whose training or measuring failed."""
    return [t for t in trials if t.state == TrialState.FAIL and not is_interrupted(t)]


def without_superseded(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """List finished trials, without those that were interrupted, or failed and were repeated."""
    finished = [t for t in trials if t.state.is_finished() and not is_interrupted(t)]
    last = {_key(trial.params): trial.number for trial in finished if trial.params}
    return [
        trial
        for trial in finished
        if trial.state != TrialState.FAIL or last.get(_key(trial.params), -1) <= trial.number
    ]


# -- candidates ----------------------------------------------------------------------------------


class Candidates:
    """Asks a study for the candidates that are left, and tells it what became of them."""

    def __init__(  # noqa: PLR0913
        self,
        study: SearchStudy,
        recipe: Recipe,
        *,
        owner: list[Any],
        lost: Sequence[FrozenTrial],  # whose process was killed: they come last
        points: Sequence[Point] | None,  # in this order, or None for draws
        n_trials: int,
        sampler_of: Callable[[int], BaseSampler],  # of a draw, by its number
        retry_failed: bool,
        deadline: float | None,
    ) -> None:
        self.study, self.recipe, self.owner = study, recipe, owner
        self.sampler_of, self.deadline = sampler_of, deadline
        self.sampler = study.sampler
        self.trials: dict[int, tuple[optuna.Trial, dict[str, Any]]] = {}  # in training
        self._lock = threading.Lock()  # joblib asks for candidates in threads
        self._has_ended = False
        trials = study.get_trials(deepcopy=False)
        released = failed(trials) if retry_failed else []
        free = [t for t in trials if is_interrupted(t) or t in released]
        held = [t for t in trials if t.state.is_finished() and t not in free]
        taken = {_key(trial.params) for trial in held}
        killed = {trial.number for trial in lost}
        self._first = deque(self._again((t for t in free if t.number not in killed), taken))
        self._last = deque(self._again((t for t in free if t.number in killed), taken))
        self._number = len(held) + len(self._first) + len(self._last)
        self._n_left = max(n_trials - self._number, 0)
        if points is not None:
            untrained = [point for point in points if _key(point) not in taken]
            is_sample = n_trials < len(points)
            self._first.extend(untrained[: self._n_left] if is_sample else untrained)
            self._n_left = 0
        waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        self._n_enqueued = len(waiting)  # by a user; Optuna asks for them first

    def _again(self, trials: Iterable[FrozenTrial], taken: set[Any]) -> list[Point]:
        """List the values that are to be trained again, and take them."""
        points: list[Point] = []
        for trial in trials:
            drew_all = self.recipe.space.distributions().keys() <= trial.params.keys()
            if trial.params and drew_all and _key(trial.params) not in taken:
                taken.add(_key(trial.params))
                points.append(trial.params)
        return points

    def __len__(self) -> int:
        """Count the candidates left, and those in training."""
        left = len(self._first) + self._n_left + len(self._last)
        return left + self._n_enqueued + len(self.trials)

    def __iter__(self) -> "Candidates":
        return self

    def __next__(self) -> Candidate:
        with self._lock:
            is_late = self.deadline is not None and time.time() >= self.deadline
            if self._has_ended or self.study.stopped or is_late:
                raise StopIteration
            with blame_storage(self.study):
                owner = self.study.user_attrs.get(OWNER)
                chosen = self._choose()
            if owner is None or owner != self.owner:
                raise CallError(
                    f"{name_owner(owner) if owner else 'Another program'} began to train study "
                    f"{self.study.study_name!r} at the same moment. Fit again when it has ended."
                )
            if chosen is None:
                raise StopIteration
            with blame_storage(self.study):
                return self._ask(*chosen)

    def _choose(self) -> tuple[BaseSampler, Point | None] | None:
        """Choose the next candidate: what draws it, and its values if they are known."""
        if self._n_enqueued:
            self._n_enqueued -= 1
            self._n_left = max(self._n_left - 1, 0)
            return self.sampler, None
        if not self._first and self._n_left:
            self._n_left -= 1
            self._number += 1
            return self.sampler_of(self._number - 1), None
        points = self._first or self._last
        if not points:
            return None
        point = points.popleft()
        return _Fixed(point), point

    def _ask(self, sampler: BaseSampler, point: Point | None) -> Candidate:
        """Begin a trial, which has an owner from then on."""
        self.study.sampler = sampler
        try:
            trial = self.study.ask()
            trial.set_user_attr(OWNER, self.owner)
            params, problem = {}, ""
            try:
                params = self.recipe.space.suggest(trial)
            except Exception as error:  # of a function of the user's
                problem = f"{type(error).__name__}: {error}"
        finally:
            self.study.sampler = self.sampler
        labels = labels_of(trial)
        if point is None and labels in self._first:  # a user enqueued a point of the grid
            self._first.remove(labels)
        self.trials[trial.number] = trial, params
        return Candidate(trial.number, params, self.recipe.seed_of(trial), problem)

    def tell(self, candidate: Candidate, minimum: Minimum, trained: Trained | None) -> FrozenTrial:
        """Store what became of a candidate."""
        trial, params = self.trials[candidate.number]
        with blame_storage(self.study):
            self.recipe.record(trial, params, minimum, trained)
            state, values = TrialState.COMPLETE, minimum.values
            if minimum.reason == STOPPED or minimum.failed:
                state = TrialState.FAIL if minimum.failed else TrialState.PRUNED
            told = self.study.tell(trial, values if state == TrialState.COMPLETE else None, state)
        del self.trials[candidate.number]
        return told

    def give_up(self) -> None:
        """Free the candidates that are in training, and ask for no others."""
        with self._lock:
            self._has_ended = True
        self.study.sampler = RandomSampler()  # which does not learn of the trials' end
        for number in list(self.trials):
            self.study.tell(number, state=TrialState.FAIL)
            del self.trials[number]

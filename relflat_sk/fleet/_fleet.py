"""Run trainings in turns, so that the nets in them train their epochs together."""

import copy
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from relflat_sk._random import fork_rng
from relflat_sk.fleet._group import Group
from relflat_sk.fleet._groups import Groups
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._routine import CURRENT, Routine
from relflat_sk.fleet._size import free_memory, memory_of_member, why_slower
from relflat_sk.fleet._stackable import NotStackable
from relflat_sk.training import EPOCH_TRAINER, EpochTrainer

__all__ = ["Fleet"]

_LOG = logging.getLogger("relflat_sk")


class Fleet(EpochTrainer):
    """Trainings that take turns: every net waits at each epoch, and all epochs are one.

    Nets of one architecture are a group, which is trained as one stacked model. A net that
    cannot be stacked trains by itself; the log says why, once for each reason.
    """

    def __init__(self, size: int, *, auto: bool = False) -> None:
        self.size = size
        self.auto = auto
        self._groups = Groups(self._accept)
        self._waiting: dict[Routine, Member] = {}
        self._losses: dict[Routine, tuple[Member, float]] = {}  # asked for, with goals
        self._norms: dict[Routine, Member] = {}  # of gradients that are asked for
        self._questions: dict[Routine, tuple[Any, Any, Callable[[list[Any]], Any]]] = {}
        self._answers: dict[Routine, Any] = {}
        self._reasons: set[str] = set()
        self._routines: list[Routine] = []
        with fork_rng(None):  # what draws from seeds of its own leaves torch's state as it is
            self._seeds = count(int(torch.randint(2**62, ())))
        self._drew = False  # whether a routine has moved its random state on

    def run(self, train: Callable[[], bool], is_enough: Callable[[], bool] = lambda: False) -> None:
        """Train until there is nothing left to train."""
        may_be_more = True
        try:
            while not is_enough() and (may_be_more or self._routines):
                while may_be_more and len(self._routines) < self.size:
                    routine = Routine(lambda: self._call(train), next(self._seeds))
                    self._routines.append(routine)
                    if self._has_ended(routine):
                        may_be_more = bool(routine.result)
                for routine in self._answer() or self._train_epoch():
                    may_be_more |= self._has_ended(routine)
        except BaseException:
            self.end()
            raise
        finally:
            if self._drew:
                torch.randint(2, ())
                self._drew = False

    def _has_ended(self, routine: Routine) -> bool:
        """Let a routine go on, and return whether it has ended."""
        if routine.resume():
            return False
        self._routines.remove(routine)
        self._drew |= routine.drew
        return True

    def end(self) -> None:
        """End all trainings that have begun."""
        for routine in self._routines:
            routine.cancel()
        self._routines.clear()
        for some in (self._waiting, self._losses, self._norms, self._questions, self._answers):
            some.clear()

    def _call(self, train: Callable[[], bool]) -> bool:
        token = EPOCH_TRAINER.set(self)
        try:
            return train()
        finally:
            EPOCH_TRAINER.reset(token)

    # -- called by nets, in their routines; all but the last wait for the others ---------------

    def train_epoch(self, net: Any, iterator: Any, fit_params: Mapping[str, Any]) -> bool:
        routine = CURRENT.get()
        assert routine is not None
        routine.check()
        try:
            member = self._groups.find(net, iterator, fit_params)
        except NotStackable as reason:
            self._say(f"trained one by one: {reason}")
            return False
        net._set_training(True)
        member.draw()
        self._waiting[routine] = member
        routine.pause()
        torch.set_rng_state(member.random_state)
        return True

    def training_loss(self, net: Any, goal: float) -> float | None:
        routine, member = CURRENT.get(), self._groups.member(net)
        if member is None or not self._groups.of(member).evaluates(member):
            return None
        assert routine is not None
        self._losses[routine] = member, goal
        return float(self._answer_to(routine))

    def gradient_norm(self, net: Any, goal: float) -> float | None:
        routine, member = CURRENT.get(), self._groups.member(net)
        if member is None:
            return None
        group = self._groups.of(member)
        if group.is_far(member, goal):
            return math.inf
        if not group.differentiates(member):
            return None
        assert routine is not None
        self._norms[routine] = member
        return float(self._answer_to(routine))

    def together(self, key: Any, item: Any, compute: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Compute something for all routines that ask for it between the same two epochs."""
        routine = CURRENT.get()
        assert routine is not None
        self._questions[routine] = key, item, compute
        return self._answer_to(routine)

    def _answer_to(self, routine: Routine) -> Any:
        """Wait for the answer to a question."""
        routine.pause()
        return self._answers.pop(routine)

    def release(self, net: Any) -> None:
        self._groups.release(net)

    def _accept(self, member: Member) -> None:
        """Refuse nets that are faster one by one, and limit the memory of the others."""
        if not self.auto:
            return
        x, _ = member.first_batch()
        with fork_rng(x.device):
            slower = why_slower(copy.deepcopy(member.module), x)
            memory = memory_of_member(copy.deepcopy(member.module).train(), x)
        if slower is not None:
            raise NotStackable(slower)
        free = free_memory(x.device)
        if free is not None:
            self.size = min(self.size, max(1, free // 2 // memory))

    def _say(self, text: str) -> None:
        if text not in self._reasons:
            self._reasons.add(text)
            _LOG.log(logging.INFO if self.auto else logging.WARNING, text)

    # -- called by the fleet itself ------------------------------------------------------------

    def _answer(self) -> list[Routine]:
        """Compute what nets ask for, group by group; return their routines."""
        losses, self._losses = self._losses, {}
        for group, routines in self._by_group({one: asked[0] for one, asked in losses.items()}):
            with _shared(routines):
                members, goals = zip(*(losses[one] for one in routines), strict=True)
                found = group.losses(members, goals)
            self._answers.update(zip(routines, found, strict=True))
        norms, self._norms = self._norms, {}
        for group, routines in self._by_group(norms):
            with _shared(routines):
                found = group.gradient_norms([norms[one] for one in routines])
            self._answers.update(zip(routines, found, strict=True))
        questions, self._questions = self._questions, {}
        by_key: dict[Any, list[Routine]] = {}
        for routine, (key, _, _) in questions.items():
            by_key.setdefault(key, []).append(routine)
        for routines in by_key.values():
            self._release_idle()  # its memory is needed
            with _shared(routines):
                results = _compute([questions[one] for one in routines])
            self._answers.update(zip(routines, results, strict=True))
        return [*losses, *norms, *questions]

    def _release_idle(self) -> None:
        """Release groups of which no net waits for its next epoch."""
        keys = {member.key for member in self._waiting.values()}
        for key, group in self._groups:
            if key not in keys:
                group.release()

    def _train_epoch(self) -> list[Routine]:
        """Train the epochs of all nets that wait, group by group; return their routines."""
        self._release_idle()
        waiting, self._waiting = self._waiting, {}
        for group, routines in self._by_group(waiting):
            with _shared(routines):
                group.train([waiting[one] for one in routines])
        return list(waiting)

    def _by_group(self, members: Mapping[Routine, Member]) -> list[tuple[Group, list[Routine]]]:
        found: dict[Group, list[Routine]] = {}
        for routine, member in members.items():
            found.setdefault(self._groups.of(member), []).append(routine)
        return list(found.items())


def _compute(questions: Sequence[tuple[Any, Any, Callable[[list[Any]], Any]]]) -> Sequence[Any]:
    """Compute what some routines ask for, if there are several and they have no error."""
    nothing = [None] * len(questions)
    if len(questions) == 1:
        return nothing
    compute = questions[0][2]
    try:
        found: Sequence[Any] = compute([item for _, item, _ in questions])
    except Exception:  # each of them raises its own, if it is not one of stacking
        return nothing
    return found


@contextmanager
def _shared(routines: Sequence[Routine]) -> Iterator[None]:
    """Add to the seconds of each routine its share of the time inside the context."""
    started = time.perf_counter()
    yield
    for routine in routines:
        routine.seconds += (time.perf_counter() - started) / len(routines)

"""Run trainings in turns, so that the nets in them train their epochs together.

A net is trained by one call of `fit`, and many nets are to be trained together. Each call of `fit`
therefore runs in a thread, which pauses at the beginning of every epoch. No two threads run at the
same time, and each has its own random state of torch, so that a net draws what it draws if it is
trained alone.
"""

import logging
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import torch
from sklearn import config_context, get_config
from torch import Tensor, nn

from relflat_sk._checks import check_integer
from relflat_sk._engine.epoch import EPOCH_TRAINER, ChainNets
from relflat_sk._engine.job import Epoch, Job, NeedsOwnLoop
from relflat_sk._random import IN_TURN, alone, fork_rng, get_states, seed_torch, set_states
from relflat_sk.fleet._stack import Stack, key_of
from relflat_sk.fleet._vmapped import VmappedNets

# -- turns -------------------------------------------------------------------------------------


class Cancelled(BaseException):
    """Raised inside a routine that is to end; no handler of `Exception` catches it."""


class Routine:
    """A function that runs while its caller waits, and pauses where it asks for it."""

    def __init__(self, function: Callable[[], Any], seed: int) -> None:
        self._function, self._seed = function, seed
        self._config = get_config()  # of scikit-learn, which has one for each thread
        # whose turn it is, rather than a signal, so that Ctrl-C while waiting loses nothing
        self._condition, self._turn = threading.Condition(), False
        self._states: list[Tensor] | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seconds = self.resumed = 0.0
        self.is_done = False
        self.result: Any = None
        self.job: Any = None  # the epoch at which the function pauses
        self.outcome: Any = None  # what came of it

    def _run(self) -> None:
        IN_TURN.set(True)
        try:
            with config_context(**self._config):
                self.result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.is_done = True
            self._give(False)

    def _await(self, turn: bool) -> None:
        with self._condition:
            while self._turn is not turn:
                self._condition.wait()

    def _give(self, turn: bool) -> None:
        with self._condition:
            self._turn = turn
            self._condition.notify_all()

    def resume(self) -> bool:
        """Run the function until it pauses or ends; return whether it goes on."""
        outside = _random_states()
        if self._states is None:
            seed_torch(self._seed)
            self._first_state = torch.get_rng_state()
        else:
            set_states("cuda", self._states)
        try:
            self._switch()
        except BaseException:  # Ctrl-C while the function runs
            self.cancel()
            raise
        finally:
            self._states = _random_states()
            set_states("cuda", outside)
        if self.is_done:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return not self.is_done

    @property
    def drew(self) -> bool:
        """Whether the function has moved its random state on, rather than used seeds only."""
        return self._states is not None and not torch.equal(self._states[0], self._first_state)

    def _switch(self) -> None:
        self.resumed = time.perf_counter()
        self._give(True)
        if self._thread.ident is None:
            self._thread.start()
        self._await(False)
        self.seconds += time.perf_counter() - self.resumed

    def pause(self, job: Job) -> Any:
        """Let the caller train an epoch, inside the function, and return what came of it."""
        self.job = job
        self._give(False)
        self._await(True)
        if self._cancelled:
            raise Cancelled
        return self.outcome

    def cancel(self) -> None:
        """End the function at its next pause, and wait for its end."""
        self._cancelled = True
        if self._thread.ident is None:  # it has not begun
            return
        self._await(False)
        while not self.is_done:
            self._switch()


def _random_states() -> list[Tensor]:
    """Return torch's random states, of the CPU and of the current CUDA device if it is in use."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return get_states("cuda" if on_cuda else None)


# -- trainings whose nets take turns -----------------------------------------------------------

_LOG = logging.getLogger("relflat_sk")
_AT_MOST = 64
# numbers in a network's weights from which on stacked steps save little time, and take memory
_MANY_NUMBERS = 2**21


def fleet_size(fleet: Any) -> int:
    """Return how many nets to train at a time."""
    if isinstance(fleet, str) and fleet == "auto":
        return _AT_MOST
    check_integer("fleet", fleet, minimum=1, reason="'auto' is possible as well")
    return int(fleet)


class Fleet:
    """Trainings that take turns: every net waits at each epoch, and all epochs are one.

    Nets of one architecture are a group, which is trained as one stacked model. A net that
    cannot be stacked trains by itself; the log says why, once for each reason.
    """

    def __init__(self, size: int, *, auto: bool = False) -> None:
        self.size = size
        self.auto = auto
        # how nets with a key are stacked, or the reason why they are not
        self._kinds: dict[Any, ChainNets | VmappedNets | str] = {}
        self._reasons: set[str] = set()
        self._routines: list[Routine] = []  # that have begun
        self._running: Routine  # the one that does not pause
        with fork_rng(None):  # what draws from seeds of its own leaves torch's state as it is
            self._seeds = count(int(torch.randint(2**62, ())))

    def run(self, train: Callable[[], bool], is_enough: Callable[[], bool] = lambda: False) -> None:
        """Train until there is nothing left to train."""
        may_be_more = True
        try:
            # Python holds filters of warnings once for all threads, each of which may change them
            with alone(), warnings.catch_warnings():
                while not is_enough() and (may_be_more or self._routines):
                    while may_be_more and len(self._routines) < self.size:
                        routine = Routine(lambda: self._call(train), next(self._seeds))
                        self._routines.append(routine)
                        if self._has_ended(routine):
                            may_be_more = bool(routine.result)
                    self._train_epoch()
                    for routine in list(self._routines):
                        may_be_more |= self._has_ended(routine)
        except BaseException:
            self.end()
            raise

    def _has_ended(self, routine: Routine) -> bool:
        """Let a routine go on, and return whether it has ended."""
        self._running = routine
        if routine.resume():
            return False
        self._routines.remove(routine)
        if routine.drew:
            torch.randint(2, ())
        return True

    def end(self) -> None:
        """End all trainings that have begun."""
        for routine in self._routines:
            self._running = routine
            routine.cancel()
        self._routines.clear()

    def _call(self, train: Callable[[], bool]) -> bool:
        EPOCH_TRAINER.set(self)  # in the routine's own thread
        return train()

    # -- called in routines, by nets, which wait for the others --------------------------------

    def seconds_used(self) -> float:
        """Return the time of a clock that runs while this routine does."""
        return self._running.seconds + time.perf_counter() - self._running.resumed

    def train_epoch(self, job: Job) -> Epoch:
        """Train a network for an epoch together with others."""
        routine, before = self._running, torch.get_rng_state()
        job.key = key_of(job)
        kind = self._kinds.get(job.key)
        if isinstance(kind, str):
            raise NeedsOwnLoop(kind)
        if kind is not None:
            job.prepare(kind.n_outputs)
        else:
            try:
                kind = self._kinds[job.key] = self._find_kind(job)
            except NeedsOwnLoop as reason:
                self._kinds[job.key] = str(reason)
                raise
        job.start_epoch()
        job.length = kind.length(job)
        penalty = job.penalty
        shown = {} if penalty is None else dict(vars(penalty.limit))
        outcome = routine.pause(job)
        if isinstance(outcome, str):
            torch.set_rng_state(before)
            if penalty is not None:  # a step may have begun before it failed
                vars(penalty.limit).update(shown)
            raise NeedsOwnLoop(outcome)
        torch.set_rng_state(job.random_state)
        return outcome  # type: ignore[no-any-return]

    def log_reason(self, reason: NeedsOwnLoop) -> None:
        """Say why a net trains its epochs by itself, once for each reason."""
        text = f"trained one by one: {reason}"
        if text not in self._reasons:
            self._reasons.add(text)
            _LOG.log(logging.INFO if self.auto else logging.WARNING, text)

    def _find_kind(self, job: Job) -> ChainNets | VmappedNets:
        """Find how nets like one are stacked; refuse those that are about as fast one by one."""
        parameters = list(job.module.parameters())
        if self.auto and sum(p.numel() for p in parameters) > _MANY_NUMBERS:
            raise NeedsOwnLoop(f"its network has more than {_MANY_NUMBERS:,} weights")
        kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d
        convolves = any(isinstance(part, kinds) for part in job.module.modules())
        if self.auto and convolves and parameters[0].is_cpu:
            raise NeedsOwnLoop("its convolutions are faster one by one on a CPU")
        with suppress(NeedsOwnLoop):
            return ChainNets(job)
        return VmappedNets(job)

    # -- called by the fleet itself ------------------------------------------------------------

    def _train_epoch(self) -> None:
        """Train the epochs of all nets, group by group."""
        groups: dict[Any, list[Routine]] = {}
        for routine in self._routines:
            job = routine.job
            rest = 0 if job.penalty is None else job.penalty.limit.rest
            groups.setdefault((job.key, rest, job.length), []).append(routine)
        for (key, *_), routines in groups.items():
            started = time.perf_counter()
            outcomes = self._outcomes(key, [routine.job for routine in routines])
            share = (time.perf_counter() - started) / len(routines)
            for routine, outcome in zip(routines, outcomes, strict=True):
                routine.outcome = outcome
                routine.seconds += share

    def _outcomes(self, key: Any, jobs: list[Job]) -> Sequence[Epoch | str]:
        """Train nets of one kind for an epoch, or say why they must train by themselves."""
        kind = self._kinds[key]
        if isinstance(kind, str):
            return [kind] * len(jobs)
        try:
            return kind.train(jobs, Stack(jobs))
        except NeedsOwnLoop as reason:  # in this epoch
            return [str(reason)] * len(jobs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            text = str(error).strip().split("\n")[0]
            self._kinds[key] = never = f"torch.func cannot stack it: {text}"
            return [never] * len(jobs)

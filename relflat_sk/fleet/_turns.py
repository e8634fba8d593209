"""Functions that are run in turns: each in a thread of its own, one at a time.

A net is trained by one call of `fit`, and many nets are to be trained together. Each call of
`fit` therefore runs in a thread, which pauses at the beginning of every epoch. No two threads
run at the same time, and each has its own random state of torch, so that a net draws what it
draws if it is trained alone.
"""

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from relflat_sk._random import IN_TURN, get_states, seed_torch, set_states


class Cancelled(BaseException):
    """Raised inside a routine that is to end; no handler of `Exception` catches it."""


class Routine:
    """A function that runs while its caller waits, and pauses where it asks for it."""

    def __init__(self, function: Callable[[], Any], seed: int) -> None:
        self._function = function
        # whose turn it is, rather than a signal, so that Ctrl-C while waiting loses nothing
        self._condition, self._turn = threading.Condition(), False
        self._states: list[Tensor] | None = None
        self._seed = seed
        self._error: BaseException | None = None
        self._cancelled = False
        self.seconds = self.resumed = 0.0
        self.result: Any = None
        self.is_done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._await(True)
        CURRENT.set(self)
        IN_TURN.set(True)
        try:
            self._check()
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
            self._thread.start()
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
        self._await(False)
        self.seconds += time.perf_counter() - self.resumed

    def pause(self) -> None:
        """Let the caller go on; to be called inside the function."""
        self._check()
        self._give(False)
        self._await(True)
        self._check()

    def _check(self) -> None:
        """Raise inside the function if it is to end."""
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End the function at its next pause, and wait for its end."""
        self._cancelled = True
        if self._thread.ident is None:  # it has not begun
            return
        self._await(False)
        while not self.is_done:
            self._switch()


# the routine whose function runs in this thread
CURRENT: ContextVar[Routine | None] = ContextVar("CURRENT", default=None)


def current() -> Routine:
    """Return the routine that runs in this thread."""
    routine = CURRENT.get()
    assert routine is not None
    return routine


def seconds_used() -> float:
    """Return the time of a clock that runs while this routine does."""
    routine, now = CURRENT.get(), time.perf_counter()
    return now if routine is None else routine.seconds + now - routine.resumed


def _random_states() -> list[Tensor]:
    """Return torch's random states, of the CPU and of the current CUDA device if it is in use."""
    on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return get_states("cuda" if on_cuda else None)

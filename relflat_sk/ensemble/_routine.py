"""Functions that are run in turns: each in a thread of its own, one at a time.

A net is trained by one call of `fit`, and many nets are to be trained together. Each call of
`fit` therefore runs in a thread, which pauses at the beginning of every epoch. No two threads
run at the same time, and each has its own random state of torch, so that a net draws what it
draws if it is trained alone.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

__all__ = ["CURRENT", "Cancelled", "Routine"]

_LARGEST = 2**63 - 1


class Cancelled(BaseException):
    """Raised inside a routine that is to end; no handler of `Exception` catches it."""


class Routine:
    """A function that runs while its caller waits, and pauses where it asks for it.

    It starts from a random state of its own, which follows from torch's global one.

    Parameters
    ----------
    function : callable
        Takes no arguments.

    Attributes
    ----------
    result : object
        What the function has returned.
    is_done : bool
        Whether the function has ended.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._states: list[torch.Tensor] | None = None
        self._seed = int(torch.randint(_LARGEST, ()))
        self._error: BaseException | None = None
        self._runs, self._cancelled = False, False
        self.result: Any = None
        self.is_done = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self._go.acquire()
        CURRENT.set(self)
        try:
            self.check()
            self.result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.is_done = True
            self._back.release()

    def resume(self) -> bool:
        """Run the function until it pauses or ends.

        Returns
        -------
        bool
            Whether it has paused, so that it can be resumed again.

        Raises
        ------
        BaseException
            What the function raises.
        """
        outside = _get_states()
        if self._states is None:
            torch.manual_seed(self._seed)
            self._thread.start()
        else:
            _set_states(self._states)
        try:
            self._runs = True
            self._switch()
        except BaseException:  # Ctrl-C while the function runs
            self.cancel()
            raise
        finally:
            self._states = _get_states()
            _set_states(outside)
        if self.is_done:
            self._thread.join()
            if self._error is not None:
                raise self._error
        return not self.is_done

    def _switch(self) -> None:
        self._go.release()
        self._back.acquire()
        self._runs = False

    def pause(self) -> None:
        """Let the caller go on; to be called inside the function.

        Raises
        ------
        Cancelled
            If the function is to end.
        """
        self.check()
        self._back.release()
        self._go.acquire()
        self.check()

    def check(self) -> None:
        """Raise inside the function if it is to end.

        Raises
        ------
        Cancelled
            If the function is to end.
        """
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """End the function at its next pause, and wait for its end."""
        self._cancelled = True
        if self._states is None and not self._runs:  # it has not begun
            self.is_done = True
        if self._runs:
            self._back.acquire()
            self._runs = False
        while not self.is_done:
            self._switch()


# the routine whose function runs in this thread
CURRENT: ContextVar[Routine | None] = ContextVar("CURRENT", default=None)


def _get_states() -> list[torch.Tensor]:
    """Copy torch's random states, of the CPU and of the current CUDA device if it is in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state())
    return states


def _set_states(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)

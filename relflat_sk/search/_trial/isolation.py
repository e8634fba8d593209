"""Train one network at a time in a process, with a number of threads that is always the same.

Torch has one random state for all threads of a process, and the number of threads that compute
changes the order of floating-point sums. A network would therefore depend on what else is trained
at the same time, and on where.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import torch
from threadpoolctl import threadpool_limits

from relflat_sk.training import EPOCH_TRAINER

__all__ = ["in_fleet", "in_isolation", "isolated"]

Method = TypeVar("Method", bound=Callable[..., Any])

_LOCK = threading.RLock()
_NOT_ISOLATED = 0
_N_THREADS: ContextVar[int | None] = ContextVar("n_threads", default=_NOT_ISOLATED)


def in_fleet() -> bool:
    """Return whether the nets of this thread are trained together with others."""
    return EPOCH_TRAINER.get() is not None


@contextmanager
def isolated(n_threads: int | None) -> Iterator[None]:
    """Compute alone in this process, with a number of threads.

    A fleet computes alone as a whole: the trainings in it take turns. A context within one of the
    same number of threads changes nothing: threadpoolctl takes 5 ms to find the libraries loaded.
    """
    if in_fleet() or n_threads == _N_THREADS.get():
        yield
        return
    with _LOCK, _limited(n_threads):
        outer = _N_THREADS.set(n_threads)
        try:
            yield
        finally:
            _N_THREADS.reset(outer)


@contextmanager
def _limited(n_threads: int | None) -> Iterator[None]:
    """Limit the threads of torch, BLAS and OpenMP; None changes nothing."""
    if n_threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)  # also for MKL inside torch, which has a limit of its own
    try:
        with threadpool_limits(limits=n_threads):
            yield
    finally:
        torch.set_num_threads(before)


def in_isolation(method: Method) -> Method:
    """Decorate a method to run in isolation, with the number of threads of its object."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with isolated(self.n_threads):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]

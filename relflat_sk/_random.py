"""Random states as scikit-learn's users give them, seeds and signs drawn from them.

Nothing here moves NumPy's global random state. Torch's moves only where a caller asks for it:
by drawing signs without a generator.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from threading import RLock
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._checks import warn

RandomState = int | np.random.RandomState | None

_LARGEST = 2**31 - 1  # seeds are smaller: NumPy's RandomState takes 32 bits
# the signs that the bits of a byte stand for
_BYTES = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float() * 2 - 1


def seed_from(random_state: RandomState) -> int | None:
    """Return an integer as it is, or draw a seed from a random state."""
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(_LARGEST))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        return int(random_state)
    raise ValueError(
        f"random_state must be an int, a numpy RandomState or None, got {random_state!r}."
    )


def as_random_state(random_state: Any) -> np.random.RandomState:
    """Make a NumPy random state, as scikit-learn's `check_random_state` does."""
    if isinstance(random_state, np.random.RandomState):
        return random_state
    return np.random.RandomState(seed_from(random_state))


def draw_seed(random_state: Any) -> int:
    """Draw one seed, also from an integer or from NumPy's newer generators."""
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(_LARGEST))
    return int(as_random_state(random_state).randint(_LARGEST))


def draw_seeds(random_state: RandomState, size: int) -> list[int]:
    """Draw seeds, one for each of several random draws that are made more than once."""
    rng = np.random.default_rng(seed_from(random_state))
    return [int(seed) for seed in rng.integers(2**63 - 1, size=size)]


def make_generator(random_state: RandomState, device: torch.device) -> torch.Generator:
    """Make a torch generator, which leaves torch's global random state alone."""
    seed = seed_from(random_state)
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


# Torch has one random state for all threads: fits, fleets and measures use it one at a time.
_LOCK = RLock()
_PATIENCE = 60.0  # seconds that a thread waits before it says so
# whether this thread computes alone, or is a routine of a fleet, of which no two run at a time
IN_TURN: ContextVar[bool] = ContextVar("IN_TURN", default=False)


@contextmanager
def alone() -> Iterator[None]:
    """Let one thread at a time train or measure inside the context; tell who waits for long."""
    if IN_TURN.get():
        yield
        return
    lock = _LOCK
    if not lock.acquire(timeout=_PATIENCE):
        warn(
            f"this thread has waited {_PATIENCE:g} s for a fit or a measure in another thread. "
            "They run one at a time, because torch has one random state for all threads: use "
            "processes to run them side by side. If the other thread waits for this one, as a "
            "callback that measures in threads does, both wait for ever: measure without threads."
        )
        lock.acquire()
    outside = IN_TURN.set(True)
    try:
        yield
    finally:
        IN_TURN.reset(outside)
        lock.release()


def _renew_lock() -> None:
    """Make a new lock in a forked process, which has none of the threads that hold the old one."""
    global _LOCK  # noqa: PLW0603
    _LOCK = RLock()


if hasattr(os, "register_at_fork"):  # systems with fork
    os.register_at_fork(after_in_child=_renew_lock)


@contextmanager
def fork_rng(device: Any) -> Iterator[None]:
    """Use torch's global random states alone, and give them back at the end of the context."""
    on_cuda = device is not None and torch.device(device).type == "cuda"
    devices = [torch.device(device)] if on_cuda else []
    with alone(), torch.random.fork_rng(devices=devices):
        yield


def get_states(device: Any) -> list[Tensor]:
    """Copy torch's random states: of the CPU first, then of a CUDA device."""
    states = [torch.get_rng_state()]
    if str(device).startswith("cuda"):
        states.append(torch.cuda.get_rng_state(torch.device(device)))
    return states


def set_states(device: Any, states: Sequence[Tensor]) -> None:
    """Return to random states that `get_states` copied."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, torch.device(device))


def seed_torch(seed: int) -> None:
    """Seed torch's global random states, without the search for devices where there is none."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # for devices that may come later, torch.manual_seed keeps a traceback of every call
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's global random states, and give them back at the end of the context.

    Other threads are not kept out: an estimator that is fitted inside may have threads of its own.
    But no other thread computes alone while the states change.
    """
    if seed is None:
        yield
        return
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else None
    with alone():
        before = get_states(device)
        seed_torch(seed)
    try:
        yield
    finally:
        with alone():
            set_states(device, before)


def rademacher(
    shape: Sequence[int], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw random signs from the bits of random integers, ten times as fast as one by one."""
    words = draw_words(n_words(shape), like.device, generator)
    return signs_of(words, shape, like)


def n_words(shape: Sequence[int]) -> int:
    """Return how many words `rademacher` draws."""
    return -(-prod(shape) // 64)


def draw_words(n: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw random integers, whose bits are random signs: (n,)."""
    return torch.randint(-(2**63), 2**63 - 1, (n,), device=device, generator=generator)


def signs_of(words: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """Turn random integers into random signs."""
    signs = F.embedding(words.view(torch.uint8).int(), _BYTES.to(like)).flatten(-2)
    return signs[..., : prod(shape)].reshape(*words.shape[:-1], *shape)

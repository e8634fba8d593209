"""Random states as scikit-learn's users give them, seeds and signs drawn from them.

Nothing here moves NumPy's global random state. Torch's moves only where a caller asks for it:
by drawing signs without a generator.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "RandomState",
    "as_random_state",
    "draw_seed",
    "draw_seeds",
    "draw_words",
    "fork_rng",
    "make_generator",
    "n_words",
    "rademacher",
    "seed_from",
    "seed_torch",
    "seeded",
    "signs_of",
]

RandomState = int | np.random.RandomState | None

_LARGEST = 2**31 - 1  # seeds are smaller: NumPy's RandomState takes 32 bits
# the signs that the bits of a byte stand for
_BYTES = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float() * 2 - 1


def seed_from(random_state: RandomState) -> int | None:
    """Return an integer as it is, or draw a seed from a random state.

    Parameters
    ----------
    random_state : int, RandomState or None
        As a user gave it.

    Returns
    -------
    int or None
        None if `random_state` is None.

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
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
    """Make a NumPy random state, as scikit-learn's `check_random_state` does.

    Parameters
    ----------
    random_state : int, RandomState or None
        As a user gave it. For None the state is a fresh one, not NumPy's global one.

    Returns
    -------
    RandomState
        `random_state` itself if it is one.

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
    if isinstance(random_state, np.random.RandomState):
        return random_state
    return np.random.RandomState(seed_from(random_state))


def draw_seed(random_state: Any) -> int:
    """Draw one seed, also from an integer or from NumPy's newer generators.

    Parameters
    ----------
    random_state : int, RandomState, Generator or None
        As a user gave it. Integers are not returned as they are, see `seed_from`: what is
        seeded by the result is independent of what the user seeds by the same integer.

    Returns
    -------
    int
        Below 2**31 - 1.

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(_LARGEST))
    return int(as_random_state(random_state).randint(_LARGEST))


def draw_seeds(random_state: RandomState, size: int) -> list[int]:
    """Draw seeds, one for each of several random draws that are made more than once.

    Parameters
    ----------
    random_state : int, RandomState or None
        As a user gave it.
    size : int
        Number of seeds.

    Returns
    -------
    list of int
        Below 2**63 - 1.

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
    rng = np.random.default_rng(seed_from(random_state))
    return [int(seed) for seed in rng.integers(2**63 - 1, size=size)]


def make_generator(random_state: RandomState, device: torch.device) -> torch.Generator:
    """Make a torch generator, which leaves torch's global random state alone.

    Parameters
    ----------
    random_state : int, RandomState or None
        As a user gave it; None for a fresh seed.
    device : torch.device
        Where the generator draws.

    Returns
    -------
    torch.Generator
        Seeded.

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
    seed = seed_from(random_state)
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def fork_rng(device: Any) -> AbstractContextManager[None]:
    """Give torch's global random states back at the end of the context.

    Parameters
    ----------
    device : torch.device, str or None
        The state of a CUDA device is given back as well as the CPU's. None for the CPU only.

    Returns
    -------
    context manager
        Inside, the states start from what they are outside.
    """
    on_cuda = device is not None and torch.device(device).type == "cuda"
    return torch.random.fork_rng(devices=[torch.device(device)] if on_cuda else [])


def seed_torch(seed: int) -> None:
    """Seed torch's global random states, without the search for devices where there is none.

    Parameters
    ----------
    seed : int
        The seed.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # for devices that may come later, torch.manual_seed keeps a traceback of every call
        torch.default_generator.manual_seed(seed)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's global random states, and give them back at the end of the context.

    Parameters
    ----------
    seed : int or None
        The seed, for the CPU and the current CUDA device if there is one. None does nothing.

    Yields
    ------
    None
        Code that draws from the global state, such as skorch nets, can be reproduced here.
    """
    if seed is None:
        yield
        return
    device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else None
    with fork_rng(device):
        seed_torch(seed)
        yield


def rademacher(
    shape: Sequence[int], like: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Draw random signs from the bits of random integers, ten times as fast as one by one.

    Parameters
    ----------
    shape : sequence of int
        Shape of the result.
    like : Tensor of any shape
        Has the dtype and the device of the result.
    generator : torch.Generator, optional
        On that device; torch's global random state if None.

    Returns
    -------
    Tensor of shape `shape`
        Independent values 1 and -1 with equal probability.

    Examples
    --------
    >>> rademacher((2, 3), torch.zeros(())).abs()
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    words = draw_words(n_words(shape), like.device, generator)
    return signs_of(words, shape, like)


def n_words(shape: Sequence[int]) -> int:
    """Return how many words `rademacher` draws.

    Parameters
    ----------
    shape : sequence of int
        Shape of the signs.

    Returns
    -------
    int
        Each word has 64 signs.
    """
    return -(-prod(shape) // 64)


def draw_words(n: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Draw random integers, whose bits are random signs.

    Parameters
    ----------
    n : int
        Their number.
    device : torch.device
        Where they are drawn.
    generator : torch.Generator, optional
        On that device; torch's global random state if None.

    Returns
    -------
    Tensor of shape (n,)
        Of 64 bits. On the CPU, several calls draw the numbers of one call for all.
    """
    return torch.randint(-(2**63), 2**63 - 1, (n,), device=device, generator=generator)


def signs_of(words: Tensor, shape: Sequence[int], like: Tensor) -> Tensor:
    """Turn random integers into random signs.

    Parameters
    ----------
    words : Tensor of shape (..., `n_words(shape)`)
        From `draw_words`.
    shape : sequence of int
        Shape of the signs, without leading axes.
    like : Tensor of any shape
        Has the dtype and the device of the result.

    Returns
    -------
    Tensor of shape (..., *shape)
        Values 1 and -1.
    """
    signs = F.embedding(words.view(torch.uint8).int(), _BYTES.to(like)).flatten(-2)
    return signs[..., : prod(shape)].reshape(*words.shape[:-1], *shape)

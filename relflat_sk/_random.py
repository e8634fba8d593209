"""Random states as scikit-learn's users give them, without touching any global one."""

import numpy as np
import torch

__all__ = ["RandomState", "make_generator", "seed_from"]

RandomState = int | np.random.RandomState | None


def seed_from(random_state: RandomState) -> int | None:
    """Return the seed that a random state stands for; None for a fresh one.

    Parameters
    ----------
    random_state : int, RandomState or None

    Returns
    -------
    int or None

    Raises
    ------
    ValueError
        If `random_state` is none of these.
    """
    if random_state is None:
        return None
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31 - 1))
    if isinstance(random_state, int | np.integer) and not isinstance(random_state, bool):
        return int(random_state)
    raise ValueError(
        f"random_state must be an int, a numpy RandomState or None, got {random_state!r}."
    )


def make_generator(random_state: RandomState, device: torch.device) -> torch.Generator:
    """Make a generator of our own, so that torch's global random state is left alone.

    Raises
    ------
    ValueError
        If `random_state` is none that `seed_from` knows.
    """
    seed = seed_from(random_state)
    generator = torch.Generator(device=device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator

"""A net's own random state, apart from torch's global one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from relflat_sk._random import draw_seed, fork_rng, seed_torch

__all__ = ["States", "get_states", "own_random_state", "set_states"]

# of the CPU first, then of the net's CUDA device if it has one
States = list[Tensor]


def get_states(device: Any) -> States:
    """Copy the random states that a net on a device draws from."""
    states = [torch.get_rng_state()]
    if str(device).startswith("cuda"):
        states.append(torch.cuda.get_rng_state(torch.device(device)))
    return states


def set_states(device: Any, states: States) -> None:
    """Return to random states that `get_states` copied."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, torch.device(device))


@contextmanager
def own_random_state(net: Any, *, restart: bool) -> Iterator[None]:
    """Use the net's own random state inside the context, and restore torch's afterwards."""
    if net.random_state is None:
        yield
        return
    with fork_rng(net.device):
        if restart or not hasattr(net, "_rng_states"):
            seed_torch(draw_seed(net.random_state))
        else:
            set_states(net.device, net._rng_states)
        yield
        net._rng_states = get_states(net.device)

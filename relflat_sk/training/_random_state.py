"""A net's own random state, apart from torch's global one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn.utils import check_random_state
from torch import Tensor

__all__ = ["States", "get_states", "own_random_state", "set_states"]

# of the CPU first, then of the CUDA device where there is one
States = list[Tensor]


def cuda_device(device: Any) -> torch.device | None:
    """Return the CUDA device that a net runs on, None on any other."""
    return torch.device(device) if str(device).startswith("cuda") else None


def get_states(device: Any) -> States:
    """Copy the random states that a net on a device draws from."""
    cuda = cuda_device(device)
    return [torch.get_rng_state(), *([] if cuda is None else [torch.cuda.get_rng_state(cuda)])]


def set_states(device: Any, states: States) -> None:
    """Go back to states that were copied."""
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, torch.device(device))


@contextmanager
def own_random_state(net: Any, *, restart: bool) -> Iterator[None]:
    """Use the net's own random state, and give torch's global one back.

    Parameters
    ----------
    net : NeuralNet
        Keeps the state between calls in `_rng_states`. With ``random_state=None`` it draws
        from the global state like everybody else.
    restart : bool
        Start from `random_state`, instead of going on where the last call ended.
    """
    if net.random_state is None:
        yield
        return
    cuda = cuda_device(net.device)
    with torch.random.fork_rng(devices=[] if cuda is None else [cuda]):
        if restart or not hasattr(net, "_rng_states"):
            seed = check_random_state(net.random_state).randint(np.iinfo(np.int32).max)
            torch.manual_seed(seed)
        else:
            set_states(net.device, net._rng_states)
        yield
        net._rng_states = get_states(net.device)

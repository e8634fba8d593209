"""The state of a training: what a net needs to know only while it is trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Size, Tensor, nn

from relflat_sk._penalty import RelativeFlatnessPenalty
from relflat_sk._random import draw_seed, fork_rng, seed_torch


@dataclass(slots=True)
class TrainingState:
    """The state of one training, with that of its current step.

    A net drops it when the training ends, and leaves it out of copies and pickles.

    Shapes: `sample_weight` (n,).
    """

    sample_weight: np.ndarray | None = None
    labels_encoded: bool = False
    dataset: Any = None
    penalty: RelativeFlatnessPenalty | None = None
    first_parameter: tuple[nn.Module, nn.Parameter | None] | None = None
    output_shape: Size | None = None
    output_checked: bool = False
    # of the current step
    recorded: bool = False
    terms: tuple[Tensor, Tensor | None, Tensor | None] | None = None


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

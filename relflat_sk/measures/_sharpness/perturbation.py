"""A network at other weights than its own: its loss there, the gradient, random draws.

The network's own parameters are never written to. `at` gives a network that runs with other
tensors in their place, so that nothing needs to be put back. All floating-point parameters
take part, biases and frozen ones included: a measure is one of the function, not of which
parameters an optimiser was told to leave alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from relflat_sk._network import Network, borrowed, mean_loss, outcomes
from relflat_sk._random import RandomState, seed_from
from relflat_sk.measures._estimate import Estimate

__all__ = [
    "RandomState",
    "Weights",
    "at",
    "check_draws",
    "check_positive",
    "disturbed_risks",
    "draw_noise",
    "draw_seeds",
    "loss_gradient",
    "mean_of",
    "moved",
    "own_recurrence",
    "own_weights",
]

# tensors by the names of the parameters that they stand for
Weights = dict[str, Tensor]


def own_weights(network: Network) -> Weights:
    """Collect the network's own weights, by name and detached; shared ones once.

    Parameters
    ----------
    network : Network

    Returns
    -------
    dict of str to Tensor
        Not copies: not to be written to.

    Raises
    ------
    ValueError
        If the network has none.
    """
    weights = {
        name: parameter.detach()
        for name, parameter in network.module.named_parameters()
        if parameter.is_floating_point()
    }
    if not weights:
        raise ValueError(
            f"{type(network.module).__name__} has no parameters whose disturbance could be "
            "measured; pass a network with weights."
        )
    return weights


class _Runner(nn.Module):
    """The network as a module, so that torch can run it with other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self.network = network

    def forward(self, x: Any) -> Tensor:
        return self.network(x)


def at(network: Network, weights: Weights) -> Network:
    """Give a network that runs with other weights; the one given keeps its own.

    Parameters
    ----------
    network : Network
    weights : dict of str to Tensor
        As `own_weights` names them. They may carry a gradient, forward or backward.

    Returns
    -------
    Network
    """
    runner = _Runner(network)
    named = {f"module.{name}": value for name, value in weights.items()}
    return replace(network, forward=lambda x: functional_call(runner, named, (x,)))


def moved(weights: Weights, direction: Weights, length: float = 1.0) -> Weights:
    """Add a multiple of a direction to weights.

    Parameters
    ----------
    weights, direction : dict of str to Tensor
    length : float, default=1.0

    Returns
    -------
    dict of str to Tensor
    """
    return {name: value + length * direction[name] for name, value in weights.items()}


@contextmanager
def own_recurrence(module: nn.Module) -> Iterator[None]:
    """Run torch's own recurrent layers, if there are any.

    Those of cuDNN have no derivative in evaluation mode, and those of oneDNN no second one.

    Parameters
    ----------
    module : nn.Module
    """
    if not any(isinstance(part, nn.RNNBase) for part in module.modules()):
        yield
        return
    onednn: Any = torch.backends.mkldnn
    before = onednn.enabled
    with torch.backends.cudnn.flags(enabled=False):
        try:
            onednn.enabled = False
            yield
        finally:
            onednn.enabled = before


def loss_gradient(network: Network, weights: Weights) -> tuple[float, Weights]:
    """Compute the mean loss over the data at some weights, and its gradient.

    Parameters
    ----------
    network : Network
    weights : dict of str to Tensor

    Returns
    -------
    loss : float
    gradient : dict of str to Tensor
        Zero for weights that the loss does not depend on.
    """
    total, divisor = 0.0, 0.0
    found = {name: torch.zeros_like(value) for name, value in weights.items()}
    with borrowed(network.module), own_recurrence(network.module), torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        for outcome in outcomes(at(network, leaves)):
            loss, share = outcome.total()
            if loss.requires_grad:
                parts = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                for name, part in zip(leaves, parts, strict=True):
                    if part is not None:
                        found[name] += part
            total += float(loss.detach())
            divisor += share
            del loss, outcome  # nothing of a batch is alive when the next one is run
    return total / divisor, {name: value / divisor for name, value in found.items()}


def draw_seeds(random_state: RandomState, size: int) -> list[int]:
    """Draw seeds, one for each of some draws, which can then be made again and again.

    Parameters
    ----------
    random_state : int, RandomState or None
    size : int

    Returns
    -------
    list of int

    Raises
    ------
    ValueError
        If `random_state` is no such thing.
    """
    return [
        int(one)
        for one in np.random.default_rng(seed_from(random_state)).integers(2**63 - 1, size=size)
    ]


def draw_noise(weights: Weights, seed: int) -> Weights:
    """Draw independent standard normal numbers in the shape of weights.

    Parameters
    ----------
    weights : dict of str to Tensor
    seed : int

    Returns
    -------
    dict of str to Tensor
        The same on every device and, up to rounding, in every floating type.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for name, value in weights.items()
    }


def disturbed_risks(
    network: Network,
    spread: Weights,
    seeds: Sequence[int],
    risk: Callable[[Network], float] = mean_loss,
) -> np.ndarray:
    """Measure a risk under normal noise on the weights, draw by draw.

    Each draw is taken with both signs: what is linear in the noise, and has no expectation,
    cancels.

    Parameters
    ----------
    network : Network
    spread : dict of str to Tensor
        Standard deviation of the noise on each weight.
    seeds : sequence of int
        One for each draw.
    risk : callable
        From a network to its risk; the mean loss if not given.

    Returns
    -------
    array of shape (n_draws,)
        Means of two risks each, independent of each other.
    """
    weights = own_weights(network)
    found = []
    for seed in seeds:
        noise = draw_noise(weights, seed)
        noise = {name: spread[name] * value for name, value in noise.items()}
        pair = [risk(at(network, moved(weights, noise, sign))) for sign in (1.0, -1.0)]
        found.append(sum(pair) / 2)
    return np.array(found)


def mean_of(draws: np.ndarray) -> Estimate:
    """Estimate an expectation from independent draws.

    Parameters
    ----------
    draws : array of shape (n_draws,)

    Returns
    -------
    Estimate
        With the standard error of the mean.
    """
    with np.errstate(invalid="ignore"):  # losses may be infinite
        stderr = draws.std(ddof=1) / np.sqrt(len(draws))
    return Estimate(float(draws.mean()), float(stderr), "monte carlo")


def check_draws(n_draws: int) -> None:
    """Refuse numbers of draws that leave no standard error.

    Raises
    ------
    ValueError
    """
    if isinstance(n_draws, bool) or not isinstance(n_draws, int | np.integer) or n_draws < 2:
        raise ValueError(
            f"n_draws must be an integer of at least 2, for a standard error, got {n_draws!r}."
        )


def check_positive(name: str, value: float) -> None:
    """Refuse scales of a disturbance that are none.

    Raises
    ------
    ValueError
    """
    if not 0 < value < np.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}.")

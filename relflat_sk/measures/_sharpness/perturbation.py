"""A network with other weights than its own: its loss and gradient there, and random noise.

The network's own parameters are never written to. `with_weights` returns a network that runs
with other tensors in their place, so that nothing has to be restored. All floating-point
parameters take part, biases and frozen parameters included: a measure depends on the function
that the network computes, not on which parameters an optimiser trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from relflat_sk._checks import check_integer
from relflat_sk._network import Network, borrowed, mean_loss, outcomes
from relflat_sk.measures._estimate import Estimate

__all__ = [
    "Weights",
    "add_weights",
    "check_draws",
    "draw_noise",
    "estimate_mean",
    "loss_gradient",
    "map_weights",
    "noisy_risks",
    "square_norm",
    "torch_recurrence",
    "weights_of",
    "with_weights",
]

# tensors by the names of the parameters that they stand for
Weights = dict[str, Tensor]


# -- weights as one vector ---------------------------------------------------------------------


def weights_of(network: Network) -> Weights:
    """Collect the floating-point parameters of a network, each shared one once.

    Parameters
    ----------
    network : Network
        The network whose parameters are collected.

    Returns
    -------
    dict of str to Tensor
        By name, detached. They are not copies: do not write to them.

    Raises
    ------
    ValueError
        If the network has no such parameters.
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


def map_weights(function: Callable[..., Tensor], *weights: Weights) -> Weights:
    """Apply a function to the tensors of one or several weights, name by name.

    Parameters
    ----------
    function : callable
        From one tensor of each of `weights` to a tensor.
    *weights : dict of str to Tensor
        Weights with the same names.

    Returns
    -------
    dict of str to Tensor
        What the function returned, by name.
    """
    return {name: function(*(each[name] for each in weights)) for name in weights[0]}


def add_weights(weights: Weights, direction: Weights, length: float = 1.0) -> Weights:
    """Add a multiple of a direction to weights.

    Parameters
    ----------
    weights, direction : dict of str to Tensor
        Weights with the same names.
    length : float, default=1.0
        Factor of the direction.

    Returns
    -------
    dict of str to Tensor
        New tensors; the arguments stay as they are.
    """
    return {name: value + length * direction[name] for name, value in weights.items()}


def square_norm(weights: Weights) -> float:
    """Sum the squares of all weights.

    Parameters
    ----------
    weights : dict of str to Tensor
        The weights.

    Returns
    -------
    float
        Summed in float64.
    """
    return sum(float(value.double().square().sum()) for value in weights.values())


# -- running a network with other weights ------------------------------------------------------


class _Runner(nn.Module):
    """The network as a module, so that torch can run it with other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self.network = network

    def forward(self, x: Any) -> Tensor:
        return self.network(x)


def with_weights(network: Network, weights: Weights) -> Network:
    """Make a network that runs with other weights.

    Parameters
    ----------
    network : Network
        The network; it keeps its own weights.
    weights : dict of str to Tensor
        By the names of `weights_of`. They may carry a gradient, forward or backward.

    Returns
    -------
    Network
        The same module, loss and data, with another forward pass.
    """
    runner = _Runner(network)
    named = {f"module.{name}": value for name, value in weights.items()}
    return replace(network, forward=lambda x: functional_call(runner, named, (x,)))


@contextmanager
def torch_recurrence(module: nn.Module) -> Iterator[None]:
    """Run recurrent layers by torch's own implementation, which has all derivatives.

    Those of cuDNN have no derivative in evaluation mode, and those of oneDNN no second one.

    Parameters
    ----------
    module : nn.Module
        The network. Nothing is switched off if it has no recurrent layers.

    Yields
    ------
    None
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
    """Compute the mean loss over the data with some weights, and its gradient in them.

    Parameters
    ----------
    network : Network
        The network, its loss and the data.
    weights : dict of str to Tensor
        The weights to run the network with.

    Returns
    -------
    loss : float
        Mean loss.
    gradient : dict of str to Tensor
        Gradient of the mean loss; zero for weights on which the loss does not depend.
    """
    total, divisor = 0.0, 0.0
    gradient = map_weights(torch.zeros_like, weights)
    with borrowed(network.module), torch_recurrence(network.module), torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        for outcome in outcomes(with_weights(network, leaves)):
            loss, share = outcome.total()
            if loss.requires_grad:
                parts = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                for name, part in zip(leaves, parts, strict=True):
                    if part is not None:
                        gradient[name] += part
            total += float(loss.detach())
            divisor += share
            del loss, outcome  # frees this batch before the next one runs
    total, divisor = network.processes.sum_numbers(total, divisor)
    gradient = map_weights(network.processes.sum, gradient)
    return total / divisor, map_weights(lambda value: value / divisor, gradient)


# -- random noise ------------------------------------------------------------------------------


def check_draws(n_draws: int) -> None:
    """Refuse a number of draws that leaves no standard error.

    Parameters
    ----------
    n_draws : int
        The argument, as the user gave it; at least 2.
    """
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")


def draw_noise(weights: Weights, seed: int) -> Weights:
    """Draw independent standard normal numbers in the shapes of weights.

    Parameters
    ----------
    weights : dict of str to Tensor
        Names, shapes, types and devices of the result.
    seed : int
        Decides the numbers.

    Returns
    -------
    dict of str to Tensor
        The same numbers on every device and, up to rounding, in every floating type.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value)
        for name, value in weights.items()
    }


def noisy_risks(
    network: Network,
    deviation: Weights,
    seeds: Sequence[int],
    risk: Callable[[Network], float] = mean_loss,
) -> np.ndarray:
    """Compute a risk under normal noise on the weights, draw by draw.

    Each draw is taken with both signs. The part of the risk that is linear in the noise has
    expectation zero, and cancels.

    Parameters
    ----------
    network : Network
        The network, its loss and the data.
    deviation : dict of str to Tensor
        Standard deviation of the noise on each weight.
    seeds : sequence of int
        One for each draw.
    risk : callable, default=mean_loss
        From a network to its risk.

    Returns
    -------
    array of shape (n_draws,)
        For each draw, the mean of the risks at its two signs.
    """
    weights = weights_of(network)
    risks = []
    for seed in seeds:
        noise = map_weights(torch.mul, deviation, draw_noise(weights, seed))
        pair = [risk(with_weights(network, add_weights(weights, noise, s))) for s in (1.0, -1.0)]
        risks.append(sum(pair) / 2)
    return np.array(risks)


def estimate_mean(draws: np.ndarray) -> Estimate:
    """Estimate an expectation from independent draws.

    Parameters
    ----------
    draws : array of shape (n_draws,)
        One value for each draw.

    Returns
    -------
    Estimate
        The mean, with its standard error.
    """
    with np.errstate(invalid="ignore"):  # losses may be infinite
        stderr = draws.std(ddof=1) / np.sqrt(len(draws))
    return Estimate(float(draws.mean()), float(stderr), "monte carlo")

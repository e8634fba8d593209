"""A network with other weights than its own: its loss and gradient there, and random noise.

The network's own parameters are never written to. `with_weights` returns a network that runs
with other tensors in their place, so that nothing has to be restored. All floating-point
parameters take part, biases and frozen parameters included: a measure depends on the function
that the network computes, not on which parameters an optimiser trained.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from relflat_sk._checks import check_integer
from relflat_sk._losses import check_twice
from relflat_sk._network import MathAttention, Network, borrowed, mean_loss, outcomes
from relflat_sk.measures._results import Estimate

# tensors by the names of the parameters that they stand for
Weights = dict[str, Tensor]


# -- weights as one vector ---------------------------------------------------------------------


def weights_of(network: Network) -> Weights:
    """Collect the floating-point parameters of a network, each shared one once."""
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
    """Apply a function to the tensors of one or several weights, name by name."""
    return {name: function(*(each[name] for each in weights)) for name in weights[0]}


def add_weights(weights: Weights, direction: Weights, length: float = 1.0) -> Weights:
    """Add a multiple of a direction to weights."""
    return {name: value + length * direction[name] for name, value in weights.items()}


def square_norm(weights: Weights) -> float:
    """Sum the squares of all weights."""
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
    """Make a network that runs with other weights."""
    runner = _Runner(network)
    named = {f"module.{name}": value for name, value in weights.items()}
    return replace(network, forward=lambda x: functional_call(runner, named, (x,)))


@contextmanager
def torch_recurrence(module: nn.Module) -> Iterator[None]:
    """Run recurrent layers by torch's own implementation, which has all derivatives.

    Those of cuDNN have no derivative in evaluation mode, and those of oneDNN no second one.
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


@contextmanager
def differentiable(network: Network, weights: Weights) -> Iterator[tuple[Network, list[Tensor]]]:
    """Make a network that runs with weights in which it can be differentiated twice."""
    with (
        borrowed(network.module),
        torch_recurrence(network.module),
        MathAttention(),
        torch.enable_grad(),
    ):
        leaves = {name: value.detach().clone().requires_grad_() for name, value in weights.items()}
        yield with_weights(network, leaves), list(leaves.values())


def loss_gradient(
    network: Network, weights: Weights, direction: Weights | None = None
) -> tuple[float, Weights]:
    """Compute the mean loss with some weights, and its gradient in them.

    With a direction, return the derivative of the gradient along it: a product with the Hessian.
    """
    total, divisor = 0.0, 0.0
    gradient = [torch.zeros_like(value) for value in weights.values()]
    with differentiable(network, weights) as (moved, leaves):
        grad = partial(torch.autograd.grad, inputs=leaves, materialize_grads=True)
        for outcome in outcomes(moved):
            loss, share = outcome.total()
            along = loss
            if direction is not None and loss.requires_grad:
                gradients = grad(loss, create_graph=True)
                check_twice(*gradients)
                pairs = zip(gradients, direction.values(), strict=True)
                along = torch.stack([(a * b).sum() for a, b in pairs]).sum()
            if along.requires_grad:
                gradient = [a + b for a, b in zip(gradient, grad(along), strict=True)]
            total += float(loss.detach())
            divisor += share
            del loss, along, outcome  # frees this batch before the next one runs
    total, divisor = network.processes.sum_numbers(total, divisor)
    summed = [network.processes.sum(part) / divisor for part in gradient]
    return total / divisor, dict(zip(weights, summed, strict=True))


# -- random noise ------------------------------------------------------------------------------


def check_draws(n_draws: int) -> None:
    """Refuse a number of draws that leaves no standard error."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")


def draw_noise(weights: Weights, seed: int) -> Weights:
    """Draw independent standard normal numbers in the shapes of weights."""
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

    Shapes: returns (n_draws,).
    """
    weights = weights_of(network)
    risks = []
    for seed in seeds:
        noise = map_weights(torch.mul, deviation, draw_noise(weights, seed))
        pair = [risk(with_weights(network, add_weights(weights, noise, s))) for s in (1.0, -1.0)]
        risks.append(sum(pair) / 2)
    return np.array(risks)


def estimate_mean(draws: np.ndarray) -> Estimate:
    """Estimate an expectation from independent draws. Shapes: `draws` (n_draws,)."""
    with np.errstate(invalid="ignore"):  # losses may be infinite
        stderr = draws.std(ddof=1) / np.sqrt(len(draws))
    return Estimate(float(draws.mean()), float(stderr), "monte carlo")

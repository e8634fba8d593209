"""A network with other weights than its own: its loss and gradient there, and random noise.

Weights are one vector. The network's own parameters are never written to: `with_weights` returns
a network that runs with the parts of a vector in their place, so that nothing has to be restored.
All floating-point parameters take part, biases and frozen parameters included: a measure depends
on the function that the network computes, not on which parameters an optimiser trained.
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
from relflat_sk.measures._results import Estimate, NotApplicableError

# -- weights as one vector ---------------------------------------------------------------------


def parameters_of(network: Network) -> dict[str, Tensor]:
    """Collect the floating-point parameters of a network, each shared one once."""
    found = {
        name: parameter.detach()
        for name, parameter in network.module.named_parameters()
        if parameter.is_floating_point()
    }
    if not found:
        raise NotApplicableError(
            f"{type(network.module).__name__} has no parameters whose disturbance could be "
            "measured; pass a network with weights."
        )
    return found


def weights_of(network: Network) -> Tensor:
    """Return the floating-point parameters of a network as one vector."""
    parts = parameters_of(network).values()
    return torch.cat([part.flatten().to(network.device) for part in parts])


def with_weights(network: Network, weights: Tensor) -> Network:
    """Make a network that runs with other weights."""
    runner, own = _Runner(network), parameters_of(network)
    parts = torch.split(weights, [part.numel() for part in own.values()])
    pairs = zip(own.items(), parts, strict=True)
    named = {f"module.{name}": part.reshape(one.shape).to(one) for (name, one), part in pairs}
    return replace(network, forward=lambda x: functional_call(runner, named, (x,)))


class _Runner(nn.Module):
    """The network as a module, so that torch can run it with other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self.network = network

    def forward(self, x: Any) -> Tensor:
        return self.network(x)


def square_norm(weights: Tensor) -> float:
    """Sum the squares of all weights."""
    return float(weights.double().square().sum())


# -- derivatives in all weights ----------------------------------------------------------------


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
def differentiable(network: Network, weights: Tensor) -> Iterator[tuple[Network, Tensor]]:
    """Make a network that runs with weights in which it can be differentiated twice."""
    with (
        borrowed(network.module),
        torch_recurrence(network.module),
        MathAttention(),
        torch.enable_grad(),
    ):
        leaf = weights.detach().clone().requires_grad_()
        yield with_weights(network, leaf), leaf


def loss_gradient(
    network: Network, weights: Tensor, direction: Tensor | None = None
) -> tuple[float, Tensor]:
    """Compute the mean loss with some weights, and its gradient in them.

    With a direction, return the derivative of the gradient along it: a product with the Hessian.
    """
    total, divisor = 0.0, 0.0
    gradient = torch.zeros_like(weights)
    with differentiable(network, weights) as (moved, leaf):
        grad = partial(torch.autograd.grad, inputs=leaf, materialize_grads=True)
        for outcome in outcomes(moved):
            loss, share = outcome.total()
            along = loss
            if direction is not None and loss.requires_grad:
                (along,) = grad(loss, create_graph=True)
                check_twice(along)
                along = along @ direction
            if along.requires_grad:
                gradient += grad(along, retain_graph=True)[0]
            total += float(loss.detach())
            divisor += share
            del loss, along, outcome  # frees this batch before the next one runs
    total, divisor = network.processes.sum_numbers(total, divisor)
    return total / divisor, network.processes.sum(gradient) / divisor


# -- random noise ------------------------------------------------------------------------------


def check_draws(n_draws: int) -> None:
    """Refuse a number of draws that leaves no standard error."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")


def draw_noise(weights: Tensor, seed: int) -> Tensor:
    """Draw independent standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(weights.shape, generator=generator, dtype=torch.float64).to(weights)


def noisy_risks(
    network: Network,
    deviation: Tensor,
    seeds: Sequence[int],
    risk: Callable[[Network], float] = mean_loss,
) -> np.ndarray:
    """Compute a risk under normal noise on the weights, draw by draw.

    Each draw is taken with both signs. The part of the risk that is linear in the noise has
    expectation zero, and cancels.

    Shapes: `deviation` as the weights; returns (n_draws,).
    """
    weights = weights_of(network)
    risks = []
    for seed in seeds:
        noise = deviation * draw_noise(weights, seed)
        pair = [risk(with_weights(network, one)) for one in (weights + noise, weights - noise)]
        risks.append(sum(pair) / 2)
    return np.array(risks)


def estimate_mean(draws: np.ndarray) -> Estimate:
    """Estimate an expectation from independent draws. Shapes: `draws` (n_draws,)."""
    with np.errstate(invalid="ignore"):  # losses may be infinite
        stderr = draws.std(ddof=1) / np.sqrt(len(draws))
    return Estimate(float(draws.mean()), float(stderr), "monte carlo")

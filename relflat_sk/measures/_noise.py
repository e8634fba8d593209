r"""A network with other weights than its own: its loss and gradient there, and random noise.

Weights are one vector. The network's own parameters are never written to: `with_weights` returns
a network that runs with the parts of a vector in their place, so that nothing has to be restored.
All floating-point parameters take part, biases and frozen parameters included: a measure depends
on the function that the network computes, not on which parameters an optimiser trained.

PAC-Bayes flatness is ``1 / sigma^2`` for the largest ``sigma`` at which noise on the weights raises
the expected risk by no more than 0.1 [1]_, [2]_. The risk of a classifier is its share of errors,
as in [1]_; the risk of any other network is its mean loss. The search for sigma uses the same
draws of noise for every sigma.

References
----------
.. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR
   2020.
.. [2] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import bisect
from torch import Tensor, nn
from torch.func import functional_call

from relflat_sk._checks import check_integer, check_number
from relflat_sk._losses.curvature import check_twice
from relflat_sk._network.borrowing import MathAttention, borrowed
from relflat_sk._network.network import Network, mean_loss, outcomes
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._predictions import count_errors
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
            divisor += float(share)
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


# -- PAC-Bayes flatness ---------------------------------------------------------------------------


# Tolerance of log(sigma): 1/sigma^2 is exact to one per cent, far less than its standard error
# with ten draws.
_XTOL = 0.005
# Step of log(sigma), to both sides, for the slope of the risk.
_STEP = 0.2
# How often sigma is doubled or halved in search of the target. Where noise is a hundred times as
# large as the weights, doubling it changes nothing any more.
_DOUBLINGS = 10
_HALVINGS = 30


def pac_bayes_flatness(
    network: Network,
    *,
    target: float = 0.1,
    risk: str = "auto",
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure ``1/sigma^2`` of the largest noise N(0, sigma^2) that the network tolerates."""
    weights = weights_of(network)
    # at a tenth of the weights' size, noise starts to change the predictions of networks
    start = 0.1 * math.sqrt(square_norm(weights) / len(weights)) or 1.0
    deviation = partial(torch.full_like, weights)
    return _flatness(network, deviation, start, target, risk, n_draws, random_state)


def pac_bayes_magnitude_flatness(
    network: Network,
    *,
    target: float = 0.1,
    risk: str = "auto",
    eps: float = 1e-3,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure ``1/sigma^2`` for noise of deviation ``sqrt(sigma^2 w^2 + eps^2)`` per weight."""
    check_number("eps", eps)
    squares = weights_of(network).square()

    def deviation(sigma: float) -> Tensor:
        return (sigma**2 * squares + eps**2).sqrt()

    return _flatness(network, deviation, 0.1, target, risk, n_draws, random_state)


def _flatness(
    network: Network,
    deviation: Callable[[float], Tensor],
    start: float,
    target: float,
    risk: str,
    n_draws: int,
    random_state: RandomState,
) -> Estimate:
    """Search for the sigma at which the risk has risen by the target, from a start on."""
    check_number("target", target)
    check_draws(n_draws)
    risk_of = _find_risk(network, risk)
    seeds = draw_seeds(random_state, n_draws)
    before = risk_of(network)
    if not math.isfinite(before):
        return Estimate(math.nan, math.nan, "none")

    @cache
    def rise(log_sigma: float) -> Estimate:
        risks = noisy_risks(network, deviation(math.exp(log_sigma)), seeds, risk_of)
        return estimate_mean(np.nan_to_num(risks, nan=np.inf) - before)  # large noise overflows

    def excess(log_sigma: float) -> float:
        return rise(log_sigma).value - target

    bracket = _bracket(excess, math.log(start))
    if bracket is None:
        return Estimate(0.0, 0.0, "monte carlo")
    log_sigma = bisect(excess, *bracket, xtol=_XTOL)
    slope = (rise(log_sigma + _STEP).value - rise(log_sigma - _STEP).value) / (2 * _STEP)
    value = math.exp(-2 * log_sigma)
    # delta method: d(sigma^-2) = -2 sigma^-2 d(log sigma)
    stderr = 2 * value * rise(log_sigma).stderr / slope if slope > 0 else math.nan
    return Estimate(value, stderr, "monte carlo")


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float] | None:
    """Find two log(sigma), a factor 2 of sigma apart, between which the excess turns positive."""
    step = math.log(2)
    above = excess(start) > 0
    for k in range(1, (_HALVINGS if above else _DOUBLINGS) + 1):
        end = start + (-k if above else k) * step
        if (excess(end) > 0) != above:
            return (end, end + step) if above else (end - step, end)
    if above:
        raise NotApplicableError(
            f"the risk rises beyond the target at any sigma down to {math.exp(end):.1g}: the "
            "noise eps, which does not depend on sigma, is too large. Use a smaller eps."
        )
    return None


def _find_risk(network: Network, risk: str) -> Callable[[Network], float]:
    """Choose between the share of errors and the mean loss."""
    row = network.loss.row
    classifies = row is not None and row.task != "regression"
    if risk not in {"auto", "error", "loss"}:
        raise ValueError(f"risk must be 'auto', 'error' or 'loss', got {risk!r}.")
    if risk == "error" and not classifies:
        raise ValueError(
            f"{network.loss.criterion!r} has no classes, and so no errors to count; use "
            "risk='loss'."
        )
    return mean_loss if risk == "loss" or not classifies else error_rate


def error_rate(network: Network) -> float:
    """Compute the share of labels that a classifier gets wrong, in evaluation mode."""
    wrong, counted = count_errors(network)
    return wrong / counted

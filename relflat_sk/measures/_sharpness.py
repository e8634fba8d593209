"""Measures of how much the loss rises when the weights are disturbed, by name.

========================  ================================================================
fisher_rao_norm           ``sqrt(mean_i <w, grad l_i>^2)`` [1]_
pac_bayes_flatness        ``1/sigma^2`` of the largest noise that the risk tolerates [2]_
pac_bayes_magnitude_...   the same with noise in proportion to each weight
expected_sharpness        mean rise of the loss under noise of ``alpha (10 |w| + 1)`` [3]_
keskar_sharpness          largest rise in a box of ``alpha (|w| + 1)``, relative [4]_
adaptive_sharpness        largest, or mean, rise in a box of ``rho |w|`` [5]_
========================  ================================================================

References
----------
.. [1] Liang et al., "Fisher-Rao Metric, Geometry, and Complexity of Neural Networks",
   AISTATS 2019.
.. [2] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR
   2020.
.. [3] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
.. [4] Keskar et al., "On Large-Batch Training for Deep Learning", ICLR 2017.
.. [5] Andriushchenko et al., "A Modern Look at the Relationship between Sharpness and
   Generalization", ICML 2023.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from relflat_sk._checks import check_integer, check_number
from relflat_sk._losses.curvature import check_twice
from relflat_sk._losses.table import TABLE
from relflat_sk._network.network import Network, mean_loss, outcomes
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._eigenvalues import largest_eigenvalue
from relflat_sk.measures._noise import (
    check_draws,
    differentiable,
    estimate_mean,
    loss_gradient,
    noisy_risks,
    pac_bayes_flatness,
    pac_bayes_magnitude_flatness,
    parameters_of,
    square_norm,
    weights_of,
)
from relflat_sk.measures._results import (
    EVERY_CHANGE,
    RESCALINGS,
    Estimate,
    NetworkMeasure,
    NotApplicableError,
)

# -- the largest rise of the loss in a box, by Algorithm 1 of APGD --------------------------------

_MOMENTUM = 0.75
_SHARE_OF_RISES = 0.75


@dataclass(frozen=True)
class Point:
    """A point of the box, in units of its radius, with the loss there."""

    u: Tensor
    loss: float
    gradient: Tensor


def largest_rise(network: Network, radius: Tensor, *, n_steps: int = 20) -> tuple[float, float]:
    """Return the mean loss, and find how much it rises at most when each weight moves."""
    check_integer("n_steps", n_steps, minimum=1)
    weights = weights_of(network)

    def evaluate(u: Tensor) -> Point:
        loss, gradient = loss_gradient(network, weights + radius * u)
        return Point(u, loss, radius * gradient)

    origin = evaluate(torch.zeros_like(weights))
    return origin.loss, _ascend(evaluate, origin, n_steps) - origin.loss


def _ascend(evaluate: Callable[[Tensor], Point], start: Point, n_steps: int) -> float:
    """Return the largest loss on the way of an ascent, its start included."""
    best, point, before = start, start, start.u
    step = 2.0  # the diameter of the box
    rises, halved, best_then, checked = 0, False, start.loss, 0
    checkpoints = _checkpoints(n_steps)
    for k in range(1, n_steps + 1):
        ahead = (point.u + step * point.gradient.sign()).clamp(-1, 1)
        # the first step has no momentum yet
        share = _MOMENTUM if k > 1 else 1.0
        u = point.u + share * (ahead - point.u) + (1 - share) * (point.u - before)
        before, last = point.u, point.loss
        point = evaluate(u.clamp(-1, 1))
        rises += point.loss > last
        best = point if point.loss > best.loss else best
        if k in checkpoints:
            stalled = not halved and best.loss == best_then
            halved = stalled or rises < _SHARE_OF_RISES * (k - checked)
            if halved:
                step, point, before = step / 2, best, best.u
            rises, best_then, checked = 0, best.loss, k
    return best.loss


def _checkpoints(n_steps: int) -> set[int]:
    """List the steps after which progress is judged; the distance between them shrinks."""
    share, gap, steps = 0.0, 0.22, set()
    while share + gap < 1:
        share += gap
        steps.add(math.ceil(share * n_steps))
        gap = max(gap - 0.03, 0.06)
    return steps


# -- derivatives along and in all weights -------------------------------------------------------


def fisher_rao_norm(network: Network) -> Estimate:
    """Measure ``sqrt(mean_i <w, grad l_i>^2)`` over all weights, biases included.

    The slopes of the losses along the weights are inner products of the losses' gradients in the
    outputs with ``J w``, and ``J w`` is the derivative of ``<J^T u, w>`` in u, with J the outputs'
    Jacobian.
    """
    squares, divisor, n = 0.0, 0.0, 0.0
    with differentiable(network, weights_of(network)) as (moved, leaf):
        for outcome in outcomes(moved):
            tangent = _along_weights(outcome.output, leaf)
            output = outcome.output.detach().requires_grad_()
            losses, divisors = replace(outcome, output=output).each()
            (gradient,) = torch.autograd.grad(losses.sum(), output)
            slopes = (gradient * tangent).reshape(len(output), -1).sum(dim=1).double()
            squares += float(outcome.weight @ slopes.square())
            divisor += float(outcome.weight @ divisors.detach().double())
            n += float(outcome.weight.sum())
            del outcome, losses  # frees this batch before the next one runs
    squares, divisor, n = network.processes.sum_numbers(squares, divisor, n)
    return Estimate(math.sqrt(squares / n) * n / divisor)


def _along_weights(output: Tensor, leaf: Tensor) -> Tensor:
    """Return the derivative of outputs along the weights themselves."""
    u = torch.zeros_like(output, requires_grad=True)
    if not output.requires_grad:
        return u.detach()
    (pulled,) = torch.autograd.grad(output, leaf, u, create_graph=True, materialize_grads=True)
    check_twice(pulled)
    tangent: Tensor = torch.autograd.grad(pulled @ leaf.detach(), u, retain_graph=True)[0]
    return tangent


def joint_eigenvalue_flatness(
    network: Network, *, rtol: float = 0.01, random_state: RandomState = None
) -> Estimate:
    """Measure ``|w|^2 lambda_max(H)``, with H the Hessian in all weights ``w`` together.

    Biases are constants. This is the first row of Table 1 of Petzka et al., 2020.
    """
    weights = weights_of(network)
    parts = parameters_of(network).values()
    is_weight = torch.cat([torch.full((part.numel(),), part.ndim >= 2) for part in parts])
    is_weight = is_weight.to(weights.device)

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        direction = torch.zeros_like(weights)
        direction[is_weight] = torch.from_numpy(vector).to(weights)
        found = loss_gradient(network, weights, direction)[1][is_weight]
        array: NDArray[np.float64] = found.double().cpu().numpy()
        return array

    value, error = largest_eigenvalue(
        product,
        int(is_weight.sum()),
        rtol=rtol,
        random_state=random_state,
        where="in all weights",
    )
    square = square_norm(weights[is_weight])
    return Estimate(square * value, square * error, "lanczos")


# -- rises under noise and in boxes ---------------------------------------------------------------


def sharpness_curve(
    network: Network,
    alphas: Sequence[float],
    *,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> pd.DataFrame:
    r"""Measure expected sharpness, and the norm of the weights in units of the noise.

    The column `kl` is the divergence of N(w, deviation^2) from N(0, deviation^2), in nats.
    """
    check_draws(n_draws)
    seeds = draw_seeds(random_state, n_draws)
    weights, loss = weights_of(network), mean_loss(network)
    rows = []
    for alpha in alphas:
        deviation = _deviation(weights, alpha)
        rise = estimate_mean(noisy_risks(network, deviation, seeds) - loss)
        divergence = square_norm(weights.double() / deviation.double()) / 2
        rows.append((float(alpha), divergence, rise.value, rise.stderr))
    return pd.DataFrame(rows, columns=["alpha", "kl", "expected_sharpness", "stderr"])


def _deviation(weights: Tensor, alpha: float) -> Tensor:
    check_number("alpha", alpha)
    return alpha * (10 * weights.abs() + 1)


def expected_sharpness(
    network: Network,
    *,
    alpha: float = 5e-4,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure the mean rise of the loss under noise of deviation ``alpha (10 |w| + 1)``."""
    return _mean_rise(network, _deviation(weights_of(network), alpha), n_draws, random_state)


def _mean_rise(
    network: Network, deviation: Tensor, n_draws: int, random_state: RandomState
) -> Estimate:
    check_draws(n_draws)
    seeds = draw_seeds(random_state, n_draws)
    return estimate_mean(noisy_risks(network, deviation, seeds) - mean_loss(network))


def keskar_sharpness(network: Network, *, alpha: float = 5e-4, n_steps: int = 20) -> Estimate:
    """Measure the largest rise of the loss in a box of ``alpha (|w| + 1)``, over 1 + loss."""
    check_number("alpha", alpha)
    radius = alpha * (weights_of(network).abs() + 1)
    loss, rise = largest_rise(network, radius, n_steps=n_steps)
    if loss <= -1:
        raise NotApplicableError(
            f"keskar_sharpness divides by 1 + loss, and the mean loss is {loss:g}; use "
            "adaptive_sharpness for losses below -1."
        )
    return Estimate(rise / (1 + loss), 0.0, "ascent")


def adaptive_sharpness(
    network: Network,
    *,
    kind: str = "worst",
    rho: float = 1e-3,
    normalize_logits: bool = False,
    n_draws: int = 10,
    n_steps: int = 20,
    random_state: RandomState = None,
) -> Estimate:
    """Measure how much the loss rises when each weight moves by a share of itself."""
    check_number("rho", rho)
    check_draws(n_draws)
    if kind not in {"worst", "average"}:
        raise ValueError(f"kind must be 'worst' or 'average', got {kind!r}.")
    if normalize_logits and network.loss.temperature != 1:
        raise ValueError(
            "normalize_logits gives logits of norm one, whose loss at_loss cannot choose: pass one "
            "of the two."
        )
    network = with_unit_logits(network) if normalize_logits else network
    radius = rho * weights_of(network).abs()
    if kind == "average":
        return _mean_rise(network, radius, n_draws, random_state)
    _, rise = largest_rise(network, radius, n_steps=n_steps)
    return Estimate(rise, 0.0, "ascent")


def with_unit_logits(network: Network) -> Network:
    """Make a network whose logits are centred and of norm one, for each sample."""
    loss, known = network.loss, [one for one, row in TABLE.items() if row.task == "classification"]
    if type(loss.criterion) not in known:
        raise NotApplicableError(
            "normalize_logits needs a classifier trained with one of "
            f"{sorted(one.__name__ for one in known)}, got {type(loss.criterion).__name__}."
        )

    def forward(x: Any) -> Tensor:
        output = network(x)
        if output.ndim != 2:
            raise NotApplicableError(
                f"normalize_logits needs outputs of shape (n, n_classes), got "
                f"{tuple(output.shape)}."
            )
        logits = loss.logits(output)
        logits = logits - logits.mean(dim=1, keepdim=True)
        return loss.from_logits(nn.functional.normalize(logits, dim=1))

    return replace(network, forward=forward)


# each takes a network, and keyword arguments of its own
SHARPNESS_MEASURES: dict[str, NetworkMeasure] = {
    "fisher_rao_norm": NetworkMeasure(fisher_rao_norm, EVERY_CHANGE),
    "joint_eigenvalue_flatness": NetworkMeasure(joint_eigenvalue_flatness),
    "pac_bayes_flatness": NetworkMeasure(pac_bayes_flatness),
    # different as far as `eps` is not small next to the weights
    "pac_bayes_magnitude_flatness": NetworkMeasure(pac_bayes_magnitude_flatness),
    "expected_sharpness": NetworkMeasure(expected_sharpness),
    "keskar_sharpness": NetworkMeasure(keskar_sharpness),
    "adaptive_sharpness": NetworkMeasure(adaptive_sharpness, RESCALINGS),
}

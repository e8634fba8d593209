"""Measures of how much the loss rises when the weights are disturbed.

`docs/definitions.md` defines them. Weights are one vector. The network's own parameters are never
written to: `with_weights` returns a network that runs with the parts of a vector in their place, so
that nothing has to be restored. All floating-point parameters take part, biases and frozen
parameters included: a measure depends on the function that the network computes, not on which
parameters an optimiser trained.

The risk of PAC-Bayes flatness may rise by 0.1. It is a classifier's share of errors, as in [1]_,
and the mean loss of any other network. The search for sigma uses the same draws of noise for every
sigma.

References
----------
.. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR 2020.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import brentq
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn import grad
from torch.overrides import TorchFunctionMode

from relflat_sk._checks import check_integer, check_number, warn
from relflat_sk._losses.curvature import ProductCurvature, check_twice
from relflat_sk._losses.table import TABLE
from relflat_sk._network.borrowing import (
    MathAttention,
    borrowed,
    by_all_names,
    changed,
    evaluation_mode,
)
from relflat_sk._network.layers import check_real
from relflat_sk._network.network import Network, mean_loss, outcomes
from relflat_sk._numerics import full_precision
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._eigenvalues import largest_eigenvalue
from relflat_sk.measures._network_measure import (
    EVERY_CHANGE,
    RESCALINGS,
    NetworkMeasure,
    NotApplicableError,
    keywords,
)
from relflat_sk.measures._predictions import count_errors
from relflat_sk.measures._scan import Measured

# -- weights as one vector ---------------------------------------------------------------------


def parameters_of(network: Network) -> dict[str, Tensor]:
    """Collect the floating-point parameters of a network, each shared one once."""
    check_real(network.module)
    with evaluation_mode(network.module):
        # an embedding with max_norm limits its rows before it reads them
        limits: dict[Any, Any] = {
            part.weight: (part.norm_type, 0, part.max_norm)
            for part in network.module.modules()
            if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm
        }
        found = {
            name: torch.renorm(parameter.detach(), *limits[parameter])
            if parameter in limits
            else parameter.detach()
            for name, parameter in network.module.named_parameters()
            if parameter.is_floating_point()
        }
    if not found:
        raise NotApplicableError(f"{type(network.module).__name__} has no parameters to disturb.")
    return found


def weights_of(network: Network) -> Tensor:
    """Return the floating-point parameters of a network in evaluation mode, as one vector."""
    with evaluation_mode(network.module):
        parts = parameters_of(network).values()
        return torch.cat([part.flatten().to(network.device) for part in parts])


def with_weights(network: Network, weights: Tensor) -> Network:
    """Make a network that runs with other weights."""
    runner, own = _Runner(network), parameters_of(network)
    parts = torch.split(weights, [part.numel() for part in own.values()])
    pairs = zip(own.items(), parts, strict=True)
    # as a copy, which an embedding with max_norm can change
    named = {
        f"module.{name}": part.reshape(one.shape).to(one, copy=True) for (name, one), part in pairs
    }
    named = by_all_names(runner, named)

    def forward(x: Any) -> Any:
        return functional_call(runner, named, (x,), tie_weights=False)

    return replace(network, forward=forward, output=None)


class _Runner(nn.Module):
    """The network as a module, so that torch can run it with other parameters."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.module = network.module
        self.network = network

    def forward(self, x: Any) -> Tensor:
        return self.network(x)


def square_norm(weights: Tensor) -> float:
    return float(weights.double().square().sum())


# -- derivatives in all weights ----------------------------------------------------------------


@contextmanager
def differentiable(network: Network, weights: Tensor) -> Iterator[tuple[Network, Tensor]]:
    """Make a network that runs with weights in which it can be differentiated twice."""
    parts = list(network.module.modules())
    # of recurrent layers, cuDNN has no derivative in evaluation mode, and oneDNN no second one
    is_recurrent = any(isinstance(part, nn.RNNBase) for part in parts)
    backends = [torch.backends.cudnn, torch.backends.mkldnn] if is_recurrent else []
    # sparse gradients of embeddings can neither be differentiated nor joined with others
    sparse = [part for part in parts if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    with (
        borrowed(network.module),
        changed(backends, "enabled", False),
        changed(sparse, "sparse", False),
        MathAttention(),
        _TwiceDifferentiable(),
        torch.enable_grad(),
    ):
        leaf = weights.detach().clone().requires_grad_()
        yield with_weights(network, leaf), leaf


class _TwiceDifferentiable(TorchFunctionMode):
    """Runs functions so that their second derivatives are right, and take no time in vain."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; weight norm by its definition, a convolution as a linear map."""
        if func is torch._weight_norm:  # whose own second derivative is wrong
            v, g, dim = args
            return v * (g / torch.norm_except_dim(v, 2, dim))
        # in the data, torch would always compute the second derivative of a convolution
        if func not in _OF_KERNEL or kwargs or len(args) < 3 or not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        x, kernel, bias, *options = args
        # padding may have a name, and data no axis of samples
        if x.requires_grad or x.ndim != kernel.ndim or any(isinstance(o, str) for o in options):
            return func(*args)
        size, of_kernel = kernel.shape, _OF_KERNEL[func]
        output = _LinearMap.apply(  # type: ignore[no-untyped-call]
            kernel,
            lambda kernel: func(x, kernel, None, *options),
            lambda outer: of_kernel(x, size, outer, *options),
        )
        return output if bias is None else output + bias.view(-1, *[1] * (x.ndim - 2))


# convolutions, and their derivatives in the kernel
_OF_KERNEL: dict[Any, Any] = {
    F.conv1d: grad.conv1d_weight,
    F.conv2d: grad.conv2d_weight,
    F.conv3d: grad.conv3d_weight,
}


class _LinearMap(torch.autograd.Function):
    """A linear map and its transpose, each of which is the derivative of the other."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, run: Callable[..., Tensor], transpose: Callable[..., Tensor]
    ) -> Tensor:
        ctx.maps = transpose, run
        return run(x)

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        pulled: Tensor = _LinearMap.apply(outer, *ctx.maps)  # type: ignore[no-untyped-call]
        return pulled, None, None


def loss_gradient(network: Network, weights: Tensor) -> tuple[float, Tensor]:
    """Compute the mean loss and its gradient."""
    total, divisor = 0.0, 0.0
    gradient = torch.zeros_like(weights)
    with differentiable(network, weights) as (moved, leaf):
        for outcome in outcomes(moved):
            loss, share = outcome.total()
            if loss.requires_grad:
                gradient += torch.autograd.grad(loss, leaf, materialize_grads=True)[0]
            total += float(loss.detach())
            divisor += float(share)
            del loss, outcome  # frees this batch before the next one runs
    return total / divisor, gradient / divisor


@contextmanager
def hessian_products(network: Network, weights: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Make a function that multiplies the Hessian of the mean loss with a vector."""
    # Data in one batch need one forward pass, whose graph is kept.
    is_one_batch = sum(1 for _ in islice(network.batches(), 2)) == 1
    with differentiable(network, weights) as (moved, leaf):

        def curvatures() -> Iterator[tuple[ProductCurvature, float]]:
            for outcome in outcomes(moved):
                loss, share = outcome.total()
                curvature = ProductCurvature(loss, leaf)
                del loss, outcome  # frees this batch before the next one runs
                yield curvature, float(share)
                del curvature

        kept = list(curvatures()) if is_one_batch else None

        def product(vector: Tensor) -> Tensor:
            total, divisor = torch.zeros_like(vector), 0.0
            for curvature, share in kept or curvatures():
                total += curvature.product(vector)
                divisor += share
                del curvature
            return total / divisor

        yield product


# -- random noise ------------------------------------------------------------------------------


def _seeds(random_state: RandomState, n_draws: int) -> list[int]:
    """Draw a seed for each draw, of which one alone has no standard error."""
    check_integer("n_draws", n_draws, minimum=2, reason="one draw has no standard error")
    return draw_seeds(random_state, n_draws)


def draw_noise(weights: Tensor, seed: int) -> Tensor:
    """Draw independent standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):  # whatever the caller's default is
        return torch.randn(weights.shape, generator=generator, dtype=torch.float64).to(weights)


# the spacing of weights in half precision that is too much, as a share of a disturbance
_ROUNDED = 0.1


def _warn_of_rounding(weights: Tensor, disturbance: Tensor) -> None:
    """Warn if the precision of the weights is too low for a disturbance."""
    if full_precision(weights) is not weights:
        spacing = torch.finfo(weights.dtype).eps * weights.float().norm()
        if bool(spacing > _ROUNDED * disturbance.float().norm()):
            warn(
                f"the weights are of {weights.dtype}, which rounds disturbances as small as these. "
                "Measure a copy of the network in float32."
            )


def noisy_risks(
    network: Network,
    deviation: Tensor,
    seeds: Sequence[int],
    risk: Callable[[Network], float] = mean_loss,
) -> np.ndarray:
    """Compute a risk under normal noise on the weights, draw by draw."""
    # Each draw is taken with both signs, so that the part that is linear in the noise cancels.
    weights = weights_of(network)
    _warn_of_rounding(weights, deviation)
    risks = []
    for seed in seeds:
        noise = deviation * draw_noise(weights, seed)
        pair = [risk(with_weights(network, one)) for one in (weights + noise, weights - noise)]
        risks.append(sum(pair) / 2)
    return np.array(risks)


def estimate_mean(draws: np.ndarray) -> Measured:
    """Estimate an expectation from independent draws."""
    with np.errstate(invalid="ignore"):  # losses may be infinite
        stderr = draws.std(ddof=1) / np.sqrt(len(draws))
    return Measured(float(draws.mean()), float(stderr), "monte carlo")


# -- PAC-Bayes flatness ---------------------------------------------------------------------------


# Tolerance of the risk, in its standard errors, and of log(sigma) where that is zero.
_TOLERANCE, _XTOL = 0.1, 0.005
# Number of draws that tell where to begin, with the tolerance of log(sigma) there.
_FEW, _ROUGH = 2, 0.1
# First steps of log(sigma) in search of the target by few draws and by all, which are doubled from
# one to the next.
_STEPS = 0.3, 0.1
# How far log(sigma) goes down and up in that search. Where noise is a hundred times as large as the
# weights, doubling it changes nothing any more.
_DOWN, _UP = 20.0, 7.0


def pac_bayes_flatness(network: Network, **search: Any) -> Measured:
    """Measure ``1/sigma^2`` of the largest noise N(0, sigma^2) that the network tolerates."""
    weights = weights_of(network)
    # at a tenth of the weights' size, noise starts to change the predictions of networks
    start = 0.1 * math.sqrt(square_norm(weights) / len(weights)) or 1.0
    return _flatness(network, partial(torch.full_like, weights), start, **search)


def pac_bayes_magnitude_flatness(network: Network, *, eps: float = 1e-3, **search: Any) -> Measured:
    """Measure ``1/sigma^2`` for noise of deviation ``sqrt(sigma^2 w^2 + eps^2)`` per weight."""
    check_number("eps", eps)
    squares = weights_of(network).square()
    return _flatness(network, lambda sigma: (sigma**2 * squares + eps**2).sqrt(), 0.1, **search)


def _flatness(
    network: Network,
    deviation: Callable[[float], Tensor],
    start: float,
    *,
    target: float = 0.1,
    risk: str = "auto",
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Measured:
    """Search for the sigma at which the risk has risen by the target, from a start on."""
    check_number("target", target)
    risk_of, seeds = _find_risk(network, risk), _seeds(random_state, n_draws)
    before = risk_of(network)
    if not math.isfinite(before):
        return Measured.without_value()

    @cache
    def rise(log_sigma: float, n: int) -> Measured:
        risks = noisy_risks(network, deviation(math.exp(log_sigma)), seeds[:n], risk_of)
        return estimate_mean(np.nan_to_num(risks, nan=np.inf) - before)  # large noise overflows

    def gap(log_sigma: float, n: int) -> float:
        return min(rise(log_sigma, n).value - target, 10 * target)

    def excess(log_sigma: float, n: int) -> float:
        is_near = abs(gap(log_sigma, n)) < _TOLERANCE * rise(log_sigma, n).stderr
        return 0.0 if is_near else gap(log_sigma, n)

    log_sigma = math.log(start)
    limits = log_sigma - _DOWN, log_sigma + _UP
    few, every = partial(gap, n=_FEW), partial(gap, n=n_draws)
    rough = _bracket(few, log_sigma, _STEPS[0], limits)
    if rough is not None:
        log_sigma = brentq(few, *rough, xtol=_ROUGH)
    else:  # all draws need not go the way of the few again
        log_sigma = limits[0] if few(log_sigma) > 0 else limits[1]
    bracket = _bracket(every, log_sigma, _STEPS[1], limits)
    if bracket is None:
        if every(log_sigma) <= 0:
            return Measured(0.0, 0.0, "monte carlo")
        raise NotApplicableError(
            f"the risk rises beyond the target at any sigma down to {start * math.exp(-_DOWN):.1g}:"
            " the noise eps, which does not depend on sigma, is too large. Use a smaller eps."
        )
    low, high = bracket
    climb = every(high) - every(low)
    slope = climb / (high - low)
    root = low - every(low) / slope
    stderr = float(np.interp(root, bracket, [rise(end, n_draws).stderr for end in bracket]))
    # a power of sigma is that far from the straight line between two of its values
    bend = climb**2 / (8 * target)
    if bend > _TOLERANCE * rise(low, n_draws).stderr:
        root = brentq(excess, low, high, args=(n_draws,), xtol=_XTOL)
        stderr = rise(root, n_draws).stderr
        if excess(root, n_draws) == 0:  # near the target, a straight line leads to it
            root -= every(root) / slope
    value = math.exp(-2 * root)
    # delta method: d(sigma^-2) = -2 sigma^-2 d(log sigma)
    return Measured(value, 2 * value * stderr / slope, "monte carlo")


def _bracket(
    excess: Callable[[float], float], start: float, step: float, limits: tuple[float, float]
) -> tuple[float, float] | None:
    """Find two numbers between which a function turns positive, by growing steps from a start."""
    above = excess(start) > 0
    near, (lowest, highest) = start, limits
    while near > lowest if above else near < highest:
        far = near - step if above else near + step
        if (excess(far) > 0) != above:
            return (far, near) if above else (near, far)
        near, step = far, 2 * step
    return None


def _find_risk(network: Network, risk: str) -> Callable[[Network], float]:
    """Choose between the share of errors and the mean loss."""
    if risk not in {"auto", "error", "loss"}:
        raise ValueError(f"risk must be 'auto', 'error' or 'loss', got {risk!r}.")
    row = network.loss.row
    classifies = row is not None and row.task != "regression"
    return error_rate if risk == "error" or (risk == "auto" and classifies) else mean_loss


def error_rate(network: Network) -> float:
    """Compute the share of labels that a classifier gets wrong, in evaluation mode."""
    wrong, counted = count_errors(network)
    return wrong / counted


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
    _warn_of_rounding(weights, radius)

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


# -- derivatives along the weights, and the largest curvature in all of them --------------------


def fisher_rao_norm(network: Network) -> Measured:
    """Measure ``sqrt(mean_i <w, grad l_i>^2)`` over all weights, biases included."""
    # The slopes along the weights are products of gradients in the outputs with ``J w``, which is
    # the derivative of ``<J^T u, w>`` in u, with J the outputs' Jacobian.
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
            n += float(outcome.weight[divisors > 0].sum())  # without ignored labels
            del outcome, losses  # frees this batch before the next one runs
    return Measured(math.sqrt(squares / n) * n / divisor)


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
) -> Measured:
    """Measure ``|w|^2 lambda_max(H)``, with H the Hessian in all weights ``w`` but biases."""
    weights = weights_of(network)
    parts = parameters_of(network).values()
    is_weight = torch.cat([
        torch.full_like(part, part.ndim >= 2, dtype=torch.bool).ravel() for part in parts
    ])

    with hessian_products(network, weights) as multiply:

        def product(vector: Tensor) -> Tensor:
            direction = torch.zeros_like(weights)
            direction[is_weight] = vector.to(weights)
            return multiply(direction)[is_weight]

        value, error = largest_eigenvalue(
            product,
            int(is_weight.sum()),
            rtol=rtol,
            random_state=random_state,
            where="in all weights",
        )
    square = square_norm(weights[is_weight])
    return Measured(square * value, square * error, "lanczos")


# -- rises under noise and in boxes ---------------------------------------------------------------


def sharpness_curve(
    network: Network, alphas: Sequence[float], *, n_draws: int, random_state: RandomState
) -> pd.DataFrame:
    """Measure expected sharpness, and the divergence of the noisy weights from noise around 0."""
    seeds = _seeds(random_state, n_draws)
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


def expected_sharpness(network: Network, *, alpha: float = 5e-4, **draws: Any) -> Measured:
    """Measure the mean rise of the loss under noise of deviation ``alpha (10 |w| + 1)``."""
    return _mean_rise(network, _deviation(weights_of(network), alpha), **draws)


def _mean_rise(
    network: Network, deviation: Tensor, *, n_draws: int = 10, random_state: RandomState = None
) -> Measured:
    seeds = _seeds(random_state, n_draws)
    return estimate_mean(noisy_risks(network, deviation, seeds) - mean_loss(network))


def keskar_sharpness(network: Network, *, alpha: float = 5e-4, n_steps: int = 20) -> Measured:
    """Measure the largest rise of the loss in a box of ``alpha (|w| + 1)``, over 1 + loss."""
    check_number("alpha", alpha)
    radius = alpha * (weights_of(network).abs() + 1)
    loss, rise = largest_rise(network, radius, n_steps=n_steps)
    if loss <= -1:
        raise NotApplicableError(
            f"keskar_sharpness divides by 1 + loss, and the mean loss is {loss:g}; use "
            "adaptive_sharpness for losses below -1."
        )
    return Measured(rise / (1 + loss), 0.0, "ascent")


def adaptive_sharpness(
    network: Network,
    *,
    kind: str = "worst",
    rho: float = 1e-3,
    normalize_logits: bool = False,
    n_draws: int = 10,
    n_steps: int = 20,
    random_state: RandomState = None,
) -> Measured:
    """Measure how much the loss rises when each weight moves by a share of itself."""
    check_number("rho", rho)
    if kind not in {"worst", "average"}:
        raise ValueError(f"kind must be 'worst' or 'average', got {kind!r}.")
    if normalize_logits and network.loss.temperature != 1:
        raise ValueError("normalize_logits and at_loss both scale logits: pass one of the two.")
    network = with_unit_logits(network) if normalize_logits else network
    radius = rho * weights_of(network).abs()
    if kind == "average":
        return _mean_rise(network, radius, n_draws=n_draws, random_state=random_state)
    _, rise = largest_rise(network, radius, n_steps=n_steps)
    return Measured(rise, 0.0, "ascent")


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

    return replace(network, forward=forward, output=None)


# each takes a network, and keyword arguments of its own
SHARPNESS_MEASURES: dict[str, NetworkMeasure] = {
    "fisher_rao_norm": NetworkMeasure(fisher_rao_norm, EVERY_CHANGE, of_loss=True),
    "joint_eigenvalue_flatness": NetworkMeasure(joint_eigenvalue_flatness, of_loss=True),
    "pac_bayes_flatness": NetworkMeasure(pac_bayes_flatness, arguments=keywords(_flatness)),
    # different as far as `eps` is not small next to the weights
    "pac_bayes_magnitude_flatness": NetworkMeasure(
        pac_bayes_magnitude_flatness, arguments=keywords(pac_bayes_magnitude_flatness, _flatness)
    ),
    "expected_sharpness": NetworkMeasure(
        expected_sharpness, of_loss=True, arguments=keywords(expected_sharpness, _mean_rise)
    ),
    "keskar_sharpness": NetworkMeasure(keskar_sharpness, of_loss=True),
    "adaptive_sharpness": NetworkMeasure(adaptive_sharpness, RESCALINGS, of_loss=True),
}

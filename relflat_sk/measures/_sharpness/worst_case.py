r"""The largest rise of the loss in a neighbourhood of the weights, by projected ascent.

With a radius ``r_i`` for every weight, the disturbance is ``nu_i = r_i u_i`` with u in the
unit ball of a norm. The ascent runs in u, where the neighbourhood is round: steps along the
steepest direction of the norm (signs for the box, the gradient's own for the ball),
momentum, and a step that is halved when progress stalls, as in APGD [1]_. What it finds is
a lower bound of the maximum.

References
----------
.. [1] F. Croce and M. Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble
   of Diverse Parameter-free Attacks", ICML 2020, Algorithm 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._network import Network
from relflat_sk.measures._sharpness.perturbation import (
    RandomState,
    Weights,
    draw_noise,
    draw_seeds,
    loss_gradient,
    moved,
    own_weights,
)

__all__ = ["BALLS", "Ball", "largest_rise"]

# Algorithm 1 of APGD
_MOMENTUM = 0.75
_SHARE_OF_RISES = 0.75


@dataclass(frozen=True)
class Ball:
    """The unit ball of a norm."""

    project: Callable[[Weights], Weights]
    direction: Callable[[Weights], Weights]  # of norm one, in which a linear function rises most


def _norm(weights: Weights) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in weights.values()))


def _scaled(weights: Weights, factor: float) -> Weights:
    return {name: factor * value for name, value in weights.items()}


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Weights], Weights]:
    return lambda weights: {name: function(value) for name, value in weights.items()}


BALLS: dict[str, Ball] = {
    "linf": Ball(_each(lambda u: u.clamp(-1, 1)), _each(torch.sign)),
    "l2": Ball(
        lambda weights: _scaled(weights, 1 / max(1.0, _norm(weights))),
        # tiny: a gradient of zero has no direction
        lambda weights: _scaled(weights, 1 / max(_norm(weights), torch.finfo(torch.double).tiny)),
    ),
}


def largest_rise(
    network: Network,
    radius: Weights,
    *,
    norm: str = "linf",
    n_steps: int = 20,
    n_restarts: int = 0,
    random_state: RandomState = None,
) -> tuple[float, float]:
    """Find how much the mean loss rises at most when the weights move.

    Parameters
    ----------
    network : Network
    radius : dict of str to Tensor
        How far each weight may move.
    norm : {"linf", "l2"}, default="linf"
        Whether every weight may move by its radius, or all of them together, by a sum of
        squares of their shares of it.
    n_steps : int, default=20
        Steps of an ascent, each a forward and backward pass over the data.
    n_restarts : int, default=0
        Further ascents from random points; the first one starts at the weights.
    random_state : int, RandomState or None, default=None
        For these.

    Returns
    -------
    loss : float
        Mean loss at the weights.
    rise : float
        The largest rise seen, 0 if there was none.

    Raises
    ------
    ValueError
        If an argument is out of its range, or there are no labels.
    """
    if norm not in BALLS:
        raise ValueError(f"norm must be one of {sorted(BALLS)}, got {norm!r}.")
    for name, value, least in (("n_steps", n_steps, 1), ("n_restarts", n_restarts, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}.")
    weights = own_weights(network)

    def loss_at(u: Weights) -> Point:
        shift = {name: radius[name] * value for name, value in u.items()}
        loss, gradient = loss_gradient(network, moved(weights, shift))
        return Point(u, loss, {name: radius[name] * value for name, value in gradient.items()})

    ball = BALLS[norm]
    start = loss_at({name: torch.zeros_like(value) for name, value in weights.items()})
    best = _ascend(loss_at, start, ball, n_steps)
    for seed in draw_seeds(random_state, n_restarts):
        begin = loss_at(ball.project(draw_noise(weights, seed)))
        best = max(best, _ascend(loss_at, begin, ball, n_steps))
    return start.loss, best - start.loss


@dataclass(frozen=True)
class Point:
    """Where an ascent has come."""

    u: Weights
    loss: float
    gradient: Weights


def _ascend(loss_at: Callable[[Weights], Point], start: Point, ball: Ball, n_steps: int) -> float:
    """Return the largest loss that an ascent meets, its start included."""
    best, point, before = start, start, start.u
    step = 2.0  # the diameter
    rises, halved, best_then, checked = 0, False, start.loss, 0
    checkpoints = _checkpoints(n_steps)
    for k in range(1, n_steps + 1):
        ahead = ball.project(moved(point.u, ball.direction(point.gradient), step))
        # the first step has no momentum yet
        share = _MOMENTUM if k > 1 else 1.0
        u = {
            name: value + share * (ahead[name] - value) + (1 - share) * (value - before[name])
            for name, value in point.u.items()
        }
        before, last = point.u, point.loss
        point = loss_at(ball.project(u))
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
    """List the steps after which progress is judged: less and less far apart."""
    share, gap, found = 0.0, 0.22, set()
    while share + gap < 1:
        share += gap
        found.add(math.ceil(share * n_steps))
        gap = max(gap - 0.03, 0.06)
    return found

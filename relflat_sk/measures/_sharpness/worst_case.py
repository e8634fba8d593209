r"""The largest rise of the loss in a neighbourhood of the weights, by projected ascent.

Every weight has a radius ``r_i``. Weights move by ``nu_i = r_i u_i``, with u in the unit ball of
a norm. The ascent runs in u, where the neighbourhood is the same in all directions. As in APGD
[1]_, it steps along the steepest direction of the norm (the gradient's signs for a box, the
gradient for a ball), with momentum, and halves the step when progress stalls. The largest rise
it finds is a lower bound of the maximum.

References
----------
.. [1] Croce and Hein, "Reliable Evaluation of Adversarial Robustness with an Ensemble
   of Diverse Parameter-free Attacks", ICML 2020, Algorithm 1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from relflat_sk._checks import check_integer
from relflat_sk._network import Network
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._sharpness.perturbation import (
    Weights,
    add_weights,
    draw_noise,
    loss_gradient,
    map_weights,
    square_norm,
    weights_of,
)

__all__ = ["BALLS", "Ball", "largest_rise"]

# Algorithm 1 of APGD
_MOMENTUM = 0.75
_SHARE_OF_RISES = 0.75


@dataclass(frozen=True)
class Ball:
    """The unit ball of a norm."""

    project: Callable[[Weights], Weights]
    direction: Callable[[Weights], Weights]


def _norm(weights: Weights) -> float:
    return math.sqrt(square_norm(weights))


def _scaled(weights: Weights, factor: float) -> Weights:
    return map_weights(lambda value: factor * value, weights)


BALLS: dict[str, Ball] = {
    "linf": Ball(
        partial(map_weights, lambda u: u.clamp(-1, 1)),
        partial(map_weights, torch.sign),
    ),
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
    """Find how much the mean loss rises at most when the weights move."""
    if norm not in BALLS:
        raise ValueError(f"norm must be one of {sorted(BALLS)}, got {norm!r}.")
    check_integer("n_steps", n_steps, minimum=1)
    check_integer("n_restarts", n_restarts, minimum=0)
    weights = weights_of(network)

    def evaluate(u: Weights) -> Point:
        moved = add_weights(weights, map_weights(torch.mul, radius, u))
        loss, gradient = loss_gradient(network, moved)
        return Point(u, loss, map_weights(torch.mul, radius, gradient))

    ball = BALLS[norm]
    origin = evaluate(map_weights(torch.zeros_like, weights))
    largest = _ascend(evaluate, origin, ball, n_steps)
    for seed in draw_seeds(random_state, n_restarts):
        start = evaluate(ball.project(draw_noise(weights, seed)))
        largest = max(largest, _ascend(evaluate, start, ball, n_steps))
    return origin.loss, largest - origin.loss


@dataclass(frozen=True)
class Point:
    """A point of the unit ball, with the loss there."""

    u: Weights
    loss: float
    gradient: Weights


def _ascend(evaluate: Callable[[Weights], Point], start: Point, ball: Ball, n_steps: int) -> float:
    """Return the largest loss on the way of an ascent, its start included."""
    best, point, before = start, start, start.u
    step = 2.0  # the ball's diameter
    rises, halved, best_then, checked = 0, False, start.loss, 0
    checkpoints = _checkpoints(n_steps)
    for k in range(1, n_steps + 1):
        ahead = ball.project(add_weights(point.u, ball.direction(point.gradient), step))
        # the first step has no momentum yet
        share = _MOMENTUM if k > 1 else 1.0
        u = {
            name: value + share * (ahead[name] - value) + (1 - share) * (value - before[name])
            for name, value in point.u.items()
        }
        before, last = point.u, point.loss
        point = evaluate(ball.project(u))
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

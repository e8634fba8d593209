r"""PAC-Bayes flatness: how much noise on the weights the network's performance endures.

``1 / sigma^2`` for the largest ``sigma`` at which noise on the weights raises the expected
risk by no more than 0.1 [1]_, [2]_. The risk of a classifier is its share of errors, as in
[1]_; of any other network it is the mean loss. The search for sigma works on a fixed set of
draws, the same ones for all sigma.

References
----------
.. [1] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR
   2020.
.. [2] B. Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
"""

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from scipy.optimize import bisect
from torch import Tensor, nn

from relflat_sk._network import Network, Outcome, borrowed, mean_loss, outcomes
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._sharpness.perturbation import (
    RandomState,
    Weights,
    check_draws,
    check_positive,
    disturbed_risks,
    draw_seeds,
    mean_of,
    own_weights,
)

__all__ = ["error_rate", "pac_bayes_flatness", "pac_bayes_magnitude_flatness"]

# of log(sigma): 1/sigma^2 is found to one per cent, far below what ten draws know of it
_XTOL = 0.005
# of log(sigma), to both sides, for the slope of the risk
_STEP = 0.2
# how often sigma is doubled or halved in search of the target; of noise a hundred times as
# large as the weights, more changes nothing
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
    """Measure ``1/sigma^2`` of the largest noise N(0, sigma^2) that the network endures.

    Parameters
    ----------
    network : Network
    target : float, default=0.1
        By how much the expected risk may rise.
    risk : {"auto", "error", "loss"}, default="auto"
        Share of errors or mean loss; "auto" is errors for classifiers, loss otherwise.
    n_draws : int, default=10
        Draws of noise, each taken with both signs, the same at every sigma.
    random_state : int, RandomState or None, default=None

    Returns
    -------
    Estimate
        0 if no noise raises the risk that much. The standard error is that of the expected
        risk at sigma, divided by the slope of the risk there.

    Raises
    ------
    ValueError
        If an argument is out of its range, or the network has no errors to count.
    """
    weights = own_weights(network)
    # noise of a tenth of the weights' size, where networks start to feel it
    start = 0.1 * _root_mean_square(weights) or 1.0

    def spread(sigma: float) -> Weights:
        return {name: torch.full_like(value, sigma) for name, value in weights.items()}

    return _flatness(network, spread, start, target, risk, n_draws, random_state)


def pac_bayes_magnitude_flatness(
    network: Network,
    *,
    target: float = 0.1,
    risk: str = "auto",
    eps: float = 1e-3,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure the same with noise of deviation ``sqrt(sigma^2 w^2 + eps^2)`` on each weight.

    Parameters
    ----------
    network : Network
    target, risk
        See `pac_bayes_flatness`.
    eps : float, default=1e-3
        Noise on weights of zero.
    n_draws, random_state
        See `pac_bayes_flatness`.

    Returns
    -------
    Estimate
        See `pac_bayes_flatness`.

    Raises
    ------
    ValueError
        As `pac_bayes_flatness`, and if `eps` alone raises the risk beyond the target.
    """
    check_positive("eps", eps)
    weights = own_weights(network)

    def spread(sigma: float) -> Weights:
        return {
            name: (sigma**2 * value.square() + eps**2).sqrt() for name, value in weights.items()
        }

    return _flatness(network, spread, 0.1, target, risk, n_draws, random_state)


def _root_mean_square(weights: Weights) -> float:
    total = sum(float(value.double().square().sum()) for value in weights.values())
    return math.sqrt(total / sum(value.numel() for value in weights.values()))


def _flatness(
    network: Network,
    spread: Callable[[float], Weights],
    start: float,
    target: float,
    risk: str,
    n_draws: int,
    random_state: RandomState,
) -> Estimate:
    check_positive("target", target)
    check_draws(n_draws)
    judge = _find_risk(network, risk)
    seeds = draw_seeds(random_state, n_draws)
    before = judge(network)
    if not math.isfinite(before):
        return Estimate(math.nan, math.nan, "none")

    @cache
    def rise(log_sigma: float) -> Estimate:
        found = disturbed_risks(network, spread(math.exp(log_sigma)), seeds, judge)
        return mean_of(np.nan_to_num(found, nan=np.inf) - before)  # too much noise overflows

    def excess(log_sigma: float) -> float:
        return rise(log_sigma).value - target

    bracket = _bracket(excess, math.log(start))
    if bracket is None:
        return Estimate(0.0, 0.0, "monte carlo")
    at = bisect(excess, *bracket, xtol=_XTOL)
    slope = (rise(at + _STEP).value - rise(at - _STEP).value) / (2 * _STEP)
    value = math.exp(-2 * at)
    # delta method: d(sigma^-2) = -2 sigma^-2 d(log sigma)
    stderr = 2 * value * rise(at).stderr / slope if slope > 0 else math.nan
    return Estimate(value, stderr, "monte carlo")


def _bracket(excess: Callable[[float], float], start: float) -> tuple[float, float] | None:
    """Find a low end where the excess is not positive, and twice that where it is."""
    step = math.log(2)
    above = excess(start) > 0
    for k in range(1, (_HALVINGS if above else _DOUBLINGS) + 1):
        at = start + (-k if above else k) * step
        if (excess(at) > 0) != above:
            return (at, at + step) if above else (at - step, at)
    if above:
        raise ValueError(
            f"the risk rises beyond the target at any sigma down to {math.exp(at):.1g}: the "
            "noise that does not depend on sigma is too much. Use a smaller eps."
        )
    return None


def _find_risk(network: Network, risk: str) -> Callable[[Network], float]:
    row = network.loss.row
    classifies = row is not None and row.task in _WRONG
    if risk not in {"auto", "error", "loss"}:
        raise ValueError(f"risk must be 'auto', 'error' or 'loss', got {risk!r}.")
    if risk == "error" and not classifies:
        raise ValueError(
            f"{network.loss.criterion!r} has no classes, and so no errors to count; use "
            "risk='loss'."
        )
    return mean_loss if risk == "loss" or not classifies else error_rate


def error_rate(network: Network) -> float:
    """Compute the share of wrong labels, in evaluation mode.

    Parameters
    ----------
    network : Network
        With a loss of the table's tasks "classification" or "binary".

    Returns
    -------
    float
        Of labels, if a sample has several; ignored ones do not count.
    """
    assert network.loss.row is not None
    judge = _WRONG[network.loss.row.task]
    total, divisor = 0.0, 0.0
    with borrowed(network.module), torch.no_grad():
        for outcome in outcomes(network):
            wrong, counted = (
                part.reshape(len(part), -1).sum(dim=1).double() for part in judge(outcome)
            )
            total += float(outcome.weight @ wrong)
            divisor += float(outcome.weight @ counted)
    return total / divisor


def _wrong_class(outcome: Outcome) -> tuple[Tensor, Tensor]:
    output, target = outcome.output, outcome.target
    if target.is_floating_point():  # class probabilities
        target = target.argmax(dim=1)
    counted = target != getattr(outcome.loss.criterion, "ignore_index", -100)
    wrong = (output.argmax(dim=1) != target) | output.isnan().any(dim=1)
    return wrong & counted, counted


def _wrong_side(outcome: Outcome) -> tuple[Tensor, Tensor]:
    threshold = 0.0 if isinstance(outcome.loss.criterion, nn.BCEWithLogitsLoss) else 0.5
    wrong = (outcome.output > threshold) != (outcome.target > 0.5)
    wrong = wrong | outcome.output.isnan()
    return wrong, torch.ones_like(wrong)


# from the task of a loss to which labels are wrong, and which count
_WRONG: dict[str, Callable[[Outcome], tuple[Tensor, Tensor]]] = {
    "classification": _wrong_class,
    "binary": _wrong_side,
}

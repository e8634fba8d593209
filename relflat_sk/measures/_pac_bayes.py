r"""PAC-Bayes flatness: how much noise on its weights a network tolerates.

The measure is ``1 / sigma^2`` for the largest ``sigma`` at which noise on the weights raises the
expected risk by no more than 0.1 [1]_, [2]_. The risk of a classifier is its share of errors, as
in [1]_; the risk of any other network is its mean loss. The search for sigma uses the same draws
of noise for every sigma.

References
----------
.. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR
   2020.
.. [2] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
"""

import math
from collections.abc import Callable
from functools import cache, partial

import numpy as np
import torch
from scipy.optimize import bisect
from torch import Tensor

from relflat_sk._checks import check_number
from relflat_sk._network import Network, mean_loss
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._perturbation import (
    check_draws,
    estimate_mean,
    noisy_risks,
    square_norm,
    weights_of,
)
from relflat_sk.measures._results import Estimate, NotApplicableError
from relflat_sk.measures._score import count_errors

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

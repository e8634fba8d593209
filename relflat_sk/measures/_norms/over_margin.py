"""Norms from their logarithms, divided by a power of the margin or not."""

import math
import sys

from relflat_sk._network import Network
from relflat_sk._warnings import warn
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._norms.margin import margin

__all__ = ["PERCENTILE", "estimate_from_log", "log", "positive_margin"]

PERCENTILE = 5.0
_LARGEST = math.log(sys.float_info.max)


def log(value: float) -> float:
    """Return the natural logarithm of a number that is not negative; minus infinity for 0."""
    return math.log(value) if value > 0 else -math.inf


def positive_margin(network: Network, percentile: float) -> float:
    """Return the margin of a classifier; nan, with a warning, if it is not positive."""
    gamma = margin(network, percentile)
    if gamma > 0:
        return gamma
    warn(
        f"the margin is {gamma:.3g}, not positive: it is the {percentile:g}th percentile of the "
        "samples' margins, and a negative margin is that of a sample that is classified wrongly. "
        "What is divided by the margin means nothing and is given as nan. Train until the network "
        "fits the training data, and measure on those, or pass a larger percentile."
    )
    return math.nan


def estimate_from_log(
    log_norm: float,
    network: Network,
    over_margin: bool,
    percentile: float = PERCENTILE,
    power: int = 2,
) -> Estimate:
    """Return a norm from its logarithm, divided by a power of the margin if asked for."""
    if over_margin:
        log_norm -= power * math.log(positive_margin(network, percentile))
    if log_norm > _LARGEST:
        warn(f"the norm is exp({log_norm:.6g}), too large for a float: it is given as infinite.")
        return Estimate(math.inf)
    return Estimate(math.exp(log_norm))

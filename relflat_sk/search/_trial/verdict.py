"""Whether a measured candidate is a minimum, and why not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relflat_sk.measures import ConstantComparison, Flatness, has_vanished
from relflat_sk.minima import depth_of
from relflat_sk.search._trial.goal import Ending, find_ending

__all__ = ["NO_MEASURE", "SATURATED", "Measured", "record_verdict"]

# how the reason of a minimum begins whose measures are nan or infinite
NO_MEASURE = "cannot be ranked: "
# the reason of a network that is perfectly flat, however well it predicts
SATURATED = (
    "has no curvature left: the network may be saturated, so that the loss of nearly all samples "
    "rounds to 0, or the criterion has no curvature"
)


@dataclass(frozen=True)
class Measured:
    """The results of the pass over the training data."""

    train_loss: float
    found: dict[str, Flatness]


def record_verdict(
    record: dict[str, Any], estimator: Any, goal: Any, measured: Measured, values: Sequence[float]
) -> list[float]:
    """Record how deep a candidate is, whether it is a minimum, and why not."""
    checked = list(values)
    constant_loss = next(iter(measured.found.values())).constant_risk()
    depth = depth_of(measured.train_loss, constant_loss)
    if np.isfinite(depth):
        record["depth"] = depth
    useless = _why_useless(measured, constant_loss)
    if useless:
        ending = Ending("", useless)
        checked = [np.nan] * len(checked)
    elif not np.isfinite(values).all():
        ending = Ending("", _name_non_finite(measured.found))
    else:
        ending = find_ending(estimator, goal, measured.train_loss, constant_loss)
    reason = ending.reason
    record["converged"] = not reason
    record["ended_by"] = ending.by
    record["reason"] = reason
    return checked


def _why_useless(measured: Measured, constant_loss: float) -> str:
    """Return why the flatness of a network is none of a minimum; "" if it may be."""
    if measured.train_loss >= constant_loss:
        return "the training loss is no better than a constant prediction's"
    comparison = ConstantComparison(measured.train_loss, constant_loss)
    values = {name: one.value for name, one in measured.found.items()}
    vanished = any(has_vanished(name, value, comparison) for name, value in values.items())
    return SATURATED if vanished else ""


def _name_non_finite(found: Mapping[str, Flatness]) -> str:
    """Say which measures are nan or infinite, as the reason of a candidate."""
    values = {name: one.value for name, one in found.items() if not np.isfinite(one.value)}
    return NO_MEASURE + ", ".join(f"{name} is {value}" for name, value in values.items())

"""Warn of measures that are not finite because the network is not."""

import math
from collections.abc import Mapping

from relflat_sk._network import find_non_finite
from relflat_sk._warnings import warn
from relflat_sk.measures._flatness import TRACE_LIKE, Flatness

__all__ = ["warn_of_non_finite"]


def warn_of_non_finite(found: Mapping[tuple[str, str], Flatness]) -> None:
    """Say why measures are nan or infinite, unless the measures have said so themselves."""
    # by name, not by layer: a network that diverged has diverged at all of them
    names = dict.fromkeys(name for (_, name), one in found.items() if not math.isfinite(one.value))
    if not names:
        return
    one = next(iter(found.values()))
    parameter, cause = find_non_finite(one.network.module), None
    if parameter is not None:
        cause = f"{parameter!r} of the network contains nan or infinite numbers"
    elif names.keys() & {*TRACE_LIKE, "gradient_norm"} and not math.isfinite(one.risk):
        cause = (
            f"the mean loss is {one.risk}: the network's outputs are too large, or not of the kind "
            "that the criterion takes, such as logits in place of probabilities"
        )
    if cause is not None:
        first, *others = names
        and_others = f" and {len(others)} more" if others else ""
        warn(
            f"the value of {first}{and_others} is nan or infinite, because {cause}. If training "
            "has diverged, train again, with a lower learning rate for example."
        )

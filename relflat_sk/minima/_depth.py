"""How deep minima are, and which of them are of the same depth.

The flatness of a network depends on its training loss: with cross-entropy, the curvature goes to
zero with the loss. Minima can therefore be compared only if they are about equally deep. The depth
is the loss of the best constant prediction over the training loss, so that 1 is no better than a
constant, and the losses of minima of the same data differ as their depths do.
"""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._checks import is_number
from relflat_sk.minima._columns import is_complete, is_converged, numeric_column

AUTO = "auto"
AT_EQUAL_LOSS = frozenset({"comparable_flatness"})  # measures that do not depend on the depth
DEPTH_BAND = 3.0  # the deepest of the minima that are compared, over the shallowest
DEEPEST = 1e6  # of smaller losses, rounding is a large part
ROUNDING = 1e-9


def depth_of(train_loss: float, constant_loss: float) -> float:
    """Compute the depth of a minimum."""
    if not (0 < constant_loss < np.inf and 0 <= train_loss < np.inf):
        return float("nan")
    return float(constant_loss / max(train_loss, constant_loss / DEEPEST))


def check_depth_band(band: Any) -> None:
    """Refuse a width of the band that is not valid."""
    is_auto = isinstance(band, str) and band == AUTO
    if band is not None and not is_auto and (not is_number(band) or not band >= 1):
        raise ValueError(
            "depth_band must be a number of at least 1, the largest ratio of the depths of minima "
            f"that are compared, {AUTO!r}, or None to compare all minima, got {band!r}."
        )


def find_depth_band(band: Any, by: str, at_loss: float | None = None) -> float | None:
    """Choose the width of the band; there is none where minima are measured at equal loss."""
    if not isinstance(band, str):
        return band  # type: ignore[no-any-return]
    return None if at_loss is not None or by in AT_EQUAL_LOSS else DEPTH_BAND


def _find_band(
    minima: pd.DataFrame, depths: NDArray[np.float64], good: NDArray[np.bool_], band: float
) -> tuple[float, float] | None:
    """Find the depths between which most good minima lie."""
    voters = good & np.isfinite(depths)
    # a saturated network has no loss and no flatness left, except for rounding
    unsaturated = voters & (depths < DEEPEST)
    voters = unsaturated if unsaturated.any() else voters
    if "ended_by" in minima.columns:
        reached = voters & minima["ended_by"].eq("goal").to_numpy(dtype=bool)
        voters = reached if reached.any() else voters
    if not voters.any():
        return None
    votes = np.sort(depths[voters])[::-1]  # argmax takes the first of equal counts: the deepest
    counts = [int(_within(votes, high / band, high).sum()) for high in votes]
    high = float(votes[int(np.argmax(counts))])
    return high / band, high


_OUTSIDE = "its depth of "  # how the reason of a minimum outside of the band begins


def forget_depth_band(minima: pd.DataFrame) -> pd.DataFrame:
    """Leave out which minima are compared, if their depths can tell it again."""
    if "comparable" not in minima.columns or "depth" not in minima.columns:
        return minima
    minima = minima.drop(columns="comparable")
    if "reason" in minima.columns:
        outside = minima["reason"].astype(str).str.startswith(_OUTSIDE)
        minima.loc[outside, "reason"] = ""
    return minima


def mark_depth_band(minima: pd.DataFrame, band: float | None) -> pd.DataFrame:
    """Mark the minima that are compared, and say of the others why they are not."""
    if "comparable" in minima.columns or "depth" not in minima.columns:
        return minima
    good = is_complete(minima) & is_converged(minima)
    depths = numeric_column(minima, "depth", argument="depth")
    found = None if band is None else _find_band(minima, depths, good, band)
    inside = ~np.isfinite(depths) | (True if found is None else _within(depths, *found))
    marked = minima.copy()
    place = list(minima.columns).index("converged") + 1 if "converged" in minima.columns else 0
    marked.insert(place or len(minima.columns), "comparable", good & inside)
    if found is not None and "reason" in marked.columns:
        low, high = found
        marked.loc[good & ~inside, "reason"] = [
            f"{_OUTSIDE}{depth:.3g} cannot be compared: most minima have {low:.3g} to {high:.3g}"
            for depth in depths[good & ~inside]
        ]
    return marked


def _within(depths: NDArray[np.float64], low: float, high: float) -> NDArray[np.bool_]:
    """Return which depths lie in a band, up to rounding."""
    return (depths >= low * (1 - ROUNDING)) & (depths <= high * (1 + ROUNDING))

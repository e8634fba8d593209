"""Minima in order of flatness, among those that are equally deep.

The flatness of a network depends on its training loss: with cross-entropy, the curvature goes to
zero with the loss. So minima can be compared only if they are about equally deep. The depth is the
loss of the best constant prediction over the training loss, so that 1 is no better than a constant,
and the losses of minima of the same data differ as their depths do. With label smoothing, no
network is below a loss, from which both are counted.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._checks import is_number
from relflat_sk._network.network import LossRange
from relflat_sk.minima._table import (
    SCORES,
    is_comparable,
    is_complete,
    is_minimum,
    list_reasons,
    measure_column,
    measure_columns,
    minima_table,
    numeric_column,
)

AUTO = "auto"
AT_EQUAL_LOSS = frozenset({"comparable_flatness"})  # measures that do not depend on the depth
DEPTH_BAND = 3.0  # the deepest of the minima that are compared, over the shallowest
DEEPEST = 1e6  # of smaller losses, rounding is a large part
ROUNDING = 1e-9


def depth_of(train_loss: float, losses: LossRange) -> float:
    """Compute the depth of a minimum; nan if losses can be negative, or have no range."""
    lowest, constant = losses
    drop = constant - lowest
    if not (ROUNDING * constant < drop < np.inf and 0 <= train_loss < np.inf):
        return float("nan")
    return float(drop / max(train_loss - lowest, drop / DEEPEST))


def find_depth_band(band: Any, by: str, at_loss: float | None = None) -> float | None:
    """Check the width of the band, or choose it: none where minima are measured at equal loss."""
    if band == AUTO:
        return None if at_loss is not None or by in AT_EQUAL_LOSS else DEPTH_BAND
    if band is not None and not (is_number(band) and band >= 1):
        raise ValueError(
            "depth_band must be a number of at least 1, the largest ratio of the depths of minima "
            f"that are compared, {AUTO!r}, or None to compare all minima, got {band!r}."
        )
    return band  # type: ignore[no-any-return]


def _find_band(
    minima: pd.DataFrame, depths: NDArray[np.float64], good: NDArray[np.bool_], band: float
) -> tuple[float, float]:
    """Find the depths between which most good minima lie; all depths if no minimum has one."""
    voters = good & np.isfinite(depths)
    # a saturated network has no loss and no flatness left, except for rounding
    unsaturated = voters & (depths < DEEPEST)
    voters = unsaturated if unsaturated.any() else voters
    if "ended_by" in minima.columns:
        reached = voters & minima["ended_by"].eq("goal").to_numpy(dtype=bool)
        voters = reached if reached.any() else voters
    if not voters.any():
        return 0.0, np.inf
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
    good = is_complete(minima) & is_comparable(minima)
    depths = numeric_column(minima, "depth", argument="depth")
    ends = (0.0, np.inf) if band is None else _find_band(minima, depths, good, band)
    inside = ~np.isfinite(depths) | _within(depths, *ends)
    marked = minima.copy()
    place = list(minima.columns).index("converged") + 1 if "converged" in minima.columns else 0
    marked.insert(place or len(minima.columns), "comparable", good & inside)
    if "reason" in marked.columns:
        kept = depths[good & inside & np.isfinite(depths)]
        marked.loc[good & ~inside, "reason"] = [
            f"{_OUTSIDE}{depth:.3g} cannot be compared: {len(kept)} of {good.sum()} minima have "
            f"{kept.min():.3g} to {kept.max():.3g}"
            for depth in depths[good & ~inside]
        ]
    return marked


def _within(depths: NDArray[np.float64], low: float, high: float) -> NDArray[np.bool_]:
    """Return which depths lie in a band, up to rounding."""
    return (depths >= low * (1 - ROUNDING)) & (depths <= high * (1 + ROUNDING))


# -- ranks ----------------------------------------------------------------------------------------


def rank_minima(
    minima: Any,
    by: str | Callable[..., Any] | None = None,
    *,
    depth_band: float | str | None = AUTO,
) -> pd.DataFrame:
    """Rank minima, flattest first.

    Flatness says something at a minimum only: a network that learned nothing can be perfectly
    flat. And it can be compared only between minima that are equally deep. The minima of the
    depth that most of them have therefore come first, then the minima of other depths, then the
    candidates that did not converge, then those that failed or whose value is not finite. Minima
    of other depths, and candidates that did not converge or failed, are in the order of their
    depths, the deepest first.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima; `relflat_sk.minima` describes the columns of a table. Without a column
        ``converged`` every row counts as a minimum. The input is not changed.
    by : str or callable, optional
        The numeric column to rank by, or the measure function that produced it. The smallest value
        comes first; of ``"train_score"`` and ``"test_score"``, the largest. None takes the first
        measure of a study or search, and of a table ``"relative_flatness"`` or its only measure.
    depth_band : float, "auto" or None, default="auto"
        The largest depth over the smallest of the minima that are compared. The depth is the loss
        of the best constant prediction over the training loss. The band with the most minima at
        their goal ranks first (if no minimum reached one, the band with the most minima), and of
        several the deepest. Saturated networks, of depth 1e6, rank first only if there are no
        others. None compares all minima. "auto" leaves the minima as they are marked, those of a
        search for example; unmarked ones have a band of 3, or None for "comparable_flatness", which
        is at equal loss. Without a column ``depth`` all minima are compared, and a column
        ``comparable`` stays as it is.

    Returns
    -------
    pandas.DataFrame
        The same rows in rank order, with a new index and a last column ``rank`` from 1 to n.
        Rows with equal values stay in their order. The column ``comparable`` marks the minima
        that are compared, if there are depths, and ``reason`` says why others are not.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study nor a fitted search.
    ValueError
        If no candidate of a study could be trained, there is no column `by`, or it is not
        numeric, or `depth_band` is less than 1.

    See Also
    --------
    FlatMinimaSearch : Train candidates and rank their minima.
    correlate_measures : Correlate measures with the generalization gap.
    MinimaRankingDisplay : Draw the ranking.

    Examples
    --------
    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "trial": [0, 1, 2],
    ...         "relative_flatness": [3.0, 0.0, 2.0],
    ...         "converged": [True, False, True],
    ...     }
    ... )
    >>> rank_minima(minima)
       trial  relative_flatness  converged  rank
    0      2                2.0       True     1
    1      0                3.0       True     2
    2      1                0.0      False     3
    """
    table = minima_table(minima)
    by = measure_column(minima, table, by)
    band = find_depth_band(depth_band, by)
    table = mark_depth_band(table if depth_band == AUTO else forget_depth_band(table), band)
    if isinstance(minima, optuna.Study):
        _check_trained(table)
    values = numeric_column(table, by, argument="by")
    if by in SCORES:  # whose large values are good
        values = -values
    finite = np.isfinite(values) & is_complete(table)
    kinds = [~finite, is_comparable(table), is_minimum(table)]
    group = np.select(kinds, [3, 0, 1], default=2)
    within = np.where(finite, values, np.inf)
    if "depth" in table.columns and np.isfinite(table["depth"]).any():
        depths = numeric_column(table, "depth", argument="depth")
        within = np.where(group == 0, within, np.where(np.isfinite(depths), -depths, np.inf))
    # lexsort: the last key is the most significant, and the sort is stable
    order = np.lexsort((within, group))
    ranked = table.drop(columns="rank", errors="ignore").iloc[order].reset_index(drop=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    return ranked


def _check_trained(table: pd.DataFrame) -> None:
    """Refuse the table of a study without minima, and say why there are none."""
    if not is_complete(table).any():
        raise ValueError(
            f"there are no minima to rank: of {len(table)} candidates, none was trained and "
            f"measured. Run the search, or study.optimize.\n{list_reasons(table)}"
        )
    if not measure_columns(table) and table["train_loss"].isna().all():
        raise ValueError(
            f"none of these {len(table)} trials recorded a minimum: they are of another objective."
        )

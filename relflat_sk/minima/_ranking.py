"""Minima in order of flatness."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
import pandas as pd

from relflat_sk.minima._columns import (
    column_of,
    is_complete,
    is_converged,
    is_score,
    measure_columns,
    numeric_column,
)
from relflat_sk.minima._depth import (
    AUTO,
    check_depth_band,
    find_depth_band,
    forget_depth_band,
    mark_depth_band,
)
from relflat_sk.minima._trials import minima_table

__all__ = ["rank_minima"]


def rank_minima(
    minima: Any,
    by: str | Callable[..., Any] = "relative_flatness",
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
    by : str or callable, default="relative_flatness"
        The numeric column to rank by, or the function of which it is the measure, smallest value
        first; of the two scores, ``"train_score"`` and ``"test_score"``, the largest comes first.
    depth_band : float, "auto" or None, default="auto"
        The largest depth over the smallest of the minima that are compared. The depth is the
        loss of the best constant prediction over the training loss. Of all such bands, the
        ranking takes the one with the most minima that reached their goal (if none did, with
        the most minima), and of several the deepest. None compares all minima. "auto" leaves
        the minima as they are marked, those of a search for example; unmarked ones have a band
        of 3, or None for "comparable_flatness", which is at equal loss. Without a column
        ``depth`` all minima are compared, and a column ``comparable`` stays as it is.

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
    check_depth_band(depth_band)
    by = column_of(by)
    table = minima_table(minima)
    if depth_band != AUTO:
        table = forget_depth_band(table)
    table = mark_depth_band(table, find_depth_band(depth_band, by))
    if isinstance(minima, optuna.Study):
        _check_trained(table)
    values = numeric_column(table, by, argument="by")
    if is_score(by):
        values = -values
    finite = np.isfinite(values) & is_complete(table)
    compared, converged = is_converged(table), is_converged(table, any_depth=True)
    group = np.select([~finite, compared, converged], [3, 0, 1], default=2)
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
    if table.empty:
        raise ValueError(
            "there are no minima to rank: no candidate has been trained. A study needs finished "
            "trials: run the search, or study.optimize(MinimaObjective(...)), first."
        )
    if not is_complete(table).any():
        reasons = table["reason"].value_counts()
        raise ValueError(
            f"there are no minima to rank: none of {len(table)} candidates could be trained and "
            "measured:\n" + "\n".join(f"  {n} x {reason}" for reason, n in reasons.items())
        )
    if not measure_columns(table) and table["train_loss"].isna().all():
        raise ValueError(
            f"none of these {len(table)} trials recorded a minimum: the study was made by another "
            "objective. Train with MinimaObjective or FlatMinimaSearch."
        )

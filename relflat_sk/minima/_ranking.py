"""Minima in order of flatness."""

from typing import Any

import numpy as np
import pandas as pd

from relflat_sk._minima_table import (
    is_complete,
    is_converged,
    is_score,
    minima_table,
    numeric_column,
)

__all__ = ["rank_minima"]


def rank_minima(minima: Any, by: str = "relative_flatness") -> pd.DataFrame:
    """Rank minima, flattest first.

    Flatness says something at a minimum only: a network that learned nothing can be perfectly
    flat. The minima therefore come first, then the candidates that did not converge, then the
    candidates that failed or whose value is not finite.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima; `relflat_sk.minima` describes the columns of a table. Without a column
        ``converged`` every row counts as a minimum. The input is not changed.
    by : str, default="relative_flatness"
        The numeric column to rank by, smallest value first; of the two scores,
        ``"train_score"`` and ``"test_score"``, the largest comes first.

    Returns
    -------
    pandas.DataFrame
        The same rows in rank order, with a new index and a last column ``rank`` from 1 to n.
        Rows with equal values stay in their order.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study nor a fitted search.
    ValueError
        If there is no column `by`, or it is not numeric.

    See Also
    --------
    FlatMinimaSearch : Train candidates and rank their minima.
    correlate : Correlate measures with the generalization gap.
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
    values = numeric_column(table, by, argument="by")
    if is_score(by):
        values = -values
    finite = np.isfinite(values) & is_complete(table)
    group = np.where(finite, np.where(is_converged(table), 0, 1), 2)
    # lexsort: the last key is the most significant, and the sort is stable
    order = np.lexsort((np.where(finite, values, 0.0), group))
    ranked = table.drop(columns="rank", errors="ignore").iloc[order].reset_index(drop=True)
    ranked["rank"] = np.arange(1, len(ranked) + 1)
    return ranked

"""What the statistics over minima share: which minima they use, and how they resample them.

=============  ==================  ==========================================================
name           shape               meaning
=============  ==================  ==========================================================
``x``, ``y``   ``(n,)``            a measure and the target, one value per minimum
``counts``     ``(b, n)``          how often each minimum is in each of b bootstrap resamples
=============  ==================  ==========================================================

A resample is a reweighting of the minima by its counts.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.utils import check_random_state

from relflat_sk.minima._table import (
    is_complete,
    is_converged,
    measure_columns,
    minima_table,
    numeric_column,
)

__all__ = [
    "FEWEST",
    "Bools",
    "Floats",
    "Judged",
    "draw_seed",
    "interval",
    "judge",
    "resample",
    "signs",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONFIDENCE = 0.95
FEWEST = 3  # with two minima every coefficient is 1 or -1
BASELINE = "train_loss"


@dataclass(frozen=True)
class Judged:
    """The minima that measures are judged by: converged, with a finite target.

    Parameters
    ----------
    table : pandas.DataFrame
        All minima.
    target : ndarray of shape (n,)
        What is to be predicted, nan where it is unknown.
    used : ndarray of bool of shape (n,)
        Which of the minima count.
    measures : list of str
        The measures, and the training loss as a baseline.
    """

    table: pd.DataFrame
    target: Floats
    used: Bools
    measures: list[str]

    def of(self, measure: str) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Return which minima have a finite measure, that measure, and their target.

        In an order of their own, by target and measure, so that the same minima are resampled
        alike in whatever order they come.
        """
        x = numeric_column(self.table, measure, argument="measure")
        order = np.lexsort((x, self.target))
        rows = order[(self.used & np.isfinite(x))[order]]
        return rows, x[rows], self.target[rows]

    def measures_but(self, columns: list[str]) -> list[str]:
        """Return the measures without columns that were given another part."""
        return [name for name in self.measures if name not in columns]


def judge(minima: Any, target: str, n_bootstrap: int) -> Judged:
    """Take the minima by which measures can be judged.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima.
    target : str
        The numeric column to predict.
    n_bootstrap : int
        The number of resamples that the caller was asked for.

    Returns
    -------
    Judged
        The minima, and the names of the measures in their order.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        one, or `n_bootstrap` is not a positive integer.
    """
    table = minima_table(minima)
    if not isinstance(n_bootstrap, Integral) or n_bootstrap < 1:
        raise ValueError(
            f"n_bootstrap must be a positive integer, got {n_bootstrap!r}: the number of "
            "resamples behind each interval, 1000 as a rule."
        )
    y = numeric_column(table, target, argument="target")
    used = is_complete(table) & is_converged(table) & np.isfinite(y)
    if used.sum() < FEWEST:
        raise ValueError(
            f"{used.sum()} of the {len(table)} minima converged and have a finite "
            f"{target!r}, and a correlation needs at least {FEWEST}. {_hint(target)}"
        )
    names = [*measure_columns(table), *(name for name in [BASELINE] if name in table.columns)]
    return Judged(table, y, used, [name for name in names if name != target])


def _hint(target: str) -> str:
    """Return what to do about too few minima."""
    if target in ("generalization_gap", "test_loss", "test_score"):
        return (
            "Pass X_test and y_test to the search to have held-out values recorded, and see "
            "the columns 'converged' and 'reason' of the table for minima that were left out."
        )
    return "See the columns 'converged' and 'reason' of the table for what was left out."


def draw_seed(random_state: Any) -> int:
    """Return one seed from anything scikit-learn or NumPy take for a random state."""
    if random_state is None:  # a fresh generator: NumPy's global one is not ours to move
        random_state = np.random.default_rng()
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31 - 1))
    return int(check_random_state(random_state).randint(2**31 - 1))


def resample(n: int, n_bootstrap: int, seed: int) -> Floats:
    """Return the counts of `n_bootstrap` resamples of n minima, shape (n_bootstrap, n)."""
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def interval(resampled: Floats) -> tuple[float, float]:
    """Return the ends of the percentile interval, nan where no resample is finite."""
    resampled = resampled[np.isfinite(resampled)]
    if not len(resampled):
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


def signs(values: Floats, first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the signs -1, 0 or 1 of the differences in pairs, which may be out of range."""
    a, b = values[first], values[second]
    return np.subtract(a > b, a < b, dtype=np.intp)

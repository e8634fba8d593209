"""Bootstrap resamples of minima, as counts, and the percentile intervals from them.

============  ============  ============================================================
name          shape         meaning
============  ============  ============================================================
``x``, ``y``  ``(n,)``      a measure and the target, one value per minimum
``counts``    ``(b, n)``    how often each minimum is drawn in each of b resamples
============  ============  ============================================================

A resample weights every minimum by its count, so no array is ever indexed by drawn minima.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._checks import check_integer
from relflat_sk.minima._columns import (
    column_of,
    is_complete,
    is_converged,
    measure_columns,
    numeric_column,
)
from relflat_sk.minima._trials import minima_table

Floats = NDArray[np.float64]

FEWEST_MINIMA = 3  # with two minima every coefficient is 1 or -1
BASELINE = "train_loss"


@dataclass(frozen=True)
class SelectedMinima:
    """A table of minima, and which of them a statistic uses. Shapes: `target`, `usable` (N,)."""

    table: pd.DataFrame
    target: Floats
    usable: NDArray[np.bool_]
    measures: list[str]

    def tabulate(
        self,
        names: Sequence[str],
        row_of: Callable[[NDArray[np.intp], Floats, Floats], dict[str, Any]],
        without: Sequence[str] = (),
    ) -> pd.DataFrame:
        """Make the table of a statistic, with a row for each measure without some columns.

        `row_of` takes rows of the table, the measure and the target there, see `pairs`.
        """
        found = []
        for measure in self.measures:
            if measure not in without:
                rows, x, y = self.pairs(measure)
                row: dict[str, Any] = {"n": len(x)} | row_of(rows, x, y)
                row["n_left_out"] = len(self.table) - row["n"]
                found.append({"measure": measure} | row)
        return pd.DataFrame(found, columns=["measure", *names, "n", "n_left_out"])

    def of_group(self, rows: NDArray[np.bool_]) -> "SelectedMinima":
        """Select some of the minima. Shapes: `rows` (N,)."""
        return SelectedMinima(self.table[rows], self.target[rows], self.usable[rows], self.measures)

    def pairs(self, measure: str) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Return the usable minima with a finite measure.

        The minima are sorted by target and measure, so that a seed draws the same resamples
        whatever the order of the table.

        Shapes: returns rows (n,), (n,).
        """
        x = numeric_column(self.table, measure, argument="measure")
        order = np.lexsort((x, self.target))
        rows = order[(self.usable & np.isfinite(x))[order]]
        return rows, x[rows], self.target[rows]


def select_minima(
    minima: Any,
    target: str | Callable[..., Any],
    n_bootstrap: int,
    finite: Sequence[str] = (),
) -> SelectedMinima:
    """Select the minima with which measures can be compared to a target."""
    table, target = minima_table(minima), column_of(target)
    reason = "it is the number of resamples behind each interval, usually 1000"
    check_integer("n_bootstrap", n_bootstrap, minimum=1, reason=reason)
    y = numeric_column(table, target, argument="target")
    usable = is_complete(table) & is_converged(table) & np.isfinite(y)
    for name in finite:
        usable &= np.isfinite(numeric_column(table, name, argument="given"))
    if usable.sum() < FEWEST_MINIMA:
        raise ValueError(
            f"{usable.sum()} of the {len(table)} minima converged and have a finite "
            f"{target!r}, and a correlation needs at least {FEWEST_MINIMA}. "
            f"{_advice(target, known=bool(np.isfinite(y).any()))}"
        )
    names = [*measure_columns(table), *(name for name in [BASELINE] if name in table.columns)]
    return SelectedMinima(table, y, usable, [name for name in names if name != target])


def _advice(target: str, *, known: bool) -> str:
    """Return what to do about too few minima, if some have a finite target or none."""
    if not known and target in ("generalization_gap", "test_loss", "test_score"):
        return (
            "Pass X_test and y_test to the search to record held-out values. The columns "
            "'converged' and 'reason' of the table say why minima were left out."
        )
    return "The columns 'converged' and 'reason' of the table say why minima were left out."


CONFIDENCE = 0.95


def resample(n: int, n_bootstrap: int, seed: int) -> Floats:
    """Draw bootstrap resamples of n minima. Shapes: returns (n_bootstrap, n)."""
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def with_ends(name: str) -> list[str]:
    """Return the columns of a coefficient and of the ends of its interval."""
    return [name, f"{name}_low", f"{name}_high"]


def interval(name: str, value: float, resampled: Floats) -> dict[str, float]:
    """Return a value with the ends of its 95% percentile interval, by column.

    Shapes: `resampled` (b,).
    """
    known, tail = resampled[np.isfinite(resampled)], (1 - CONFIDENCE) / 2
    ends = np.quantile(known, [tail, 1 - tail]).tolist() if len(known) else [np.nan, np.nan]
    return dict(zip(with_ends(name), [float(value), *ends], strict=True))


def signs(values: Floats, first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the sign of the difference in each pair of values.

    Shapes: `values` (n,), `first, second` (p,); returns (p,).
    """
    a, b = values[first], values[second]
    return np.subtract(a > b, a < b, dtype=np.intp)


def ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> Floats:
    """Return a ratio, nan where the denominator is 0."""
    found: Floats = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=found, where=denominator > 0)
    return found

r"""Correlation of measures with the generalization gap, over many minima and bootstrap resamples.

============  ============  ============================================================
name          shape         meaning
============  ============  ============================================================
``x``, ``y``  ``(n,)``      a measure and the target, one value per minimum
``counts``    ``(b, n)``    how often each minimum is drawn in each of b resamples
============  ============  ============================================================

A resample weights every minimum by its count, so no array is ever indexed by drawn minima.
All three coefficients are ratios of quadratic forms in the counts :math:`c` of a resample, so that
b resamples take a few matrix products and no loop. Kendall's tau is

.. math::
    \tau_b = \frac{c^\top (S_x \circ S_y) c}{\sqrt{c^\top S_x^{\circ 2} c}
                                             \sqrt{c^\top S_y^{\circ 2} c}},
    \qquad (S_x)_{ij} = \mathrm{sign}(x_i - x_j);

Pearson's r is the weighted one, with the counts as weights, and Spearman's rho the weighted r
of the ranks within the resample. A resample with all counts 1 gives the coefficient of the
minima themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._checks import check_integer
from relflat_sk._random import draw_seed
from relflat_sk.minima._table import (
    column_of,
    find_axes,
    is_comparable,
    is_complete,
    measure_columns,
    minima_table,
    numeric_column,
)

Floats = NDArray[np.float64]

FEWEST_MINIMA = 3  # with two minima every coefficient is 1 or -1
BASELINE = "train_loss"
ROUNDING = 1e-20  # a smaller sum of squares is that of a constant


@dataclass(frozen=True)
class SelectedMinima:
    """A table of minima, and which of them a statistic uses."""

    table: pd.DataFrame
    target: Floats  # (N,)
    usable: NDArray[np.bool_]  # (N,)
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
        table = []
        for measure in self.measures:
            if measure not in without:
                rows, x, y = self.pairs(measure)
                row: dict[str, Any] = {"n": len(x)} | row_of(rows, x, y)
                row["n_left_out"] = len(self.table) - row["n"]
                table.append({"measure": measure} | row)
        return pd.DataFrame(table, columns=["measure", *names, "n", "n_left_out"])

    def pairs(self, measure: str) -> tuple[NDArray[np.intp], Floats, Floats]:
        """Return the usable minima with a finite measure.

        The minima are sorted by target and measure, so that a seed draws the same resamples
        whatever the order of the table.
        """
        x = numeric_column(self.table, measure, argument="measure")
        order = np.lexsort((x, self.target))
        rows = order[(self.usable & np.isfinite(x))[order]]
        return rows, x[rows], self.target[rows]


def select_minima(
    minima: Any, target: str | Callable[..., Any], n_bootstrap: int, finite: Sequence[str] = ()
) -> SelectedMinima:
    """Select the minima with which measures can be compared to a target."""
    table, target = minima_table(minima), column_of(target)
    reason = "it is the number of resamples behind each interval, usually 1000"
    check_integer("n_bootstrap", n_bootstrap, minimum=1, reason=reason)
    y = numeric_column(table, target, argument="target")
    usable = is_complete(table) & is_comparable(table) & np.isfinite(y)
    for name in finite:
        usable &= np.isfinite(numeric_column(table, name, argument="given"))
    if usable.sum() < FEWEST_MINIMA:
        raise ValueError(
            f"{usable.sum()} of the {len(table)} minima converged and have a finite {target!r}, "
            f"and a correlation needs at least {FEWEST_MINIMA}. The column 'reason' says why. "
            "Held-out losses and scores are recorded if the search gets X_test and y_test."
        )
    names = [*measure_columns(table), *(name for name in [BASELINE] if name in table.columns)]
    return SelectedMinima(table, y, usable, [name for name in names if name != target])


CONFIDENCE = 0.95


def resample(n: int, n_bootstrap: int, seed: int | list[int]) -> Floats:
    """Draw bootstrap resamples of n minima, (n_bootstrap, n)."""
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def with_ends(name: str) -> list[str]:
    """Return the columns of a coefficient and of the ends of its interval."""
    return [name, f"{name}_low", f"{name}_high"]


def interval(name: str, value: float, resampled: Floats) -> dict[str, float]:
    """Return a value with the ends of its 95% percentile interval, by column."""
    finite, tail = resampled[np.isfinite(resampled)], (1 - CONFIDENCE) / 2
    ends = np.quantile(finite, [tail, 1 - tail]).tolist() if len(finite) else [np.nan, np.nan]
    return dict(zip(with_ends(name), [float(value), *ends], strict=True))


def signs(values: Floats, first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the sign of the difference in each pair of values."""
    a, b = values[first], values[second]
    return np.subtract(a > b, a < b, dtype=np.intp)


def ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> Floats:
    """Return a ratio, nan where the denominator is 0."""
    quotient: Floats = np.full(numerator.shape, np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator > 0)
    return quotient


# -- coefficients ---------------------------------------------------------------------------------


def correlate_measures(
    minima: Any,
    target: str | Callable[..., Any] = "generalization_gap",
    *,
    strata: str | Sequence[str] | None = None,
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Correlate every measure with the generalization gap over many minima.

    Only converged minima with a finite target are used: flatness says nothing away from a
    minimum, and a few networks that diverged or stopped early can turn the sign of the result.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima; `relflat_sk.minima` describes the columns of a table.
    target : str or callable, default="generalization_gap"
        The numeric column to predict, or the measure function that produced it.
    strata : str, sequence of str or None, default=None
        Columns or hyper-parameters that divide the minima into groups, such as ``"method"``. A
        coefficient over all minima can have the opposite sign of those within every group
        (Simpson's paradox).
    n_bootstrap : int, default=1000
        Number of bootstrap resamples behind each interval.
    random_state : int, RandomState, Generator or None, default=None
        Seed of the resampling. The order of the minima does not change the result.

    Returns
    -------
    pandas.DataFrame
        One row per measure, and one for ``train_loss`` as a baseline, with the columns

        - ``measure``: its name;
        - ``pearson``, ``pearson_low``, ``pearson_high``: the coefficient, in [-1, 1], and its
          95% percentile interval over resampled minima;
        - the same for ``spearman`` and ``kendall`` (tau-b);
        - ``n``: the number of minima used; ``n_left_out``: the number of other rows.

        The coefficients are nan where the measure or the target is constant, and for a measure
        with finite values at fewer than 3 minima.

        With `strata`, each measure has one row for all minima, whose ``stratum`` is "pooled", one
        for the mean over the groups, weighted by their numbers of minima, "within", and one for
        each group. Groups without a coefficient do not count within, and ``n`` is then the
        number of minima in the others.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study nor a fitted search.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        target, or `n_bootstrap` is not a positive integer.

    See Also
    --------
    granulated_kendall : Kendall's tau along one hyper-parameter at a time.
    conditional_mutual_information : Information about the gap beyond the hyper-parameters.
    rank_minima : Rank minima, flattest first.
    FlatnessGapDisplay : Draw the gap against one measure, with the coefficients.

    Notes
    -----
    Jiang et al. [1]_ compare measures by Kendall's tau; the intervals are those of [2]_.
    Percentile intervals are approximate for few minima (below about 20). A resample in which
    the measure or the target is constant has no coefficient and is left out of the interval.

    References
    ----------
    .. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.
    .. [2] Efron, Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    Examples
    --------
    The measure orders five of the six pairs of minima as the gap does, and one pair the other
    way round: Kendall's tau is (5 - 1) / 6.

    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "relative_flatness": [1.0, 2.0, 3.0, 4.0],
    ...         "generalization_gap": [0.1, 0.3, 0.2, 0.5],
    ...     }
    ... )
    >>> table = correlate_measures(minima, random_state=0)
    >>> table[["measure", "spearman", "kendall", "n"]].round(3)
                 measure  spearman  kendall  n
    0  relative_flatness       0.8    0.667  4
    """
    selected = select_minima(minima, target, n_bootstrap)
    seed = draw_seed(random_state)
    columns = [c for name in _COEFFICIENTS for c in with_ends(name)]

    def resampled(x: Floats, y: Floats, seed: Any = seed) -> Floats:
        """Return each coefficient of the minima, and then of the resamples: (3, 1 + b)."""
        counts = np.vstack([np.ones((1, len(x))), resample(len(x), int(n_bootstrap), seed)])
        if len(x) < FEWEST_MINIMA:
            return np.full((len(_COEFFICIENTS), len(counts)), np.nan)
        return np.stack([coefficient(x, y, counts) for coefficient in _COEFFICIENTS.values()])

    def coefficients(_: Any, x: Floats, y: Floats) -> dict[str, float]:
        return _with_intervals(resampled(x, y))

    if strata is None:
        return selected.tabulate(columns, coefficients)
    axes = find_axes(selected.table, strata, argument="strata")
    named = selected.table[axes].map(str)  # what is missing is a group of its own
    groups, labels = pd.MultiIndex.from_frame(named).factorize()
    # equal draws in groups of equal size would not average out; sorted, whatever the order of rows
    seeds = [[seed, int(place)] for place in labels.argsort().argsort()]

    def within(rows: NDArray[np.intp], x: Floats, y: Floats) -> dict[str, float]:
        parts = [groups[rows] == group for group in range(len(labels))]
        values = np.stack([
            resampled(x[part], y[part], seed) for part, seed in zip(parts, seeds, strict=True)
        ])
        sizes = np.sum(parts, axis=1) * np.isfinite(values[:, -1, 0])  # of groups with a tau
        weights = np.where(np.isfinite(values), sizes[:, None, None], 0)
        means = ratio((weights * np.nan_to_num(values)).sum(axis=0), weights.sum(axis=0))
        return _with_intervals(means) | {"n": int(sizes.sum())}

    tables = {
        "pooled": selected.tabulate(columns, coefficients, without=axes),
        "within": selected.tabulate(columns, within, without=axes),
    }
    for group, label in enumerate(labels):
        rows = groups == group
        part = SelectedMinima(
            selected.table[rows], selected.target[rows], selected.usable[rows], selected.measures
        )
        tables[", ".join(label)] = part.tabulate(columns, coefficients, without=axes)
    every = pd.concat(tables, names=["stratum", "row"]).reset_index("stratum")
    every = every.sort_index(kind="stable").reset_index(drop=True)
    return every[["measure", "stratum", *columns, "n", "n_left_out"]]


def _with_intervals(coefficients: Floats) -> dict[str, float]:
    """Return coefficients with the ends of their intervals, by column."""
    row: dict[str, float] = {}
    for name, (value, *resamples) in zip(_COEFFICIENTS, coefficients, strict=True):
        row |= interval(name, value, np.array(resamples))
    return row


def _kendall(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Kendall's tau-b of x and y in each resample."""
    sign_x, sign_y = (np.sign(values[:, None] - values) for values in (x, y))
    matrices = np.stack([sign_x * sign_y, sign_x**2, sign_y**2])
    concordant_minus_discordant, *untied = ((counts @ matrices) * counts).sum(axis=2)
    return ratio(concordant_minus_discordant, np.sqrt(np.prod(untied, axis=0))).clip(-1.0, 1.0)


def _ranks(values: Floats, counts: Floats) -> Floats:
    """Return the mean rank of every value within each resample, shape (b, n)."""
    # x_i comes after all smaller values, and equal values share the mean of their places
    below = counts @ (values[:, None] < values)
    tied = counts @ (values[:, None] == values)
    ranks: Floats = below + (tied + 1) / 2
    return ranks


def _standardize(values: Floats) -> Floats:
    """Return values shifted and scaled to [-1, 1], so that no sum of squares overflows."""
    low, high = values.min(), values.max()
    # halves, as high - low itself may overflow
    middle, reach = low / 2 + high / 2, high / 2 - low / 2
    return (values - middle) / reach if reach > 0 else np.zeros_like(values)


def _pearson(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Pearson's r of x and y, or of their rows, weighted by the rows of counts."""
    total = counts.sum(axis=1, keepdims=True)
    x = x - (counts * x).sum(axis=1, keepdims=True) / total
    y = y - (counts * y).sum(axis=1, keepdims=True) / total
    covariance, *spreads = ((counts * a * b).sum(axis=1) for a, b in ((x, y), (x, x), (y, y)))
    defined = np.minimum(*spreads) > ROUNDING
    return ratio(covariance, np.where(defined, np.sqrt(np.prod(spreads, axis=0)), 0)).clip(-1, 1)


# from measure (n,), target (n,) and counts (b, n) to the coefficients (b,), nan where undefined
_COEFFICIENTS: dict[str, Callable[[Floats, Floats, Floats], Floats]] = {
    "pearson": lambda x, y, counts: _pearson(_standardize(x), _standardize(y), counts),
    "spearman": lambda x, y, counts: _pearson(_ranks(x, counts), _ranks(y, counts), counts),
    "kendall": _kendall,
}

r"""What a measure tells about the generalization gap where hyper-parameters are known.

The symbols are those of `relflat_sk.minima._resampling`, and

=====================  ================  =====================================================
name                   shape             meaning
=====================  ================  =====================================================
``levels``             ``(n, k)``        values of k hyper-parameters, numbered along each axis
``first``, ``second``  ``(p,)``          the minima of each pair, every pair once
``cell``               ``(p,)``          number of the values a pair has in S, of q in all
``table``              ``(q, 3, 3)``     share of the pairs with each sign of the measure's and
                                         of the gap's difference, in each cell
=====================  ================  =====================================================

The definition is over ordered pairs. Turning a pair around turns both signs and the order of
its values in S, so that unordered pairs do, put in the order of their values; pairs of equal
values count half in either order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import xlogy

from relflat_sk.minima._hyperparameters import find_axes, number_levels, plain_name
from relflat_sk.minima._resampling import Bools, Floats, draw_seed, interval, judge, resample, signs

__all__ = ["conditional_mutual_information"]

Integers = NDArray[np.intp]

MOST_CONDITIONS = 2  # as in the paper; more leave few pairs to a cell
N_SHUFFLES = 50  # behind the level of chance, whose own error is then small beside it
LEAST_ENTROPY = 1e-12  # below this, in nats, it is rounding


def conditional_mutual_information(
    minima: Any,
    axes: str | Sequence[str] | None = None,
    *,
    target: str = "generalization_gap",
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Measure what a measure tells about the gap where hyper-parameters are known.

    Of a pair of minima, does knowing which has the larger measure help to tell which has the
    larger gap, given the values that up to two hyper-parameters have in both? The share of
    the uncertainty that it takes away, at the hyper-parameters where that is least: 0 for a
    measure that repeats what some hyper-parameters say already, 1 for one that orders the
    minima as the gap does, or in exactly the opposite order.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima, best a grid over the axes; see `relflat_sk.minima._table` for the columns.
    axes : str, sequence of str or None, default=None
        The hyper-parameters, as ``"batch_size"`` or ``"param_batch_size"``. None takes every
        parameter that was varied; of two that were only varied together, the first. Leave
        out the random seed, which is known to cause nothing.
    target : str, default="generalization_gap"
        The numeric column to predict.
    n_bootstrap : int, default=1000
        Number of bootstrap resamples behind each interval.
    random_state : int, RandomState, Generator or None, default=None
        Seed of the resampling. The order of the minima does not matter.

    Returns
    -------
    pandas.DataFrame
        One row per measure, and one for ``train_loss`` as a baseline. Columns: ``measure``;
        ``cmi``, ``cmi_low``, ``cmi_high``, the least share over the sets of
        hyper-parameters, and its 95% percentile interval over resampled minima; ``given``,
        the set where it is least; ``cmi_given_0``, ``cmi_given_1``, ``cmi_given_2``, the
        least over sets of that size; ``chance``, what a shuffled measure gets on average;
        ``n``, the number of minima used; ``n_left_out``, the number of rows that were not.
        Shares are nan where the target is constant.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        one, there is no such axis, or `n_bootstrap` is not a positive integer.

    See Also
    --------
    granulated_kendall : Along which hyper-parameters does the measure follow the gap?

    Notes
    -----
    Section 2.2.3 of [1]_: over pairs of minima, :math:`V_\mu` and :math:`V_g` are the signs of
    the differences of measure and gap (-1, 0 or 1), and :math:`U_S` the values of the
    hyper-parameters S in both minima, in the order of the pair;

    .. math::
        \min_{|S| \le 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)}

    with the frequencies among all ordered pairs for probabilities. Frequencies from few pairs
    look informative by chance, all the more so given more hyper-parameters: compare with
    ``chance``.

    References
    ----------
    .. [1] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.

    Examples
    --------
    This measure knows the batch size and nothing else: given the batch sizes of a pair, it
    tells nothing about the gap.

    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "param_batch_size": [8, 8, 8, 64, 64, 64],
    ...         "relative_flatness": [1.0, 1.0, 1.0, 2.0, 2.0, 2.0],
    ...         "generalization_gap": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    ...     }
    ... )
    >>> table = conditional_mutual_information(minima, random_state=0)
    >>> table[["measure", "cmi", "given", "cmi_given_0"]].round(2)
                 measure  cmi          given  cmi_given_0
    0  relative_flatness  0.0  (batch_size,)          0.6
    """
    judged = judge(minima, target, n_bootstrap)
    columns = find_axes(judged.table, axes)
    levels = number_levels(judged.table, columns)
    seed = draw_seed(random_state)
    sizes = range(min(MOST_CONDITIONS, len(columns)) + 1)
    sets = [chosen for size in sizes for chosen in combinations(range(len(columns)), size)]
    names = {size: f"cmi_given_{size}" for size in sizes}
    rows = []
    for measure in judged.measures_but(columns):
        used, x, y = judged.of(measure)
        pairs = _Pairs.of(levels[used], sets, y)
        everything = np.ones((1, len(x)))
        shares = pairs.shares(x, everything)[0]
        low, high = interval(_least(pairs.shares(x, resample(len(x), int(n_bootstrap), seed))))
        shuffled = np.random.default_rng(seed).permuted(np.tile(x, (N_SHUFFLES, 1)), axis=1)
        chance = [_least(pairs.shares(one, everything))[0] for one in shuffled]
        at = int(np.argmin(np.where(np.isnan(shares), np.inf, shares)))
        row: dict[str, Any] = {"measure": measure, "cmi": float(shares[at])}
        row |= {"cmi_low": low, "cmi_high": high}
        row |= {"given": tuple(plain_name(columns[axis]) for axis in sets[at])}
        for size, name in names.items():
            of_size = [len(chosen) == size for chosen in sets]
            row[name] = float(_least(shares[None, of_size])[0])
        row |= {"chance": float(np.mean(chance))}
        rows.append(row | {"n": len(x), "n_left_out": len(judged.table) - len(x)})
    shown = ["measure", "cmi", "cmi_low", "cmi_high", "given", *names.values(), "chance"]
    return pd.DataFrame(rows, columns=[*shown, "n", "n_left_out"])


def _least(shares: Floats) -> Floats:
    """Return the least share in each row; sets that leave nothing to tell have none (nan)."""
    least: Floats = np.fmin.reduce(shares, axis=1)
    return least


@dataclass(frozen=True)
class _Cells:
    """The values that pairs of minima have in one set of hyper-parameters."""

    cell: Integers
    turned: Bools  # pairs to be turned around, to be in the order of their values
    alike: Bools  # cells of pairs that agree in all values of the set

    @classmethod
    def of(cls, levels: Integers, first: Integers, second: Integers) -> "_Cells":
        # a column of zeros makes the empty set a case like any other
        constant = np.zeros((len(levels), 1), dtype=np.intp)
        _, values = np.unique(np.hstack([constant, levels]), axis=0, return_inverse=True)
        a, b = values.ravel()[first], values.ravel()[second]
        ordered = np.column_stack([np.minimum(a, b), np.maximum(a, b)])
        cells, cell = np.unique(ordered, axis=0, return_inverse=True)
        return cls(cell.ravel(), a > b, cells[:, 0] == cells[:, 1])

    def places(self, outcome: Integers) -> Integers:
        """Return where each pair belongs in the flat table."""
        return 9 * self.cell + np.where(self.turned, 8 - outcome, outcome)

    def table(self, places: Integers, weights: Floats) -> Floats:
        """Return the shares of the outcomes in each cell, shape (q, 3, 3)."""
        q = len(self.alike)
        table = np.bincount(places, weights, minlength=9 * q).reshape(q, 3, 3)
        table[self.alike] = (table[self.alike] + table[self.alike][:, ::-1, ::-1]) / 2
        total = table.sum()
        shares: Floats = table / total if total > 0 else table.astype(np.float64)
        return shares


@dataclass(frozen=True)
class _Pairs:
    """All pairs of minima, what each set of hyper-parameters is in them, and their gaps."""

    first: Integers
    second: Integers
    cells: list[_Cells]
    sign_of_target: Integers

    @classmethod
    def of(cls, levels: Integers, sets: list[tuple[int, ...]], y: Floats) -> "_Pairs":
        first, second = np.triu_indices(len(y), 1)
        cells = [_Cells.of(levels[:, list(chosen)], first, second) for chosen in sets]
        return cls(first, second, cells, signs(y, first, second))

    def shares(self, x: Floats, counts: Floats) -> Floats:
        """Return the share of the uncertainty that x takes away: (resamples, sets)."""
        # 0 to 8, so that 8 - outcome is the one with both signs turned
        outcome = 3 * (signs(x, self.first, self.second) + 1) + self.sign_of_target + 1
        places = [(cells, cells.places(outcome)) for cells in self.cells]
        shares = np.empty((len(counts), len(self.cells)))
        for row, each in zip(shares, counts, strict=True):
            weights = each[self.first] * each[self.second]
            row[:] = [_share(cells.table(place, weights)) for cells, place in places]
        return shares


def _share(table: Floats) -> float:
    """Return the mutual information of the two signs given the cell, over the gap's entropy."""
    # H(A | B) = sum p(b) log p(b) - sum p(a, b) log p(a, b)
    cell, measure, gap, both = (
        float(xlogy(p, p).sum())
        for p in (table.sum(axis=(1, 2)), table.sum(axis=2), table.sum(axis=1), table)
    )
    entropy = cell - gap
    if entropy < LEAST_ENTROPY:
        return np.nan
    return min(max((both - measure - gap + cell) / entropy, 0.0), 1.0)

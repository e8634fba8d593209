r"""How measures and the generalization gap go together, given hyper-parameters.

The symbols are those of `relflat_sk.minima._correlation`, and

=====================  ================  =====================================================
name                   shape             meaning
=====================  ================  =====================================================
``levels``             ``(n, k)``        level numbers of the values of k hyper-parameters
``first``, ``second``  ``(p,)``          the two minima of each pair
``weights``            ``(p,)``          ``counts[first] * counts[second]`` in one resample
``cell``               ``(p,)``          number, below q, of the two combinations of values
                                         that a pair has in a set S of hyper-parameters
``table``              ``(q, 3, 3)``     share of the pairs with each sign of the measure's and
                                         of the gap's difference, in each cell
=====================  ================  =====================================================

*Granulated.* The pairs are those that differ in exactly one hyper-parameter. Two copies of the same
minimum in a resample differ in none and form no pair.

*Mutual information.* The pairs are ordered: every pair stands in both orders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import xlogy

from relflat_sk._random import draw_seed
from relflat_sk.minima._correlation import (
    Floats,
    interval,
    ratio,
    resample,
    select_minima,
    signs,
    with_ends,
)
from relflat_sk.minima._table import column_of, find_axes, number_levels, numeric_column, plain_name

Integers = NDArray[np.intp]


def granulated_kendall(
    minima: Any,
    axes: str | Sequence[str] | None = None,
    *,
    target: str | Callable[..., Any] = "generalization_gap",
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Correlate measures with the gap along one hyper-parameter at a time.

    Kendall's tau over all minima is high for any measure that follows the one hyper-parameter
    with the largest effect on the gap. The granulated coefficient compares only minima that
    differ in a single hyper-parameter, and gives every hyper-parameter (axis) equal weight.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima, preferably a grid over the axes; `relflat_sk.minima` describes the columns
        of a table.
    axes : str, sequence of str or None, default=None
        The hyper-parameters, as ``"batch_size"`` or ``"param_batch_size"``. None takes every
        parameter that was varied, and the first of several that were only varied together.
        Random seeds are left out unless they are named: runs with other seeds are repeats.
    target : str or callable, default="generalization_gap"
        The numeric column to predict, or the measure function that produced it.
    n_bootstrap : int, default=1000
        Number of bootstrap resamples behind each interval.
    random_state : int, RandomState, Generator or None, default=None
        Seed of the resampling. The order of the minima does not change the result.

    Returns
    -------
    pandas.DataFrame
        One row per measure, and one for ``train_loss`` as a baseline, with the columns

        - ``measure``: its name;
        - ``psi``, ``psi_low``, ``psi_high``: the coefficient, in [-1, 1], and its 95%
          percentile interval over resampled minima;
        - ``psi_<axis>``, ``psi_<axis>_low``, ``psi_<axis>_high``: the same for every axis;
        - ``n``: the number of minima used; ``n_left_out``: the number of other rows.

        An axis is nan, and left out of ``psi``, if no two minima differ in it alone.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study nor a fitted search.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        target, there is no such axis, no two minima differ in one axis alone, or `n_bootstrap`
        is not a positive integer.

    See Also
    --------
    correlate_measures : Kendall's tau over all minima.
    conditional_mutual_information : Information about the gap beyond the hyper-parameters.

    Notes
    -----
    The coefficient is defined in section 2.2.2 of [1]_. Let :math:`\tau` of a group of minima
    be the mean of :math:`\mathrm{sign}(\mu_1 - \mu_2) \, \mathrm{sign}(g_1 - g_2)` over its
    pairs, with :math:`\mu` the measure and :math:`g` the gap; ties count as 0 (this is tau-a,
    unlike in `correlate_measures`). Then

    .. math::
        \psi_i = \frac{1}{m_i} \sum_{\text{groups}} \tau, \qquad
        \psi = \frac1k \sum_{i=1}^k \psi_i,

    where the minima of each of the :math:`m_i` groups along axis i share all other
    hyper-parameters. Repeats, which share all hyper-parameters, form no pairs. A group in
    which some minima did not converge counts with its remaining pairs.

    If every combination of hyper-parameters has repeats, resamples are drawn within each
    combination. Otherwise they are drawn from all minima, since a combination with a single
    minimum would be the same in every resample.

    References
    ----------
    .. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.

    Examples
    --------
    Along the batch size, the measure orders the minima as the gap does at both learning rates.
    Along the learning rate, it does so at one of the two batch sizes:

    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "param_batch_size": [8, 8, 64, 64],
    ...         "param_lr": [0.1, 0.2, 0.1, 0.2],
    ...         "relative_flatness": [1.0, 2.0, 3.0, 4.0],
    ...         "generalization_gap": [0.1, 0.2, 0.4, 0.3],
    ...     }
    ... )
    >>> table = granulated_kendall(minima, random_state=0)
    >>> table[["measure", "psi", "psi_batch_size", "psi_lr", "n"]]
                 measure  psi  psi_batch_size  psi_lr  n
    0  relative_flatness  0.5             1.0     0.0  4
    """
    selected = select_minima(minima, target, n_bootstrap)
    columns = find_axes(selected.table, axes)
    levels = number_levels(selected.table, columns)
    if not len(_Granules.of(levels[selected.usable]).first):
        raise ValueError(
            f"No two of the {selected.usable.sum()} minima differ in one of {columns} alone. Name "
            "axes of a grid, without the random seed."
        )
    seed = draw_seed(random_state)
    names = ["psi", *(f"psi_{plain_name(column)}" for column in columns)]

    def coefficients(rows: Integers, x: Floats, y: Floats) -> dict[str, float]:
        granules = _Granules.of(levels[rows])
        row: dict[str, float] = {}
        psi = granules.psi(x, y, np.ones((1, len(x))))[0]
        resampled = granules.psi(x, y, resample_cells(levels[rows], int(n_bootstrap), seed))
        for name, value, values in zip(names, psi, resampled.T, strict=True):
            row |= interval(name, value, values)
        return row

    ends = [column for name in names for column in with_ends(name)]
    return selected.tabulate(ends, coefficients, without=columns)


def resample_cells(levels: Integers, n_bootstrap: int, seed: int) -> Floats:
    """Draw resamples within each combination of hyper-parameters, if all have repeats.

    If a combination has a single minimum, resamples are drawn from all minima instead.
    """
    # numbered by their first minimum, whatever the numbers of the levels
    cell, _ = pd.factorize(np.unique(levels, axis=0, return_inverse=True)[1].ravel())
    sizes = np.bincount(cell)
    if len(sizes) == 0 or sizes.min() < 2:
        return resample(len(levels), n_bootstrap, seed)
    counts = np.empty((n_bootstrap, len(levels)))
    seeds = np.random.default_rng(seed).integers(2**31 - 1, size=len(sizes))
    for k, size in enumerate(sizes):
        counts[:, cell == k] = resample(int(size), n_bootstrap, int(seeds[k]))
    return counts


@dataclass(frozen=True)
class _Granules:
    """The pairs of minima that differ in one axis only, grouped by their other levels."""

    first: Integers
    second: Integers
    group: Integers
    axis_of_group: Integers
    n_axes: int

    @classmethod
    def of(cls, levels: Integers) -> "_Granules":
        """Find the pairs and their groups from the levels of the minima, shape (n, k)."""
        first, second = np.triu_indices(len(levels), 1)
        differs = levels[first] != levels[second]
        one_apart = differs.sum(axis=1) == 1
        first, second, differs = first[one_apart], second[one_apart], differs[one_apart]
        # the levels that a pair shares, with -1 at its axis, identify its group
        shared = np.where(differs, -1, levels[first])
        groups, group = np.unique(shared, axis=0, return_inverse=True)
        axis_of_group = (groups == -1).argmax(axis=1)
        return cls(first, second, group.ravel(), axis_of_group, levels.shape[1])

    def psi(self, x: Floats, y: Floats, counts: Floats) -> Floats:
        """Return the mean over the axes, then each axis, in each resample: (b, 1 + k)."""
        concordance = signs(x, self.first, self.second) * signs(y, self.first, self.second)
        along = np.stack([self._psi_of_axes(concordance, drawn) for drawn in counts])
        finite = np.isfinite(along)
        mean = ratio(np.where(finite, along, 0.0).sum(axis=1), finite.sum(axis=1))
        return np.column_stack([mean, along])

    def _psi_of_axes(self, concordance: Integers, counts: Floats) -> Floats:
        """Return psi along each axis in one resample, shape (k,)."""
        weights = counts[self.first] * counts[self.second]
        n_pairs = np.bincount(self.group, weights, minlength=len(self.axis_of_group))
        total = np.bincount(self.group, weights * concordance, minlength=len(self.axis_of_group))
        drawn = n_pairs > 0
        axis = self.axis_of_group[drawn]
        tau = np.bincount(axis, total[drawn] / n_pairs[drawn], minlength=self.n_axes)
        return ratio(tau, np.bincount(axis, minlength=self.n_axes))


# -- information about the gap --------------------------------------------------------------------


MOST_CONDITIONS = 2  # as in the paper; with more, few pairs are left in a cell
N_SHUFFLES = 50  # for the chance level, whose own error is then comparatively small
LEAST_ENTROPY = 1e-12  # in nats; smaller values are rounding errors


def conditional_mutual_information(
    minima: Any,
    axes: str | Sequence[str] | None = None,
    *,
    target: str | Callable[..., Any] = "generalization_gap",
    given: Sequence[str | Callable[..., Any]] = (),
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Compute how much a measure tells about the gap beyond the hyper-parameters.

    For pairs of minima whose values of up to two hyper-parameters are known: what fraction of the
    uncertainty about the sign of the gap's difference does the sign of the measure's difference
    remove? The result is the smallest fraction over all such sets of hyper-parameters. It is 0 for
    a measure that only repeats hyper-parameters, and 1 for a measure that orders the minima as the
    gap does, or in exactly the opposite order.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima, preferably a grid over the axes; `relflat_sk.minima` describes the columns
        of a table.
    axes : str, sequence of str or None, default=None
        The hyper-parameters, as ``"batch_size"`` or ``"param_batch_size"``. None takes every
        parameter that was varied, and the first of several that were only varied together.
        Random seeds, which have no systematic effect on the gap, are left out unless named.
    target : str or callable, default="generalization_gap"
        The numeric column to predict, or the measure function that produced it.
    given : sequence of str or callable, default=()
        Measures, or columns such as ``train_loss``, whose differences are known beside the
        hyper-parameters: does a measure tell anything that these do not? They have no rows, and
        minima where one of them is not finite are left out.
    n_bootstrap : int, default=1000
        Number of bootstrap resamples behind each interval.
    random_state : int, RandomState, Generator or None, default=None
        Seed of the resampling. The order of the minima does not change the result.

    Returns
    -------
    pandas.DataFrame
        One row per measure, and one for ``train_loss`` as a baseline, with the columns

        - ``measure``: its name;
        - ``cmi``, ``cmi_low``, ``cmi_high``: the smallest share over the sets of
          hyper-parameters, in [0, 1], and its 95% percentile interval over resampled minima;
        - ``given``: the set with the smallest share, and the names of `given`;
        - ``cmi_given_0``, ``cmi_given_1``, ``cmi_given_2``: the smallest share over the sets of
          that size;
        - ``chance``: the mean share of a shuffled measure;
        - ``n``: the number of minima used; ``n_left_out``: the number of other rows.

        Shares are nan where the target is constant.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study nor a fitted search.
    ValueError
        If there is no numeric column `target` or of a name in `given`, fewer than 3 converged
        minima have a finite target, there is no such axis, or `n_bootstrap` is not a positive
        integer.

    See Also
    --------
    granulated_kendall : Kendall's tau along one hyper-parameter at a time.

    Notes
    -----
    The share is defined in section 2.2.3 of [1]_. For a pair of minima, let :math:`V_\mu` and
    :math:`V_g` be the signs (-1, 0 or 1) of the differences of measure and gap, and
    :math:`U_S` the values of the hyper-parameters S in both minima, in the order of the pair.
    The result is

    .. math::
        \min_{|S| \le 2} \frac{I(V_\mu; V_g \mid U_S)}{H(V_g \mid U_S)},

    where probabilities are frequencies among all ordered pairs. The signs of the differences of
    the measures in `given` are part of :math:`U_S` for every set. Frequencies from few pairs look
    informative by chance, the more so the more hyper-parameters are given: compare the result
    with ``chance``.

    References
    ----------
    .. [1] Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.

    Examples
    --------
    This measure depends on the batch size only: given the batch sizes of a pair, it tells
    nothing about the gap.

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
    if isinstance(given, str) or callable(given):
        given = [given]
    names_given = [column_of(measure) for measure in given]
    selected = select_minima(minima, target, n_bootstrap, finite=names_given)
    numbers = [numeric_column(selected.table, name, argument="given") for name in names_given]
    columns = find_axes(selected.table, axes)
    levels = number_levels(selected.table, columns)
    seed = draw_seed(random_state)
    sizes = range(min(MOST_CONDITIONS, len(columns)) + 1)
    sets = [chosen for size in sizes for chosen in combinations(range(len(columns)), size)]

    def information(rows: Integers, x: Floats, y: Floats) -> dict[str, Any]:
        pairs = _Pairs.of(levels[rows], sets, y, [values[rows] for values in numbers])
        all_once = np.ones((1, len(x)))
        shares = pairs.shares(x, all_once)[0]
        smallest = int(np.argmin(np.where(np.isnan(shares), np.inf, shares)))
        resampled = pairs.shares(x, resample(len(x), int(n_bootstrap), seed))
        row: dict[str, Any] = interval("cmi", shares[smallest], _least(resampled))
        axes_given = (plain_name(columns[axis]) for axis in sets[smallest])
        row["given"] = (*axes_given, *names_given)
        for size in sizes:
            of_size = [len(chosen) == size for chosen in sets]
            row[f"cmi_given_{size}"] = float(_least(shares[None, of_size])[0])
        shuffled = np.random.default_rng(seed).permuted(np.tile(x, (N_SHUFFLES, 1)), axis=1)
        of_shuffled = [_least(pairs.shares(copy, all_once))[0] for copy in shuffled]
        return row | {"chance": float(np.mean(of_shuffled))}

    names = [*with_ends("cmi"), "given", *(f"cmi_given_{size}" for size in sizes), "chance"]
    return selected.tabulate(names, information, without=[*columns, *names_given])


def _least(shares: Floats) -> Floats:
    """Return the smallest share in each row, leaving out nan (sets that leave no uncertainty)."""
    least: Floats = np.fmin.reduce(shares, axis=1)
    return least


@dataclass(frozen=True)
class _Pairs:
    """All ordered pairs of minima, their cells in each set of hyper-parameters, and their gaps."""

    first: Integers
    second: Integers
    cells: list[Integers]  # of each set
    sign_of_target: Integers

    @classmethod
    def of(
        cls, levels: Integers, sets: list[tuple[int, ...]], y: Floats, given: Sequence[Floats] = ()
    ) -> "_Pairs":
        """Pair the minima, from their levels (n, k), targets (n,) and other measures (n,)."""
        first, second = np.nonzero(~np.eye(len(y), dtype=np.bool_))
        directions = [signs(values, first, second) for values in given]
        cells = []
        for chosen in sets:
            of_minima = [levels[minimum][:, chosen] for minimum in (first, second)]
            # a column of zeros makes the empty set a case like any other
            values = np.column_stack([np.zeros_like(first), *of_minima, *directions])
            cells.append(np.unique(values, axis=0, return_inverse=True)[1].ravel())
        return cls(first, second, cells, signs(y, first, second))

    def shares(self, x: Floats, counts: Floats) -> Floats:
        """Return the share of the uncertainty that x removes, shape (resamples, sets)."""
        outcome = 3 * (signs(x, self.first, self.second) + 1) + self.sign_of_target + 1
        places = [9 * cell + outcome for cell in self.cells]
        sizes = [9 * (cell.max(initial=-1) + 1) for cell in self.cells]
        shares = np.empty((len(counts), len(self.cells)))
        for row, drawn in zip(shares, counts, strict=True):
            weights = drawn[self.first] * drawn[self.second]
            tables = (
                np.bincount(place, weights, minlength=size).reshape(-1, 3, 3)
                for place, size in zip(places, sizes, strict=True)
            )
            row[:] = [_share(table / max(weights.sum(), 1.0)) for table in tables]
        return shares


def _share(table: Floats) -> float:
    """Return the mutual information of both signs given the cell, divided by the gap's entropy."""
    # H(A | B) = sum p(b) log p(b) - sum p(a, b) log p(a, b)
    cell, measure, gap, both = (
        float(xlogy(p, p).sum())
        for p in (table.sum(axis=(1, 2)), table.sum(axis=2), table.sum(axis=1), table)
    )
    entropy = cell - gap
    if entropy < LEAST_ENTROPY:
        return np.nan
    return min(max((both - measure - gap + cell) / entropy, 0.0), 1.0)

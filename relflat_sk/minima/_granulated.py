r"""Correlation of measures with the generalization gap along one hyper-parameter at a time.

The symbols are those of `relflat_sk.minima._resampling`, and

=====================  ===========  ==========================================================
name                   shape        meaning
=====================  ===========  ==========================================================
``levels``             ``(n, k)``   level numbers of the values of k hyper-parameters
``first``, ``second``  ``(p,)``     the two minima of each pair that differs in exactly one
                                    hyper-parameter
``weights``            ``(p,)``     ``counts[first] * counts[second]`` in one resample
=====================  ===========  ==========================================================

Two copies of the same minimum in a resample differ in no hyper-parameter and form no pair.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._random import draw_seed
from relflat_sk.minima._columns import find_axes, number_levels, plain_name
from relflat_sk.minima._resampling import (
    Floats,
    interval,
    ratio,
    resample,
    select_minima,
    signs,
    with_ends,
)

__all__ = ["granulated_kendall"]

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
        The numeric column to predict, or the function of which it is the measure.
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
            f"No two of the {selected.usable.sum()} minima differ in one of {columns} alone. "
            "Name the hyper-parameters that were varied independently as axes, without the "
            "random seed, and sweep over a grid of them: values drawn at random hardly ever "
            "repeat."
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

    Shapes: `levels` (n, k); returns (n_bootstrap, n).
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
        along = np.stack([self._psi_of_axes(concordance, each) for each in counts])
        known = np.isfinite(along)
        mean = ratio(np.where(known, along, 0.0).sum(axis=1), known.sum(axis=1))
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

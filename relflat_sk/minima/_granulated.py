r"""How well a measure follows the generalization gap along one hyper-parameter at a time.

The symbols are those of `relflat_sk.minima._resampling`, and

=====================  ===========  ==========================================================
name                   shape        meaning
=====================  ===========  ==========================================================
``levels``             ``(n, k)``   values of k hyper-parameters, numbered along each axis
``first``, ``second``  ``(p,)``     the minima of each pair that differs in one of them
``weights``            ``(p,)``     ``counts[first] * counts[second]``, of one resample
=====================  ===========  ==========================================================

Two copies of one minimum in a resample differ in nothing, and are no such pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima._hyperparameters import find_axes, number_levels, plain_name
from relflat_sk.minima._resampling import Floats, draw_seed, interval, judge, resample, signs

__all__ = ["granulated_kendall"]

Integers = NDArray[np.intp]


def granulated_kendall(
    minima: Any,
    axes: str | Sequence[str] | None = None,
    *,
    target: str = "generalization_gap",
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Correlate measures with the gap along one hyper-parameter at a time.

    Kendall's tau over all minima rewards a measure for following the one hyper-parameter that
    moves the gap most. The granulated coefficient asks along every axis, among minima that
    differ in that hyper-parameter only, and weighs the axes alike.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima, best a grid over the axes; see `relflat_sk.minima._table` for the columns.
    axes : str, sequence of str or None, default=None
        The hyper-parameters, as ``"batch_size"`` or ``"param_batch_size"``. None takes every
        parameter that was varied; of two that were only varied together, the first. Leave
        out the random seed to treat its values as repeats.
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
        ``psi``, ``psi_low``, ``psi_high``, the coefficient and its 95% percentile interval
        over resampled minima; the same as ``psi_<axis>`` for every axis; ``n``, the number of
        minima used; ``n_left_out``, the number of rows that were not. An axis along which no
        two minima differ alone has nan, and no part in ``psi``.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        one, there is no such axis, no two minima differ in one axis alone, or `n_bootstrap`
        is not a positive integer.

    See Also
    --------
    correlate : Kendall's tau over all minima.
    conditional_mutual_information : What the measure tells where hyper-parameters are known.

    Notes
    -----
    Section 2.2.2 of [1]_: with :math:`\tau` of a group of minima the mean of
    :math:`\mathrm{sign}(\mu_1 - \mu_2) \, \mathrm{sign}(g_1 - g_2)` over its pairs (ties count
    as 0: tau-a, unlike in `correlate`),

    .. math::
        \psi_i = \frac{1}{m_i} \sum_{\text{groups}} \tau, \qquad
        \psi = \frac1k \sum_{i=1}^k \psi_i,

    where the :math:`m_i` groups along axis i share all other hyper-parameters. Where several
    minima share all of them (repeats), pairs of these are in no group: they differ in
    nothing. Groups that lost minima, because these did not converge, count with the pairs
    that are left.

    Where every combination of hyper-parameters has repeats, resamples are drawn within each
    combination; otherwise, since a single minimum can only be drawn again, from all minima.

    References
    ----------
    .. [1] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.

    Examples
    --------
    Along the batch size, the measure orders minima as the gap does for both learning rates;
    along the learning rate it does so for one batch size of two:

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
    judged = judge(minima, target, n_bootstrap)
    columns = find_axes(judged.table, axes)
    levels = number_levels(judged.table, columns)
    if not len(_Granules.of(levels[judged.used]).first):
        raise ValueError(
            f"No two of the {judged.used.sum()} minima differ in one of {columns} alone. Name "
            "the hyper-parameters that were varied independently as axes, without the random "
            "seed, and sweep over a grid of them: values drawn at random hardly ever agree."
        )
    seed = draw_seed(random_state)
    names = ["psi", *(f"psi_{plain_name(column)}" for column in columns)]
    rows = []
    for measure in judged.measures_but(columns):
        used, x, y = judged.of(measure)
        granules = _Granules.of(levels[used])
        psi = granules.psi(x, y, np.ones((1, len(x))))[0]
        resampled = granules.psi(x, y, resample_cells(levels[used], int(n_bootstrap), seed))
        row: dict[str, Any] = {"measure": measure}
        for name, value, values in zip(names, psi, resampled.T, strict=True):
            low, high = interval(values)
            row |= {name: float(value), f"{name}_low": low, f"{name}_high": high}
        rows.append(row | {"n": len(x), "n_left_out": len(judged.table) - len(x)})
    ends = [name + end for name in names for end in ("", "_low", "_high")]
    return pd.DataFrame(rows, columns=["measure", *ends, "n", "n_left_out"])


def resample_cells(levels: Integers, n_bootstrap: int, seed: int) -> Floats:
    """Return the counts of resamples of minima, within cells of equal levels where they can.

    Parameters
    ----------
    levels : ndarray of int of shape (n, k)
    n_bootstrap : int
    seed : int

    Returns
    -------
    ndarray of shape (n_bootstrap, n)
    """
    cells, cell, sizes = np.unique(levels, axis=0, return_inverse=True, return_counts=True)
    if len(cells) == 0 or sizes.min() < 2:
        return resample(len(levels), n_bootstrap, seed)
    counts = np.empty((n_bootstrap, len(levels)))
    seeds = np.random.default_rng(seed).integers(2**31 - 1, size=len(cells))
    for k, size in enumerate(sizes):
        counts[:, cell.ravel() == k] = resample(int(size), n_bootstrap, int(seeds[k]))
    return counts


@dataclass(frozen=True)
class _Granules:
    """The pairs of minima that differ in one axis only, grouped by their other values."""

    first: Integers
    second: Integers
    group: Integers
    axis_of_group: Integers
    n_axes: int

    @classmethod
    def of(cls, levels: Integers) -> "_Granules":
        first, second = np.triu_indices(len(levels), 1)
        differs = levels[first] != levels[second]
        one_apart = differs.sum(axis=1) == 1
        first, second, differs = first[one_apart], second[one_apart], differs[one_apart]
        # what a pair shares, with a hole at its axis: a name for its group
        shared = np.where(differs, -1, levels[first])
        groups, group = np.unique(shared, axis=0, return_inverse=True)
        axis_of_group = (groups == -1).argmax(axis=1)
        return cls(first, second, group.ravel(), axis_of_group, levels.shape[1])

    def psi(self, x: Floats, y: Floats, counts: Floats) -> Floats:
        """Return the mean over the axes, then each axis, in each resample: (b, 1 + k)."""
        concordance = signs(x, self.first, self.second) * signs(y, self.first, self.second)
        along = np.stack([self._psi_of_axes(concordance, each) for each in counts])
        known = np.isfinite(along)
        mean = _ratio(np.where(known, along, 0.0).sum(axis=1), known.sum(axis=1))
        return np.column_stack([mean, along])

    def _psi_of_axes(self, concordance: Integers, counts: Floats) -> Floats:
        weights = counts[self.first] * counts[self.second]
        n_pairs = np.bincount(self.group, weights, minlength=len(self.axis_of_group))
        total = np.bincount(self.group, weights * concordance, minlength=len(self.axis_of_group))
        there = n_pairs > 0
        axis = self.axis_of_group[there]
        tau = np.bincount(axis, total[there] / n_pairs[there], minlength=self.n_axes)
        return _ratio(tau, np.bincount(axis, minlength=self.n_axes))


def _ratio(numerator: NDArray[Any], denominator: NDArray[Any]) -> Floats:
    """Return a ratio, nan where the denominator is 0."""
    ratio: Floats = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=ratio, where=denominator > 0)
    return ratio

r"""Correlation of measures with the generalization gap, over many minima.

The symbols are those of `relflat_sk.minima._resampling`. All three coefficients are ratios of
quadratic forms in the counts :math:`c` of a resample, so that b resamples take a few matrix
products and no loop. Kendall's tau is

.. math::
    \tau_b = \frac{c^\top (S_x \circ S_y) c}{\sqrt{c^\top S_x^{\circ 2} c}
                                             \sqrt{c^\top S_y^{\circ 2} c}},
    \qquad (S_x)_{ij} = \mathrm{sign}(x_i - x_j);

Pearson's r is the weighted one, with the counts as weights, and Spearman's rho the weighted r
of the ranks within the resample. A resample with all counts 1 gives the coefficient of the
minima themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._random import draw_seed
from relflat_sk.minima._columns import find_axis
from relflat_sk.minima._resampling import (
    FEWEST_MINIMA,
    Floats,
    interval,
    ratio,
    resample,
    select_minima,
    with_ends,
)

__all__ = ["correlate_measures"]


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
        The numeric column to predict, or the function of which it is the measure.
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

    def resampled(x: Floats, y: Floats) -> dict[str, Floats]:
        """Return each coefficient of the minima, followed by those of the resamples."""
        if len(x) < FEWEST_MINIMA:
            return {}
        counts = np.vstack([np.ones((1, len(x))), resample(len(x), int(n_bootstrap), seed)])
        return {name: coefficient(x, y, counts) for name, coefficient in _COEFFICIENTS.items()}

    def coefficients(_: Any, x: Floats, y: Floats) -> dict[str, float]:
        return _with_intervals(resampled(x, y))

    pooled = selected.tabulate(columns, coefficients)
    if strata is None:
        return pooled
    names = [strata] if isinstance(strata, str) else list(strata)
    axes = [find_axis(selected.table, name, argument="strata") for name in names]
    groups, labels = pd.MultiIndex.from_frame(selected.table[axes].astype(str)).factorize()

    def within(rows: NDArray[np.intp], x: Floats, y: Floats) -> dict[str, float]:
        parts = [groups[rows] == group for group in range(len(labels))]
        found = [(part.sum(), resampled(x[part], y[part])) for part in parts]
        known = [(n, one) for n, one in found if one and np.isfinite(one["kendall"][0])]
        if not known:
            return {"n": 0}
        sizes = np.array([[n] for n, _ in known], dtype=np.float64)
        means = {}
        for name in _COEFFICIENTS:
            values = np.array([one[name] for _, one in known])
            weights = np.where(np.isfinite(values), sizes, 0.0)
            means[name] = ratio((weights * np.nan_to_num(values)).sum(axis=0), weights.sum(axis=0))
        return {**_with_intervals(means), "n": int(sizes.sum())}

    tables = {"pooled": pooled, "within": selected.tabulate(columns, within)}
    for group, label in enumerate(labels):
        part = selected.of_group(groups == group)
        tables[", ".join(label)] = part.tabulate(columns, coefficients)
    every = pd.concat(tables, names=["stratum", "row"]).reset_index("stratum")
    every = every.sort_index(kind="stable").reset_index(drop=True)
    return every[["measure", "stratum", *columns, "n", "n_left_out"]]


def _with_intervals(found: dict[str, Floats]) -> dict[str, float]:
    """Return coefficients with the ends of their intervals, by column."""
    row: dict[str, float] = {}
    for name, (value, *resamples) in found.items():
        row |= interval(name, value, np.array(resamples))
    return row


def _pearson(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Pearson's r of x and y in each resample, shape (b,), nan where undefined."""
    x, y = (np.broadcast_to(_standardize(values), counts.shape) for values in (x, y))
    return _weighted_pearson(x, y, counts)


def _spearman(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Spearman's rho of x and y in each resample, shape (b,), nan where undefined."""
    return _weighted_pearson(_ranks(x, counts), _ranks(y, counts), counts)


def _kendall(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Kendall's tau-b of x and y in each resample, shape (b,), nan where undefined."""
    sign_x, sign_y = (np.sign(values[:, None] - values) for values in (x, y))
    concordant_minus_discordant = _quadratic_form(sign_x * sign_y, counts)
    untied = _quadratic_form(sign_x**2, counts) * _quadratic_form(sign_y**2, counts)
    return ratio(concordant_minus_discordant, np.sqrt(untied)).clip(-1.0, 1.0)


def _quadratic_form(matrix: Floats, counts: Floats) -> Floats:
    """Return ``c @ matrix @ c`` for every row c of counts, shape (b,)."""
    form: Floats = ((counts @ matrix) * counts).sum(axis=1)
    return form


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


def _weighted_pearson(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Pearson's r of the rows of x and y, weighted by the rows of counts."""
    total = counts.sum(axis=1, keepdims=True)
    x = x - (counts * x).sum(axis=1, keepdims=True) / total
    y = y - (counts * y).sum(axis=1, keepdims=True) / total
    covariance = (counts * x * y).sum(axis=1)
    variances = (counts * x * x).sum(axis=1) * (counts * y * y).sum(axis=1)
    # rounding gives a constant row a variance of about eps**2 instead of 0
    constant = _is_constant(x, counts) | _is_constant(y, counts)
    return ratio(covariance, np.where(constant, 0.0, np.sqrt(variances))).clip(-1.0, 1.0)


def _is_constant(values: Floats, counts: Floats) -> NDArray[np.bool_]:
    """Return which rows of values are constant over the minima with a positive count."""
    drawn = counts > 0
    low = np.where(drawn, values, np.inf).min(axis=1)
    high = np.where(drawn, values, -np.inf).max(axis=1)
    return np.asarray(low == high)


_COEFFICIENTS: dict[str, Callable[[Floats, Floats, Floats], Floats]] = {
    "pearson": _pearson,
    "spearman": _spearman,
    "kendall": _kendall,
}

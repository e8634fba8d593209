r"""How well a measure predicts the generalization gap, over many minima.

=============  ==================  ==========================================================
name           shape               meaning
=============  ==================  ==========================================================
``x``, ``y``   ``(n,)``            a measure and the target, one value per minimum
``counts``     ``(b, n)``          how often each minimum is in each of b bootstrap resamples
=============  ==================  ==========================================================

A resample is a reweighting of the minima by its counts, and all three coefficients are ratios
of quadratic forms in the counts, so that b resamples are a matrix product and no loop:

.. math::
    \tau_b = \frac{c^\top (S_x \circ S_y) c}{\sqrt{c^\top S_x^{\circ 2} c}
                                             \sqrt{c^\top S_y^{\circ 2} c}},
    \qquad (S_x)_{ij} = \mathrm{sign}(x_i - x_j),

Pearson's r is the weighted one, and Spearman's the weighted r of the ranks that the minima
have within the resample. One resample with all counts 1 is the coefficient itself.
"""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.utils import check_random_state

from relflat_sk.minima import (
    is_complete,
    is_converged,
    measure_columns,
    minima_table,
    numeric_column,
)

__all__ = ["correlate"]

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
FEWEST = 3  # with two minima every coefficient is 1 or -1
BASELINE = "train_loss"


def correlate(
    minima: Any,
    target: str = "generalization_gap",
    *,
    n_bootstrap: int = 1000,
    random_state: int | np.random.RandomState | np.random.Generator | None = None,
) -> pd.DataFrame:
    r"""Correlate every measure with the generalization gap over many minima.

    Only converged minima with a finite target are used: away from a minimum flatness means
    nothing, and a few networks that diverged or stopped early can turn the sign of the result.

    Parameters
    ----------
    minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
        The minima; see `relflat_sk.minima` for the columns of a table.
    target : str, default="generalization_gap"
        The numeric column to predict.
    n_bootstrap : int, default=1000
        Number of bootstrap resamples behind each interval.
    random_state : int, RandomState, Generator or None, default=None
        Seed of the resampling. Measures known for the same minima see the same resamples.

    Returns
    -------
    pandas.DataFrame
        One row per measure, and one for ``train_loss`` as a baseline. Columns: ``measure``;
        ``pearson``, ``pearson_low``, ``pearson_high``, the coefficient and its 95% percentile
        interval over resampled minima; the same for ``spearman`` and ``kendall`` (tau-b);
        ``n``, the number of minima used; ``n_left_out``, the number of rows that were not.
        Where a measure or the target is constant, or there are fewer than 3 minima with that
        measure, the coefficients are nan.

    Raises
    ------
    TypeError
        If `minima` is neither a table nor a study.
    ValueError
        If there is no numeric column `target`, fewer than 3 converged minima have a finite
        one, or `n_bootstrap` is not a positive integer.

    See Also
    --------
    rank_minima : The minima in order of flatness.
    FlatnessGapDisplay : The same as a picture.

    Notes
    -----
    Percentile intervals are approximate for few minima (below about 20). Resamples in which a
    column is constant have no coefficient and are left out of its interval.

    References
    ----------
    .. [1] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them",
       ICLR 2020.
    .. [2] B. Efron, R. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    Examples
    --------
    Of the six pairs of these minima the measure orders five as the gap does, and one
    wrongly: Kendall's tau is (5 - 1) / 6.

    >>> import pandas as pd
    >>> minima = pd.DataFrame(
    ...     {
    ...         "relative_flatness": [1.0, 2.0, 3.0, 4.0],
    ...         "generalization_gap": [0.1, 0.3, 0.2, 0.5],
    ...     }
    ... )
    >>> table = correlate(minima, random_state=0)
    >>> table[["measure", "spearman", "kendall", "n"]].round(3)
                 measure  spearman  kendall  n
    0  relative_flatness       0.8    0.667  4
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
    names = [name for name in _columns_to_correlate(table) if name != target]
    seed = _draw_seed(random_state)
    rows = []
    for name in names:
        x = numeric_column(table, name, argument="measure")
        rows_used = used & np.isfinite(x)
        counts = _resample(int(rows_used.sum()), int(n_bootstrap), seed)
        row = {"measure": name} | _coefficients(x[rows_used], y[rows_used], counts)
        n = int(rows_used.sum())
        rows.append(row | {"n": n, "n_left_out": len(table) - n})
    return pd.DataFrame(rows, columns=["measure", *_COLUMNS, "n", "n_left_out"])


def _hint(target: str) -> str:
    """Return what to do about too few minima."""
    if target in ("generalization_gap", "test_loss", "test_score"):
        return (
            "Pass X_test and y_test to the search to have held-out values recorded, and see "
            "the columns 'converged' and 'reason' of the table for minima that were left out."
        )
    return "See the columns 'converged' and 'reason' of the table for what was left out."


def _columns_to_correlate(table: pd.DataFrame) -> list[str]:
    """Return the measures of a table, and the baseline if it is there."""
    return [*measure_columns(table), *(name for name in [BASELINE] if name in table.columns)]


def _draw_seed(random_state: Any) -> int:
    """Return one seed from anything scikit-learn or NumPy take for a random state."""
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31 - 1))
    return int(check_random_state(random_state).randint(2**31 - 1))


def _resample(n: int, n_bootstrap: int, seed: int) -> Floats:
    """Return the counts of `n_bootstrap` resamples of n minima, shape (n_bootstrap, n)."""
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def _coefficients(x: Floats, y: Floats, counts: Floats) -> dict[str, float]:
    """Return all coefficients of one measure with their intervals, by column name."""
    row: dict[str, float] = dict.fromkeys(_COLUMNS, np.nan)
    if len(x) < FEWEST:
        return row
    everything = np.ones((1, len(x)))
    for name, coefficient in _COEFFICIENTS.items():
        row[name] = float(coefficient(x, y, everything)[0])
        resampled = coefficient(x, y, counts)
        resampled = resampled[np.isfinite(resampled)]
        if np.isfinite(row[name]) and len(resampled):
            tail = (1 - CONFIDENCE) / 2
            low, high = np.quantile(resampled, [tail, 1 - tail])
            row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
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
    return _divide(concordant_minus_discordant, np.sqrt(untied))


def _quadratic_form(matrix: Floats, counts: Floats) -> Floats:
    """Return ``c @ matrix @ c`` for every row c of counts, shape (b,)."""
    form: Floats = ((counts @ matrix) * counts).sum(axis=1)
    return form


def _ranks(values: Floats, counts: Floats) -> Floats:
    """Return the mean rank of every value within each resample, shape (b, n)."""
    # of c_j copies of x_j: those below x_i come first, and the tied ones share their places
    below = counts @ (values[:, None] < values)
    tied = counts @ (values[:, None] == values)
    ranks: Floats = below + (tied + 1) / 2
    return ranks


def _standardize(values: Floats) -> Floats:
    """Return values moved and scaled to about one, so that no sum of squares overflows."""
    low, high = values.min(), values.max()
    # halved, as high - low itself may overflow
    middle, reach = low / 2 + high / 2, high / 2 - low / 2
    return (values - middle) / reach if reach > 0 else np.zeros_like(values)


def _weighted_pearson(x: Floats, y: Floats, counts: Floats) -> Floats:
    """Return Pearson's r of the rows of x and y, each weighted by its counts."""
    total = counts.sum(axis=1, keepdims=True)
    x = x - (counts * x).sum(axis=1, keepdims=True) / total
    y = y - (counts * y).sum(axis=1, keepdims=True) / total
    covariance = (counts * x * y).sum(axis=1)
    variances = (counts * x * x).sum(axis=1) * (counts * y * y).sum(axis=1)
    # rounding leaves a constant row a variance of about eps**2 instead of 0
    constant = _is_constant(x, counts) | _is_constant(y, counts)
    return _divide(covariance, np.where(constant, 0.0, np.sqrt(variances)))


def _is_constant(values: Floats, counts: Floats) -> NDArray[np.bool_]:
    """Return which rows of values are constant over the minima with a positive count."""
    drawn = counts > 0
    low = np.where(drawn, values, np.inf).min(axis=1)
    high = np.where(drawn, values, -np.inf).max(axis=1)
    return np.asarray(low == high)


def _divide(numerator: Floats, denominator: Floats) -> Floats:
    """Return a ratio within [-1, 1], nan where the denominator is 0."""
    ratio: Floats = np.full(len(numerator), np.nan)
    np.divide(numerator, denominator, out=ratio, where=denominator > 0)
    return ratio.clip(-1.0, 1.0)


_COEFFICIENTS: dict[str, Callable[[Floats, Floats, Floats], Floats]] = {
    "pearson": _pearson,
    "spearman": _spearman,
    "kendall": _kendall,
}
_COLUMNS = [name + end for name in _COEFFICIENTS for end in ("", "_low", "_high")]

"""Bootstrap resamples of minima, as counts, and the percentile intervals from them.

============  ============  ============================================================
name          shape         meaning
============  ============  ============================================================
``x``, ``y``  ``(n,)``      a measure and the target, one value per minimum
``counts``    ``(b, n)``    how often each minimum is drawn in each of b resamples
============  ============  ============================================================

A resample weights every minimum by its count, so no array is ever indexed by drawn minima.
"""

import numpy as np
from numpy.typing import NDArray

from relflat_sk.minima._selection import Floats

__all__ = ["interval", "resample", "signs"]

CONFIDENCE = 0.95


def resample(n: int, n_bootstrap: int, seed: int) -> Floats:
    """Draw bootstrap resamples of n minima.

    Parameters
    ----------
    n : int
        Number of minima.
    n_bootstrap : int
        Number of resamples.
    seed : int
        Seed of the draws.

    Returns
    -------
    ndarray of shape (n_bootstrap, n)
        The counts; every row sums to n.
    """
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def interval(resampled: Floats) -> tuple[float, float]:
    """Return the ends of the 95% percentile interval.

    Parameters
    ----------
    resampled : ndarray of shape (b,)
        The statistic in each resample; values that are not finite are left out.

    Returns
    -------
    low, high : float
        The ends, nan where no resample is finite.
    """
    resampled = resampled[np.isfinite(resampled)]
    if not len(resampled):
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


def signs(values: Floats, first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the sign of the difference in each pair of values.

    Parameters
    ----------
    values : ndarray of shape (n,)
        The values, of any size: they are compared, as a difference may overflow.
    first, second : ndarray of int of shape (p,)
        The positions of the values of each pair.

    Returns
    -------
    ndarray of int of shape (p,)
        -1, 0 or 1.
    """
    a, b = values[first], values[second]
    return np.subtract(a > b, a < b, dtype=np.intp)

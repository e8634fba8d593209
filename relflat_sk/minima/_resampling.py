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
    """Draw bootstrap resamples of n minima. Shapes: returns (n_bootstrap, n)."""
    if n == 0:
        return np.zeros((n_bootstrap, 0))
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=n_bootstrap).astype(np.float64)


def interval(resampled: Floats) -> tuple[float, float]:
    """Return the ends of the 95% percentile interval. Shapes: `resampled` (b,)."""
    resampled = resampled[np.isfinite(resampled)]
    if not len(resampled):
        return np.nan, np.nan
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return float(low), float(high)


def signs(values: Floats, first: NDArray[np.intp], second: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the sign of the difference in each pair of values.

    Shapes: `values` (n,), `first, second` (p,); returns (p,).
    """
    a, b = values[first], values[second]
    return np.subtract(a > b, a < b, dtype=np.intp)

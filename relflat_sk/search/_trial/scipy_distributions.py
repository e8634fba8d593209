"""Distributions of scipy.stats in a space, as scikit-learn's randomized search takes them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from scipy.stats import rv_discrete

__all__ = ["Quantiles", "is_scipy_distribution", "range_of"]

_EDGE = 1e-12  # no quantile is closer to 0 and 1: it may be infinite there


def is_scipy_distribution(value: Any) -> bool:
    """Return whether an object is a distribution of scipy with its parameters."""
    return hasattr(value, "support") and (hasattr(value, "ppf") or hasattr(value, "icdf"))


def range_of(distribution: Any) -> FloatDistribution | IntDistribution | None:
    """Return the range of numbers of Optuna that is the same distribution."""
    low, high = distribution.support()
    kind = getattr(getattr(distribution, "dist", None), "name", type(distribution).__name__)
    if kind == "randint":
        return IntDistribution(int(low), int(high))
    if kind in ("uniform", "Uniform"):
        return FloatDistribution(float(low), float(high))
    of_logarithm = kind in ("loguniform", "reciprocal", "LogUniform")
    if of_logarithm and np.isclose(_quantile(distribution, 0.5) ** 2, low * high):  # not shifted
        return FloatDistribution(float(low), float(high), log=True)
    return None


def _quantile(distribution: Any, share: float) -> float:
    inverse = distribution.ppf if hasattr(distribution, "ppf") else distribution.icdf
    return float(inverse(share))


@dataclass(frozen=True)
class Quantiles:
    """A function of a trial that draws from any distribution, by its quantile."""

    name: str
    distribution: Any

    def __call__(self, trial: optuna.Trial) -> float | int:
        """Draw a value."""
        share = trial.suggest_float(f"{self.name}_quantile", 0.0, 1.0)
        value = _quantile(self.distribution, min(max(share, _EDGE), 1 - _EDGE))
        return int(value) if self._is_discrete else value

    @property
    def _is_discrete(self) -> bool:
        return isinstance(getattr(self.distribution, "dist", None), rv_discrete)

    def __repr__(self) -> str:
        distribution = self.distribution
        kind = getattr(distribution, "dist", None)
        if kind is None:
            return repr(distribution)
        arguments = [*map(str, distribution.args)]
        arguments += [f"{name}={value}" for name, value in distribution.kwds.items()]
        return f"{kind.name}({', '.join(arguments)})"

"""A measured number with its standard error."""

from dataclasses import dataclass, replace

__all__ = ["Estimate", "with_tolerance"]


@dataclass(frozen=True)
class Estimate:
    """A measured value, its standard error, and the method that gave it.

    Parameters
    ----------
    value : float
        The measure.
    stderr : float, default=0.0
        Standard error; 0 for exact values.
    method : str, default="exact"
        How the value was computed, as reports name it.
    """

    value: float
    stderr: float = 0.0
    method: str = "exact"


def with_tolerance(estimate: Estimate, stderr: float) -> Estimate:
    """Return an estimate with the tolerance of the iteration for norms that led to it."""
    return replace(estimate, stderr=stderr, method="lanczos") if stderr > 0 else estimate

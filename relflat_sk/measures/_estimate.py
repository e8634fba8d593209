"""A measured number with its standard error."""

from dataclasses import dataclass

__all__ = ["Estimate"]


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

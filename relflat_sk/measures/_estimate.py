"""A number with its error bar."""

from dataclasses import dataclass

__all__ = ["Estimate"]


@dataclass(frozen=True)
class Estimate:
    """A measured value, how well it is known, and how it was computed."""

    value: float
    stderr: float = 0.0  # 0 for what is exact
    method: str = "exact"

"""The model and the data that a network was made of, as the user passed them."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """The model and the data that a network was made of, for measures of your own.

    Shapes: `sample_weight` (n,).
    """

    model: Any
    X: Any
    y: Any
    sample_weight: Any = None

"""The model and the data that a network was made of, as the user passed them."""

from dataclasses import dataclass
from typing import Any

__all__ = ["Source"]


@dataclass(frozen=True)
class Source:
    """The model and the data that a network was made of, for measures of your own.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        The model.
    X, y : array-like of n samples
        Inputs and labels as the model takes them; y may be None.
    sample_weight : array of shape (n,), optional
        Weight of each sample.
    """

    model: Any
    X: Any
    y: Any
    sample_weight: Any = None

"""The interface of tasks: what a net does with labels and outputs.

A task turns a user's labels into the targets that a criterion takes, determines the number of
outputs, and turns outputs into predictions. It stores what it learns from the labels on the net,
in fitted attributes such as `classes_`.
"""

from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["Array", "Task"]

Array = npt.NDArray[Any]


class Task(Protocol):
    """The interface of all tasks."""

    @property
    def estimator_type(self) -> str | None:
        """The name of the task in scikit-learn's tags; None if scikit-learn has no such task."""

    @property
    def learned(self) -> str:
        """The name of an attribute that the net has after `learn`."""

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        """Store on the net what encoding and decoding need. Shapes: `classes` (n_classes,)."""

    def learn_from_outputs(self, net: Any, n_outputs: int) -> None:
        """Store on the net what is known without labels, which are targets in a Dataset."""

    def encode(self, net: Any, y: Any) -> Array:
        """Turn labels into targets."""

    def n_outputs(self, net: Any) -> int | None:
        """Count the outputs that the targets need."""

    def describe(self, net: Any) -> str:
        """Describe the labels for error messages."""

    def probabilities(self, outputs: Array) -> Array:
        """Arrange the probabilities in one column per class. Shapes: returns (n, n_classes)."""

    def predict(self, outputs: Array) -> Array:
        """Turn outputs into predicted targets."""

    def decode(self, net: Any, predicted: Array) -> Array:
        """Turn predicted targets into labels as the user knows them."""

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        """Compute scikit-learn's default score of predictions. Shapes: `sample_weight` (n,)."""

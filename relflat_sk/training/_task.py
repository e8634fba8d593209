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
    """The interface of all tasks.

    Parameters
    ----------
    *args, **kwargs
        None: a task has no state of its own.
    """

    @property
    def estimator_type(self) -> str | None:
        """The name of the task in scikit-learn's tags; None if scikit-learn has no such task."""

    @property
    def learned(self) -> str:
        """The name of an attribute that the net has after `learn`."""

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        """Store on the net what encoding and decoding need.

        Parameters
        ----------
        net : NeuralNet
            Gets the fitted attributes.
        y : array-like of shape (n, ...)
            Labels as the user passes them.
        classes : array-like of shape (n_classes,), optional
            All classes; those in y if None.

        Raises
        ------
        ValueError
            If the labels do not fit the task.
        """

    def learn_from_outputs(self, net: Any, n_outputs: int) -> None:
        """Store on the net what is known without labels, which are targets in a Dataset.

        Parameters
        ----------
        net : NeuralNet
            Gets the fitted attributes.
        n_outputs : int
            Number of the network's outputs.
        """

    def encode(self, net: Any, y: Any) -> Array:
        """Turn labels into targets.

        Parameters
        ----------
        net : NeuralNet
            A net on which `learn` was called.
        y : array-like of shape (n, ...)
            Labels as the user passes them.

        Returns
        -------
        ndarray of shape (n, ...)
            Targets as the criterion takes them.
        """

    def n_outputs(self, net: Any) -> int | None:
        """Count the outputs that the targets need.

        Parameters
        ----------
        net : NeuralNet
            A net on which `learn` was called.

        Returns
        -------
        int or None
            None if the task does not determine the number.
        """

    def describe(self, net: Any) -> str:
        """Describe the labels for error messages.

        Parameters
        ----------
        net : NeuralNet
            A net on which `learn` was called.

        Returns
        -------
        str
            Such as "classes ['x', 'y']".
        """

    def probabilities(self, outputs: Array) -> Array:
        """Arrange the probabilities in one column per class.

        Parameters
        ----------
        outputs : ndarray of shape (n, ...)
            Outputs of the network after softmax or sigmoid.

        Returns
        -------
        ndarray of shape (n, n_classes)
            Probabilities.
        """

    def predict(self, outputs: Array) -> Array:
        """Turn outputs into predicted targets.

        Parameters
        ----------
        outputs : ndarray of shape (n, ...)
            Outputs of the network after softmax, sigmoid or the like.

        Returns
        -------
        ndarray of shape (n, ...)
            Such as class indices.
        """

    def decode(self, net: Any, predicted: Array) -> Array:
        """Turn predicted targets into labels as the user knows them.

        Parameters
        ----------
        net : NeuralNet
            A fitted net.
        predicted : ndarray of shape (n, ...)
            From `predict`.

        Returns
        -------
        ndarray of shape (n, ...)
            Predicted labels.
        """

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        """Compute scikit-learn's default score of predictions.

        Parameters
        ----------
        y : array-like of shape (n, ...)
            True labels.
        predicted : ndarray of shape (n, ...)
            Predicted labels.
        sample_weight : array-like of shape (n,), optional
            Weight of each sample in the score.

        Returns
        -------
        float
            Greater is better.

        Raises
        ------
        AttributeError
            If the task has no score.
        """

"""Labels and class weights of scikit-learn's classifiers and regressors, as criteria take them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

__all__ = [
    "Array",
    "binary_targets",
    "class_indices",
    "class_weights",
    "label_indicators",
    "one_hot",
    "regression_targets",
    "two_class_criterion",
]

Array = npt.NDArray[Any]


# -- class weights --------------------------------------------------------------------------


def class_weights(estimator: Any, y: Any) -> Array | None:
    """Compute the weight of each class of a fitted classifier.

    Parameters
    ----------
    estimator : estimator
        A fitted classifier with the parameter ``class_weight``.
    y : array-like of shape (n,) or None
        Labels whose frequencies decide the weights if ``class_weight`` is "balanced".

    Returns
    -------
    array of shape (n_classes,) or None
        In the order of ``classes_``; None if all classes weigh 1.

    Raises
    ------
    ValueError
        If the weights are "balanced" and there are no labels.
    """
    if estimator.class_weight is None:
        return None
    classes = estimator.classes_
    if isinstance(estimator.class_weight, Mapping):
        weights = compute_class_weight(estimator.class_weight, classes=classes, y=classes)
        return np.asarray(weights, dtype=np.float64)
    if y is None:
        raise ValueError(
            f'{type(estimator).__name__}(class_weight="balanced") weighs classes by their '
            "frequencies, which takes labels: pass y."
        )
    return _balanced_weights(np.bincount(class_indices(y, classes), minlength=len(classes)))


def _balanced_weights(counts: Array) -> Array:
    """Weigh classes inversely to their counts, so that the samples' mean weight is 1."""
    present = counts > 0
    weights = np.ones(len(counts))  # a class without samples may have any weight
    weights[present] = counts.sum() / (present.sum() * counts[present])
    return weights


def two_class_criterion(criterion: Callable[..., nn.Module], weights: Array | None) -> nn.Module:
    """Make a criterion of one output with the weights of the negative and positive class.

    Parameters
    ----------
    criterion : callable
        Makes the criterion, from keyword arguments `weight` and `pos_weight`.
    weights : array of shape (2,) or None
        From `class_weights`.

    Returns
    -------
    nn.Module
        The criterion. It divides by the number of samples, not by the sum of their weights.

    Raises
    ------
    ValueError
        If the negative class weighs 0.
    """
    if weights is None:
        return criterion()
    if weights[0] == 0:
        raise ValueError(
            "the first of two classes has class weight 0: a loss of positive samples alone "
            "has no minimum to be flat or sharp at. Give both classes a positive weight."
        )
    return criterion(
        weight=torch.as_tensor(weights[:1]),
        pos_weight=torch.as_tensor(weights[1:] / weights[0]),
    )


# -- targets --------------------------------------------------------------------------------


def class_indices(y: Any, classes: Array) -> Array:
    """Replace labels of any type by their positions among the classes.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels.
    classes : array of shape (n_classes,)
        The labels that the estimator knows.

    Returns
    -------
    array of shape (n,), int64
        Positions in `classes`.

    Raises
    ------
    ValueError
        If there are other labels than the classes; names some of them.
    """
    index = {label: i for i, label in enumerate(classes.tolist())}
    labels = column_or_1d(y).tolist()
    try:
        return np.array([index[label] for label in labels], dtype=np.int64)
    except KeyError:
        unknown = sorted({label for label in labels if label not in index}, key=str)
        raise ValueError(
            f"y has labels the estimator was not fitted on, such as {unknown[:5]}; it knows "
            f"{list(index)}."
        ) from None


def binary_targets(y: Any, classes: Array) -> Array:
    """Turn labels of two classes into one column of 0 and 1.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels.
    classes : array of shape (2,)
        The negative and the positive class.

    Returns
    -------
    array of shape (n, 1), float64
        1 for the positive class.
    """
    return class_indices(y, classes).astype(np.float64)[:, None]


def one_hot(y: Any, classes: Array) -> Array:
    """Turn labels into one column of 0 and 1 for each class.

    Parameters
    ----------
    y : array-like of shape (n,)
        Labels.
    classes : array of shape (n_classes,)
        The labels that the estimator knows.

    Returns
    -------
    array of shape (n, n_classes), float64
        1 in the column of each sample's class.
    """
    return np.eye(len(classes))[class_indices(y, classes)]


def label_indicators(y: Any, n_labels: int) -> Array:
    """Check a label indicator matrix, sparse or dense.

    Parameters
    ----------
    y : array-like or sparse matrix of shape (n, n_labels)
        1 where a sample has a label, 0 elsewhere.
    n_labels : int
        Number of labels that the estimator was fitted on.

    Returns
    -------
    array of shape (n, n_labels), float64
        The matrix, dense.

    Raises
    ------
    ValueError
        If the matrix has another shape, or values other than 0 and 1.
    """
    dense = y.toarray() if issparse(y) else y
    indicators: Array = check_array(dense, dtype=np.float64, input_name="y")
    if indicators.shape[1] != n_labels or not np.isin(indicators, [0, 1]).all():
        raise ValueError(
            f"y has shape {indicators.shape} and values {np.unique(indicators)[:5]}, expected "
            f"a label indicator matrix of shape (n, {n_labels}) with values 0 and 1."
        )
    return indicators


def regression_targets(y: Any, n_outputs: int) -> Array:
    """Check regression targets, and bring them into columns.

    Parameters
    ----------
    y : array-like of shape (n,) or (n, n_outputs)
        Finite targets.
    n_outputs : int
        Number of targets that the estimator was fitted on.

    Returns
    -------
    array of shape (n, n_outputs), float64
        One column for each target.

    Raises
    ------
    ValueError
        If there are more or fewer columns.
    """
    targets: Array = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    columns = targets[:, None] if targets.ndim == 1 else targets
    if columns.shape[1] != n_outputs:
        raise ValueError(
            f"y has shape {targets.shape}, but the estimator was fitted on {n_outputs} "
            f"target{'s' if n_outputs > 1 else ''}: expected (n, {n_outputs})."
        )
    return columns

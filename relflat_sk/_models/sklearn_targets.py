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

    Shapes: `y` (n,); returns (n_classes,).
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

    Shapes: `weights` (2,).
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

    Shapes: `y` (n,), `classes` (n_classes,); returns (n,).
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

    Shapes: `y` (n,), `classes` (2,); returns (n, 1).
    """
    return class_indices(y, classes).astype(np.float64)[:, None]


def one_hot(y: Any, classes: Array) -> Array:
    """Turn labels into one column of 0 and 1 for each class.

    Shapes: `y` (n,), `classes` (n_classes,); returns (n, n_classes).
    """
    return np.eye(len(classes))[class_indices(y, classes)]


def label_indicators(y: Any, n_labels: int) -> Array:
    """Check a label indicator matrix, sparse or dense.

    Shapes: `y` (n, n_labels); returns (n, n_labels).
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

    Shapes: `y` (n,); returns (n, n_outputs).
    """
    targets: Array = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    columns = targets[:, None] if targets.ndim == 1 else targets
    if columns.shape[1] != n_outputs:
        raise ValueError(
            f"y has shape {targets.shape}, but the estimator was fitted on {n_outputs} "
            f"target{'s' if n_outputs > 1 else ''}: expected (n, {n_outputs})."
        )
    return columns

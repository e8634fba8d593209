r"""Fitted scikit-learn estimators as torch modules: their network, loss and targets.

scikit-learn keeps the weights of a network or generalised linear model in arrays.
`to_torch` copies them into a module that computes, in float64, what the estimator
computes *before* its link function, so that everything that measures a torch network
measures these estimators too. One row per type and loss, with ``z`` what the module
returns, ``t`` the target and ``mu`` the prediction:

==================  ===========================  =======================================
estimator           loss                         criterion
==================  ===========================  =======================================
LinearRegression,   squared error                ``MSELoss``
Ridge, RidgeCV
LogisticRegression  two classes                  ``BCEWithLogitsLoss``
\                   more classes                 ``CrossEntropyLoss``
SGDClassifier       log_loss                     ``BCEWithLogitsLoss``
\                   modified_huber, …            `MarginLoss` of the margin ``(2t - 1) z``
SGDRegressor        squared_error                ``MSELoss``
\                   huber                        ``HuberLoss(delta=epsilon)``
\                   squared_epsilon_insensitive  `SquaredEpsilonInsensitiveLoss`
MLPClassifier       softmax outputs              ``CrossEntropyLoss``
\                   logistic outputs             ``BCEWithLogitsLoss``
MLPRegressor        squared_error                ``MSELoss``
\                   poisson, ``mu = exp(z)``     ``PoissonNLLLoss(log_input=True)``
==================  ===========================  =======================================

The criteria are torch's, with torch's constants, so that values compare across models:
a squared error has no factor 1/2, several outputs (one-vs-rest classes, labels, targets)
are averaged where scikit-learn sums some of them, and the Poisson loss leaves out what
depends on the targets alone. Only losses are translated: neither weight decay nor sample
weights are in the criterion, class weights are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    Ridge,
    RidgeCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_is_fitted
from torch import nn

from relflat_sk._models.sklearn_losses import (
    MLP_REGRESSION_LOSSES,
    SGD_CLASSIFICATION_LOSSES,
    SGD_REGRESSION_LOSSES,
    own_loss,
)

__all__ = ["TorchModel", "to_torch"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TorchModel:
    """What a fitted estimator computes, in torch.

    Attributes
    ----------
    module : nn.Module
        Maps float64 inputs of shape ``(n, n_features)`` to outputs of shape ``(n, k)``:
        logits, linear predictors or regression outputs, before any link function. Its
        last layer is a linear one, and that layer's output is the module's.
    criterion : nn.Module
        The loss the estimator was fitted with, as ``criterion(outputs, targets)``.
    encode_target : callable
        Turns labels ``y`` as the user has them into the criterion's targets, an array:
        class indices (int64, of shape ``(n,)``) for ``CrossEntropyLoss``, floats of
        shape ``(n, k)`` otherwise.
    """

    module: nn.Module
    criterion: nn.Module
    encode_target: Callable[[Any], Array]


def to_torch(estimator: Any, y: Any = None) -> TorchModel:
    """Copy a fitted scikit-learn estimator into a torch module with its loss.

    Parameters
    ----------
    estimator : estimator
        A fitted estimator of one of the types in the module's table, or of a subclass.
    y : array-like of shape (n,), default=None
        Labels that are to be measured on. Only ``class_weight="balanced"`` asks for them:
        the weights are made from their frequencies, since fitted estimators do not keep
        those of their training labels. On the training labels they are what the estimator
        was fitted with.

    Returns
    -------
    TorchModel
        Module, criterion and target encoding; nothing in it shares memory with the
        estimator, and making it draws no random number.

    Raises
    ------
    TypeError
        If the estimator is of any other type.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.
    ValueError
        If the estimator's loss is piecewise linear, or its class weights are "balanced"
        and there is no ``y``, or weigh the first of two classes with 0.

    Notes
    -----
    Class weights ``c`` scale the loss of a sample of class ``i`` by ``c_i``.
    ``CrossEntropyLoss`` divides by the sum of the samples' weights, as `LogisticRegression`
    does; ``BCEWithLogitsLoss`` and `MarginLoss` divide by the number of samples.

    Examples
    --------
    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = [[0.0], [1.0], [2.0], [3.0]], ["no", "no", "yes", "yes"]
    >>> estimator = LogisticRegression().fit(X, y)
    >>> model = to_torch(estimator)
    >>> model.criterion
    BCEWithLogitsLoss()
    >>> model.encode_target(y).ravel().tolist()
    [0.0, 0.0, 1.0, 1.0]
    >>> logits = model.module(torch.tensor(X, dtype=torch.float64))
    >>> bool(np.isclose(logits[0].sigmoid().item(), estimator.predict_proba(X)[0, 1]))
    True
    """
    if _convert.dispatch(type(estimator)) is not _convert.registry[object]:
        check_is_fitted(estimator)
    return _convert(estimator, y)


# -- one converter per type -----------------------------------------------------------------


@singledispatch
def _convert(estimator: Any, y: Any) -> TorchModel:
    """Refuse whatever has no converter below."""
    known = sorted(kind.__name__ for kind in _convert.registry if kind is not object)
    raise TypeError(
        f"a {type(estimator).__name__} is not a network that can be read from its "
        f"attributes; of scikit-learn's estimators these are: {', '.join(known)}."
    )


@_convert.register(LinearRegression)
@_convert.register(Ridge)
@_convert.register(RidgeCV)
def _least_squares(estimator: Any, y: Any) -> TorchModel:
    return _linear_regressor(estimator, nn.MSELoss())


@_convert.register(SGDRegressor)
def _sgd_regressor(estimator: Any, y: Any) -> TorchModel:
    return _linear_regressor(estimator, own_loss(estimator, SGD_REGRESSION_LOSSES)(estimator))


@_convert.register(LogisticRegression)
def _logistic_regression(estimator: Any, y: Any) -> TorchModel:
    classes = estimator.classes_
    module = _network([(estimator.coef_, estimator.intercept_)])
    weights = _class_weights(estimator, y)
    if len(classes) == 2:
        return TorchModel(
            module,
            _two_class_criterion(nn.BCEWithLogitsLoss, weights),
            partial(_binary_targets, classes=classes),
        )
    return TorchModel(
        module,
        nn.CrossEntropyLoss(weight=None if weights is None else torch.as_tensor(weights)),
        partial(_class_indices, classes=classes),
    )


@_convert.register(SGDClassifier)
def _sgd_classifier(estimator: Any, y: Any) -> TorchModel:
    classes = estimator.classes_
    criterion = own_loss(estimator, SGD_CLASSIFICATION_LOSSES)(estimator)
    weights = _class_weights(estimator, y)
    module = _network([(estimator.coef_, estimator.intercept_)])
    if len(classes) == 2:
        return TorchModel(
            module,
            _two_class_criterion(criterion, weights),
            partial(_binary_targets, classes=classes),
        )
    # one against the rest: class i weighs c_i in its own problem, the rest weigh 1
    pos_weight = None if weights is None else torch.as_tensor(weights)
    return TorchModel(module, criterion(pos_weight=pos_weight), partial(_one_hot, classes=classes))


@_convert.register(MLPClassifier)
def _mlp_classifier(estimator: Any, y: Any) -> TorchModel:
    module = _mlp(estimator)
    if estimator.out_activation_ == "softmax":
        encode = partial(_class_indices, classes=estimator.classes_)
        return TorchModel(module, nn.CrossEntropyLoss(), encode)
    if estimator.n_outputs_ == 1:
        encode = partial(_binary_targets, classes=estimator.classes_)
    else:
        encode = partial(_label_indicators, n_labels=estimator.n_outputs_)
    return TorchModel(module, nn.BCEWithLogitsLoss(), encode)


@_convert.register(MLPRegressor)
def _mlp_regressor(estimator: Any, y: Any) -> TorchModel:
    return TorchModel(
        _mlp(estimator),
        own_loss(estimator, MLP_REGRESSION_LOSSES)(estimator),
        partial(_regression_targets, n_outputs=estimator.n_outputs_),
    )


def _linear_regressor(estimator: Any, criterion: nn.Module) -> TorchModel:
    layer = _linear(estimator.coef_, estimator.intercept_)
    encode = partial(_regression_targets, n_outputs=layer.out_features)
    return TorchModel(nn.Sequential(layer).eval(), criterion, encode)


def _mlp(estimator: Any) -> nn.Sequential:
    # scikit-learn multiplies from the right: its weights are torch's transposed
    layers = [
        (coef.T, intercept)
        for coef, intercept in zip(estimator.coefs_, estimator.intercepts_, strict=True)
    ]
    return _network(layers, MLP_ACTIVATIONS[estimator.activation])


# -- modules --------------------------------------------------------------------------------


MLP_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}


def _network(
    layers: list[tuple[Any, Any]], activation: Callable[[], nn.Module] = nn.Identity
) -> nn.Sequential:
    """Stack linear layers with these (weight, bias), an activation between any two."""
    modules: list[nn.Module] = []
    for weight, bias in layers:
        modules += [_linear(weight, bias), activation()]
    return nn.Sequential(*modules[:-1]).eval()


def _linear(coef: Any, intercept: Any) -> nn.Linear:
    """Make a linear layer of (d, m) or (m,) coefficients and d intercepts, or one for all."""
    dense = coef.toarray() if issparse(coef) else coef  # after estimator.sparsify()
    weight = np.array(dense, dtype=np.float64, ndmin=2)
    d, m = weight.shape
    bias = np.array(np.broadcast_to(np.ravel(intercept), (d,)), dtype=np.float64)
    layer = nn.Linear(m, d, device="meta")  # draws no random numbers for values not kept
    layer.weight = nn.Parameter(torch.from_numpy(weight))
    layer.bias = nn.Parameter(torch.from_numpy(bias))
    return layer


# -- class weights --------------------------------------------------------------------------


def _class_weights(estimator: Any, y: Any) -> Array | None:
    """Compute the weight of each class, in the order of ``classes_``, or None for all 1."""
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
    return _balanced_weights(np.bincount(_class_indices(y, classes), minlength=len(classes)))


def _balanced_weights(counts: Array) -> Array:
    """Weigh classes that occur inversely to their counts, the samples' mean weight being 1."""
    present = counts > 0
    weights = np.ones(len(counts))  # of classes without samples: any number will do
    weights[present] = counts.sum() / (present.sum() * counts[present])
    return weights


def _two_class_criterion(criterion: Callable[..., nn.Module], weights: Array | None) -> nn.Module:
    """Give a criterion of one output the weights of its negative and positive class."""
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


def _class_indices(y: Any, classes: Array) -> Array:
    """Find each label among the classes, which may be of any type."""
    index = {label: i for i, label in enumerate(classes.tolist())}
    labels = column_or_1d(y).tolist()
    try:
        return np.array([index[label] for label in labels], dtype=np.int64)
    except KeyError:
        unseen = sorted({label for label in labels if label not in index}, key=str)
        raise ValueError(
            f"y has labels the estimator was not fitted on, such as {unseen[:5]}; it knows "
            f"{list(index)}."
        ) from None


def _binary_targets(y: Any, classes: Array) -> Array:
    return _class_indices(y, classes).astype(np.float64)[:, None]


def _one_hot(y: Any, classes: Array) -> Array:
    return np.eye(len(classes))[_class_indices(y, classes)]


def _label_indicators(y: Any, n_labels: int) -> Array:
    """Check a label indicator matrix, sparse or dense."""
    dense = y.toarray() if issparse(y) else y
    indicators: Array = check_array(dense, dtype=np.float64, input_name="y")
    if indicators.shape[1] != n_labels or not np.isin(indicators, [0, 1]).all():
        raise ValueError(
            f"y has shape {indicators.shape} and values {np.unique(indicators)[:5]}, expected "
            f"a label indicator matrix of shape (n, {n_labels}) with values 0 and 1."
        )
    return indicators


def _regression_targets(y: Any, n_outputs: int) -> Array:
    """Bring finite regression targets into shape (n, n_outputs)."""
    targets: Array = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    columns = targets[:, None] if targets.ndim == 1 else targets
    if columns.shape[1] != n_outputs:
        raise ValueError(
            f"y has shape {targets.shape}, but the estimator was fitted on {n_outputs} "
            f"target{'s' if n_outputs > 1 else ''}: expected (n, {n_outputs})."
        )
    return columns

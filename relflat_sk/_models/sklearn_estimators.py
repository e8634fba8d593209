r"""Fitted scikit-learn estimators as torch modules: their network, loss and targets.

scikit-learn keeps the weights of a network or generalised linear model in arrays. `to_torch`
copies these weights into a module, in float64. The module computes what the estimator
computes *before* its link function, so that all measures of torch networks apply to these
estimators too. The table has one row per type and loss; ``z`` is the module's output, ``t``
the target and ``mu`` the prediction:

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

The criteria are torch's, with torch's constants, so that values compare across models. A
squared error has no factor 1/2. Several outputs (one-vs-rest classes, labels, targets) are
averaged, where scikit-learn sums some of them. The Poisson loss leaves out the terms that
depend on the targets alone. The criterion includes class weights, but neither weight decay
nor sample weights.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any

import numpy as np
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
from sklearn.utils.validation import check_is_fitted
from torch import nn

from relflat_sk._models.sklearn_losses import (
    MLP_REGRESSION_LOSSES,
    SGD_CLASSIFICATION_LOSSES,
    SGD_REGRESSION_LOSSES,
    fitted_loss,
)
from relflat_sk._models.sklearn_targets import (
    Array,
    binary_targets,
    class_indices,
    class_weights,
    label_indicators,
    one_hot,
    regression_targets,
    two_class_criterion,
)

__all__ = ["TorchModel", "to_torch"]


@dataclass(frozen=True)
class TorchModel:
    """A fitted estimator in torch: its network, its loss and the encoding of its targets."""

    module: nn.Module
    criterion: nn.Module
    encode_target: Callable[[Any], Array]


def to_torch(estimator: Any, y: Any = None) -> TorchModel:
    """Copy a fitted scikit-learn estimator into a torch module with its loss. Shapes: `y` (n,)."""
    if _convert.dispatch(type(estimator)) is not _convert.registry[object]:
        check_is_fitted(estimator)
    return _convert(estimator, y)


# -- one converter per type -----------------------------------------------------------------


@singledispatch
def _convert(estimator: Any, y: Any) -> TorchModel:
    """Refuse estimators that have no converter below."""
    name = type(estimator).__name__
    known = sorted(kind.__name__ for kind in _convert.registry if kind is not object)
    raise TypeError(
        f"a model of type {name} is not a network that can be read from its attributes; of "
        f"scikit-learn's estimators these are: {', '.join(known)}."
    )


@_convert.register(LinearRegression)
@_convert.register(Ridge)
@_convert.register(RidgeCV)
def _least_squares(estimator: Any, y: Any) -> TorchModel:
    return _linear_regressor(estimator, nn.MSELoss())


@_convert.register(SGDRegressor)
def _sgd_regressor(estimator: Any, y: Any) -> TorchModel:
    return _linear_regressor(estimator, fitted_loss(estimator, SGD_REGRESSION_LOSSES)(estimator))


@_convert.register(LogisticRegression)
def _logistic_regression(estimator: Any, y: Any) -> TorchModel:
    """Use one logit for two classes, and softmax for more."""
    weights = class_weights(estimator, y)
    if len(estimator.classes_) == 2:
        return _two_classes(estimator, nn.BCEWithLogitsLoss, weights)
    criterion = nn.CrossEntropyLoss(weight=None if weights is None else torch.as_tensor(weights))
    encode = partial(class_indices, classes=estimator.classes_)
    return TorchModel(_linear_network(estimator), criterion, encode)


@_convert.register(SGDClassifier)
def _sgd_classifier(estimator: Any, y: Any) -> TorchModel:
    """Use one score for two classes, and one score per class, against the rest, for more."""
    criterion = fitted_loss(estimator, SGD_CLASSIFICATION_LOSSES)(estimator)
    weights = class_weights(estimator, y)
    if len(estimator.classes_) == 2:
        return _two_classes(estimator, criterion, weights)
    # class i weighs c_i in its own problem, in which all other classes weigh 1
    pos_weight = None if weights is None else torch.as_tensor(weights)
    encode = partial(one_hot, classes=estimator.classes_)
    return TorchModel(_linear_network(estimator), criterion(pos_weight=pos_weight), encode)


def _two_classes(
    estimator: Any, criterion: Callable[..., nn.Module], weights: Array | None
) -> TorchModel:
    """Convert a linear classifier of two classes, which has one output."""
    encode = partial(binary_targets, classes=estimator.classes_)
    return TorchModel(_linear_network(estimator), two_class_criterion(criterion, weights), encode)


@_convert.register(MLPClassifier)
def _mlp_classifier(estimator: Any, y: Any) -> TorchModel:
    """Use softmax for classes, and one logit for two classes or for each of several labels."""
    module = _mlp(estimator)
    if estimator.out_activation_ == "softmax":
        encode = partial(class_indices, classes=estimator.classes_)
        return TorchModel(module, nn.CrossEntropyLoss(), encode)
    if estimator.n_outputs_ == 1:
        encode = partial(binary_targets, classes=estimator.classes_)
    else:
        encode = partial(label_indicators, n_labels=estimator.n_outputs_)
    return TorchModel(module, nn.BCEWithLogitsLoss(), encode)


@_convert.register(MLPRegressor)
def _mlp_regressor(estimator: Any, y: Any) -> TorchModel:
    return TorchModel(
        _mlp(estimator),
        fitted_loss(estimator, MLP_REGRESSION_LOSSES)(estimator),
        partial(regression_targets, n_outputs=estimator.n_outputs_),
    )


def _linear_regressor(estimator: Any, criterion: nn.Module) -> TorchModel:
    encode = partial(regression_targets, n_outputs=len(np.atleast_2d(estimator.coef_)))
    return TorchModel(_linear_network(estimator), criterion, encode)


def _linear_network(estimator: Any) -> nn.Sequential:
    return _network([(estimator.coef_, estimator.intercept_)])


def _mlp(estimator: Any) -> nn.Sequential:
    """Copy the layers of an MLP."""
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
    """Stack linear layers with these (weight, bias), an activation between any two.

    The layers have the names of those in `relflat_sk.MLP`.
    """
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (weight, bias) in enumerate(layers[:-1]):
        modules[f"hidden{i}"] = _linear(weight, bias)
        modules[f"activation{i}"] = activation()
    modules["output"] = _linear(*layers[-1])
    return nn.Sequential(modules).eval()


def _linear(coef: Any, intercept: Any) -> nn.Linear:
    """Make a linear layer from (d, m) or (m,) coefficients and d intercepts, or one for all."""
    dense = coef.toarray() if issparse(coef) else coef  # after estimator.sparsify()
    weight = np.array(dense, dtype=np.float64, ndmin=2)
    d, m = weight.shape
    bias = np.array(np.broadcast_to(np.ravel(intercept), (d,)), dtype=np.float64)
    layer = nn.Linear(m, d, device="meta")  # no random numbers for initial weights
    layer.weight = nn.Parameter(torch.from_numpy(weight))
    layer.bias = nn.Parameter(torch.from_numpy(bias))
    return layer

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
Ridge, ElasticNet,
Lasso, their CVs
RidgeClassifier,    squared error of -1 and 1    ``MSELoss``
its CV
HuberRegressor      huber                        ``HuberLoss(delta=epsilon * scale_)``
PoissonRegressor    ``mu = exp(z)``              ``PoissonNLLLoss(log_input=True)``
LogisticRegression  two classes                  ``BCEWithLogitsLoss``, divided by the sum
\                                                of class weights if there are any
\                   more classes                 ``CrossEntropyLoss``
SGDClassifier       log_loss                     ``BCEWithLogitsLoss``
SGDRegressor        squared_error                ``MSELoss``
\                   huber                        ``HuberLoss(delta=epsilon)``
MLPClassifier       softmax outputs              ``CrossEntropyLoss``
\                   logistic outputs             ``BCEWithLogitsLoss``
MLPRegressor        squared_error                ``MSELoss``
\                   poisson, ``mu = exp(z)``     ``PoissonNLLLoss(log_input=True)``
==================  ===========================  =======================================

The criteria are torch's, with torch's constants, so that values compare across models. A
squared error has no factor 1/2. Losses of several classes against the rest, and of several
labels, are summed, as scikit-learn sums them; those of several targets are averaged. The losses
of Poisson models leave out the terms that depend on the targets alone. The
criterion includes class weights, but neither weight decay nor sample weights.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.linear_model import (
    ElasticNet,
    ElasticNetCV,
    HuberRegressor,
    Lasso,
    LassoCV,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from relflat_sk._losses.table import WeightedLogisticLoss

Array = npt.NDArray[Any]
LossT = TypeVar("LossT")

# -- losses --------------------------------------------------------------------------------


def _fitted_loss(estimator: Any, losses: Mapping[str, LossT]) -> LossT:
    """Look up the loss that an estimator was fitted with."""
    if estimator.loss not in losses:
        raise TypeError(
            f"{type(estimator).__name__}(loss={estimator.loss!r}) cannot be measured: its loss is "
            f"none of torch's criteria. Losses that work: {', '.join(losses)}."
        )
    return losses[estimator.loss]


# from the types of regressors to functions of the estimator that return its criterion
_REGRESSORS: dict[type, Callable[[Any], nn.Module]] = {
    **dict.fromkeys(
        (LinearRegression, Ridge, RidgeCV, ElasticNet, ElasticNetCV, Lasso, LassoCV),
        lambda estimator: nn.MSELoss(),
    ),
    # its loss is 2 / scale_ times torch's
    HuberRegressor: lambda estimator: nn.HuberLoss(delta=estimator.epsilon * estimator.scale_),
    PoissonRegressor: lambda estimator: nn.PoissonNLLLoss(log_input=True),
    SGDRegressor: lambda estimator: _fitted_loss(
        estimator,
        {"huber": nn.HuberLoss(delta=estimator.epsilon), "squared_error": nn.MSELoss()},
    ),
    MLPRegressor: lambda estimator: _fitted_loss(
        estimator, {"poisson": nn.PoissonNLLLoss(log_input=True), "squared_error": nn.MSELoss()}
    ),
}


# -- class weights --------------------------------------------------------------------------


# whether this scikit-learn balances classes by the samples' weights, which SGD never does
_COUNTS_WEIGHTS = "sample_weight" in signature(compute_class_weight).parameters


def class_weights(estimator: Any, y: Any, sample_weight: Any = None) -> Array | None:
    """Compute the weight of each class of a fitted classifier: (n_classes,)."""
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
    weighs = _COUNTS_WEIGHTS and isinstance(estimator, LogisticRegression)
    indices = class_indices(y, classes)
    counts = np.bincount(indices, sample_weight if weighs else None, minlength=len(classes))
    present = counts > 0
    weights = np.ones(len(counts))  # a class without samples may have any weight
    weights[present] = counts.sum() / (present.sum() * counts[present])  # 1 in the samples' mean
    return weights


# -- targets --------------------------------------------------------------------------------


def class_indices(y: Any, classes: Array) -> Array:
    """Replace labels of any type by their positions among the classes: (n,)."""
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


def class_columns(y: Any, classes: Array) -> Array:
    """Turn labels into one column of 0 and 1 for each class, or one for two classes: (n, k)."""
    indices = class_indices(y, classes)
    return np.eye(len(classes))[indices] if len(classes) > 2 else indices.astype(float)[:, None]


def label_indicators(y: Any, n_labels: int) -> Array:
    """Check a label indicator matrix, sparse or dense: (n, n_labels)."""
    dense = y.toarray() if issparse(y) else y
    indicators: Array = check_array(dense, dtype=np.float64, input_name="y")
    if indicators.shape[1] != n_labels or not np.isin(indicators, [0, 1]).all():
        raise ValueError(
            f"y has shape {indicators.shape} and values {np.unique(indicators)[:5]}, expected "
            f"a label indicator matrix of shape (n, {n_labels}) with values 0 and 1."
        )
    return indicators


def signs(y: Any, classes: Array) -> Array:
    """Turn labels, or a label indicator matrix, into columns of -1 and 1: (n, k)."""
    is_matrix = len(np.shape(y)) == 2 and np.shape(y)[1] > 1
    columns = label_indicators(y, len(classes)) if is_matrix else class_columns(y, classes)
    return 2 * columns - 1


def regression_targets(y: Any) -> Array:
    """Bring regression targets, (n,) or (n, n_outputs), into columns."""
    targets: Array = check_array(y, ensure_2d=False, dtype=np.float64, input_name="y")
    return targets[:, None] if targets.ndim == 1 else targets


@dataclass(frozen=True)
class TorchModel:
    """A fitted estimator in torch: its network, its loss and the encoding of its targets."""

    module: nn.Module
    criterion: nn.Module
    encode_target: Callable[[Any], Array]


def to_torch(estimator: Any, y: Any = None, sample_weight: Any = None) -> TorchModel:
    """Copy a fitted scikit-learn estimator into a torch module with its loss."""
    kinds = {**_REGRESSORS, **_CLASSIFIERS}
    kind = next((kind for kind in type(estimator).__mro__ if kind in kinds), None)
    if kind is None:
        raise TypeError(
            f"a model of type {type(estimator).__name__} is not a network that can be measured. "
            "Pass a torch.nn.Module, a fitted skorch net, a Pipeline or search around one, or one "
            "of scikit-learn's estimators that can be measured, which are: "
            f"{', '.join(sorted(kind.__name__ for kind in kinds))}."
        )
    check_is_fitted(estimator)
    if kind in _CLASSIFIERS:
        return _CLASSIFIERS[kind](estimator, y, sample_weight)
    return TorchModel(_to_module(estimator), _REGRESSORS[kind](estimator), regression_targets)


# -- classifiers ----------------------------------------------------------------------------


def _linear_classifier(estimator: Any, *data: Any) -> TorchModel:
    """Use one output for two classes, and softmax or one output per class for more."""
    is_logistic = isinstance(estimator, LogisticRegression)
    make: Any = nn.BCEWithLogitsLoss
    if not is_logistic:
        make = _fitted_loss(estimator, {"log_loss": make})
    array, classes = class_weights(estimator, *data), estimator.classes_
    # scikit-learn before 1.8 has other losses as well
    kind = getattr(estimator, "multi_class", "auto")
    against_rest = is_logistic and (kind == "ovr" or estimator.solver == "liblinear")
    if against_rest if len(classes) > 2 else kind == "multinomial":
        raise TypeError(
            f"{type(estimator).__name__}(solver={estimator.solver!r}, multi_class={kind!r}) of "
            f"{len(classes)} classes cannot be measured. Fit with the defaults of both."
        )
    weights = None if array is None else torch.as_tensor(array)
    encode = partial(class_columns, classes=classes)
    if len(classes) == 2 and weights is not None:
        weighted = WeightedLogisticLoss if is_logistic else make  # SGD divides by their number
        criterion = weighted(weight=weights[:1], pos_weight=weights[1:] / weights[0])
    elif len(classes) == 2:
        criterion = make()
    elif is_logistic:
        criterion, encode = nn.CrossEntropyLoss(weights), partial(class_indices, classes=classes)
    else:
        # class i weighs c_i in its own problem, in which all other classes weigh 1
        criterion = make(weight=_sum_of_outputs(len(classes)), pos_weight=weights)
    return TorchModel(_to_module(estimator), criterion, encode)


def _sum_of_outputs(n: int) -> Tensor:
    """Return the weights by which torch's mean over outputs becomes their sum."""
    return torch.full((n,), float(n), dtype=torch.float64)


def _ridge_classifier(estimator: Any, *data: Any) -> TorchModel:
    """Use the squared error of signs, which is what it was fitted by."""
    if estimator.class_weight is not None:
        raise ValueError(
            f"{type(estimator).__name__}(class_weight={estimator.class_weight!r}) weighs samples: "
            "measure it without class_weight, and pass these weights as sample_weight."
        )
    encode = partial(signs, classes=estimator.classes_)
    return TorchModel(_to_module(estimator), nn.MSELoss(), encode)


def _mlp_classifier(estimator: Any, *data: Any) -> TorchModel:
    """Use softmax for classes, and one logit for two classes or for each of several labels."""
    module = _to_module(estimator)
    if estimator.out_activation_ == "softmax":
        encode = partial(class_indices, classes=estimator.classes_)
        return TorchModel(module, nn.CrossEntropyLoss(), encode)
    encode = partial(class_columns, classes=estimator.classes_)
    if estimator.n_outputs_ > 1:
        encode = partial(label_indicators, n_labels=estimator.n_outputs_)
    return TorchModel(module, nn.BCEWithLogitsLoss(_sum_of_outputs(estimator.n_outputs_)), encode)


# from the types of classifiers to functions of the estimator, of labels and of sample weights
_CLASSIFIERS: dict[type, Callable[..., TorchModel]] = {
    LogisticRegression: _linear_classifier,
    RidgeClassifier: _ridge_classifier,
    RidgeClassifierCV: _ridge_classifier,
    SGDClassifier: _linear_classifier,
    MLPClassifier: _mlp_classifier,
}


# -- modules --------------------------------------------------------------------------------


MLP_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
}


def _to_module(estimator: Any) -> nn.Sequential:
    """Copy the layers of an MLP, or the single one of a linear model."""
    # They have the names of those in `relflat_sk.MLP`.
    if hasattr(estimator, "coefs_"):
        # scikit-learn multiplies from the right: its weights are torch's transposed
        weights = [coef.T for coef in estimator.coefs_]
        biases, activation = estimator.intercepts_, MLP_ACTIVATIONS[estimator.activation]
    else:
        weights, biases, activation = [estimator.coef_], [estimator.intercept_], nn.Identity
    modules: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        if i == len(weights) - 1:
            modules["output"] = _linear(weight, bias)
        else:
            modules |= {f"hidden{i}": _linear(weight, bias), f"activation{i}": activation()}
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

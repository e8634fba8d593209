"""From what users hand in to a network with its loss and data.

`to_network` is the one place that knows bare modules, skorch nets, scikit-learn's
estimators, and what wraps them. A new kind of model is one more registration.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted
from skorch import NeuralNet, NeuralNetClassifier
from skorch.dataset import Dataset as SkorchDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from relflat_sk._losses import Loss, ProbabilityNLLLoss, as_criterion
from relflat_sk._models.sklearn_estimators import to_torch
from relflat_sk._network import Batches, Network, make_batches

__all__ = [
    "CRITERION_ALONE",
    "DataOptions",
    "final_estimator",
    "skorch_batches",
    "skorch_network",
    "to_network",
]


@dataclass(frozen=True)
class DataOptions:
    """How to run a model over data, whatever the model is."""

    criterion: Any = None
    batch_size: int = 1024
    device: Any = None
    sample_weight: Any = None

    def batches(self, X: Any, y: Any) -> Batches:
        """Cut the data into batches."""
        return make_batches(X, y, batch_size=self.batch_size, sample_weight=self.sample_weight)

    def loss(self, own: Any) -> Loss:
        """Take the criterion asked for, or the model's own."""
        return Loss(as_criterion(own if self.criterion is None else self.criterion))


@singledispatch
def to_network(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    """Find the network in a model, its loss, and the data as the network sees it.

    Parameters
    ----------
    model : nn.Module, skorch net, scikit-learn estimator, pipeline or search object
    X, y : array-like
        As the model takes them; y may be None.
    options : DataOptions

    Returns
    -------
    Network

    Raises
    ------
    TypeError
        If there is no network in the model; lists what works.
    sklearn.exceptions.NotFittedError
        If the model is not fitted.
    ValueError
        If data and model do not fit, or a bare module comes without a criterion.
    """
    inner = getattr(model, "best_estimator_", None)
    if inner is not None:
        return to_network(inner, X, y, options)
    try:
        converted = to_torch(model, y)
    except TypeError as error:
        raise TypeError(
            f"{error} Models that can be measured: a torch.nn.Module, a fitted skorch net, one "
            "of these estimators, and a fitted Pipeline, search object (GridSearchCV, ...) or "
            "TransformedTargetRegressor around one of them."
        ) from None
    if hasattr(X, "shape") and len(X.shape) == 2 and X.shape[1] != model.n_features_in_:
        raise ValueError(
            f"X has {X.shape[1]} features, but {type(model).__name__} was fitted with "
            f"{model.n_features_in_}."
        )
    targets = None if y is None else converted.encode_target(y)
    module = converted.module if options.device is None else converted.module.to(options.device)
    return Network(module, options.loss(converted.criterion), options.batches(X, targets))


@to_network.register
def _(model: nn.Module, X: Any, y: Any, options: DataOptions) -> Network:
    if options.criterion is None:
        raise ValueError(
            "criterion is needed for a bare module, which does not know its loss: pass "
            "criterion=torch.nn.CrossEntropyLoss(), say, or the fitted skorch net."
        )
    module = getattr(model, "_orig_mod", model)  # a compiled module runs without our hooks
    if options.device is not None:
        here = next((p.device for p in module.parameters()), None)
        if here is not None and here != torch.device(options.device):
            module = copy.deepcopy(module).to(options.device)
    return Network(module, options.loss(None), options.batches(X, y))


@to_network.register
def _(model: NeuralNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    return skorch_network(model, skorch_batches(model, X, y, options), options)


@to_network.register
def _(model: Pipeline, X: Any, y: Any, options: DataOptions) -> Network:
    for _name, step in model.steps[:-1]:
        if step not in {None, "passthrough"} and hasattr(step, "transform"):
            X = step.transform(X)  # samplers, which have none, work at fit time only
    return to_network(model.steps[-1][1], X, y, options)


@to_network.register(BaseSearchCV)
@to_network.register(FixedThresholdClassifier)
@to_network.register(TunedThresholdClassifierCV)
@to_network.register(TransformedTargetRegressor)
def _(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    if isinstance(model, TransformedTargetRegressor) and y is not None:
        check_is_fitted(model)
        columns = np.asarray(y, dtype=np.float64)
        y = model.transformer_.transform(columns.reshape(len(columns), -1))
    return to_network(_inner(model), X, y, options)


def _inner(model: Any) -> Any:
    for attribute in ("best_estimator_", "regressor_", "estimator_"):
        if hasattr(model, attribute):
            return getattr(model, attribute)
    raise NotFittedError(
        f"this {type(model).__name__} holds no fitted estimator: call fit first"
        + (", with refit=True." if isinstance(model, BaseSearchCV) else ".")
    )


def final_estimator(model: Any) -> Any:
    """Unwrap pipelines and search objects down to the estimator that holds the network."""
    if isinstance(model, Pipeline):
        return final_estimator(model.steps[-1][1])
    if isinstance(model, _WRAPPERS) or getattr(model, "best_estimator_", None) is not None:
        return final_estimator(_inner(model))
    return model


_WRAPPERS = (
    BaseSearchCV,
    FixedThresholdClassifier,
    TunedThresholdClassifierCV,
    TransformedTargetRegressor,
)


def skorch_network(net: NeuralNet, batches: Batches, options: DataOptions) -> Network:
    """Read a fitted skorch net: its module, how it runs, and the loss that it minimises."""
    if options.device is not None and torch.device(options.device) != torch.device(net.device):
        net = copy.deepcopy(net)
        net.module_.to(options.device)
        net.criterion_.to(options.device)
        net.device = options.device
    module = getattr(net.module_, "_orig_mod", net.module_)

    def forward(x: Any) -> Any:
        compiled, net.module_ = net.module_, module
        try:
            return net.infer(x)
        finally:
            net.module_ = compiled

    run = net.infer if module is net.module_ else forward
    return Network(module, options.loss(_net_criterion(net)), batches, run)


# implementations of get_loss that, outside training, return the criterion and nothing else
CRITERION_ALONE: set[Any] = {NeuralNetClassifier.get_loss, NeuralNet.get_loss}


def _net_criterion(net: NeuralNet) -> Any:
    criterion = getattr(net.criterion_, "_orig_mod", net.criterion_)  # of a compiled one
    get_loss = type(net).get_loss
    if get_loss is NeuralNetClassifier.get_loss and type(criterion) is nn.NLLLoss:
        # skorch's classifiers take the logarithm of the module's probabilities
        return ProbabilityNLLLoss(
            weight=criterion.weight,
            ignore_index=criterion.ignore_index,
            reduction=criterion.reduction,
        )
    if get_loss in CRITERION_ALONE:
        return criterion

    def own_loss(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = net.get_loss(output, target, training=False)
        return loss

    own_loss.reduction = getattr(criterion, "reduction", "mean")  # type: ignore[attr-defined]
    return own_loss


def skorch_batches(net: NeuralNet, X: Any, y: Any, options: DataOptions) -> Batches:
    """Cut data into batches as the net would, but without its loader where it adds nothing."""
    plain = isinstance(X, np.ndarray | Tensor | Mapping | tuple) or issparse(X)
    params = net.get_params_for("iterator_valid")
    usual_loader = net.iterator_valid is DataLoader and not (params.keys() - {"batch_size"})
    if plain and net.dataset is SkorchDataset and usual_loader:
        return options.batches(X, y)
    if options.sample_weight is not None:
        raise ValueError("sample_weight needs X and y as arrays, not a dataset.")
    dataset = net.get_dataset(X, y)
    if len(dataset) == 0:
        raise ValueError("X has no samples, and flatness is a mean over samples.")
    return make_batches(net.iterator_valid(dataset, **{**params, "batch_size": options.batch_size}))

"""Any kind of trained model, as a network with its loss and data.

`to_network` is the only function that knows all kinds: bare modules, skorch nets, scikit-learn's
estimators, and the estimators that wrap them. A new kind of model needs one more registration.
"""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import singledispatch
from itertools import chain
from typing import Any

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.model_selection._search import BaseSearchCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import _check_feature_names, check_is_fitted
from skorch import NeuralNet
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from relflat_sk._checks import is_integer
from relflat_sk._models.language_models import is_causal_language_model, next_tokens
from relflat_sk._models.options import DataOptions
from relflat_sk._models.sklearn_estimators import to_torch
from relflat_sk._models.skorch_nets import skorch_batches, skorch_network
from relflat_sk._models.transformed_rows import transform
from relflat_sk._network import Layer, Network, Source, check_stored, find_layer, join

__all__ = [
    "final_estimator",
    "joined",
    "name_layer",
    "name_layers",
    "to_network",
    "to_network_with_source",
]


@singledispatch
def to_network(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    """Find the network in a model, its loss, and the data as the network takes them."""
    inner = getattr(model, "best_estimator_", None)  # of a search that is not scikit-learn's
    if inner is not None:
        return to_network(inner, X, y, options)
    if isinstance(model, type):
        raise TypeError(f"pass a fitted instance, not the class {model.__name__}.")
    if isinstance(model, Mapping):
        raise TypeError(
            f"pass a model, not its weights in an object of type {type(model).__name__}: load them "
            "into their module, by module.load_state_dict(weights), and pass the module."
        )
    try:
        converted = to_torch(model, y)
    except TypeError as error:
        raise TypeError(
            f"{error} Models that can be measured: a torch.nn.Module, a fitted skorch net, one "
            "of these estimators, and a fitted Pipeline, search object (GridSearchCV, ...) or "
            "TransformedTargetRegressor around one of them."
        ) from None
    if getattr(X, "ndim", 2) == 1:
        raise ValueError(
            f"X is 1-D, of shape {tuple(X.shape)}, but {type(model).__name__} takes rows of "
            "features. For a single sample, pass X.reshape(1, -1), with y as an array of one label."
        )
    _check_feature_names(model, X, reset=False)
    if hasattr(X, "shape") and len(X.shape) == 2 and X.shape[1] != model.n_features_in_:
        raise ValueError(
            f"X has {X.shape[1]} features, but {type(model).__name__} was fitted with "
            f"{model.n_features_in_}."
        )
    targets = None if y is None else converted.encode_target(y)
    module = converted.module if options.device is None else converted.module.to(options.device)
    return Network(module, options.loss(converted.criterion), options.batches(X, targets))


def to_network_with_source(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    """Do the same as `to_network`, for measures that may be functions of model and data."""
    source = Source(model, X, y, options.sample_weight)
    return replace(to_network(model, X, y, options), source=source)


@contextmanager
def joined(
    model: Any, X: Any, y: Any, options: DataOptions, process_group: Any
) -> Iterator[Network]:
    """Make a network of a model, whose data several processes may hold."""
    processes = join(process_group)
    with processes.together():
        network = to_network_with_source(model, X, y, options)
        if processes.are_several:
            # data parallelism leaves each process running statistics of its own in batch norm
            named = chain(network.module.named_parameters(), network.module.named_buffers())
            held = [(name, _digest(tensor)) for name, tensor in named if tensor.is_floating_point()]
            if any(other != held for other in processes.gather(held)):
                raise ValueError(
                    "the processes of process_group hold models with different weights or buffers, "
                    "such as the running statistics of batch norm, so that there is no value for "
                    "all of them. Load the same state_dict in each process."
                )
        yield replace(network, processes=processes)


def _digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's numbers, in their order."""
    numbers = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data
    return hashlib.sha256(numbers).hexdigest()


@to_network.register
def _(model: nn.Module, X: Any, y: Any, options: DataOptions) -> Network:
    module = getattr(model, "_orig_mod", model)  # a compiled module runs no hooks
    if isinstance(module, DistributedDataParallel):
        module = module.module  # each forward pass through the wrapper waits for the others'
    own, batches = None, options.batches(X, y)
    if options.criterion is None and is_causal_language_model(module):
        own, batches = nn.CrossEntropyLoss(), next_tokens(batches)
    elif options.criterion is None:
        raise ValueError(
            "criterion is needed for a bare module, which does not know its loss: pass "
            "criterion=torch.nn.CrossEntropyLoss(), for example, or the fitted skorch net."
        )
    check_stored(module)
    if options.device is not None:
        present = next((p.device for p in module.parameters()), None)
        if present is not None and present != torch.device(options.device):
            module = copy.deepcopy(module).to(options.device)
    return Network(module, options.loss(own), batches)


@to_network.register
def _(model: NeuralNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    return skorch_network(model, skorch_batches(model, X, y, options), options)


@to_network.register
def _(model: Pipeline, X: Any, y: Any, options: DataOptions) -> Network:
    for _name, step in model.steps[:-1]:
        if step not in {None, "passthrough"} and hasattr(step, "transform"):
            # a sampler has no transform: it works in fit only
            X = transform(step, X, options.batch_size)
    return to_network(model.steps[-1][1], X, y, options)


@to_network.register
def _(model: TransformedTargetRegressor, X: Any, y: Any, options: DataOptions) -> Network:
    if isinstance(X, Dataset | DataLoader):
        raise ValueError(
            "a TransformedTargetRegressor transforms y, which it cannot do inside a "
            f"{type(X).__name__}. Pass X and y as arrays, on disk too; or measure its regressor_, "
            "with transformed labels."
        )
    if y is not None:
        check_is_fitted(model)
        columns = np.asarray(y, dtype=np.float64)
        y = model.transformer_.transform(columns.reshape(len(columns), -1))
    return to_network(_wrapped(model), X, y, options)


@to_network.register(BaseSearchCV)
@to_network.register(FixedThresholdClassifier)
@to_network.register(TunedThresholdClassifierCV)
def _(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    return to_network(_wrapped(model), X, y, options)


_WRAPPERS = (
    BaseSearchCV,
    FixedThresholdClassifier,
    TransformedTargetRegressor,
    TunedThresholdClassifierCV,
)


def _wrapped(model: Any) -> Any:
    """Return the fitted estimator inside one of the wrappers."""
    for attribute in ("best_estimator_", "regressor_", "estimator_"):
        if hasattr(model, attribute):
            return getattr(model, attribute)
    raise NotFittedError(
        f"this {type(model).__name__} holds no fitted estimator: call fit first"
        + (", with refit=True." if isinstance(model, BaseSearchCV) else ".")
    )


def final_estimator(model: Any) -> Any:
    """Unwrap pipelines and search objects, down to the estimator that holds the network."""
    if isinstance(model, Pipeline):
        return final_estimator(model.steps[-1][1])
    if isinstance(model, _WRAPPERS) or getattr(model, "best_estimator_", None) is not None:
        return final_estimator(_wrapped(model))
    return model


def name_layer(model: Any, layer: Layer) -> Layer:
    """Replace a layer that is passed as a module by its name, which copies of the model share."""
    if not isinstance(layer, nn.Module):
        return layer
    estimator = final_estimator(model)
    module = getattr(estimator, "module_", estimator)
    if not isinstance(module, nn.Module):
        return layer  # scikit-learn's estimators hold no modules: no layer will be found
    return find_layer(getattr(module, "_orig_mod", module), layer)


def name_layers(model: Any, layers: Any) -> list[Layer] | str:
    """Check a choice of layers, and replace modules in it by their names."""
    if isinstance(layers, str) and layers == "all":
        return layers
    if is_integer(layers) or isinstance(layers, str | nn.Module):
        layers = [layers]
    if not isinstance(layers, Iterable):
        raise TypeError(
            'layers must be "all", a layer or a list of layers, each given by its position, its '
            f"name or as the module itself, got {layers!r} of type {type(layers).__name__}."
        )
    names = [name_layer(model, layer) for layer in layers]
    if not names:
        raise ValueError(
            f'layers must name at least one layer, got {layers!r}. Pass layers="all" for all.'
        )
    return names

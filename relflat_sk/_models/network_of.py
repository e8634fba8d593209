"""Any kind of trained model, as a network with its loss and data.

`to_network` is the only function that knows all kinds: bare modules, skorch nets, scikit-learn's
estimators, and the estimators that wrap them. A new kind of model needs one more registration.
"""

import copy
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.compose import TransformedTargetRegressor
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted, validate_data
from skorch import NeuralNet, NeuralNetClassifier
from skorch.dataset import Dataset as SkorchDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from relflat_sk._checks import check_device, is_integer, warn
from relflat_sk._losses.loss import Loss, as_criterion, call_criterion, multiple_of
from relflat_sk._losses.table import ProbabilityNLLLoss
from relflat_sk._models.sklearn_estimators import to_torch
from relflat_sk._network.batches import Batches, LoadedBatches, Weighted, make_batches
from relflat_sk._network.borrowing import autocast_off, borrowed, uncompiled, unwrapped
from relflat_sk._network.layers import Layer, check_stored, find_layer
from relflat_sk._network.network import Network, Source
from relflat_sk._numerics import full_precision

# -- options -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DataOptions:
    """How to run a model of any kind over data."""

    criterion: Any = None
    batch_size: int = 1024
    device: Any = None
    sample_weight: Any = None  # (n,)
    in_order: bool = False
    output: Any = None

    def __post_init__(self) -> None:
        """Refuse a device that torch cannot use, before anything is computed."""
        check_device(self.device)

    def batches(self, X: Any, y: Any) -> Batches:
        """Cut data into batches."""
        return make_batches(
            X,
            y,
            batch_size=self.batch_size,
            sample_weight=self.sample_weight,
            in_order=self.in_order,
        )

    def loss(self, own: Any) -> Loss:
        """Choose between the criterion in these options and the model's own."""
        return Loss(as_criterion(own if self.criterion is None else self.criterion))


# -- causal language models of transformers, which bring their own loss --------------------

IGNORED = -100  # the label of tokens that do not count, in torch and in transformers


def is_causal_language_model(module: nn.Module) -> bool:
    """Recognise a causal language model of transformers and its loss without importing it."""
    name = type(module).__name__
    if not (name.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(module, "config")):
        return False
    loss = getattr(module, "loss_function", None)
    return getattr(loss, "__name__", "") == "ForCausalLMLoss"


def next_tokens(batches: Batches) -> Batches:
    """Replace the labels of each token by those of the next one, as transformers does."""
    return lambda: (replace(batch, y=next_labels(batch.y)) for batch in batches())


def next_labels(labels: Tensor | None) -> Tensor:
    """Shift labels so that each token has the next one's."""
    if labels is None or labels.ndim != 2:
        raise ValueError(
            "a causal language model takes labels of shape (samples, tokens) as y, got "
            f"{'none' if labels is None else tuple(labels.shape)}. Pass the input_ids as y, and "
            f"{IGNORED} for padding."
        )
    last = torch.full_like(labels[:, :1], IGNORED)
    return torch.cat([labels[:, 1:], last], dim=1)


# -- skorch nets ---------------------------------------------------------------------------

# implementations of get_loss that, outside training, return the criterion and nothing else
CRITERION_ALONE: set[Any] = {NeuralNetClassifier.get_loss, NeuralNet.get_loss}
# by how much factors of the same loss may differ, as a share
_ROUNDING = 1e-4


# what to do if the get_loss of a net cannot be called as measures call it
_WITHOUT_X = (
    "Measures call it with outputs and targets, without X and with training=False. If it reads X, "
    "such as weights of samples, pass criterion= to the measure, and the weights as sample_weight."
)


# whether a pass is one of a measure, which records layers itself, so that no penalty does
IS_MEASURED: ContextVar[bool] = ContextVar("is measured", default=False)


def skorch_network(net: NeuralNet, batches: Batches, options: DataOptions) -> Network:
    """Make a network of a fitted skorch net and batches of data."""
    if options.device is not None and torch.device(options.device) != torch.device(net.device):
        net = copy.deepcopy(net)
        net.module_.to(options.device)
        net.criterion_.to(options.device)
        net.device = options.device
    module = unwrapped(net.module_)  # a compiled module runs no hooks
    criterion = unwrapped(net.criterion_)  # of a compiled one
    get_loss = type(net).get_loss
    if get_loss is NeuralNetClassifier.get_loss and type(criterion) is nn.NLLLoss:
        # skorch's classifiers take the logarithm of the module's probabilities
        criterion = ProbabilityNLLLoss.of(criterion)

    def forward(x: Any) -> Any:
        measured = IS_MEASURED.set(True)
        try:
            with uncompiled(net.module_):
                return net.infer(x)
        finally:
            IS_MEASURED.reset(measured)

    network = Network(module, options.loss(criterion), batches, forward)
    if get_loss in CRITERION_ALONE or options.criterion is not None:
        return network
    return replace(network, loss=Loss(_own_loss(net, network)))


def _own_loss(net: NeuralNet, network: Network) -> Any:
    """Find what a net with a `get_loss` of its own minimises: that, without a constant factor."""
    # Gradient accumulation divides the loss by a number of batches, which is no property of the
    # minimum. If nothing but a factor is between `get_loss` and the criterion, it is the criterion.
    criterion = network.loss.criterion
    factor = 1.0

    def loss_of_net(output: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = net.get_loss(output, target, training=False)
        return loss if factor == 1 else loss / factor

    loss_of_net.reduction = getattr(criterion, "reduction", "mean")  # type: ignore[attr-defined]
    loss_of_net.advice = _WITHOUT_X  # type: ignore[attr-defined]
    loss_of_net.__name__ = f"the get_loss of {type(net).__name__}"
    batch = next(iter(network.batches()))
    if batch.y is None:
        return loss_of_net
    with borrowed(network.module), torch.no_grad():
        output = full_precision(network(batch.x))
    y, multiples, is_criterion = batch.y.to(output.device), [], True
    for rows in (slice(0, None, 2), slice(1, None, 2)) if len(y) > 1 else (slice(None),):
        with torch.enable_grad():
            z = output[rows].detach().requires_grad_()
            loss = call_criterion(loss_of_net, z, y[rows], each=False)
            try:
                values = network.loss.read_target(z, y[rows]).values
                reference = call_criterion(criterion, z, values, each=False)
            except (TypeError, ValueError):
                return loss_of_net  # a criterion that the net does not use
            multiple = multiple_of(loss, reference, z)
        if multiple is None:
            return loss_of_net
        multiples.append(multiple)
        scaled = multiple * float(reference.detach().mean())
        is_criterion &= math.isclose(float(loss.detach().mean()), scaled, rel_tol=_ROUNDING)
    if max(multiples) > (1 + _ROUNDING) * min(multiples):
        return loss_of_net
    factor = multiples[0]
    # weights of classes cannot be told from a factor where there is one class
    return criterion if is_criterion and bool((y != y[:1]).any()) else loss_of_net


def skorch_batches(net: NeuralNet, X: Any, y: Any, options: DataOptions) -> Batches:
    """Cut data into batches as a net would, without its data loader where that changes nothing."""
    arrays = isinstance(X, np.ndarray | Tensor | Mapping | tuple) or issparse(X)
    params = net.get_params_for("iterator_valid")
    usual_loader = net.iterator_valid is DataLoader and not (params.keys() - {"batch_size"})
    if arrays and net.dataset is SkorchDataset and usual_loader:
        return options.batches(X, y)
    if isinstance(X, DataLoader | LoadedBatches):
        return options.batches(X, y)
    if options.sample_weight is not None:
        raise ValueError("sample_weight needs X and y as arrays, not a dataset.")
    dataset = net.get_dataset(X, y)
    if hasattr(dataset, "__len__") and len(dataset) == 0:  # a stream has no length
        raise ValueError("X has no samples, and flatness is a mean over samples.")
    params["batch_size"] = options.batch_size
    if "drop_last" in params:  # every sample counts, and the batches here are others than the net's
        params["drop_last"] = False
    loader = net.iterator_valid(dataset, **params)
    return make_batches(loader, in_order=options.in_order)


@singledispatch
def to_network(model: Any, X: Any, y: Any, options: DataOptions) -> Network:
    """Find the network in a model, its loss, and the data as the network takes them."""
    inside = _estimator_inside(model)
    if inside is not None:
        return to_network(inside, X, y, options)
    if isinstance(model, type):
        raise TypeError(f"pass a fitted instance, not the class {model.__name__}.")
    converted = to_torch(model, y, options.sample_weight)
    if not isinstance(X, Dataset | DataLoader):  # names and number of features
        validate_data(model, X, reset=False, skip_check_array=True)
    targets = None if y is None else converted.encode_target(y)
    module = converted.module if options.device is None else converted.module.to(options.device)
    return Network(module, options.loss(converted.criterion), options.batches(X, targets))


def open_model(model: Any, X: Any, y: Any = None, **options: Any) -> Network:
    """Make the handle of a model with its data, which everything that measures takes."""
    how = DataOptions(**options)
    source = Source(model, X, y, how.sample_weight)
    return replace(to_network(model, X, y, how), source=source, output=how.output)


@to_network.register
def _of_module(model: nn.Module, X: Any, y: Any, options: DataOptions) -> Network:
    # a compiled module runs no hooks, and data parallelism waits in each pass for other processes
    module = unwrapped(model)
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise TypeError(
            "a module of torch.jit does not show its layers' inputs. Pass the module that was "
            "compiled, with module.load_state_dict(scripted.state_dict())."
        )
    criterion, batches = None, options.batches(X, y)
    is_causal = is_causal_language_model(module)
    if options.criterion is None and is_causal:
        criterion, batches = nn.CrossEntropyLoss(), next_tokens(batches)
    elif options.criterion is None:
        raise ValueError("criterion is needed for a bare module, as criterion=nn.MSELoss().")
    check_stored(module)
    if options.device is not None:
        present = next((p.device for p in module.parameters()), None)
        if present is not None and present != torch.device(options.device):
            module = copy.deepcopy(module).to(options.device)
    # transformers has the classes of a token on the last axis
    return Network(module, replace(options.loss(criterion), classes_last=is_causal), batches)


@to_network.register
def _of_net(model: NeuralNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    return skorch_network(model, skorch_batches(model, X, y, options), options)


@to_network.register
def _of_pipeline(model: Pipeline, X: Any, y: Any, options: DataOptions) -> Network:
    *steps, last = [step for _, step in model.steps]
    for step in steps:
        if hasattr(step, "fit_resample") and not hasattr(step, "transform"):  # imbalanced-learn's
            warn(
                f"the {type(step).__name__} of the pipeline resampled the rows in fit, but the "
                f"{type(last).__name__} is measured on the rows of X as they are."
            )
    transformers = [step for step in steps if hasattr(step, "transform")]
    if not (transformers and isinstance(X, Dataset | DataLoader)):
        return to_network(last, _transform(transformers, X), y, options)
    # all rows together: a step need not transform each one by itself
    batches = list(options.batches(X, y)())
    rows = _transform(transformers, np.concatenate([np.asarray(batch.x) for batch in batches]))
    rows = rows.toarray() if issparse(rows) else np.asarray(rows)
    parts = np.split(rows, np.cumsum([len(batch.x) for batch in batches[:-1]], dtype=int))
    pairs: Any = [
        (part, Weighted(batch.y, batch.weight)) for part, batch in zip(parts, batches, strict=True)
    ]
    return to_network(last, DataLoader(pairs, batch_size=None), None, options)


def _transform(steps: Sequence[Any], rows: Any) -> Any:
    """Transform rows without the caller's mixed precision, which a step made of torch would see."""
    with autocast_off():
        for step in steps:
            rows = step.transform(rows)
    return rows


@to_network.register
def _of_transformed_target(
    model: TransformedTargetRegressor, X: Any, y: Any, options: DataOptions
) -> Network:
    if isinstance(X, Dataset | DataLoader):
        raise ValueError(
            "a TransformedTargetRegressor transforms y, which it cannot do inside a "
            f"{type(X).__name__}. Pass arrays, or its regressor_ with transformed labels."
        )
    if y is not None:
        check_is_fitted(model)
        columns = np.asarray(y, dtype=np.float64)
        y = model.transformer_.transform(columns.reshape(len(columns), -1))
    return to_network(_estimator_inside(model), X, y, options)


def _estimator_inside(model: Any) -> Any | None:
    """Return the fitted estimator in a wrapper, such as a search of any library, or None."""
    if isinstance(model, FrozenEstimator):
        return model.estimator
    searches = isinstance(model, BaseEstimator) and hasattr(model, "refit")
    is_search = hasattr(model, "best_estimator_") or (searches and hasattr(model, "estimator"))
    wraps = FixedThresholdClassifier | TransformedTargetRegressor | TunedThresholdClassifierCV
    if not (is_search or isinstance(model, wraps)):
        return None
    for attribute in ("best_estimator_", "regressor_", "estimator_"):
        if hasattr(model, attribute):
            return getattr(model, attribute)
    raise NotFittedError(
        f"this {type(model).__name__} holds no fitted estimator: call fit first"
        + (", with refit=True." if is_search else ".")
    )


def unwrap(model: Any) -> Iterator[Any]:
    """Yield pipelines and search objects from outside to inside, then what holds the network."""
    yield model
    inside = model.steps[-1][1] if isinstance(model, Pipeline) else _estimator_inside(model)
    if inside is not None:
        yield from unwrap(inside)


def final_estimator(model: Any) -> Any:
    """Unwrap pipelines and search objects, down to the estimator that holds the network."""
    return list(unwrap(model))[-1]


def last_step(estimator: Any) -> Any:
    """Find the unfitted estimator that is going to hold the network."""
    return _descend(estimator)[1]


def last_prefix(estimator: Any) -> str:
    """Return what stands before the parameters of the estimator that holds the network."""
    return _descend(estimator)[0]


def _descend(estimator: Any, prefix: str = "") -> tuple[str, Any]:
    inside = [(name, getattr(estimator, name, None)) for name in ("regressor", "estimator")]
    for name, inner in [*getattr(estimator, "steps", [])[-1:], *inside]:
        if hasattr(inner, "fit"):
            return _descend(inner, f"{prefix}{name}__")
    return prefix, estimator


def name_layer(model: Any, layer: Layer) -> Layer:
    """Replace a layer that is passed as a module by its name, which copies of the model share."""
    if not isinstance(layer, nn.Module):
        return layer
    estimator = final_estimator(model)
    module = getattr(estimator, "module_", estimator)
    if not isinstance(module, nn.Module):
        return layer  # scikit-learn's estimators hold no modules: no layer will be found
    return find_layer(unwrapped(module), layer)


def name_layers(model: Any, layers: Any) -> list[Layer] | str:
    """Check a choice of layers, and replace modules in it by their names."""
    if isinstance(layers, str) and layers == "all":
        return layers
    if is_integer(layers) or isinstance(layers, str | nn.Module):
        layers = [layers]
    names = [name_layer(model, layer) for layer in layers] if isinstance(layers, Iterable) else []
    if not names:
        raise ValueError(f'layers must be "all", a layer or a list of layers, got {layers!r}.')
    return names


# -- descriptions of models in warnings ----------------------------------------------------

_LONGEST = 60  # characters of a parameter's value
# nets that differ in their seeds have one warning; the last is a note of skorch to itself
_UNTOLD = {"verbose", "random_state", "_params_to_validate"}


def describe(model: Any) -> str:
    """Return a model's class, with the parameters that differ from their defaults."""
    kind = type(model)
    params = model.get_params(deep=False) if hasattr(model, "get_params") else {}
    defaults = defaults_of(kind)
    changed = [
        f"{name}={_shorten(value)}"
        for name, value in params.items()
        if name not in _UNTOLD and repr(value) != repr(defaults.get(name))
    ]
    return f"{kind.__name__}({', '.join(changed)})"


def defaults_of(kind: type) -> dict[str, Any]:
    """Collect the defaults of a constructor, and of those that it passes arguments on to."""
    defaults: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        if "__init__" in vars(parent) and parent is not object:
            arguments = inspect.signature(vars(parent)["__init__"]).parameters.values()
            defaults |= {argument.name: argument.default for argument in arguments}
    return defaults


def _shorten(value: Any) -> str:
    """Write a parameter on one line."""
    written = value.__name__ if isinstance(value, type) else repr(value)
    text = " ".join(re.sub(r" at 0x\w+", "", written).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

"""The table of all measures, and functions of the user in their place.

The table says what a measure takes, and under which changes of the weights it is invariant, that
leave the network's function as it is. The tests check it, `flatness_report` shows it, and the
documentation prints it.
"""

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import joblib
import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from relflat_sk._checks import check_number, did_you_mean
from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import borrowed, unwrapped
from relflat_sk._network.network import Network
from relflat_sk._random import RandomState
from relflat_sk.measures._equal_loss import check_share
from relflat_sk.measures._layer_measures import (
    GRADIENT_NORM,
    LAYER_MEASURES,
    TRACE_LIKE,
    measure_layers,
)
from relflat_sk.measures._norms import NORM_MEASURES
from relflat_sk.measures._results import Measure, Measured, NetworkMeasure, name_of
from relflat_sk.measures._sharpness import SHARPNESS_MEASURES
from relflat_sk.minima._minimum import is_reserved
from relflat_sk.minima._ranking import AT_EQUAL_LOSS
from relflat_sk.minima._table import column_of


def _network_flatness(
    network: Network,
    *,
    rtol: float = 0.01,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
) -> Measured:
    """Return the largest eigenvalue flatness of all layers."""
    of_layers = measure_layers(
        network,
        ["eigenvalue_flatness"],
        "all",
        rtol=rtol,
        random_state=random_state,
        weight_decay=weight_decay,
    )
    return max(of_layers.values(), key=lambda layer: (math.isnan(layer.value), layer.value))


# measures of the network as a whole, each with arguments of its own
NETWORK_WIDE: dict[str, NetworkMeasure] = {
    "network_flatness": NetworkMeasure(_network_flatness, ("layer",), of_loss=True),
    **NORM_MEASURES,
    **SHARPNESS_MEASURES,
}
# the changes of the weights under which each measure is invariant
SAME: dict[str, tuple[str, ...]] = {
    **LAYER_MEASURES,
    **{name: measure.same for name, measure in NETWORK_WIDE.items()},
}
# arguments of the measures of layers, which measures of the whole network accept without effect
_OF_LAYERS = {"atol", "max_passes", "method", "n_probes", "rtol", "verbose"}
# an argument that every measure accepts, also where it has no effect
_SEED = {"random_state"}
ALWAYS = _OF_LAYERS | _SEED | {"weight_decay"}
# measures that are zero where the loss has no curvature
CURVATURES = {*LAYER_MEASURES, "network_flatness"} - {GRADIENT_NORM}
# measures that are taken at equal loss always, and the share of the best constant's loss
SHARES = dict.fromkeys(AT_EQUAL_LOSS, 0.1)


def find_measure(measure: Measure) -> Measure:
    """Check a measure, which is a name of this library or a function of the user's."""
    if isinstance(measure, str) and measure in SAME:
        return measure
    if not callable(measure):
        names = sorted(SAME)
        question = did_you_mean(measure, names) if isinstance(measure, str) else ""
        raise ValueError(
            f"there is no measure {measure!r}.{question} Choose from {names}, or pass a "
            "function of model, X and y."
        )
    if isinstance(measure, BaseEstimator):  # its values have the other sign
        raise TypeError(
            f"{measure!r} is greater for flatter models, and a measure is smaller. Pass the name "
            "of its measure; only searches and rank_models take scorers, for their arguments."
        )
    arguments_of(measure)
    name = name_of(measure)
    if name in SAME or is_reserved(name):
        raise ValueError(
            f"{name!r} is a measure or a column of relflat_sk: give {measure!r} another name."
        )
    return measure


def takes_loss(measure: Measure) -> bool:
    """Return whether a measure can be taken at equal loss."""
    name = name_of(measure)
    return name in LAYER_MEASURES or (name in NETWORK_WIDE and NETWORK_WIDE[name].of_loss)


def is_of_network(measure: Measure) -> bool:
    """Return whether a measure belongs to the network as a whole, so that it has no layer."""
    return not isinstance(measure, str) or measure in NETWORK_WIDE


def counts_decay(measure: Measure) -> bool:
    """Return whether the optimiser's weight decay can be counted into a measure."""
    if is_of_network(measure):
        return "weight_decay" in own_arguments(measure)
    name = name_of(measure)
    return name not in TRACE_LIKE or TRACE_LIKE[name].identity is not None


def own_arguments(measure: Measure) -> Set[str]:
    """List the arguments of a measure of the whole network."""
    if not isinstance(measure, str):
        return arguments_of(measure)
    return NETWORK_WIDE[measure].arguments if measure in NETWORK_WIDE else set()


# what a measure must be to have an option
_NEEDS: dict[str, tuple[Callable[[Measure], bool], str]] = {
    "at_loss": (takes_loss, "depends on the loss"),
    "weight_decay": (counts_decay, "is a curvature in units of the weights"),
    "per_sample": (
        lambda measure: name_of(measure) in TRACE_LIKE,
        f"is a mean over samples: one of {list(TRACE_LIKE)}",
    ),
}


def check_options(measures: Sequence[Measure], **options: Any) -> None:
    """Refuse bad values of the options of `_NEEDS`, and those that a measure cannot have."""
    check_number("weight_decay", options.get("weight_decay", 0.0), positive=False)
    check_share(options.get("at_loss"))
    for option, value in options.items():
        has, kind = _NEEDS[option]
        without = [name_of(measure) for measure in measures if value and not has(measure)]
        if without:
            raise ValueError(
                f"{option}={value!r} has no effect on {', '.join(without)}: it needs a measure "
                f"that {kind}. Leave one of them out."
            )


def check_layers(measures: Sequence[Measure], layers: Any) -> None:
    """Refuse a choice of layers if all measures are of the whole network."""
    is_default = isinstance(layers, str | Integral) and layers in (-1, "all")
    if not is_default and all(map(is_of_network, measures)):
        raise ValueError(
            f"{', '.join(map(name_of, measures))} measures the network as a whole, which has no "
            f"layers to choose; got {layers!r}. Leave the layer out, or choose a measure of a "
            "layer, such as relative_flatness."
        )


def check_arguments(measures: Sequence[Measure], params: Mapping[str, Any]) -> None:
    """Refuse arguments that none of the measures takes."""
    of_library = set() if all(map(callable, measures)) else _OF_LAYERS | {"at_loss"}
    known = _SEED.union(of_library, *map(own_arguments, measures)) - {"weight_decay"}
    for key in params:
        if key not in known:
            raise TypeError(
                f"{key!r} is no argument of {', '.join(map(name_of, measures))}. Expected some of "
                f"{sorted(known)}."
            )


def get_measure_names() -> list[str]:
    """List the names that `measure` and `flatness_report` take.

    Returns
    -------
    list of str
        The names in alphabetical order.

    See Also
    --------
    measure : Measure a model by one of these names.
    flatness_report : Several of them at all layers.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted(SAME)


def find_measures(measures: Any) -> dict[str, Measure]:
    """Check the measures of a table, and return them by the names of their columns.

    A measure is what `measure_network` takes: a name of this library, or the user's function
    itself. Columns, records of trials and results of `measure_network` have the name only.
    """
    alone = isinstance(measures, str) or callable(measures)
    listed = [measures] if alone else list(measures) if isinstance(measures, Iterable) else []
    if not listed:
        raise TypeError(
            f"measures must be a name, a function of model, X and y, or a list of these, got "
            f"{measures!r}. The names are those of get_measure_names()."
        )
    columns: dict[str, Measure] = {}
    for measure in listed:
        checked = find_measure(measure)
        name = column_of(measure)  # refuses a function without a name
        if columns.setdefault(name, checked) != checked:
            raise ValueError(
                f"two measures have the name {name!r}, which is that of one column: "
                f"{columns[name]!r} and {checked!r}. Give one of the functions another name."
            )
    return columns


# -- lend a model to a function of the user's, and return it as it was --------------------------


@contextmanager
def kept_model(model: Any) -> Iterator[None]:
    """Restore weights, gradients and fitted attributes when the context ends."""
    estimator = final_estimator(model)
    module = unwrapped(getattr(estimator, "module_", estimator))
    if isinstance(module, nn.Module):
        with borrowed(module), _kept_parameters(module):
            yield
    else:
        # scikit-learn's estimators have no module, so that only the random state is borrowed
        with borrowed(nn.Module()), _kept_attributes(estimator):
            yield


@contextmanager
def _kept_parameters(module: nn.Module) -> Iterator[None]:
    kept = [
        (m, name, p, p.data, p.detach().clone(), p.grad, p.requires_grad)
        for m in module.modules()
        for name, p in m.named_parameters(recurse=False)
    ]
    for parameter in module.parameters():
        parameter.grad = None  # a backward pass adds to no gradient of the user's
    try:
        yield
    finally:
        for m, name, parameter, storage, content, gradient, needs_gradient in kept:
            setattr(m, name, parameter)
            parameter.grad = None
            parameter.data = storage
            if not torch.equal(storage, content):
                storage.copy_(content)
            parameter.grad = gradient
            parameter.requires_grad_(needs_gradient)


@contextmanager
def _kept_attributes(estimator: Any) -> Iterator[None]:
    """Restore what `fit` has set, for estimators of scikit-learn; optimizers are private there."""

    def fitted() -> dict[str, Any]:
        every = vars(estimator).items()
        return {name: one for name, one in every if name.startswith("_") or name.endswith("_")}

    before = copy.deepcopy(fitted())
    try:
        yield
    finally:
        after = fitted()
        if joblib.hash(after) != joblib.hash(before):
            for name in after.keys() - before.keys():
                delattr(estimator, name)
            vars(estimator).update(before)


# arguments of the functions that measure; a function's own argument of such a name would get no
# value
TAKEN = {
    "aggregate", "at_loss", "batch_size", "criterion", "device", "layer", "layers", "measure",
    "measures", "name", "network", "output", "per_sample", "tolerates",
    "weight_decay",
}  # fmt: skip

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def measure_by_function(function: Callable[..., Any], network: Network, **params: Any) -> Measured:
    """Call a user's function with the model and the data that a network was made of."""
    name, source = name_of(function), network.source
    assert source is not None
    if source.sample_weight is not None:
        if "sample_weight" not in arguments_of(function):
            raise ValueError(
                f"the measure {name!r} does not take sample weights: measure without "
                "sample_weight, or give its function an argument sample_weight."
            )
        params["sample_weight"] = source.sample_weight
    with kept_model(source.model):
        result = function(source.model, source.X, source.y, **params)
    both = result if isinstance(result, tuple) and len(result) == 2 else (result, 0.0)
    pair = [number.detach() if isinstance(number, Tensor) else number for number in both]
    try:
        if any(isinstance(number, str) or np.ndim(number) for number in pair):
            raise TypeError
        value, stderr = map(float, pair)
    except (TypeError, ValueError):
        raise TypeError(
            f"the measure {name!r} must return a number, or a pair of a number and its "
            f"standard error, got {result!r} of type {type(result).__name__}."
        ) from None
    return Measured(value, stderr, "function")


def arguments_of(function: Callable[..., Any]) -> frozenset[str]:
    """List the arguments of a function beside model, X and y; refuse what is no measure."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C do not say
        return frozenset()
    first = [p for p in parameters if p.kind in _POSITIONAL][:3]
    if len(first) < 3 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise TypeError(
            f"a measure must be a function of model, X and y, got {function!r} with the arguments "
            f"({', '.join(map(str, parameters))})."
        )
    names = {p.name for p in parameters if p.kind in _BY_NAME and p not in first}
    if taken := sorted(names & TAKEN):
        raise ValueError(
            f"the measure {function!r} has an argument {taken[0]!r}, which the functions that "
            "measure use themselves and do not pass on: give it another name."
        )
    return frozenset(names)

"""Read the factors by which a user wants layers or neurons to be multiplied."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from relflat_sk._network import Layer, find_layer, layer_map

__all__ = ["parse_factors"]

Floats = NDArray[np.float64]


def parse_factors(
    kind: str, module: nn.Module, factors: Any, order: Sequence[str]
) -> dict[str, Floats]:
    """Check factors and assign them to layers. Shapes: returns (1,)."""
    return _PARSERS[kind](module, factors, order)


def _parse_layer_factors(
    module: nn.Module, factors: Any, order: Sequence[str]
) -> dict[str, Floats]:
    """Read one factor for each layer, from a sequence for all or a mapping for some of them."""
    if isinstance(factors, Mapping):
        named = _by_name(module, factors, order)
        return {name: _positive(name, values, ()).reshape(1) for name, values in named.items()}
    values = _to_array("factors", factors)
    if values.shape != (len(order),):
        raise ValueError(
            f"factors must hold one number for each of the {len(order)} layers with a weight "
            f"matrix, in forward order ({', '.join(map(repr, order))}), got shape {values.shape}."
        )
    return {
        name: _positive(name, value, ()).reshape(1)
        for name, value in zip(order, values, strict=True)
    }


def _parse_neuron_factors(
    module: nn.Module, factors: Any, order: Sequence[str]
) -> dict[str, Floats]:
    """Read one factor for each output neuron of some layers."""
    if not isinstance(factors, Mapping):
        raise TypeError(
            'factors must be a mapping of layer to one factor per output neuron for kind="neuron", '
            f"got {type(factors).__name__}."
        )
    return {
        name: _positive(name, values, (layer_map(module.get_submodule(name)).n_outputs,))
        for name, values in _by_name(module, factors, order).items()
    }


_PARSERS: dict[str, Callable[[nn.Module, Any, Sequence[str]], dict[str, Floats]]] = {
    "layer": _parse_layer_factors,
    "neuron": _parse_neuron_factors,
}


def _by_name(
    module: nn.Module, factors: Mapping[Layer, Any], order: Sequence[str]
) -> dict[str, Any]:
    """Replace layers as the user gave them by their dotted names."""
    names = {layer: name for name, layer in module.named_modules()}  # aliases have one name
    found: dict[str, Any] = {}
    for layer, values in factors.items():
        name = names[module.get_submodule(find_layer(module, layer, order))]
        if name not in order:
            raise ValueError(
                f"layer {name!r} is not called in the forward pass as torch.fx sees it: it is "
                "unused, changes what a layer computes, or belongs to a module that torch.fx "
                f"does not trace through. Layers that can be rescaled: {list(order)}."
            )
        if name in found:
            raise ValueError(f"factors names layer {name!r} more than once.")
        found[name] = values
    return found


def _positive(name: str, values: Any, shape: tuple[int, ...]) -> Floats:
    """Check shape and sign of the factors of one layer."""
    array = _to_array(f"the factors of layer {name!r}", values)
    if array.shape != shape:
        expected = f"one for each of its {shape[0]} output neurons" if shape else "one number"
        raise ValueError(
            f"the factors of layer {name!r} must be {expected}, got shape {array.shape}."
        )
    if not (np.isfinite(array) & (array > 0)).all():
        raise ValueError(
            f"the factors of layer {name!r} must be positive and finite, got {values!r}; only "
            "positive factors pass through a ReLU."
        )
    return array


def _to_array(what: str, values: Any) -> Floats:
    """Convert numbers to an array, or say that `what` must be numbers."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must be numbers, got {values!r}.") from error

"""Find the layers of a network that have a weight matrix."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from relflat_sk._network.layer_maps import ConvolutionMap, LayerMap, LinearMap, TransposedLinearMap
from relflat_sk.exceptions import LayerNotFoundError

Layer = int | str | nn.Module

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d,
                 nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # fmt: skip
_MAPS: dict[type[nn.Module], type[LayerMap]] = {
    nn.Linear: LinearMap,
    **dict.fromkeys(_CONVOLUTIONS, ConvolutionMap),
}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# layers with weights of another kind, refused by name
_OTHER_WEIGHTS = (nn.Bilinear, *_EMBEDDINGS)


def is_weight_layer(module: nn.Module) -> bool:
    """Return whether a module is of a kind of layer that has a weight matrix."""
    return weight_kind(module) is not None


def weight_kind(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that makes a module a layer with a weight matrix."""
    own = next((kind for kind in _MAPS if isinstance(module, kind)), None) or _conv1d_kind(module)
    base = None if own else adapted_layer(module)
    return own if base is None else weight_kind(base)


def _conv1d_kind(module: nn.Module) -> type[nn.Module] | None:
    """Recognise the linear layer of GPT-2 in Hugging Face's transformers, without importing it.

    Its name is misleading: it is a linear layer with a weight of shape (inputs, `nf` outputs).
    """
    n_outputs, weight = module.__dict__.get("nf"), module._parameters.get("weight")
    if n_outputs is None or weight is None or weight.shape[1:] != (n_outputs,):
        return None
    return next((kind for kind in type(module).__mro__ if kind.__name__ == "Conv1D"), None)


def adapted_layer(module: nn.Module) -> nn.Module | None:
    """Recognise a layer with low-rank adapters, and return the layer inside it.

    It is called as the `LoraLayer` of PEFT is: `base_layer`, `lora_A`, `get_delta_weight`.
    """
    is_adapted = "lora_A" in module._modules and hasattr(type(module), "get_delta_weight")
    return module._modules.get("base_layer") if is_adapted else None


def _merged_weight(layer: Any) -> Tensor:
    """Add the active adapters of a layer to its weight, with their graph."""
    weight: Tensor = layer.base_layer.weight
    if layer.merged or layer.disable_adapters:
        return weight
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    return sum((layer.get_delta_weight(name) for name in active), start=weight)


def layer_map(layer: nn.Module, weight: Tensor | None = None) -> LayerMap:
    """Return a layer as a linear map of its weight matrix."""
    base = adapted_layer(layer)
    if base is not None:
        return layer_map(base, _merged_weight(layer) if weight is None else weight)
    kind = weight_kind(layer)
    if kind is not None:
        return _MAPS.get(kind, TransposedLinearMap)(layer, weight)
    raise TypeError(
        f"flatness is not defined at a {type(layer).__name__}: its output is not a matrix times "
        f"its input. Layers that can be measured: {[kind.__name__ for kind in _MAPS]}, and "
        "the Conv1D of transformers."
    )


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """List the layers with a weight matrix, by dotted name, in the order of registration."""
    return {name: m for name, m in module.named_modules() if is_weight_layer(m)}


def find_layer(module: nn.Module, layer: Layer, order: Sequence[str] | None = None) -> str:
    """Return the dotted name of a layer with a weight matrix."""
    layers = weight_layers(module)
    names = list(layers) if order is None else list(order)
    known = _describe({name: layers[name] for name in names})
    if isinstance(layer, np.integer):
        layer = int(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str | nn.Module):
        raise TypeError(
            "layer must be an int, a dotted module name or the module itself, got "
            f"{layer!r} of type {type(layer).__name__}; flatness_report measures several. {known}"
        )
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise LayerNotFoundError(f"there is no layer {layer}. {known}")
        return names[layer]
    name = _find_module(module, layer, known)
    found = module.get_submodule(name)
    if isinstance(found, _OTHER_WEIGHTS):
        layer_map(found)  # raises and says why not
    if not is_weight_layer(found):
        raise LayerNotFoundError(
            f"layer {name!r} is a {type(found).__name__}, which has no weight matrix to measure "
            f"flatness at. {known}"
        )
    return name


def _find_module(module: nn.Module, layer: Layer, known: str) -> str:
    """Return the dotted name of any module of the network."""
    modules = dict(module.named_modules(remove_duplicate=False))
    if isinstance(layer, str):
        if layer not in modules:
            several = " To measure all layers, use flatness_report." if layer == "all" else ""
            raise LayerNotFoundError(f"there is no layer {layer!r}.{several} {known}")
        return layer
    same = [name for name, candidate in modules.items() if candidate is layer]
    if not same:
        raise LayerNotFoundError(
            f"the {type(layer).__name__} given as layer is not part of the network (was the "
            f"network copied, as clone and deepcopy do?). {known}"
        )
    return str(same[0])


def _describe(layers: Mapping[str, nn.Module]) -> str:
    """Return the sentence of an error message that lists the layers there are."""
    if not layers:
        return (
            "The network has no layer whose weight matrix can be measured, such as nn.Linear or "
            "nn.Conv2d; recurrent layers and embeddings are not measured."
        )
    listed = ", ".join(
        f"{i}: {name!r} ({type(layer).__name__})" for i, (name, layer) in enumerate(layers.items())
    )
    return f"Layers with a weight matrix: {listed}."


def why_shared(name: str, named: Mapping[str, nn.Module]) -> str:
    """Say which other modules than embeddings have the weight of a layer; nothing if none have.

    A layer that is tied to an embedding is the head of a language model. It counts as if it had a
    copy of the weight to itself.
    """
    weight = named[name]._parameters.get("weight")
    others = [
        other
        for other, candidate in named.items()
        # the packed weight of attention is that of the layer `in_proj` inside it
        if other != name
        and not isinstance(candidate, (nn.MultiheadAttention, *_EMBEDDINGS))
        and any(parameter is weight for parameter in candidate._parameters.values())
    ]
    if weight is None or not others:  # None if it is computed from parameters of its own
        return ""
    return (
        f"the weight of layer {name!r} is shared by the modules {sorted([name, *others])}; the "
        "curvature in a shared weight is not that of one layer. Measure another layer."
    )


# -- values of parameters ------------------------------------------------------------------


def check_stored(module: nn.Module) -> None:
    """Refuse a network with lazy layers, which a measure would fill with random weights."""
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise ValueError(
            "the network has lazy layers, which have no weights yet; run it once on data first."
        )


def check_real(module: nn.Module) -> None:
    """Refuse a network with complex parameters, whose imaginary parts would be left out."""
    named = module.named_parameters()
    name = next((name for name, parameter in named if parameter.is_complex()), None)
    if name is not None:
        raise ValueError(
            f"the parameter {name!r} is complex, and weights must be real numbers here. Measure "
            "the flatness of a layer with a real weight instead."
        )


def find_non_finite(module: nn.Module) -> str | None:
    """Return the name of the first parameter or buffer that contains nan or an infinite number."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return next((name for name, tensor in tensors if not bool(tensor.isfinite().all())), None)

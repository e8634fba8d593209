"""Find a layer in a network, and what lies between it and the loss.

What lies between the layer and the loss is read off the graph that autograd records from
the layer's output to the network's, not guessed from the kind of module: see `find_link`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relflat_sk._network.layer_maps import MAPS, layer_map
from relflat_sk.exceptions import LayerNotFoundError

__all__ = [
    "Layer",
    "check_thrice",
    "check_unshared",
    "find_layer",
    "find_link",
    "hands_on",
    "is_piecewise_linear",
    "primary_output",
    "weight_layers",
]

Layer = int | str | nn.Module

WEIGHT_LAYERS = tuple(MAPS)
# layers with weights of another kind, refused by name
_OTHER_WEIGHTS = (nn.Bilinear, nn.Embedding, nn.EmbeddingBag)

# autograd nodes that hand the same numbers on in the same order
_SAME_NUMBERS = {
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
_LINKS = {
    "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
}


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """List the layers with a weight matrix, by dotted name, as they are registered.

    Parameters
    ----------
    module : nn.Module

    Returns
    -------
    dict of str to nn.Module

    Examples
    --------
    >>> list(weight_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
    ['0', '2']
    """
    return {name: m for name, m in module.named_modules() if isinstance(m, WEIGHT_LAYERS)}


def find_layer(module: nn.Module, layer: Layer, order: Sequence[str] | None = None) -> str:
    """Find a layer with a weight matrix and return its dotted name.

    Parameters
    ----------
    module : nn.Module
        The network.
    layer : int, str or nn.Module
        Position among the layers in `order`, dotted name, or the module itself.
    order : sequence of str, optional
        Names of the layers in the order of the forward pass; as registered if None.

    Returns
    -------
    str

    Raises
    ------
    LayerNotFoundError
        If there is no such layer or it has no weight matrix; lists the layers there are.
    TypeError
        If `layer` is of another type, or a kind of layer that is not supported.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_layer(net, -1)
    '2'
    """
    layers = weight_layers(module)
    names = list(layers) if order is None else list(order)
    there = _describe({name: layers[name] for name in names})
    if isinstance(layer, np.integer):
        layer = int(layer)
    if isinstance(layer, bool) or not isinstance(layer, int | str | nn.Module):
        raise TypeError(
            "layer must be an int, a dotted module name or the module itself, got "
            f"{layer!r} of type {type(layer).__name__}. {there}"
        )
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise LayerNotFoundError(f"there is no layer {layer}. {there}")
        return names[layer]
    modules = dict(module.named_modules(remove_duplicate=False))
    if isinstance(layer, str):
        if layer not in modules:
            raise LayerNotFoundError(f"there is no layer {layer!r}. {there}")
        name = layer
    else:
        same = [name for name, candidate in modules.items() if candidate is layer]
        if not same:
            raise LayerNotFoundError(
                f"the {type(layer).__name__} given as layer is not part of the network (was "
                f"the network copied, as clone and deepcopy do?). {there}"
            )
        name = same[0]
    if isinstance(modules[name], _OTHER_WEIGHTS):
        layer_map(modules[name])  # says why not
    if not isinstance(modules[name], WEIGHT_LAYERS):
        raise LayerNotFoundError(
            f"layer {name!r} is a {type(modules[name]).__name__}, which has no weight matrix "
            f"that flatness could be measured at. {there}"
        )
    return name


def check_layer(module: nn.Module, name: str) -> nn.Module:
    """Return the layer of that name if no other module shares its weight.

    Raises
    ------
    ValueError
        If another module uses the same weight.
    """
    named: dict[str, nn.Module] = dict(module.named_modules())
    check_unshared(name, named)
    return named[name]


def check_unshared(name: str, named: Mapping[str, nn.Module]) -> None:
    """Refuse a layer whose weight is a parameter of another module too.

    Parameters
    ----------
    name : str
    named : dict of str to nn.Module
        All modules of the network.

    Raises
    ------
    ValueError
    """
    weight = named[name]._parameters.get("weight")
    if weight is None:  # computed from parameters of its own
        return
    users = [
        owner
        for owner, candidate in named.items()
        for parameter in candidate._parameters.values()
        # the in_proj of attention is one with it
        if parameter is weight and not isinstance(candidate, nn.MultiheadAttention)
    ]
    if len(users) > 1:
        raise ValueError(
            f"the weight of layer {name!r} is shared by the modules {sorted(users)}; the "
            "curvature in a shared weight is not that of one layer. Measure another layer."
        )


def _describe(layers: Mapping[str, nn.Module]) -> str:
    if not layers:
        return "The network has no layer with a weight matrix."
    listed = ", ".join(
        f"{i}: {name!r} ({type(layer).__name__})" for i, (name, layer) in enumerate(layers.items())
    )
    return f"Layers with a weight matrix: {listed}."


def find_link(output: Tensor, node: Any) -> str | None:
    """Say what the network did between the layer's output and its own.

    Parameters
    ----------
    output : Tensor
        What the network put out, with its autograd graph.
    node : torch.autograd.graph.Node
        Where that graph starts: `LayerRecord.node`.

    Returns
    -------
    {"identity", "softmax", "log_softmax", "sigmoid"} or None
        None if the network did anything else.

    Examples
    --------
    >>> z = torch.zeros(2, 3, requires_grad=True).clone()
    >>> find_link(z.log_softmax(dim=1).view(2, 3), z.grad_fn)
    'log_softmax'
    >>> find_link(z.tanh(), z.grad_fn) is None
    True
    """
    link = "identity"
    step = output.grad_fn
    while step is not None and step is not node:
        name = step.name()
        if name in _LINKS and link == "identity" and _over_outputs(step, output):
            link = _LINKS[name]
        elif name not in _SAME_NUMBERS:
            return None
        step = step.next_functions[0][0]
    return link if step is node and node is not None else None


def hands_on(output: Tensor, node: Any, z: Tensor) -> bool:
    """Whether the network puts out the layer's (n, ..., d) output, axes moved at most.

    Parameters
    ----------
    output : Tensor of shape (n, d, ...)
        What the criterion takes, classes second.
    node : torch.autograd.graph.Node
        `LayerRecord.node` of the layer.
    z : Tensor of shape (n, ..., d)
        Its output.

    Returns
    -------
    bool
    """
    step: Any = output.grad_fn
    while step is not None and step is not node:
        name = step.name()
        if name not in _SAME_NUMBERS and name not in {"TransposeBackward0", "PermuteBackward0"}:
            return False
        step = step.next_functions[0][0]
    # the graph says that the numbers are the same, a look at them that they are in order
    return (
        step is node
        and node is not None
        and output.ndim == z.ndim
        and torch.equal(output.detach().movedim(1, -1), z)
    )


def _over_outputs(step: Any, output: Tensor) -> bool:
    """Whether a softmax runs along axis 1 of an (n, d) array; true for a sigmoid."""
    dim = getattr(step, "_saved_dim", None)
    # autograd hands negative axes out as unsigned 64-bit integers
    return dim is None or (output.ndim == 2 and (dim + 2) % 2**64 % 2 == 1)


# autograd nodes that are linear, or linear in pieces, in all their inputs together
_PIECEWISE_LINEAR = {
    "Add", "Sub", "Neg", "Mean", "Sum", "Cat", "Stack", "Relu", "LeakyRelu", "RreluWithNoise",
    "Threshold", "Hardtanh", "Clamp", "ClampMin", "ClampMax", "Abs", "Maximum", "Minimum", "Max",
    "Amax", "Where", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AdaptiveMaxPool2D",
    "AdaptiveMaxPool3D", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D",
    "MkldnnAdaptiveAvgPool2D", "MkldnnMaxPool2D", "MkldnnMaxPool3D", "UpsampleNearest2D",
    "UpsampleBilinear2D", "ConstantPadNd", "ReflectionPad1D", "ReflectionPad2D",
    "ReplicationPad1D", "ReplicationPad2D", "T", "Transpose", "Permute", "Expand", "Slice",
    "Select", "Index", "Gather", "Split", "SplitWithSizes", "Unbind", "Repeat", "Flip", "Roll",
    "PixelShuffle", "AsStrided", "MaskedFill",
}  # fmt: skip
# linear in each of their inputs, so that only one of them may depend on the layer
_MULTILINEAR = {"Mul", "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "MkldnnConvolution",
                "PreluKernel", "Mv", "Dot"}  # fmt: skip
# linear in the first input as long as the others do not depend on the layer
_LINEAR_IN_FIRST = {"Div", "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "_OfBatch"}


def is_piecewise_linear(base: Tensor, *nodes: Any, by_batch: bool = False) -> bool:
    """Whether `base` is piecewise linear in the layers' outputs, by the graph in between.

    Parameters
    ----------
    base : Tensor
        Something computed from the layers' outputs.
    *nodes : torch.autograd.graph.Node
        `LayerRecord.node` of each layer.
    by_batch : bool, default=False
        Take the statistics by which batch norm divides in training for given, so that it
        counts as linear; see `relflat_sk._network.norm_layers`.

    Returns
    -------
    bool
        False also for what is not known.

    Examples
    --------
    >>> z = torch.zeros(2, 3, requires_grad=True).clone()
    >>> is_piecewise_linear(z.relu() + 2 * z, z.grad_fn)
    True
    >>> is_piecewise_linear(z.relu() * z, z.grad_fn)
    False
    """
    return all(_keeps_linear(step, reached, by_batch) for step, reached in tail(base, *nodes))


def tail(base: Tensor, *nodes: Any) -> list[tuple[Any, list[bool]]]:
    """List the autograd nodes behind the layers that something was computed by.

    Parameters
    ----------
    base : Tensor
        Something computed from the layers' outputs.
    *nodes : torch.autograd.graph.Node
        `LayerRecord.node` of each layer.

    Returns
    -------
    list of (torch.autograd.graph.Node, list of bool)
        Each with which of its inputs depend on the layers' outputs.
    """
    starts = set(nodes)
    depends: dict[Any, bool] = {None: False}
    stack: list[Any] = [base.grad_fn]
    found = []
    while stack:  # depth first without recursion: networks are deep
        step = stack[-1]
        if step in depends:
            stack.pop()
            continue
        # what is before the only layer is of no interest
        inputs = [] if starts == {step} else [source for source, _ in step.next_functions]
        missing = [source for source in inputs if source not in depends]
        if missing:
            stack.extend(missing)
            continue
        stack.pop()
        reached = [depends[source] for source in inputs]
        depends[step] = step in starts or any(reached)
        if any(reached):
            found.append((step, reached))
    return found


def _kind(step: Any) -> str:
    name: str = step.name()
    kind = name.removesuffix("0").removesuffix("1").removesuffix("2")
    return kind.removesuffix("Backward")


# torch's second derivatives of these take statistics of the input for constants
_STATISTICS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm",
               "NativeGroupNorm", "FusedRmsNorm"}  # fmt: skip


def check_thrice(base: Tensor, *nodes: Any) -> None:
    """Refuse what torch cannot differentiate three times, and does not say so.

    Parameters
    ----------
    base : Tensor
    *nodes : torch.autograd.graph.Node
        `LayerRecord.node` of each layer.

    Raises
    ------
    ValueError
    """
    for step, _ in tail(base, *nodes):
        if _kind(step) in _STATISTICS and getattr(step, "_saved_training", True):
            raise ValueError(
                f"a normalisation behind the layer ({step.name()}) is called as a function, whose "
                "third derivative, of which the gradient of the penalty is made, torch gets "
                "wrong. Use a module such as nn.LayerNorm or nn.BatchNorm2d, or penalise the last "
                "layer."
            )


def _keeps_linear(step: Any, reached: list[bool], by_batch: bool) -> bool:
    kind = _kind(step)
    if step.name() in _SAME_NUMBERS or kind in _PIECEWISE_LINEAR:
        return True
    if kind in _MULTILINEAR:
        return sum(reached) == 1
    if kind in _LINEAR_IN_FIRST:
        fused = getattr(step, "_saved_training", False)  # see `check_thrice`
        return not any(reached[1:]) and not fused and (by_batch or kind != "_OfBatch")
    return False


def primary_output(output: Any) -> Tensor:
    """Return the tensor that the criterion sees: the logits, or the first of several.

    Raises
    ------
    TypeError
        If there is no tensor in the output.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return a tensor, a tuple that starts with one, or a mapping "
            f"with 'logits', got {type(output).__name__}."
        )
    return output

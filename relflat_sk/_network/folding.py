r"""The steps of a network's forward pass, and its layers as affine maps, batch norm folded in.

`trace` records the steps as a graph, without data, by torch.fx. In evaluation mode batch norm
multiplies each channel by a number and adds another. Directly behind a layer with a weight matrix,
it can be counted as part of that layer:

.. math::
    \gamma \frac{W x + b - \mu}{\sqrt{v + \epsilon}} + \beta = W' x + b', \qquad
    W' = \mathrm{diag}\Bigl(\frac{\gamma}{\sqrt{v + \epsilon}}\Bigr) W .

The network is not changed: the folded weights are copies, in float64.
"""

import copy
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_weights

from relflat_sk._network.borrowing import has_own_forward
from relflat_sk._network.layer_maps import LayerMap
from relflat_sk._network.layers import (
    check_real,
    check_stored,
    is_weight_layer,
    layer_map,
    weight_kind,
)
from relflat_sk._network.network import Network
from relflat_sk._network.recording import LayerRecord, Recorder, layer_input

BATCH_NORMS = (_BatchNorm, nn.SyncBatchNorm)


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of one of the kinds and computes the same as they do."""
    return (
        isinstance(module, kinds)
        and not has_own_forward(module)
        and any(type(module).forward is kind.forward for kind in kinds)
    )


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer with a weight matrix that computes ``W x + b``."""
    kind = weight_kind(module)
    return kind is not None and is_plain(module, (kind,))


class _Tracer(fx.Tracer):
    """Traces through custom modules, but not through subclasses that only rename a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            super().is_leaf_module(m, module_qualified_name)
            or is_plain_layer(m)
            or is_plain(m, BATCH_NORMS)
        )


def trace(module: nn.Module) -> fx.Graph:
    """Record the forward pass in evaluation mode, on a copy that shares the parameters."""
    check_stored(module)
    tracer = _Tracer()
    if tracer.is_leaf_module(module, ""):
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("x"),)))
        return graph
    # tracing runs the user's code, which may leave proxies behind in attributes
    root = copy_module(module, {id(parameter): parameter for parameter in module.parameters()})
    try:
        return tracer.trace(root.eval(), concrete_args=_defaults(root))
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot follow the forward pass of the {type(module).__name__}, so it is "
            "not known which function the network computes. Usually the reason is control flow "
            f"that depends on data. torch.fx says: {error}"
        ) from error


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `forward` that have a constant as their default."""
    return {
        argument.name: argument.default
        for argument in inspect.signature(module.forward).parameters.values()
        if argument.default is None or isinstance(argument.default, bool | int | float | str)
    }


def copy_module(module: nn.Module, shared: dict[int, Any]) -> nn.Module:
    """Make a deep copy of a network."""
    try:
        return copy.deepcopy(module, shared)
    except RuntimeError as error:
        raise ValueError(
            f"the {type(module).__name__} cannot be copied. If it stores a hidden value of its "
            "last forward pass, run it once under torch.no_grad(); if a weight is computed "
            f"(pruning, weight norm), make it permanent. torch says: {error}"
        ) from error


def describe_step(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Describe a step of the forward pass for error messages."""
    if node.op == "call_module":
        name = str(node.target)
        return f"module {name!r} ({type(modules[name]).__name__})"
    if node.op == "output":
        return "what the network returns"
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    owner = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
    inside = f"module {owner!r}" if owner else "the network's forward"
    return f"the {node.op.removeprefix('call_')} {name!r} in {inside}"


def step_name(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Return the name that a module, function and method of torch share; empty for any other."""
    step: Any = node.target
    if node.op == "call_module":
        step = None if has_own_forward(modules[step]) else type(modules[step])
    if not isinstance(step, str):  # of torch, or an operator of Python
        origin = getattr(step, "__module__", "").partition(".")[0]
        step = getattr(step, "__name__", "") if origin in {"torch", "_operator", "builtins"} else ""
    return re.sub(r"_|[123]d$", "", step.lower())


# -- layers as affine maps ------------------------------------------------------------------------


@dataclass(frozen=True)
class AffineLayer:
    """One call of a layer ``W x + b`` in the forward pass.

    Shapes: `weight` (d, m), `bias` (d,).
    """

    name: str
    map: LayerMap
    weight: Tensor
    bias: Tensor | None
    input_shape: torch.Size
    output_shape: torch.Size
    norm: str | None = None

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply another weight matrix, without bias. Shapes: `weight` (d, m)."""
        z = x.new_empty((len(x), *self.output_shape))
        return self.map.from_rows(self.map.apply(x, weight), z)

    def spread_bias(self, bias: Tensor) -> Tensor:
        """Arrange one number per row of the weight so that it can be added to the output.

        Shapes: `bias` (d,); returns (1, ...).
        """
        z = bias.new_empty((1, *self.output_shape))
        rows = bias[:, None].expand_as(self.map.to_rows(z)[0])
        return self.map.from_rows(rows[None], z)


@dataclass(frozen=True)
class _Call:
    name: str
    input_shape: torch.Size  # of one sample
    output_shape: torch.Size  # of one sample


def fold_layers(network: Network) -> list[AffineLayer]:
    """List the layers with a weight matrix in the order of their calls, batch norm folded in.

    To be used within `relflat_sk._network.borrowed`.
    """
    check_real(network.module)
    calls = _record_calls(network)
    modules: dict[str, Any] = dict(network.module.named_modules())
    called = Counter(call.name for call in calls)
    norms = {name for name in called if isinstance(modules[name], BATCH_NORMS)}
    behind = _norms_behind(network.module, modules, called) if norms else {}
    return [
        _fold(call, modules[call.name], behind.get(call.name), modules)
        for call in calls
        if call.name not in norms
    ]


def _record_calls(network: Network) -> list[_Call]:
    """List the calls of layers and batch norms in the first batch, in order."""
    calls: list[_Call] = []

    def keep_shapes(record: LayerRecord, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        shape = layer_input(args, kwargs).shape
        calls.append(_Call(record.name, shape[1:], output.shape[1:]))
        return output

    layers = {
        name: module
        for name, module in network.module.named_modules()
        if is_weight_layer(module) or isinstance(module, BATCH_NORMS)
    }
    with torch.no_grad(), Recorder(layers, keep_shapes):
        network(next(network.batches()).x)
    return calls


def _norms_behind(
    module: nn.Module, modules: dict[str, Any], called: Counter[str]
) -> dict[str, str]:
    """Find for each layer the batch norm that directly follows it."""
    try:
        graph = trace(module)
    except ValueError as error:
        raise ValueError(
            "batch norm cannot be folded into the layers before it, because it is not known which "
            f"layers these are: {error}"
        ) from error
    steps = {str(node.target): node for node in graph.nodes if node.op == "call_module"}
    found = {}
    for name in called:
        if isinstance(modules[name], BATCH_NORMS):
            found[_layer_before(name, steps.get(name), modules, called)] = name
    return found


def _layer_before(
    name: str, node: fx.Node | None, modules: dict[str, Any], called: Counter[str]
) -> str:
    """Return the layer directly before a batch norm, or say why there is none."""

    def refusal(reason: str) -> ValueError:
        return ValueError(
            f"batch norm {name!r} cannot be folded into a layer before it: {reason}. Without that, "
            "norms of weights mean nothing, because batch norm undoes the scale of the weights."
        )

    if node is None:
        raise refusal("torch.fx does not record its call")
    if modules[name].running_mean is None:
        raise refusal("it has no running statistics")
    (before,) = node.all_input_nodes
    layer = str(before.target)
    if before.op != "call_module" or not is_plain_layer(modules[layer]):
        raise refusal(f"it follows {before.name!r}, which is no layer with a weight matrix")
    if len(before.users) > 1:
        raise refusal(f"the output of layer {layer!r} is also used elsewhere")
    if called[name] > 1 or called[layer] > 1:
        raise refusal(f"it or layer {layer!r} is called more than once")
    return layer


def _fold(call: _Call, layer: nn.Module, norm: str | None, modules: dict[str, Any]) -> AffineLayer:
    """Return one call of a layer as an affine map."""
    if not is_plain_layer(layer):
        raise ValueError(
            f"layer {call.name!r} is a {type(layer).__name__} with a forward method of its own, so "
            "that it may compute something other than W x + b. Use one of torch's own layers, or a "
            "measure that does not read weights."
        )
    as_map = layer_map(layer)
    weight = as_map.weight.double()
    own: Any = layer.bias
    bias = None if own is None else own.detach().double()
    if norm is not None:
        if as_map.channels_last and len(call.output_shape) != 1:
            raise ValueError(
                f"batch norm {norm!r} cannot be folded into layer {call.name!r}: it acts on "
                f"another axis than the layer's outputs, of shape {tuple(call.output_shape)}."
            )
        weight, bias = _fuse(weight, bias, modules[norm])
    return AffineLayer(call.name, as_map, weight, bias, call.input_shape, call.output_shape, norm)


def _fuse(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into a weight matrix and a bias."""

    def exact(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.detach().double()

    # for each kind of layer, a row of the weight matrix belongs to one channel
    fused = fuse_conv_bn_weights(
        weight,
        bias,
        exact(norm.running_mean),
        exact(norm.running_var),
        norm.eps,
        exact(norm.weight),
        exact(norm.bias),
    )
    return fused[0].detach(), fused[1].detach()

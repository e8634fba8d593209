r"""The layers of a network as affine maps, with batch norm folded into them.

In evaluation mode batch norm multiplies each channel by a number and adds another. Directly
behind a layer with a weight matrix, it can be counted as part of that layer:

.. math::
    \gamma \frac{W x + b - \mu}{\sqrt{v + \epsilon}} + \beta = W' x + b', \qquad
    W' = \mathrm{diag}\Bigl(\frac{\gamma}{\sqrt{v + \epsilon}}\Bigr) W .

The network is not changed: the folded weights are copies, in float64.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from relflat_sk._network import (
    LayerMap,
    LayerRecord,
    Network,
    Recorder,
    is_weight_layer,
    layer_input,
    layer_map,
)
from relflat_sk._rescaling.tracing import BATCH_NORMS, is_plain_layer, trace


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

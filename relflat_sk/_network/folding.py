r"""The layers of a network as affine maps, batch norm folded in.

In evaluation mode batch norm multiplies each channel by a number and adds another. Directly behind
a layer with a weight matrix, it can be counted as part of that layer:

.. math::
    \gamma \frac{W x + b - \mu}{\sqrt{v + \epsilon}} + \beta = W' x + b', \qquad
    W' = \mathrm{diag}\Bigl(\frac{\gamma}{\sqrt{v + \epsilon}}\Bigr) W .

The network is not changed: the folded weights are copies, in float64.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from relflat_sk._network.borrowing import has_own_forward
from relflat_sk._network.layers import LayerMap, check_real, layer_map, weight_kind
from relflat_sk._network.network import Network
from relflat_sk._network.recording import (
    LayerRecord,
    Recorder,
    graph_alone,
    nodes_behind,
)

BATCH_NORMS = (_BatchNorm, nn.SyncBatchNorm)


@dataclass(frozen=True)
class AffineLayer:
    """One call of a layer ``W x + b`` in the forward pass."""

    name: str
    map: LayerMap
    weight: Tensor  # (d, m)
    bias: Tensor | None  # (d,)
    input_shape: torch.Size
    output_shape: torch.Size
    norm: str | None = None

    def apply(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply another weight matrix, without bias."""
        z = x.new_empty((len(x), *self.output_shape))
        return self.map.from_rows(self.map.apply(x, weight), z)

    def spread_bias(self, bias: Tensor) -> Tensor:
        """Arrange one number per row of the weight so that it can be added to the output."""
        z = bias.new_empty((1, *self.output_shape))
        rows = bias[:, None].expand_as(self.map.to_rows(z)[0])
        return self.map.from_rows(rows[None], z)


@dataclass(frozen=True)
class _Call:
    name: str
    input_shape: torch.Size  # of one sample
    output_shape: torch.Size  # of one sample
    before: Any  # the node of autograd's graph that made the input
    node: Any  # that of the output


def fold_layers(network: Network) -> list[AffineLayer]:
    """List the layers with a weight matrix in the order of their calls, batch norm folded in."""
    # To be used within `relflat_sk._network.borrowed`.
    check_real(network.module)
    calls, uses = _record_calls(network)
    modules: dict[str, Any] = dict(network.module.named_modules())
    is_norm = {call.name: isinstance(modules[call.name], BATCH_NORMS) for call in calls}
    behind = {
        _layer_before(call, modules[call.name], calls, uses): call.name
        for call in calls
        if is_norm[call.name]
    }
    return [
        _fold(call, modules[call.name], behind.get(call.name), modules)
        for call in calls
        if not is_norm[call.name]
    ]


def _record_calls(network: Network) -> tuple[list[_Call], Counter[Any]]:
    """List the calls of layers and batch norms in the first batch, and how often nodes are used."""
    calls: list[_Call] = []

    def keep_nodes(record: LayerRecord, x: Tensor, output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_() * 1
        calls.append(_Call(record.name, x.shape[1:], output.shape[1:], x.grad_fn, output.grad_fn))
        return output

    layers = {
        name: module
        for name, module in network.module.named_modules()
        if weight_kind(module) or isinstance(module, BATCH_NORMS)
    }
    with torch.enable_grad(), Recorder(layers, keep_nodes), graph_alone():
        output = network(next(network.batches()).x)
    nodes = nodes_behind(output.grad_fn)
    return calls, Counter(source for node in nodes for source, _ in node.next_functions)


def _layer_before(norm: _Call, module: Any, calls: list[_Call], uses: Counter[Any]) -> str:
    """Return the layer directly before a batch norm, or say why there is none."""
    called = Counter(call.name for call in calls)
    layers = [call.name for call in calls if call.node is norm.before is not None]
    layer = layers[0] if layers else ""
    reasons = {
        "it has no running statistics": module.running_mean is None,
        "it does not follow a layer with a weight matrix": not layers,
        f"it or layer {layer!r} is called more than once": max(called[norm.name], called[layer])
        > 1,
        f"the output of layer {layer!r} is also used elsewhere": uses[norm.before] > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(
                f"batch norm {norm.name!r} cannot be folded into a layer before it: {reason}. "
                "Without that, norms of weights mean nothing."
            )
    return layer


def _fold(call: _Call, layer: nn.Module, norm: str | None, modules: dict[str, Any]) -> AffineLayer:
    """Return one call of a layer as an affine map."""
    kind: Any = weight_kind(layer)
    if (
        not isinstance(layer, kind)  # but one with adapters
        or has_own_forward(layer)
        or type(layer).forward is not kind.forward
    ):
        raise ValueError(
            f"layer {call.name!r} is a {type(layer).__name__} with a forward method of its own. "
            "Use one of torch's own layers, or a measure that does not read weights."
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
    """Fold a batch norm into a weight matrix and a bias, by the formula above."""
    # for each kind of layer, a row of the weight matrix belongs to one channel
    mean, scale = norm.running_mean.double(), (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = (-mean if bias is None else bias - mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    return weight * scale[:, None], shift

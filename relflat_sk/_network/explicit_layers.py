"""Make normalisation layers differentiable as often as a penalty needs.

A penalty at an earlier layer differentiates the network behind that layer several times: its
gradient is a third derivative of the loss. Torch's formula for the second derivative of its fused
normalisations treats the mean and deviation that the forward pass saved as constants, so that every
third derivative is wrong, without an error. Within `ExplicitLayers`, normalisation layers compute
the same as before, but are differentiated through their definition.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from relflat_sk._losses import pull_back
from relflat_sk._network.borrowing import (
    ReplacedForwards,
    clamp_hardsigmoid,
    find_hardsigmoids,
    has_own_forward,
)
from relflat_sk._numerics import full_precision

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _InstanceNorm, nn.LayerNorm,
          nn.GroupNorm, nn.RMSNorm)  # fmt: skip


class ExplicitLayers(ReplacedForwards):
    """Context in which normalisation layers run so that a penalty can differentiate them."""

    def __init__(self, layers: Iterable[nn.Module] = ()) -> None:
        super().__init__((layer, partial(_run, layer, self)) for layer in layers)
        self.inputs_only = False
        self.linear = False

    def pull_back(
        self,
        of: Sequence[Tensor],
        inputs: Sequence[Any],
        vectors: Sequence[Tensor] | None = None,
        *,
        linear: bool,
    ) -> tuple[Tensor | None, ...]:
        """Pull vectors back with their graph, see `relflat_sk._losses.pull_back`."""
        self.inputs_only, self.linear = True, linear
        try:
            return pull_back(of, inputs, vectors, create_graph=True)
        finally:
            self.inputs_only = self.linear = False


def find_fused(module: nn.Module) -> list[nn.Module]:
    """List a network's normalisations and hardsigmoids: torch cannot differentiate them thrice."""
    return find_hardsigmoids(module) + [
        layer
        for layer in module.modules()
        if isinstance(layer, _NORMS)
        and any(type(layer).forward is kind.forward for kind in _NORMS if isinstance(layer, kind))
        and not has_own_forward(layer)
    ]


def _run(layer: Any, explicit: ExplicitLayers, x: Tensor) -> Tensor:
    """Run a layer so that further derivatives are those of its definition."""
    if isinstance(layer, nn.Hardsigmoid):
        return clamp_hardsigmoid(x)
    by_input = not isinstance(layer, _BatchNorm | _InstanceNorm) or (
        layer.training or layer.running_mean is None
    )
    if not by_input or not torch.is_grad_enabled():
        usual: Tensor = type(layer).forward(layer, x)
        return usual
    function = _OfBatch if isinstance(layer, _BatchNorm) else _OfSample
    tensors = layer.weight, getattr(layer, "bias", None)
    done: Tensor = function.apply(layer, explicit, x, *tensors)  # type: ignore[no-untyped-call]
    return done


class _OfSample(torch.autograd.Function):
    """A normalisation with its fused forward pass and the gradient of its definition."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        explicit: ExplicitLayers,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.explicit = layer, explicit
        ctx.save_for_backward(x, weight, bias)
        out: Tensor = type(layer).forward(layer, x)
        return out

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        again, tensors, used = torch.is_grad_enabled(), ctx.saved_tensors, ctx.needs_input_grad[2:]
        if ctx.explicit.inputs_only:
            used = (used[0], False, False)
        if not again:  # keep the new graph apart from the one that is being freed
            tensors = [t if t is None else t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            out = _define(ctx.layer, *tensors).to(outer.dtype)
        needed = [t for t, is_used in zip(tensors, used, strict=True) if is_used]
        found = iter(torch.autograd.grad(out, needed, outer, create_graph=again))
        return None, None, *(next(found) if is_used else None for is_used in used)


class _OfBatch(_OfSample):
    """A normalisation by statistics of the batch: given these, a linear map of each sample."""

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if not (torch.is_grad_enabled() and ctx.explicit.linear):
            return _OfSample.backward(ctx, outer)
        x, weight, _ = ctx.saved_tensors
        _, scale, shape = _normalise(ctx.layer, full_precision(x))
        scale = scale if weight is None else scale * weight.view(shape)
        return None, None, (outer * scale).to(outer.dtype), None, None


def _define(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute a layer's output by its definition, in terms of means."""
    x = full_precision(x)
    centred, scale, shape = _normalise(layer, x)
    out = (centred * scale).reshape(x.shape)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def _normalise(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Return the centred input, one over its deviation, and the shape of the layer's weight."""
    rows, axes, shape = _arrange(layer, x)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    centred = rows if isinstance(layer, nn.RMSNorm) else rows - rows.mean(axes, keepdim=True)
    return centred, (centred.square().mean(axes, keepdim=True) + eps).rsqrt(), shape


def _arrange(layer: Any, x: Tensor) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return the input, the axes to take means over, and the shape of the layer's weight."""
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        shape = tuple(layer.normalized_shape)
        return x, tuple(range(-len(shape), 0)), shape
    if isinstance(layer, _InstanceNorm):
        # there may be no axis of samples
        positions = layer._get_no_batch_dim() - 1  # type: ignore[no-untyped-call]
        return x, tuple(range(-positions, 0)), (-1, *[1] * positions)
    shape = (-1, *[1] * (x.ndim - 2))
    if isinstance(layer, nn.GroupNorm):
        return x.reshape(len(x), layer.num_groups, -1), (2,), shape
    return x, (0, *range(2, x.ndim)), shape

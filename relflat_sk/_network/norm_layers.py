"""Make normalisation layers differentiable as often as a penalty needs.

The gradient of a penalty at an earlier layer is a third derivative of the loss. Torch's
formula for the second derivative of its fused normalisations treats the mean and deviation
that the forward pass saved as constants, so that every third derivative is wrong, without an
error. Within `explicit_norms`, normalisation layers compute the same as before, but are
differentiated through their definition.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from relflat_sk._network.forwards import ReplacedForwards, has_own_forward
from relflat_sk._numerics import full_precision

__all__ = ["explicit_norms", "find_norm_layers"]


def find_norm_layers(module: nn.Module) -> list[nn.Module]:
    """List the layers of a network that normalise by statistics of their input.

    Parameters
    ----------
    module : nn.Module
        The network.

    Returns
    -------
    list of nn.Module
        Layers whose forward method is replaced by the user are left out.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _InstanceNorm, nn.LayerNorm,
             nn.GroupNorm, nn.RMSNorm)  # fmt: skip
    return [m for m in module.modules() if isinstance(m, kinds) and not has_own_forward(m)]


def explicit_norms(layers: Sequence[nn.Module]) -> ReplacedForwards:
    """Differentiate these layers through their definition while the context is open.

    Parameters
    ----------
    layers : sequence of nn.Module
        From `find_norm_layers`.

    Returns
    -------
    ReplacedForwards
        To be used as a context.
    """
    return ReplacedForwards((layer, partial(_forward, layer)) for layer in layers)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Run a layer so that it is differentiated through its definition."""
    given = isinstance(layer, _BatchNorm | _InstanceNorm) and not _by_input(layer)
    if given or not torch.is_grad_enabled():
        usual: Tensor = type(layer).forward(layer, x)
        return usual
    function = _OfBatch if isinstance(layer, _BatchNorm) else _OfSample
    tensors = layer.weight, getattr(layer, "bias", None)
    done: Tensor = function.apply(layer, x, *tensors)  # type: ignore[no-untyped-call]
    return done


def _by_input(layer: Any) -> bool:
    """Return whether batch or instance norm uses the input's statistics, not running ones."""
    return layer.training or layer.running_mean is None


class _OfSample(torch.autograd.Function):
    """A normalisation with its fused forward pass and the gradient of its definition."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight, bias)
        out: Tensor = type(layer).forward(layer, x)
        return out

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        again = torch.is_grad_enabled()
        tensors, used = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if not again:  # keep the new graph apart from the one that is being freed
            tensors = [t if t is None else t.detach().requires_grad_() for t in tensors]
        with torch.enable_grad():
            out = _define(ctx.layer, *tensors).to(outer.dtype)
        needed = [t for t, is_used in zip(tensors, used, strict=True) if is_used]
        found = iter(torch.autograd.grad(out, needed, outer, create_graph=again))
        return None, *(next(found) if is_used else None for is_used in used)


class _OfBatch(_OfSample):
    """A normalisation by statistics of the batch: given these, a linear map of each sample."""


def _define(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute a layer's output by its definition, in terms of means."""
    x = full_precision(x)
    rows, axes, shape = _arrange(layer, x)
    eps = torch.finfo(x.dtype).eps if layer.eps is None else layer.eps
    centred = rows if isinstance(layer, nn.RMSNorm) else rows - rows.mean(axes, keepdim=True)
    out = (centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()).reshape(x.shape)
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


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

"""Run layers so that a penalty can differentiate them, and pull vectors back through them.

A penalty at an earlier layer differentiates the network behind that layer several times. Torch's
derivatives of some layers are wrong from the third on, or slow from the second on. Within
`ExplicitLayers`, normalisations and convolutions compute what they always do, and have
derivatives that are right and fast.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from relflat_sk._losses import pull_back
from relflat_sk._network.borrowing import ReplacedForwards, has_own_forward
from relflat_sk._numerics import full_precision

# a layer, and what runs it within `ExplicitLayers`: called with layer, context and input
Explicit = tuple[nn.Module, Callable[[Any, "ExplicitLayers", Tensor], Tensor]]


class ExplicitLayers(ReplacedForwards):
    """Context in which layers run so that a penalty can differentiate them."""

    def __init__(self, layers: Sequence[Explicit] = ()) -> None:
        super().__init__((layer, partial(run, layer, self)) for layer, run in layers)
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


# -- normalisations ------------------------------------------------------------------------
# The gradient of a penalty at an earlier layer is a third derivative of the loss. Torch's
# formula for the second derivative of its fused normalisations treats the mean and deviation
# that the forward pass saved as constants, so that every third derivative is wrong, without an
# error. Within `ExplicitLayers`, normalisation layers compute the same as before, but are
# differentiated through their definition.

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _InstanceNorm, nn.LayerNorm,
          nn.GroupNorm, nn.RMSNorm)  # fmt: skip


def find_norms(module: nn.Module) -> list[Explicit]:
    """List the layers of a network that normalise by statistics of their input."""
    return [(layer, _run_norm) for layer in module.modules() if _is_plain_norm(layer)]


def _is_plain_norm(layer: nn.Module) -> bool:
    """Return whether a module is a normalisation that runs torch's forward method."""
    kind = next((kind for kind in _NORMS if isinstance(layer, kind)), None)
    return kind is not None and type(layer).forward is kind.forward and not has_own_forward(layer)


def _run_norm(layer: Any, explicit: ExplicitLayers, x: Tensor) -> Tensor:
    """Run a layer so that further derivatives are those of its definition."""
    given = isinstance(layer, _BatchNorm | _InstanceNorm) and not _by_input(layer)
    if given or not torch.is_grad_enabled():
        usual: Tensor = type(layer).forward(layer, x)
        return usual
    function = _OfBatch if isinstance(layer, _BatchNorm) else _OfSample
    tensors = layer.weight, getattr(layer, "bias", None)
    done: Tensor = function.apply(layer, explicit, x, *tensors)  # type: ignore[no-untyped-call]
    return done


def _by_input(layer: Any) -> bool:
    """Return whether batch or instance norm uses the input's statistics, not running ones."""
    return layer.training or layer.running_mean is None


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
        again = torch.is_grad_enabled()
        tensors, used = ctx.saved_tensors, list(ctx.needs_input_grad[2:])
        if ctx.explicit.inputs_only:
            used[1:] = [False] * len(used[1:])
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
        x, weight, bias = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, None, *_fused_gradient(ctx.layer, x, weight, bias, outer)
        if not ctx.explicit.linear:
            return _OfSample.backward(ctx, outer)
        _, scale, shape = _normalise(ctx.layer, full_precision(x))
        scale = scale if weight is None else scale * weight.view(shape)
        return None, None, (outer * scale).to(outer.dtype), None, None


def _fused_gradient(
    layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, outer: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute the gradient of a batch norm by torch's formula, in a fifth of the time."""
    x = x.detach().requires_grad_()
    affine = [t if t is None else t.detach().requires_grad_() for t in (weight, bias)]
    with torch.enable_grad():
        out = F.batch_norm(x, None, None, affine[0], affine[1], True, eps=layer.eps)
    found = iter(torch.autograd.grad(out, [x, *(t for t in affine if t is not None)], outer))
    return next(found), *(t if t is None else next(found) for t in affine)


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


# -- convolutions --------------------------------------------------------------------------
# Torch differentiates the gradient of a convolution in its input by a convolution whose kernels are
# as large as the images, which is slow on some machines. The gradient is itself a transposed
# convolution, and torch differentiates it as such as fast as any other.

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_convolutions(module: nn.Module) -> list[Explicit]:
    """List the convolutions of a network that compute what their class says."""
    return [(layer, _run_convolution) for layer in module.modules() if _is_plain_convolution(layer)]


def _is_plain_convolution(layer: Any) -> bool:
    """Return whether a module is a convolution without anything of its own."""
    kind = next((kind for kind in _CONVOLUTIONS if isinstance(layer, kind)), None)
    return (
        kind is not None
        and type(layer).forward is kind.forward
        and type(layer)._conv_forward is kind._conv_forward
        and not has_own_forward(layer)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _run_convolution(layer: Any, explicit: ExplicitLayers, x: Tensor) -> Tensor:
    """Run a convolution so that vectors are pulled back by a transposed one."""
    if x.ndim != 2 + len(layer.kernel_size) or not torch.is_grad_enabled():
        usual: Tensor = type(layer).forward(layer, x)
        return usual
    done: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        layer, explicit, x, layer.weight, layer.bias
    )
    return done


class _Convolution(torch.autograd.Function):
    """A convolution whose gradient in the input is a transposed convolution."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        explicit: ExplicitLayers,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.explicit = layer, explicit
        ctx.save_for_backward(x, weight)
        out: Tensor = layer._conv_forward(x, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        x, weight = (t.to(outer.dtype) for t in ctx.saved_tensors)  # differ under autocast
        where = layer.stride, layer.padding, layer.dilation
        if ctx.explicit.inputs_only:
            # what the stride leaves over at the end
            rest = [
                (size + 2 * padding - dilation * (kernel - 1) - 1) % stride
                for size, kernel, stride, padding, dilation in zip(
                    x.shape[2:], layer.kernel_size, *where, strict=True
                )
            ]
            found = torch.convolution(outer, weight, None, *where, True, rest, layer.groups)
            return None, None, found, None, None
        sizes = None if layer.bias is None else list(layer.bias.shape)
        no_rest = [0] * len(layer.stride)
        found = torch.ops.aten.convolution_backward(
            outer, x, weight, sizes, *where, False, no_rest, layer.groups, ctx.needs_input_grad[2:]
        )
        return None, None, *found

"""Make convolutions as cheap to differentiate twice as once.

Torch differentiates the gradient of a convolution in its input by a convolution whose kernels are
as large as the images, which is slow on some machines. The gradient is itself a transposed
convolution, and torch differentiates it as such as fast as any other.
"""

from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._network.explicit_layers import Explicit, ExplicitLayers
from relflat_sk._network.forwards import has_own_forward

__all__ = ["find_convolutions"]

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_convolutions(module: nn.Module) -> list[Explicit]:
    """List the convolutions of a network that compute what their class says."""
    return [(layer, _run) for layer in module.modules() if _is_plain(layer)]


def _is_plain(layer: Any) -> bool:
    """Return whether a module is a convolution without anything of its own."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    return (
        kind is not None
        and type(layer).forward is kind.forward
        and type(layer)._conv_forward is kind._conv_forward
        and not has_own_forward(layer)
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
    )


def _run(layer: Any, explicit: ExplicitLayers, x: Tensor) -> Tensor:
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

"""Read off autograd's graph whether the layers alone make a network's outputs change fast."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from relflat_sk._network.graph import kind_of, moves_axes, tail

__all__ = ["find_faster_step"]

_AFFINE = {"Addmm", "Mm", "Convolution", "MkldnnConvolution", "_Convolution"}
_BATCH_NORMS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}


def _does_not_overlap(step: Any) -> bool:
    """Return whether each input of a maximum pooling belongs to one window at most."""
    windows = zip(step._saved_kernel_size, step._saved_stride, step._saved_dilation, strict=True)
    return all(stride >= size and dilation == 1 for size, stride, dilation in windows)


def _averages(step: Any) -> bool:
    """Return whether the weights of an average pooling's windows add up to 1 or less."""
    return step._saved_divisor_override is None


def _averages_equally(step: Any) -> bool:
    """Return whether, besides, windows at the border weigh an input no more than others do."""
    return _averages(step) and (step._saved_count_include_pad or not any(step._saved_padding))


def _any(step: Any) -> bool:
    return True


# steps whose outputs change at most as fast as their inputs, in the maximum norm
_SLOW: dict[str, Callable[[Any], bool]] = {
    "AvgPool2D": _averages,
    "AvgPool3D": _averages,
    "ConstantPadNd": _any,
    "Hardtanh": _any,
    "LeakyRelu": lambda step: abs(step._saved_negative_slope) <= 1,
    "MaxPool2DWithIndices": _any,
    "MaxPool3DWithIndices": _any,
    "Mean": _any,
    "Relu": _any,
    "Select": _any,
    "Sigmoid": _any,
    "Slice": _any,
    "Softplus": _any,
    "Tanh": _any,
}
# and in the Euclidean norm, in which an input counts in each window that it belongs to
_SLOW_EUCLIDEAN = _SLOW | {
    "AvgPool2D": _averages_equally,
    "AvgPool3D": _averages_equally,
    "MaxPool2DWithIndices": _does_not_overlap,
    "MaxPool3DWithIndices": _does_not_overlap,
}


def find_faster_step(
    output: Tensor, x: Tensor, n_layers: int, n_folded: int = 0, *, euclidean: bool
) -> str | None:
    """Return a step by which the outputs may change faster than the layers' norms allow.

    The product of the layers' norms limits the changes of the outputs if the network is a chain
    of the layers, and all steps between them change at most as fast as their inputs.
    """
    slow = _SLOW_EUCLIDEAN if euclidean else _SLOW
    n_affine = n_norms = 0
    for step, reached in tail(output, get_gradient_edge(x).node):
        kind = kind_of(step)
        if sum(reached) > 1:
            return f"{step.name()} joins {sum(reached)} branches"
        if kind in _AFFINE:
            n_affine += 1
        elif kind in _BATCH_NORMS:
            n_norms += 1
        elif not (moves_axes(step) or (kind in slow and slow[kind](step))):
            return f"{step.name()} may change faster than its input"
    if (n_affine, n_norms) != (n_layers, n_folded):
        return "matrices or batch norms are applied by functions, outside of layers"
    return None

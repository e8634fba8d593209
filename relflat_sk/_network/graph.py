"""Read off autograd's graph what a network computes between its layers and its output.

The graph of a forward pass tells what was computed behind a layer, whatever modules or
functions did it. A layer is given by the node at which its output entered the graph,
`LayerRecord.node`. Unknown nodes count as computing anything.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

# nodes whose output holds the same numbers as their input, in the same order
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
_SAME_BUT_FOR_AXES = _SAME_NUMBERS | {"TransposeBackward0", "PermuteBackward0"}
_LINKS = {
    "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
}


def find_link(output: Tensor, node: Any) -> str | None:
    """Return the function that turned a layer's output into the network's."""
    link = "identity"
    step = output.grad_fn
    while step is not None and step is not node:
        name = step.name()
        if name in _LINKS and link == "identity" and _over_outputs(step):
            link = _LINKS[name]
        elif name not in _SAME_NUMBERS:
            return None
        step = step.next_functions[0][0]
    return link if step is node and node is not None else None


def find_ending(output: Tensor) -> str | None:
    """Return the function that a network ends in, if it makes probabilities or their logarithms."""
    step = output.grad_fn
    while step is not None and step.name() in _SAME_BUT_FOR_AXES:
        step = step.next_functions[0][0]
    return None if step is None else _LINKS.get(step.name())


def _over_outputs(step: Any) -> bool:
    """Return whether a softmax runs along axis 1 of an (n, d) array; true for a sigmoid."""
    dim = getattr(step, "_saved_dim", None)
    # autograd hands negative axes out as unsigned 64-bit integers
    return dim is None or (step._saved_result.ndim == 2 and (dim + 2) % 2**64 % 2 == 1)


def only_moves_axes(output: Tensor, node: Any, z: Tensor) -> bool:
    """Return whether the network's output is the layer's, with axes moved at most.

    Shapes: `output` (n, d, ...), `z` (n, ..., d).
    """
    step: Any = output.grad_fn
    while step is not None and step is not node:
        if step.name() not in _SAME_BUT_FOR_AXES:
            return False
        step = step.next_functions[0][0]
    # the graph shows that the numbers are the same, a comparison that they are in order
    return (
        step is node
        and node is not None
        and output.ndim == z.ndim
        and torch.equal(output.detach().movedim(1, -1), z)
    )


# nodes that are linear, or piecewise linear, in all their inputs together
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


def is_piecewise_linear(base: Tensor, *nodes: Any) -> bool:
    """Return whether a value is a piecewise linear function of the layers' outputs.

    Batch norm that `relflat_sk._network.explicit_layers` takes apart counts as linear, with the
    statistics that it divides by as constants.
    """
    return all(_keeps_linear(step, reached) for step, reached in tail(base, *nodes))


def _keeps_linear(step: Any, reached: list[bool]) -> bool:
    """Return whether a node is linear in pieces in those of its inputs that are `reached`."""
    kind = kind_of(step)
    if step.name() in _SAME_NUMBERS or kind in _PIECEWISE_LINEAR:
        return True
    if kind in _MULTILINEAR:
        return sum(reached) == 1
    if kind in _LINEAR_IN_FIRST:
        fused = getattr(step, "_saved_training", False)  # see `check_thrice`
        return not any(reached[1:]) and not fused
    return False


def has_fused_attention(base: Tensor, *nodes: Any) -> bool:
    """Return whether attention behind some layers ran in a kernel without a second derivative."""
    return any(step.name().startswith("ScaledDotProduct") for step, _ in tail(base, *nodes))


# torch's second derivatives of these take statistics of the input for constants
_STATISTICS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm", "NativeLayerNorm",
               "NativeGroupNorm", "FusedRmsNorm"}  # fmt: skip


def check_thrice(base: Tensor, *nodes: Any) -> None:
    """Refuse a network with operations whose third derivative torch gets silently wrong."""
    for step, _ in tail(base, *nodes):
        if kind_of(step) in _STATISTICS and getattr(step, "_saved_training", True):
            raise ValueError(
                f"a normalisation behind the layer ({step.name()}) is called as a function. The "
                "gradient of the penalty needs its third derivative, which torch gets wrong. Use "
                "a module such as nn.LayerNorm or nn.BatchNorm2d, or penalise the last layer."
            )


def depends_on(base: Tensor, node: Any) -> bool:
    """Return whether a value depends on a layer's output."""
    return base.grad_fn is node or bool(tail(base, node))


def moves_axes(step: Any) -> bool:
    """Return whether a node's output holds the numbers of its input, with axes moved at most."""
    return step.name() in _SAME_BUT_FOR_AXES


def kind_of(step: Any) -> str:
    """Return a node's name without its number: "Relu" for "ReluBackward0"."""
    name: str = step.name()
    kind = name.removesuffix("0").removesuffix("1").removesuffix("2")
    return kind.removesuffix("Backward")


def tail(base: Tensor, *nodes: Any) -> list[tuple[Any, list[bool]]]:
    """List the nodes between layers and `base`, each with which inputs depend on the layers."""
    starts = set(nodes)
    depends: dict[Any, bool] = {None: False}
    stack: list[Any] = [base.grad_fn]
    found = []
    while stack:  # depth first without recursion: networks are deep
        step = stack[-1]
        if step in depends:
            stack.pop()
            continue
        # with one layer, the graph before it does not matter
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


# -- how fast the outputs change between the layers ----------------------------------------

_AFFINE = {"Addmm", "Mm", "Convolution", "MkldnnConvolution"}
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

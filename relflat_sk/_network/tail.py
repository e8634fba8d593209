r"""Choose how the curvature of the loss in the outputs of layers is computed.

The *tail* of a network is its part behind a layer, up to the loss. Let ``B_i`` be the Hessian of
the loss of sample i in the layer's output. What the tail computed in a forward pass decides which
of three ways to ``B_i`` there are:

closed form
    The layer's output is what the criterion takes, but for a constant factor, or is turned into
    that by one function that the table of losses knows: the table has ``B_i``. The same holds for
    each token of a language model whose last layer puts out the logits, and for each pixel of a
    convolution's, whose kernel has one pixel. For a softmax over thousands of classes it is
    `ManyClasses`, whose sums run over chunks of them.
gradients
    The tail up to the criterion's input is piecewise linear, with Jacobian ``J_i``, and the table
    has the curvature ``R_i R_i^T`` of the loss in that input: then ``B_i = (J_i^T R_i)
    (J_i^T R_i)^T``. A backward pass pulls one vector of each sample back to all layers at once.
products
    Anything else: products ``B_i v_i`` by differentiating twice.

The measures and the penalty both choose here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from relflat_sk._losses.curvature import ClosedForm, Softmax
from relflat_sk._losses.loss import Loss
from relflat_sk._losses.many_classes import MANY, ManyClasses
from relflat_sk._losses.table import Target
from relflat_sk._network.borrowing import is_explicit_batch_norm
from relflat_sk._network.recording import LayerRecord

# -- what autograd's graph of a forward pass tells ---------------------------------------------
# whatever modules or functions computed it. A layer is given by the node at which its output
# entered the graph, `LayerRecord.node`. Unknown nodes count as computing anything.

# nodes whose output holds the same numbers as their input, in the same order
_SAME_NUMBERS = {
    "AliasBackward0", "CloneBackward0", "ReshapeAliasBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "ToCopyBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0",
}  # fmt: skip
SAME_BUT_FOR_AXES = _SAME_NUMBERS | {"TransposeBackward0", "PermuteBackward0"}
_LINKS = {
    "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
}


def find_link(output: Tensor, node: Any) -> str | None:
    """Return the function that turned a layer's output into the network's."""
    link, step = "identity", _first_other(output.grad_fn, _SAME_NUMBERS, node)
    if step is not None and step is not node and step.name() in _LINKS and _over_outputs(step):
        link = _LINKS[step.name()]
        step = _first_other(step.next_functions[0][0], _SAME_NUMBERS, node)
    return link if step is node and node is not None else None


def find_factor(output: Tensor, node: Any) -> float | None:
    """Return the constant number by which a layer's output was multiplied to be the network's."""
    step = _first_other(output.grad_fn, _SAME_NUMBERS, node)
    if step is None or kind_of(step) not in {"Mul", "Div"} or step.next_functions[1][0] is not None:
        return None
    number = step._saved_other
    # a number on a device would have to be waited for
    if number.numel() > 1 or not number.is_cpu:
        return None
    if node is None or _first_other(step.next_functions[0][0], _SAME_NUMBERS, node) is not node:
        return None
    return float(number if kind_of(step) == "Mul" else 1 / number)  # a tensor: 1 / 0 is infinite


def find_ending(output: Tensor) -> str | None:
    """Return the function that a network ends in, if it makes probabilities or their logarithms."""
    step = _first_other(output.grad_fn, SAME_BUT_FOR_AXES)
    return None if step is None else _LINKS.get(step.name())


def _first_other(step: Any, names: Collection[str], node: Any = None) -> Any:
    """Return the first step, from a result back, that is `node` or has none of the names."""
    while step is not None and step is not node and step.name() in names:
        step = step.next_functions[0][0]
    return step


def _over_outputs(step: Any) -> bool:
    """Return whether a softmax runs along axis 1 of an (n, d) array; true for a sigmoid."""
    dim = getattr(step, "_saved_dim", None)
    # autograd hands negative axes out as unsigned 64-bit integers
    return dim is None or (step._saved_result.ndim == 2 and (dim + 2) % 2**64 % 2 == 1)


def only_moves_axes(output: Tensor, node: Any, z: Tensor) -> bool:
    """Return whether the network's output is the layer's, with axes moved at most."""
    # the graph shows that the numbers are the same, a comparison that they are in order
    return (
        node is not None
        and _first_other(output.grad_fn, SAME_BUT_FOR_AXES, node) is node
        and output.ndim > 2
        and torch.equal(output.detach().movedim(1, -1).flatten(0, -2), z)
    )


# nodes that are linear, or piecewise linear, in all their inputs together
_PIECEWISE_LINEAR = {
    "Add", "Sub", "Neg", "Mean", "Sum", "Cat", "Stack", "Relu", "LeakyRelu", "RreluWithNoise",
    "Threshold", "Hardtanh", "Hardsigmoid", "Clamp", "ClampMin", "ClampMax", "Abs", "Maximum",
    "Minimum", "Max", "Amax", "Where", "MaxPool2DWithIndices", "MaxPool3DWithIndices",
    "AdaptiveMaxPool2D", "AdaptiveMaxPool3D", "AvgPool2D", "AvgPool3D", "AdaptiveAvgPool2D",
    "AdaptiveAvgPool3D",
    "MkldnnAdaptiveAvgPool2D", "MkldnnMaxPool2D", "MkldnnMaxPool3D", "UpsampleNearest2D",
    "UpsampleBilinear2D", "ConstantPadNd", "ReflectionPad1D", "ReflectionPad2D",
    "ReplicationPad1D", "ReplicationPad2D", "T", "Transpose", "Permute", "Expand", "Slice",
    "Select", "Index", "Gather", "Split", "SplitWithSizes", "Unbind", "Repeat", "Flip", "Roll",
    "PixelShuffle", "AsStrided", "MaskedFill",
}  # fmt: skip
# linear in each of their inputs, so that only one of them may depend on the layer
_MULTILINEAR = {"Mul", "Mm", "Addmm", "Bmm", "Baddbmm", "Convolution", "MkldnnConvolution",
                "PreluKernel", "Mv", "Dot"}  # fmt: skip
_BATCH_NORMS = {"NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"}
# linear in the first input as long as the others do not depend on the layer
_LINEAR_IN_FIRST = _BATCH_NORMS | {"Div"}


def is_piecewise_linear(base: Tensor, *nodes: Any) -> bool:
    """Return whether a value is a piecewise linear function of the layers' outputs.

    Batch norm that `relflat_sk._network.borrowing` takes apart counts as linear, with the
    statistics that it divides by as constants.
    """
    for step, reached in steps_behind(base, *nodes):
        kind = kind_of(step)
        if step.name() in _SAME_NUMBERS or kind in _PIECEWISE_LINEAR:
            continue
        fused = getattr(step, "_saved_training", False)  # see `check_thrice`
        if not (
            (kind in _MULTILINEAR and sum(reached) == 1)
            or (
                (kind in _LINEAR_IN_FIRST or is_explicit_batch_norm(step))
                and not any(reached[1:])
                and not fused
            )
        ):
            return False
    return True


# torch's second derivatives of these take statistics of the input for constants
_STATISTICS = _BATCH_NORMS | {"NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm"}


def check_thrice(base: Tensor, *nodes: Any) -> None:
    """Refuse a network with operations whose third derivative torch gets silently wrong."""
    for step, _ in steps_behind(base, *nodes):
        if kind_of(step) in _STATISTICS and getattr(step, "_saved_training", True):
            raise ValueError(
                f"a normalisation behind the layer ({step.name()}) is called as a function, or is "
                "a module that is defined before the last layer. The gradient of the penalty needs "
                "its third derivative, which torch gets wrong. Use a module such as nn.LayerNorm "
                "or nn.BatchNorm2d behind the last layer, or penalise the last layer."
            )


def normalises_batch(node: Any) -> bool:
    """Return whether a node is a batch norm of torch by the statistics of the batch."""
    return kind_of(node) in _BATCH_NORMS and bool(getattr(node, "_saved_training", True))


def nodes_behind(
    *starts: Any, until: Collection[Any] = (), enters: Callable[[Any], bool] = lambda step: True
) -> list[Any]:
    """List the nodes that some nodes follow from, with these; not those that follow from others."""
    stack, seen = list(starts), dict.fromkeys([None, *until])
    while stack:
        step = stack.pop()
        if step not in seen:
            seen[step] = None
            if enters(step):
                stack.extend(source for source, _ in step.next_functions)
    return [step for step in seen if step is not None and step not in until]


# products with a matrix, whose biases are vectors; those without biases
_WITHOUT_BIAS = {"Mm", "Bmm", "Mv", "Dot"}
_PRODUCTS = _WITHOUT_BIAS | {
    "Addmm", "Baddbmm", "Convolution", "MkldnnConvolution", "Trilinear",
}  # fmt: skip


def find_multiplier(output: Tensor, node: Any) -> nn.Parameter | None:
    """Return a parameter that multiplies a layer's output as a matrix, on the way to `output`."""
    for step, reached in steps_behind(output, node):
        kind = kind_of(step)
        if kind not in _PRODUCTS:
            continue
        sources = zip(step.next_functions, reached, strict=True)
        for source in nodes_behind(*(source for (source, _), behind in sources if not behind)):
            parameter = getattr(source, "variable", None)
            if isinstance(parameter, nn.Parameter) and (
                parameter.ndim > 1 or kind in _WITHOUT_BIAS
            ):
                return parameter
    return None


def kind_of(step: Any) -> str:
    """Return a node's name without its number: "Relu" for "ReluBackward0"; none for Python's."""
    if isinstance(step, BackwardCFunction):  # a user's function may be named as one of torch's
        return ""
    name: str = step.name()
    kind = name.removesuffix("0").removesuffix("1").removesuffix("2")
    return kind.removesuffix("Backward")


def steps_behind(base: Tensor, *nodes: Any) -> list[tuple[Any, list[bool]]]:
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

# steps whose outputs change at most as fast as their inputs, in the maximum norm
_SLOW: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("ConstantPadNd", "Hardtanh", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "Mean",
         "Relu", "Select", "Sigmoid", "Slice", "Softplus", "Tanh"),
        lambda step: True,
    ),
    # the weights of whose windows add up to 1 or less
    **dict.fromkeys(
        ("AvgPool2D", "AvgPool3D"), lambda step: step._saved_divisor_override is None
    ),
    "LeakyRelu": lambda step: abs(step._saved_negative_slope) <= 1,
}  # fmt: skip


def find_faster_step(output: Tensor, x: Tensor, n_layers: int, n_folded: int = 0) -> str | None:
    """Return a step by which the outputs may change faster than the layers' norms allow.

    The product of the layers' norms limits the changes of the outputs if the network is a chain
    of the layers, and all steps between them change at most as fast as their inputs.
    """
    n_affine = n_norms = 0
    for step, reached in steps_behind(output, get_gradient_edge(x).node):
        kind = kind_of(step)
        if sum(reached) > 1:
            return f"{step.name()} joins {sum(reached)} branches"
        if kind in _AFFINE:
            n_affine += 1
        elif kind in _BATCH_NORMS:
            n_norms += 1
        elif not (step.name() in SAME_BUT_FOR_AXES or (kind in _SLOW and _SLOW[kind](step))):
            return f"{step.name()} may change faster than its input"
    if (n_affine, n_norms) != (n_layers, n_folded):
        return "matrices or batch norms are applied by functions, outside of layers"
    return None


@dataclass(frozen=True)
class Curvatures:
    """Which of some layers have their curvature in which way.

    Attributes
    ----------
    closed : list of (LayerRecord, Tensor of shape (n, m), ClosedForm)
        Layers whose curvature the table of losses has, with their features; `ManyClasses` for
        those that put out the logits of very many classes.
    linear : list of LayerRecord
        Layers behind which the network is piecewise linear.
    base : (Tensor of shape (n, o), ClosedForm) or None
        Up to where it is, and the curvature there.
    others : list of LayerRecord
        Layers for which there are only products.
    """

    closed: list[tuple[LayerRecord, Tensor, ClosedForm]]
    linear: list[LayerRecord]
    base: tuple[Tensor, ClosedForm] | None
    others: list[LayerRecord]


@dataclass(slots=True)
class Tail:
    """The network's output and the loss, behind some layers in one forward pass."""

    loss: Loss
    output: Tensor
    target: Target | None
    last: LayerRecord | None
    precise: Callable[[Tensor], Tensor]

    @property
    def relevant(self) -> Tensor | None:
        """The labels, if curvatures depend on them."""
        return None if self.target is None else self.target.relevant

    def closed_form(self, record: LayerRecord) -> tuple[LayerRecord, Tensor, ClosedForm] | None:
        """Return a layer with its features and curvature, if the table of losses has it."""
        features, z = record.check()
        loss, relevant, factor = self.loss, self.relevant, 1.0
        if z.ndim == 2:
            link = self._link(record)
            if link is None and z.shape == self.output.shape and z.shape[1] < MANY:
                factor = find_factor(self.output, record.node) or 0.0
                link = "identity" if factor else None
        elif (
            loss.has_closed_form("identity")
            and not loss.weighs_outputs  # along axes that have moved
            and (positions := record.map.by_position(features, z)) is not None
            and only_moves_axes(self.output, record.node, positions[-1])
        ):
            link, relevant = "identity", loss.per_token(relevant)
            layer, features, z = positions
            record = replace(record, position_map=layer)
        else:
            return None
        if not loss.has_closed_form(link):
            return None
        if z.shape[1] >= MANY:
            found = loss.closed_form(link, z, relevant)
            if isinstance(found, Softmax):
                return record, features, ManyClasses(found.z, found.scale)
        curvature = loss.closed_form(link, self.precise(z) * factor, relevant)
        if curvature is None:
            return None
        return record, features, curvature if factor == 1 else curvature.times(factor * factor)

    def _link(self, record: LayerRecord) -> str | None:
        """Return the function behind a layer; None where the criterion sees other axes than it."""
        z = record.output
        same = self.output.ndim <= 2 and z is not None and len(self.output) == len(z)
        return find_link(self.output, record.node) if same else None

    def base(self) -> tuple[Tensor, ClosedForm] | None:
        """Return where the table's curvature applies, as (n, o), and that curvature."""
        loss, base, link = self.loss, self.output, "identity"
        if not loss.has_closed_form(link):
            if self.last is None or self.last.calls != 1:
                return None
            _, z = self.last.check()
            base = z if self.last.tail_input is None else self.last.tail_input
            link = self._link(self.last) or ""
        if base.ndim > 2 or (base.ndim == 1 and not loss.acts_on_each_output):
            return None
        base = base.reshape(len(base), -1)
        curvature = loss.closed_form(link, self.precise(base), self.relevant)
        return None if curvature is None else (base, curvature)


def choose_curvatures(
    tail: Tail, records: Sequence[LayerRecord], *, together: bool = False
) -> Curvatures:
    """Choose how the curvatures at some layers are computed."""
    closed: list[tuple[LayerRecord, Tensor, ClosedForm]] = []
    others: list[LayerRecord] = []
    base = None
    for record in records:
        found = tail.closed_form(record)
        if found is None:
            others.append(record)
        else:
            closed.append(found)
    if others:
        base = tail.base()
    if base is None:
        return Curvatures(closed, [], None, others)
    # a network that is piecewise linear in all outputs together is so in each of them
    if is_piecewise_linear(base[0], *(record.node for record in others)):
        return Curvatures(closed, others, base, [])
    linear: list[LayerRecord] = []
    curved: list[LayerRecord] = []
    one_by_one = not together and len(others) > 1
    for record in others:
        is_linear = one_by_one and is_piecewise_linear(base[0], record.node)
        (linear if is_linear else curved).append(record)
    return Curvatures(closed, linear, base, curved)

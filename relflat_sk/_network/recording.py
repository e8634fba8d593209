"""What a forward pass shows: what passes the layers of a network, and autograd's graph behind them.

A `Recorder` replaces the forward methods of layers while its context is open. What it keeps of
a call, and what the rest of the network receives, is up to a function given to it:

===================  =======================================================================
`keep_graph`         inputs and outputs with their graph, for training
`start_graph`        detached ones; autograd starts at the layer's output, for measuring
None                 nothing but the order of the calls
===================  =======================================================================
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrize import cached
from torch.overrides import TorchFunctionMode

from relflat_sk._network.borrowing import (
    MathAttention,
    ReplacedForwards,
    changed,
    is_explicit_batch_norm,
)
from relflat_sk._network.layers import CALL_LAYERS, LayerMap, layer_map, weight_kind, weight_layers
from relflat_sk._numerics import constant


@dataclass(slots=True)
class LayerRecord:
    """Input and output of a layer in one forward pass."""

    name: str
    layer: nn.Module
    calls: int = 0
    features: Tensor | None = None
    version: int = 0
    output: Tensor | None = None
    node: Any = None
    output_nr: int = 0
    offset: Tensor | None = None
    tail_input: Tensor | None = None
    # those of the call, which `torch.func.functional_call` replaces, or each call computes
    weight: Tensor | None = None
    bias: Tensor | None = None
    received: Tensor | None = None  # see `_Operands`
    position_map: LayerMap | None = None  # if positions count as samples

    @property
    def map(self) -> LayerMap:
        """The layer as a linear map of the weight that it had in its call."""
        return self.position_map or layer_map(self.layer, self.weight)

    @property
    def is_overwritten(self) -> bool:
        """Whether a step behind the layer changed its output, as kept with its graph, in place."""
        return self.tail_input is None and getattr(self.output, "grad_fn", None) is not self.node

    def check(self) -> tuple[Tensor, Tensor]:
        """Return features and output of a layer that was called exactly once."""
        if self.calls != 1 or self.features is None or self.output is None:
            raise ValueError(
                f"layer {self.name!r} was called {self.calls} times in one forward pass; only a "
                "layer that is called exactly once can be measured. "
                + ("Measure another layer." if self.calls else CALL_LAYERS)
            )
        if self.features._version != self.version:
            raise ValueError(
                f"the input that layer {self.name!r} received was overwritten in place later in "
                "the forward pass. Replace the in-place operation, or measure another layer."
            )
        if self.output.is_complex():
            raise ValueError(f"the output of layer {self.name!r} is complex. Measure another one.")
        return self.features, self.output


# from a record, the layer's input and its output to what the rest of the network receives
Keep = Callable[[LayerRecord, Tensor, Tensor], Tensor]


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first argument of a call: the input of a layer."""
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


def keep_graph(record: LayerRecord, features: Tensor, output: Tensor) -> Tensor:
    """Keep input and output with their graph; the network runs as ever."""
    record.calls += 1
    record.features = features
    record.version = features._version
    record.output, record.node, record.output_nr = output, output.grad_fn, output.output_nr
    return output


def start_graph(record: LayerRecord, features: Tensor, output: Tensor) -> Tensor:
    """Keep detached input and output, and start a graph of the tail of the network."""
    record.calls += 1
    record.features = features.detach()  # shares its version counter
    record.version = record.features._version
    record.output = output.detach()
    # a single zero in memory: the outputs of a language model's head are large
    record.offset = constant(0.0, record.output).expand_as(record.output).requires_grad_()
    torch.set_grad_enabled(True)  # until a no_grad of the network ends
    record.tail_input = tail_input = output + record.offset
    record.node, record.output_nr = tail_input.grad_fn, tail_input.output_nr
    return tail_input


def graph_alone() -> saved_tensors_hooks:
    """Return a context in which the graph keeps no values, as only a backward pass needs them."""
    return saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


class Recorder(ReplacedForwards):
    """Context that records the calls of some layers, in little time."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        keep: Keep | None = keep_graph,
        twice: Collection[str] = (),
    ) -> None:
        self.calls: list[str] = []
        self.failed = False
        self.is_finished = False  # then calls are no part of the forward pass
        self._keep = keep
        self._twice = twice
        self._attention = MathAttention() if twice else None
        self._records = {name: LayerRecord(name, layer) for name, layer in layers.items()}
        super().__init__((each.layer, self._recorded(each)) for each in self._records.values())

    def __getitem__(self, name: str) -> LayerRecord:
        return self._records[name]

    @property
    def order(self) -> list[str]:
        """Names of the layers in the order in which they were first called."""
        return list(dict.fromkeys(self.calls))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.failed = any(error)
        if self._attention is not None:
            self._attention.__exit__()

    def _recorded(self, record: LayerRecord) -> Callable[..., Any]:
        """Return a layer's forward method that records its calls as well."""
        forward, name, calls, keep = _forward_of(record), record.name, self.calls, self._keep
        attention = self._attention if name in self._twice else None

        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self.is_finished:
                return output
            calls.append(name)
            if attention is not None:
                attention.__enter__()
            if keep is None:
                return output
            if record.weight is None:
                record.weight = record.layer._parameters.get("weight")
            record.bias = getattr(record.layer, "bias", None)
            # what the layer multiplied, if it changed its input first
            features = layer_input(args, kwargs) if record.received is None else record.received
            return keep(record, features, output)

        return recorded


def _forward_of(record: LayerRecord) -> Callable[..., Any]:
    """Return a layer's forward method; one that keeps the weight, if each call computes it."""
    layer: Any = record.layer
    forward: Callable[..., Any] = layer.forward
    kind: Any = weight_kind(layer)
    if kind is None:
        return forward
    if "weight" in layer._parameters:
        if type(layer).forward is kind.forward:
            return forward

        def keeping_operands(*args: Any, **kwargs: Any) -> Any:
            with _Operands(record):
                return forward(*args, **kwargs)

        return keeping_operands

    def keeping_weight(*args: Any, **kwargs: Any) -> Any:
        with cached():  # spectral norm changes its buffers when the weight is computed once more
            output = forward(*args, **kwargs)
            record.weight = layer_map(layer).kernel
        return output

    return keeping_weight


class _Operands(TorchFunctionMode):
    """Keep what a layer with a forward method of its own multiplies.

    A standardised convolution multiplies with a weight that it computes from its parameter, and
    one with padding of its own with another input than it received.
    """

    def __init__(self, record: LayerRecord) -> None:
        super().__init__()
        self._record = record
        self._shape = layer_map(record.layer).kernel.shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and keep the operands of the layer's product."""
        kwargs = kwargs or {}
        if func in _OF_LAYERS:
            x = kwargs.get("input", args[0] if args else None)
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            if weight is not None and weight.shape == self._shape:
                self._record.received, self._record.weight = x, weight
        return func(*args, **kwargs)


_OF_LAYERS = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d,
              F.conv_transpose3d}  # fmt: skip


def record_order(module: nn.Module) -> Recorder:
    """Record in which order the layers with a weight matrix are called."""
    return Recorder(weight_layers(module), None)


@contextmanager
def record_tail(module: nn.Module, *names: str) -> Iterator[Recorder]:
    """Record layers for measuring, as `start_graph` does."""
    # Up to the first of them, parameters count as constants. Under `torch.no_grad`, a view that is
    # made before a layer could not be changed in place behind it.
    layers = {name: module.get_submodule(name) for name in names}
    learnable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with ExitStack() as constants:
        constants.enter_context(changed(learnable, "requires_grad", False))

        def start(record: LayerRecord, features: Tensor, output: Tensor) -> Tensor:
            constants.close()
            return start_graph(record, features, output)

        with torch.enable_grad(), Recorder(layers, start, names) as recorder:
            yield recorder


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
    # a tensor: 1 / 0 is infinite
    return float(number if kind_of(step) == "Mul" else 1 / number.double())


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
    """Return whether a value is a piecewise linear function of the layers' outputs."""
    return all(_is_linear(step, reached) for step, reached in steps_behind(base, *nodes))


def _is_linear(step: Any, reached: list[bool]) -> bool:
    """Return whether a step is piecewise linear in those of its inputs that depend on layers."""
    kind = kind_of(step)
    if kind in _MULTILINEAR:
        return sum(reached) == 1
    # Batch norm that `relflat_sk._network.borrowing` takes apart counts as linear, with the
    # statistics that it divides by as constants; for fused ones, see `check_thrice`.
    if kind in _LINEAR_IN_FIRST or is_explicit_batch_norm(step):
        return not any(reached[1:]) and not getattr(step, "_saved_training", False)
    return step.name() in _SAME_NUMBERS or kind in _PIECEWISE_LINEAR


# torch's second derivatives of these take statistics of the input for constants
_STATISTICS = _BATCH_NORMS | {"NativeLayerNorm", "NativeGroupNorm", "FusedRmsNorm"}


def check_thrice(base: Tensor, *nodes: Any) -> None:
    """Refuse a network with operations whose third derivative torch gets silently wrong."""
    for step, _ in steps_behind(base, *nodes):
        if kind_of(step) in _STATISTICS and getattr(step, "_saved_training", True):
            raise ValueError(
                f"torch gets the third derivative of a normalisation ({step.name()}) wrong that is "
                "called as a function, or is a module defined before the last layer. Use a module "
                "such as nn.LayerNorm behind the last layer, or penalise the last layer."
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
    return name.rstrip("012").removesuffix("Backward")


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
_SLOW = {
    "AvgPool2D", "AvgPool3D", "ConstantPadNd", "Hardtanh", "LeakyRelu", "MaxPool2DWithIndices",
    "MaxPool3DWithIndices", "Mean", "Relu", "Select", "Sigmoid", "Slice", "Softplus", "Tanh",
}  # fmt: skip


def find_faster_step(output: Tensor, x: Tensor, n_layers: int, n_folded: int = 0) -> str | None:
    """Return a step by which the outputs may change faster than the layers' norms allow."""
    # The product of the layers' norms limits the changes of the outputs if the network is a chain
    # of the layers, and all steps between them change at most as fast as their inputs.
    n_affine = n_norms = 0
    for step, reached in steps_behind(output, get_gradient_edge(x).node):
        kind = kind_of(step)
        if sum(reached) > 1:
            return f"{step.name()} joins {sum(reached)} branches"
        if kind in _AFFINE:
            n_affine += 1
        elif kind in _BATCH_NORMS:
            n_norms += 1
        elif step.name() not in SAME_BUT_FOR_AXES and (
            kind not in _SLOW
            or abs(getattr(step, "_saved_negative_slope", 0)) > 1  # of a leaky ReLU
            # the weights of whose windows need not add up to 1
            or getattr(step, "_saved_divisor_override", None) is not None
        ):
            return f"{step.name()} may change faster than its input"
    if (n_affine, n_norms) != (n_layers, n_folded):
        return "matrices or batch norms are applied by functions, outside of layers"
    return None

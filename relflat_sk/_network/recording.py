"""Record what passes the layers of a network in its forward pass.

A `Recorder` replaces the forward methods of layers while its context is open. What it keeps of
a call, and what the rest of the network receives, is up to a function given to it:

===================  =======================================================================
`keep_graph`         inputs and outputs with their graph, for training
`start_graph`        detached ones; autograd starts at the layer's output, for measuring
None                 nothing but the order of the calls
===================  =======================================================================
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrize import cached
from torch.overrides import TorchFunctionMode

from relflat_sk._network.borrowing import MathAttention, ReplacedForwards
from relflat_sk._network.layers import LayerMap, layer_map, weight_kind, weight_layers
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
    weight: Tensor | None = None
    received: Tensor | None = None  # what the layer multiplied, if it changed its input first
    position_map: LayerMap | None = None  # if positions count as samples

    @property
    def map(self) -> LayerMap:
        """The layer as a linear map of the weight that it had in its call."""
        return self.position_map or layer_map(self.layer, self.weight)

    def check(self) -> tuple[Tensor, Tensor]:
        """Return features and output of a layer that was called exactly once."""
        if self.calls != 1 or self.features is None or self.output is None:
            raise ValueError(
                f"layer {self.name!r} was called {self.calls} times in one forward pass; only a "
                "layer that is called exactly once can be measured. Measure another layer."
            )
        if self.features._version != self.version:
            raise ValueError(
                f"the input that layer {self.name!r} received was overwritten in place later in "
                "the forward pass. Replace the in-place operation, or measure another layer."
            )
        if self.output.is_complex():
            raise ValueError(
                f"the output of layer {self.name!r} is complex, and curvature is defined for real "
                "weights. Measure another layer."
            )
        return self.features, self.output


# from a record, the call's arguments and its output to what the rest of the network receives
Keep = Callable[[LayerRecord, tuple[Any, ...], dict[str, Any], Any], Any]


def features_of(record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return what a layer multiplied with its weight in a call."""
    return layer_input(args, kwargs) if record.received is None else record.received


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first argument of a call: the input of a layer."""
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


def keep_graph(
    record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Keep input and output with their graph; the network runs as ever."""
    record.calls += 1
    record.features = features = features_of(record, args, kwargs)
    record.version = features._version
    record.output, record.node, record.output_nr = output, output.grad_fn, output.output_nr
    return output


def start_graph(
    record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
) -> Tensor:
    """Keep detached input and output, and start a graph of the tail of the network."""
    record.calls += 1
    record.features = features_of(record, args, kwargs).detach()  # shares its version counter
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


class Recorder:
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
        self._replaced = ReplacedForwards(
            (record.layer, self._recorded(record)) for record in self._records.values()
        )

    def __getitem__(self, name: str) -> LayerRecord:
        return self._records[name]

    @property
    def order(self) -> list[str]:
        """Names of the layers in the order in which they were first called."""
        return list(dict.fromkeys(self.calls))

    def __enter__(self) -> "Recorder":
        self._replaced.__enter__()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._replaced.__exit__()
        self.failed = error is not None
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
            return output if keep is None else keep(record, args, kwargs, output)

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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and keep the operands of the layer's product."""
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            x = kwargs.get("input", args[0] if args else None)
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            if weight is not None and weight.shape == self._shape:
                self._record.received, self._record.weight = x, weight
        return func(*args, **kwargs)


_PRODUCTS = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d,
             F.conv_transpose3d}  # fmt: skip


def record_order(module: nn.Module) -> Recorder:
    """Record in which order the layers with a weight matrix are called."""
    return Recorder(weight_layers(module), None)


@contextmanager
def record_tail(module: nn.Module, *names: str) -> Iterator[Recorder]:
    """Record layers for measuring, as `start_graph` does.

    Up to the first of them, parameters count as constants. Under `torch.no_grad`, a view that is
    made before a layer could not be changed in place behind it.
    """
    layers = {name: module.get_submodule(name) for name in names}
    constants = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def start(*call: Any) -> Tensor:
        release()
        return start_graph(*call)

    def release() -> None:
        while constants:
            constants.pop().requires_grad = True

    try:
        for parameter in constants:
            parameter.requires_grad = False
        with torch.enable_grad(), Recorder(layers, start, names) as recorder:
            yield recorder
    finally:
        release()

"""Find out whether a network uses the weight of a layer outside of the calls of the layer.

An autoencoder whose decoder is ``F.linear(h, encoder.weight.T)`` calls its encoder once, and no
other module has the weight. The curvature in the weight is not that of the layer's call then.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from relflat_sk._network.forwards import ReplacedForwards
from relflat_sk._network.layer_record import LayerRecord
from relflat_sk._network.recording import Recorder

__all__ = ["WeightWatch", "check_uses", "find_uses_elsewhere", "uses_elsewhere", "watch_frozen"]

# a head that is tied to an embedding counts as if it had a copy of the weight to itself
_LOOKUPS = {F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag}
# a constant for the graph, which shows the uses of weights that are not frozen
_DETACHED = {Tensor.detach, torch.detach, Tensor.data.__get__}  # type: ignore[attr-defined]
_NO_USES = _LOOKUPS | _DETACHED


def _parameters_of_weight(layer: nn.Module) -> list[nn.Parameter]:
    """List the parameters that a weight is, or is computed from."""
    weight = layer._parameters.get("weight")
    if weight is not None:
        return [weight]
    computed = getattr(layer, "parametrizations", {})
    if "weight" in computed:
        return list(computed["weight"].parameters())
    # hooks of torch compute it before each call: weight_g, weight_v; weight_orig
    named = layer._parameters.items()
    return [one for name, one in named if name.startswith("weight_") and one is not None]


class WeightWatch(TorchFunctionMode):
    """Context of a forward pass that notices weights outside of the calls of their layers.

    It costs little, because it follows no values: a weight of which only the device is asked for
    is not noticed, but one that a tensor is made like is. `uses_elsewhere` then tells.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.noticed: set[str] = set()
        self._names = {
            id(parameter): name
            for name, layer in layers.items()
            for parameter in _parameters_of_weight(layer)
        }
        self._running: list[str] = []  # the layers whose calls are being made
        self._replaced = ReplacedForwards(
            (layer, self._marked(name, layer.forward)) for name, layer in layers.items()
        )

    def __enter__(self) -> "WeightWatch":
        self._replaced.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._replaced.__exit__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and notice the weights among its arguments."""
        result = func(*args, **(kwargs or {}))
        if func not in _NO_USES and _has_values(result):
            self._notice(args)
            if kwargs:
                self._notice(kwargs.values())
        return result

    def _notice(self, values: Iterable[Any]) -> None:
        """Notice the weights among some arguments, which may be lists of tensors."""
        for value in values:
            if isinstance(value, Tensor):
                name = self._names.get(id(value))
                if name is not None and name not in self._running:
                    self.noticed.add(name)
            elif isinstance(value, tuple | list):
                self._notice(value)

    def _marked(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a layer's forward method that says that it runs."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            self._running.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._running.pop()

        return marked


class _GradientWatch(WeightWatch):
    """Leave out what a network computes in `torch.no_grad`, constants for the graph."""

    def _notice(self, values: Iterable[Any]) -> None:
        if torch.is_grad_enabled():
            super()._notice(values)


@contextmanager
def watch_frozen(module: nn.Module, layers: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Watch frozen weights in the calls of a network, whose graph does not show their uses."""
    frozen = {
        name: layer
        for name, layer in layers.items()
        if layer is not module
        and any(not weight.requires_grad for weight in _parameters_of_weight(layer))
    }
    noticed: set[str] = set()
    forward = module.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        with _GradientWatch(frozen) as watch:
            output = forward(*args, **kwargs)
        noticed.update(watch.noticed)
        return output

    with ReplacedForwards([(module, watched)] if frozen else []):
        yield noticed


def _has_values(result: Any) -> bool:
    """Return whether a result may hold values of a weight; false for its device or its shape."""
    return isinstance(result, Tensor | tuple | list) and not isinstance(result, torch.Size)


def uses_elsewhere(output: Tensor, record: LayerRecord) -> bool:
    """Return whether a network's output depends on a layer's weight other than by its call."""
    parameters = {id(parameter) for parameter in _parameters_of_weight(record.layer)}
    features = record.features
    stack: list[Any] = [output.grad_fn, None if features is None else features.grad_fn]
    seen = {None, record.node}
    while stack:
        step = stack.pop()
        if step in seen:
            continue
        seen.add(step)
        if id(getattr(step, "variable", None)) in parameters:  # where the gradient is added up
            return True
        if not step.name().startswith("Embedding"):
            stack.extend(source for source, _ in step.next_functions)
    return False


def find_uses_elsewhere(run: Callable[[], Tensor], layers: Mapping[str, nn.Module]) -> set[str]:
    """Find the layers whose weights a network uses outside of their calls, by running it once."""
    weights = [weight for layer in layers.values() for weight in _parameters_of_weight(layer)]
    frozen = [weight for weight in weights if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad = True
        with torch.enable_grad(), Recorder(layers) as recorder:
            output = run()
    finally:
        for weight in frozen:
            weight.requires_grad = False
    return {name for name in layers if uses_elsewhere(output, recorder[name])}


def check_uses(name: str, elsewhere: Collection[str]) -> None:
    """Refuse a layer whose weight is used outside of the layer's call."""
    if name in elsewhere:
        raise ValueError(
            f"the network uses the weight of layer {name!r} outside of the layer's call, as a tied "
            "autoencoder does with F.linear(h, encoder.weight.T); the curvature in a shared weight "
            "is not that of one layer. Measure another layer; or detach the weight there, if it is "
            "only read, as for a log."
        )

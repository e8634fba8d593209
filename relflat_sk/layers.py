"""Find a layer in a network, and see what goes through it in a forward pass.

What lies between the layer and the loss is read off the graph that autograd records from
the layer's output to the network's, not guessed from the kind of module: see `find_link`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk.exceptions import LayerNotFoundError

__all__ = ["Layer", "Tap", "find_layer", "find_link", "primary_output", "tap", "weight_layers"]

Layer = int | str | nn.Module

WEIGHT_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

# autograd nodes that hand the same numbers on in the same order
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
_LINKS = {
    "SigmoidBackward0": "sigmoid",
    "SoftmaxBackward0": "softmax",
    "LogSoftmaxBackward0": "log_softmax",
}


def weight_layers(module: nn.Module) -> dict[str, nn.Module]:
    """List the layers with a weight matrix, by dotted name, as they are registered.

    Parameters
    ----------
    module : nn.Module

    Returns
    -------
    dict of str to nn.Module

    Examples
    --------
    >>> list(weight_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))))
    ['0', '2']
    """
    return {
        name: layer for name, layer in module.named_modules() if isinstance(layer, WEIGHT_LAYERS)
    }


def find_layer(module: nn.Module, layer: Layer, order: Sequence[str] | None = None) -> str:
    """Find a layer with a weight matrix and return its dotted name.

    Parameters
    ----------
    module : nn.Module
        The network.
    layer : int, str or nn.Module
        Position among the layers in `order`, dotted name, or the module itself.
    order : sequence of str, optional
        Names of the layers in the order of the forward pass; as registered if None.

    Returns
    -------
    str

    Raises
    ------
    LayerNotFoundError
        If there is no such layer or it has no weight matrix; lists the layers there are.
    TypeError
        If `layer` is of another type, or a kind of layer that is not supported.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> find_layer(net, -1)
    '2'
    """
    layers = weight_layers(module)
    names = list(layers) if order is None else list(order)
    there = _describe({name: layers[name] for name in names})
    if isinstance(layer, bool) or not isinstance(layer, int | str | nn.Module):
        raise TypeError(
            "layer must be an int, a dotted module name or the module itself, got "
            f"{layer!r} of type {type(layer).__name__}. {there}"
        )
    if isinstance(layer, int):
        if not -len(names) <= layer < len(names):
            raise LayerNotFoundError(f"there is no layer {layer}. {there}")
        return names[layer]
    modules = dict(module.named_modules(remove_duplicate=False))
    if isinstance(layer, str):
        if layer not in modules:
            raise LayerNotFoundError(f"there is no layer {layer!r}. {there}")
        name = layer
    else:
        same = [name for name, candidate in modules.items() if candidate is layer]
        if not same:
            raise LayerNotFoundError(
                f"the {type(layer).__name__} given as layer is not part of the network (was "
                f"the network copied, as clone and deepcopy do?). {there}"
            )
        name = same[0]
    if not isinstance(modules[name], WEIGHT_LAYERS):
        raise LayerNotFoundError(
            f"layer {name!r} is a {type(modules[name]).__name__}, which has no weight matrix "
            f"that flatness could be measured at. {there}"
        )
    return name


def check_layer(module: nn.Module, name: str) -> nn.Linear:
    """Return the layer of that name if it can be measured.

    Raises
    ------
    TypeError
        If the layer is not an `nn.Linear`.
    ValueError
        If another module uses the same weight.
    """
    layer = module.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise TypeError(
            f"layer {name!r} is a {type(layer).__name__}; flatness is measured at nn.Linear "
            f"layers so far. {_describe(weight_layers(module))}"
        )
    weight = layer._parameters.get("weight")
    users = {
        owner
        for owner, candidate in module.named_modules()
        for parameter in candidate._parameters.values()
        if parameter is weight and parameter is not None
    }
    if len(users) > 1:
        raise ValueError(
            f"the weight of layer {name!r} is shared by the modules {sorted(users)}; the "
            "curvature in a shared weight is not that of one layer. Measure another layer."
        )
    return layer


def _describe(layers: Mapping[str, nn.Module]) -> str:
    if not layers:
        return "The network has no layer with a weight matrix."
    listed = ", ".join(
        f"{i}: {name!r} ({type(layer).__name__})" for i, (name, layer) in enumerate(layers.items())
    )
    return f"Layers with a weight matrix: {listed}."


@dataclass
class Tap:
    """What one forward pass sent through a layer."""

    features: Tensor | None = None  # (n, m), what the layer received
    z: Tensor | None = None  # (n, d), what it put out
    node: Any = None  # the autograd node at which the tail of the network starts
    calls: int = 0
    version: int = 0  # of `features`, to notice when they are written over

    def check(self, name: str) -> tuple[Tensor, Tensor]:
        """Return features and output, if the layer saw one row for each sample, once.

        Raises
        ------
        ValueError
            If the layer was not called, or more than once, or not on (n, m) input.
        """
        if self.calls != 1 or self.features is None or self.z is None:
            raise ValueError(
                f"layer {name!r} was called {self.calls} times in one forward pass; flatness "
                "is that of a layer which is used exactly once. Measure another layer."
            )
        if self.features.ndim != 2:
            raise ValueError(
                f"layer {name!r} received inputs of shape {tuple(self.features.shape)}; "
                "flatness is measured at layers that see (n_samples, n_features) so far. "
                "Measure a layer after pooling or flattening."
            )
        if self.features._version != self.version:
            raise ValueError(
                f"what layer {name!r} received was overwritten in place later in the forward "
                "pass. Replace the in-place operation, or measure another layer."
            )
        return self.features, self.z


@contextmanager
def tap(layer: nn.Module, *, tail_only: bool) -> Iterator[Tap]:
    """Record what goes through a layer while the context is open.

    Parameters
    ----------
    layer : nn.Module
    tail_only : bool
        True, for measuring: autograd starts at the layer's output, and records only the
        tail of the network behind it. False, for training: everything is left as it is.

    Yields
    ------
    Tap
    """
    seen = Tap()

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        seen.calls += 1
        features = args[0] if args else next(iter(kwargs.values()))
        seen.features, seen.version = features, features._version
        if not tail_only:
            seen.z, seen.node = output, output.grad_fn
            return None
        seen.features = features.detach()  # shares its version counter
        torch.set_grad_enabled(True)  # until the caller's no_grad ends
        seen.z = output.detach().requires_grad_()
        passed_on = seen.z.clone()  # not a leaf: the tail may work on it in place
        seen.node = passed_on.grad_fn
        return passed_on

    handle = layer.register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def call_order(module: nn.Module) -> Iterator[list[str]]:
    """List the names of the weight layers in the order in which they are first called."""
    order: dict[str, None] = {}

    def remember(name: str) -> Callable[..., None]:
        return lambda *_: order.setdefault(name)

    names: list[str] = []
    handles = [
        layer.register_forward_pre_hook(remember(name))
        for name, layer in weight_layers(module).items()
    ]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()
        names[:] = order


def find_link(output: Tensor, node: Any) -> str | None:
    """Say what the network did between the layer's output and its own.

    Parameters
    ----------
    output : Tensor
        What the network put out, with its autograd graph.
    node : torch.autograd.graph.Node
        Where that graph starts: `Tap.node`.

    Returns
    -------
    {"identity", "softmax", "log_softmax", "sigmoid"} or None
        None if the network did anything else.

    Examples
    --------
    >>> z = torch.zeros(2, 3, requires_grad=True).clone()
    >>> find_link(z.log_softmax(dim=1).view(2, 3), z.grad_fn)
    'log_softmax'
    >>> find_link(z.tanh(), z.grad_fn) is None
    True
    """
    link = "identity"
    step = output.grad_fn
    while step is not None and step is not node:
        name = step.name()
        if name in _LINKS and link == "identity" and _over_outputs(step, output):
            link = _LINKS[name]
        elif name not in _SAME_NUMBERS:
            return None
        step = step.next_functions[0][0]
    return link if step is node and node is not None else None


def _over_outputs(step: Any, output: Tensor) -> bool:
    """Whether a softmax runs along axis 1 of an (n, d) array; true for a sigmoid."""
    dim = getattr(step, "_saved_dim", None)
    # autograd hands negative axes out as unsigned 64-bit integers
    return dim is None or (output.ndim == 2 and (dim + 2) % 2**64 % 2 == 1)


def primary_output(output: Any) -> Tensor:
    """Return the tensor that the criterion sees: the logits, or the first of several.

    Raises
    ------
    TypeError
        If there is no tensor in the output.
    """
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise TypeError(
            "the network must return a tensor, a tuple that starts with one, or a mapping "
            f"with 'logits', got {type(output).__name__}."
        )
    return output

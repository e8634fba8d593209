"""How positive scales pass through a network: what is positively homogeneous, and what is not.

A value in the forward pass of a rescaled network is that of the old one times a scale, one
positive number for all of it or one for each neuron. `Walk` follows the graph that torch.fx
records; each step hands on the scale of what it takes, by one row of the table of
`relflat_sk._rescaling.scale_rules`, or refuses. See `relflat_sk.reparameterize` for the notation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from relflat_sk._network import WEIGHT_LAYERS, has_own_forward

__all__ = ["KINDS", "NORMS", "ONE", "Change", "Rule", "Scale", "Walk", "describe_step", "is_plain"]

Floats = NDArray[np.float64]

PRODUCT_TOLERANCE = 1e-6  # of factors multiplied in float32; what is left goes into one weight
NORMS = (_BatchNorm, nn.SyncBatchNorm)
ROUNDING = 1e-12  # of two scales multiplied in float64 along different branches


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of the kinds and computes what they do."""
    return (
        isinstance(module, kinds)
        and not has_own_forward(module)
        and any(type(module).forward is kind.forward for kind in kinds)
    )


@dataclass(frozen=True, eq=False)
class Scale:
    """What a value of the new network is, divided by that of the old.

    Parameters
    ----------
    values : ndarray of shape (k,)
        One number per neuron; k = 1 if one holds for all.
    layout : {"channels", "last", "blocks", "tiles"}
        Where neurons lie: axis 1 of (n, k, ...), the last axis of (..., k), or axis 1 of
        (n, k * block), number j belonging to neuron j // block or, for tiles, j % k.
    ndim : int
        Number of axes, if the layout is "channels".
    """

    values: Floats
    layout: str = "last"
    ndim: int = 2

    @property
    def is_one(self) -> bool:
        """Whether nothing is rescaled."""
        return bool((self.values == 1).all())

    @property
    def is_uniform(self) -> bool:
        """Whether one number holds for all neurons."""
        return len(self.values) == 1

    def spread(self, n: int) -> Floats | None:
        """Give each of n features its neuron's number; None if they cannot be matched."""
        k = len(self.values)
        if k in {1, n}:
            return np.broadcast_to(self.values, n)
        if n % k or self.layout not in {"blocks", "tiles"}:
            return None
        blocks = self.layout == "blocks"
        return np.repeat(self.values, n // k) if blocks else np.tile(self.values, n // k)

    def equals(self, other: "Scale") -> bool:
        """Whether two values can be put together, number by number."""
        return (
            self.values.shape == other.values.shape
            and (self.is_uniform or (self.layout, self.ndim) == (other.layout, other.ndim))
            and bool(np.isclose(self.values, other.values, rtol=ROUNDING, atol=0).all())
        )


ONE = Scale(np.ones(1))


@dataclass(frozen=True, eq=False)
class Change:
    """What happens to a layer, see the top of the module."""

    rows: Floats
    columns: Floats
    out: Floats

    @property
    def is_none(self) -> bool:
        """Whether nothing changes."""
        return all(bool((part == 1).all()) for part in (self.rows, self.columns, self.out))


def _plan_layer(taken: Scale, features: int, factor: Floats | None) -> Change:
    """Multiply the whole weight."""
    rows = np.ones(1) if factor is None else factor
    out = taken.values * rows
    if abs(out[0] - 1) <= PRODUCT_TOLERANCE:
        out = np.ones(1)
        rows = out / taken.values
    return Change(rows, np.ones(1), out)


def _plan_neurons(taken: Scale, features: int, factor: Floats | None) -> Change | None:
    """Multiply the rows asked for, undo in the columns what came before."""
    columns = taken.spread(features)
    rows = np.ones(1) if factor is None else factor
    return None if columns is None else Change(rows, columns, rows)


_Plan = Callable[[Scale, int, Floats | None], Change | None]


@dataclass(frozen=True)
class _Kind:
    plan: _Plan
    unfinished: str  # what to say when the last layer's output has a scale


KINDS = {
    "layer": _Kind(
        _plan_layer,
        "the factors multiply to {out:.10g} on the way to the network's output, behind layer "
        "{name!r}; their product must be 1.",
    ),
    "neuron": _Kind(
        _plan_neurons,
        "layer {name!r} has no layer behind it in which the factors of its output neurons could "
        "be undone; give factors for layers before it.",
    ),
}


Rule = Callable[["Walk", fx.Node], Scale]
FindRule = Callable[[fx.Node, Mapping[str, nn.Module]], Rule | None]


@dataclass
class Walk:
    """One way through the graph, collecting what has to change."""

    module: nn.Module
    graph: fx.Graph
    kind: _Kind
    factors: dict[str, Floats]
    scales: dict[fx.Node, Scale] = field(default_factory=dict)
    layers: dict[str, Change] = field(default_factory=dict)
    norms: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, Any] = dict(self.module.named_modules())
        self.leads_to_layer: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(user in self.leads_to_layer or self.is_layer(user) for user in node.users):
                self.leads_to_layer.add(node)

    def run(self, find_rule: FindRule) -> None:
        """Give every node its scale.

        Parameters
        ----------
        find_rule : callable
            Says what a step that is no layer does with the scale of what it takes.

        Raises
        ------
        ValueError
            If a node does not pass on the scale of what it takes.
        """
        for node in self.graph.nodes:
            self.scales[node] = self._step(node, find_rule)

    def is_layer(self, node: fx.Node) -> bool:
        """Whether a step is a layer with a weight matrix."""
        return node.op == "call_module" and is_plain(self.modules[str(node.target)], WEIGHT_LAYERS)

    def scaled(self, node: fx.Node) -> list[fx.Node]:
        """List what a step takes that is rescaled."""
        return [taken for taken in node.all_input_nodes if not self.scales[taken].is_one]

    def refusal(self, node: fx.Node, reason: str) -> ValueError:
        """Make the error that says why a step cannot be passed."""
        return ValueError(
            f"{describe_step(node, self.modules)} {reason}; the copy would not compute the same "
            "function."
        )

    def check_hooks(self, node: fx.Node) -> None:
        """Refuse modules with forward hooks."""
        module = self.modules[str(node.target)] if node.op == "call_module" else None
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise self.refusal(
                node, "has forward hooks, which may do anything to rescaled values; remove them"
            )

    def only_input(self, node: fx.Node) -> Scale:
        """Return the scale of the first input, if it is the only one that is scaled."""
        first = node.args[0] if node.args else node.all_input_nodes[0]
        if any(taken is not first for taken in self.scaled(node)):
            raise self.refusal(node, "takes a rescaled value in a place where it cannot be undone")
        return self.scales[first] if isinstance(first, fx.Node) else ONE

    def check_own(self, node: fx.Node) -> None:
        """Refuse to change tensors that are computed, or used in more than one place."""
        name = str(node.target)
        module = self.modules[name]
        if not {"weight", "bias"} <= module._parameters.keys():
            raise self.refusal(
                node,
                "has a weight or bias that is computed from other tensors (weight norm, pruning or "
                "another parametrization), which cannot be rescaled; make it permanent first",
            )
        self.check_hooks(node)
        calls = sum(
            other.op == "call_module" and other.target == name for other in self.graph.nodes
        )
        if calls > 1:
            raise self.refusal(node, f"is called {calls} times, with one weight for all calls")
        own = {_identity(tensor) for tensor in _tensors(module)}
        users = {
            other
            for other, candidate in self.modules.items()
            if candidate is not module
            and any(_identity(tensor) in own for tensor in _tensors(candidate))
        }
        named: dict[Any, Tensor] = {
            **dict(self.module.named_parameters(remove_duplicate=False)),
            **dict(self.module.named_buffers(remove_duplicate=False)),
        }
        users |= {
            str(other.target)
            for other in self.graph.nodes
            if other.op == "get_attr"
            and other.target in named
            and _identity(named[other.target]) in own
        }
        if users:
            raise self.refusal(node, f"shares its weights with {sorted(users)}")

    def _step(self, node: fx.Node, find_rule: FindRule) -> Scale:
        if self.is_layer(node):
            return self._pass_layer(node)
        if not self.scaled(node):
            return ONE
        self.check_hooks(node)
        rule = find_rule(node, self.modules)
        if rule is None or node.kwargs.get("out") is not None:
            raise self.refusal(
                node,
                "follows rescaled layers, but does not pass positive factors on: f(c x) = c f(x) "
                "does not hold for it, or is not known to hold",
            )
        return rule(self, node)

    def _pass_layer(self, node: fx.Node) -> Scale:
        """Find out how a layer has to change."""
        name = str(node.target)
        layer = self.modules[name]
        taken = self.only_input(node)
        linear = isinstance(layer, nn.Linear)
        features = layer.in_features if linear else layer.in_channels
        fits = taken.is_uniform or (taken.layout == "channels") != linear
        change = self.kind.plan(taken, features, self.factors.get(name)) if fits else None
        if change is None:
            raise self.refusal(
                node,
                f"takes {features} features, which cannot be matched with the {len(taken.values)} "
                "neurons that are rescaled before it",
            )
        if change.is_none:
            return ONE
        self.check_own(node)
        out = Scale(change.out, "last" if linear else "channels", layer.weight.ndim)
        if not out.is_one and node not in self.leads_to_layer:
            raise ValueError(self.kind.unfinished.format(name=name, out=out.values[0]))
        self.layers[name] = change
        return out


def describe_step(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Say which step of the forward pass a node is.

    Parameters
    ----------
    node : fx.Node
    modules : mapping of str to nn.Module
        All modules of the network, by dotted name.

    Returns
    -------
    str
        The subject of a sentence.
    """
    if node.op == "call_module":
        name = str(node.target)
        return f"module {name!r} ({type(modules[name]).__name__})"
    if node.op == "output":
        return "what the network returns"
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    owner = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
    inside = f"module {owner!r}" if owner else "the network's forward"
    return f"the {node.op.removeprefix('call_')} {name!r} in {inside}"


def _tensors(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _identity(tensor: Tensor) -> int:
    return tensor.data_ptr() or id(tensor)  # an empty tensor has no address

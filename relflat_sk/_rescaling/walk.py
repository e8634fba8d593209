"""Follow positive scales through a network, from its input to its output.

The scale of a value in the forward pass is the positive factor between the rescaled network's
value and the original's: one number for all of the value, or one for each neuron. `Walk` follows
the graph that torch.fx records. Each step passes the scale of its input on, by one row of the
table in `relflat_sk._rescaling.scale_rules`, or is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from relflat_sk._network import layer_map
from relflat_sk._rescaling.scales import ONE, Change, Kind, Scale
from relflat_sk._rescaling.tracing import describe_step, is_plain_layer

__all__ = ["Rule", "Walk"]

Floats = NDArray[np.float64]
Rule = Callable[["Walk", fx.Node], Scale]
FindRule = Callable[[fx.Node, Mapping[str, nn.Module]], Rule | None]


@dataclass
class Walk:
    """A walk through the steps of a forward pass, which collects the changes of layers."""

    module: nn.Module
    graph: fx.Graph
    kind: Kind
    factors: dict[str, Floats]
    scales: dict[fx.Node, Scale] = field(default_factory=dict)
    layers: dict[str, Change] = field(default_factory=dict)
    norms: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, Any] = dict(self.module.named_modules())
        self._leads_to_layer: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(user in self._leads_to_layer or self._is_layer(user) for user in node.users):
                self._leads_to_layer.add(node)

    def run(self, find_rule: FindRule) -> None:
        """Find the scale of each step's result."""
        for node in self.graph.nodes:
            self.scales[node] = self._step(node, find_rule)

    def refusal(self, node: fx.Node, reason: str) -> ValueError:
        """Make the error that says why a step does not pass scales on."""
        return ValueError(
            f"{describe_step(node, self.modules)} {reason}; the copy would not compute the same "
            "function."
        )

    def only_input(self, node: fx.Node) -> Scale:
        """Return the scale of a step's first input, the only one that may be rescaled."""
        first = node.args[0] if node.args else node.all_input_nodes[0]
        if any(source is not first for source in self._rescaled_inputs(node)):
            raise self.refusal(node, "takes a rescaled value in a place where it cannot be undone")
        return self.scales[first] if isinstance(first, fx.Node) else ONE

    def check_changeable(self, node: fx.Node) -> None:
        """Refuse to change tensors that are computed, or used in more than one place."""
        name = str(node.target)
        module = self.modules[name]
        if not {"weight", "bias"} <= module._parameters.keys():
            raise self.refusal(
                node,
                "has a weight or bias that is computed from other tensors (weight norm, pruning or "
                "another parametrization), which cannot be rescaled; make it permanent first",
            )
        self._check_hooks(node)
        calls = sum(
            other.op == "call_module" and other.target == name for other in self.graph.nodes
        )
        if calls > 1:
            raise self.refusal(node, f"is called {calls} times, with one weight for all calls")
        users = self._users_of(module)
        if users:
            raise self.refusal(node, f"shares its weights with {sorted(users)}")

    def _users_of(self, module: nn.Module) -> set[str]:
        """Return names of other modules and of steps that use a module's tensors."""
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
        return users | {
            str(other.target)
            for other in self.graph.nodes
            if other.op == "get_attr"
            and other.target in named
            and _identity(named[other.target]) in own
        }

    def _is_layer(self, node: fx.Node) -> bool:
        """Return whether a step is a layer with a weight matrix."""
        return node.op == "call_module" and is_plain_layer(self.modules[str(node.target)])

    def _rescaled_inputs(self, node: fx.Node) -> list[fx.Node]:
        """List the inputs of a step that are rescaled."""
        return [source for source in node.all_input_nodes if not self.scales[source].is_one]

    def _check_hooks(self, node: fx.Node) -> None:
        """Refuse modules with forward hooks."""
        module = self.modules[str(node.target)] if node.op == "call_module" else None
        if module is not None and (module._forward_hooks or module._forward_pre_hooks):
            raise self.refusal(
                node, "has forward hooks, which may do anything to rescaled values; remove them"
            )

    def _step(self, node: fx.Node, find_rule: FindRule) -> Scale:
        """Return the scale of a step's result."""
        if self._is_layer(node):
            return self._pass_layer(node)
        if not self._rescaled_inputs(node):
            return ONE
        self._check_hooks(node)
        rule = find_rule(node, self.modules)
        if rule is None or node.kwargs.get("out") is not None:
            raise self.refusal(
                node,
                "follows rescaled layers, but does not pass positive factors on: f(c x) = c f(x) "
                "does not hold for it, or is not known to hold",
            )
        return rule(self, node)

    def _pass_layer(self, node: fx.Node) -> Scale:
        """Plan the change of a layer, and return the scale of its output."""
        name = str(node.target)
        layer = self.modules[name]
        before = self.only_input(node)
        as_map = layer_map(layer)
        fits = before.is_uniform or (before.layout == "channels") != as_map.channels_last
        factor = self.factors.get(name)
        change = self.kind.plan(before, as_map.n_inputs, factor) if fits else None
        if change is None:
            raise self.refusal(
                node,
                f"takes {as_map.n_inputs} features, which cannot be matched with "
                f"the {len(before.values)} neurons that are rescaled before it",
            )
        if change.is_none:
            return ONE
        self.check_changeable(node)
        layout = "last" if as_map.channels_last else "channels"
        after = Scale(change.after, layout, layer.weight.ndim)
        if not after.is_one and node not in self._leads_to_layer:
            raise ValueError(self.kind.unfinished.format(name=name, after=after.values[0]))
        self.layers[name] = change
        return after


def _tensors(module: nn.Module) -> list[Tensor]:
    """List the parameters and buffers of a module itself."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _identity(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return tensor.data_ptr() or id(tensor)  # an empty tensor has no address

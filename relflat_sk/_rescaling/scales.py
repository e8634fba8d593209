"""Follow the scales of values through a forward pass, and plan the changes of layers.

See `relflat_sk._rescaling.reparameterization` for the notation.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from relflat_sk._network.borrowing import has_own_forward
from relflat_sk._network.layers import layer_map
from relflat_sk._rescaling.layers import BATCH_NORMS, describe_step, is_plain, is_plain_layer

Floats = NDArray[np.float64]

_PRODUCT_TOLERANCE = 1e-6  # of factors multiplied in float32; the last layer absorbs the rest
_ROUNDING = 1e-12  # of two scales multiplied in float64 along different branches


@dataclass(frozen=True, eq=False)
class Scale:
    """A value of the rescaled network divided by that of the original. Shapes: `values` (k,)."""

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
        """Return the scales of n features, each that of its neuron. Shapes: returns (n,)."""
        k = len(self.values)
        if k in {1, n}:
            return np.broadcast_to(self.values, n)
        if n % k or self.layout not in {"blocks", "tiles"}:
            return None
        blocks = self.layout == "blocks"
        return np.repeat(self.values, n // k) if blocks else np.tile(self.values, n // k)

    def equals(self, other: "Scale") -> bool:
        """Return whether values of both scales can be added number by number."""
        return (
            self.values.shape == other.values.shape
            and (self.is_uniform or (self.layout, self.ndim) == (other.layout, other.ndim))
            and bool(np.isclose(self.values, other.values, rtol=_ROUNDING, atol=0).all())
        )


ONE = Scale(np.ones(1))


@dataclass(frozen=True, eq=False)
class Change:
    """The change of one layer. Shapes: `rows`, `after` (d,), `columns` (k,)."""

    rows: Floats
    columns: Floats
    after: Floats


# the kinds of rescaling, with the error for factors that nothing undoes
KINDS = {
    "layer": "the factors multiply to {after:.10g} on the way to the network's output, behind "
    "layer {name!r}; their product must be 1.",
    "neuron": "layer {name!r} has no layer behind it in which the factors of its output neurons "
    "could be undone; give factors for layers before it.",
}


# -- the walk through the graph that torch.fx records --------------------------------------

Rule = Callable[["Walk", fx.Node], Scale]


@dataclass
class Walk:
    """A walk through the steps of a forward pass, which collects the changes of layers."""

    module: nn.Module
    graph: fx.Graph
    kind: str
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

    def run(self) -> None:
        """Find the scale of each step's result."""
        for node in self.graph.nodes:
            self.scales[node] = self._step(node)

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

    def kept(self, node: fx.Node, *layouts: str) -> Scale:
        """Keep a single factor, or those of neurons in some layouts: the rest would be mixed."""
        scale = self.only_input(node)
        if not scale.is_uniform and scale.layout not in layouts:
            raise self.refusal(node, _MIXES)
        return scale

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
        own = {_identity(tensor) for tensor in (*module.parameters(), *module.buffers())}
        read = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        users = set()
        for name, tensor in (
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ):
            if _identity(tensor) in own:
                owner = name.rpartition(".")[0]
                users |= {owner} if self.module.get_submodule(owner) is not module else set()
                users |= {name} & read
        return users

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

    def _step(self, node: fx.Node) -> Scale:
        """Return the scale of a step's result."""
        if self._is_layer(node):
            return self._pass_layer(node)
        if not self._rescaled_inputs(node):
            return ONE
        self._check_hooks(node)
        rule = _find_rule(node, self.modules)
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
        change = self._plan(before, as_map.n_inputs, self.factors.get(name)) if fits else None
        if change is None:
            raise self.refusal(
                node,
                f"takes {as_map.n_inputs} features, which cannot be matched with "
                f"the {len(before.values)} neurons that are rescaled before it",
            )
        if all((part == 1).all() for part in (change.rows, change.columns, change.after)):
            return ONE
        self.check_changeable(node)
        layout = "last" if as_map.channels_last else "channels"
        after = Scale(change.after, layout, layer.weight.ndim)
        if not after.is_one and node not in self._leads_to_layer:
            raise ValueError(KINDS[self.kind].format(name=name, after=after.values[0]))
        self.layers[name] = change
        return after

    def _plan(self, before: Scale, n_features: int, factor: Floats | None) -> Change | None:
        """Plan the change of a layer; None if its columns cannot be matched with the neurons."""
        rows = np.ones(1) if factor is None else factor
        if self.kind == "neuron":
            columns = before.spread(n_features)
            return None if columns is None else Change(rows, columns, rows)
        after = before.values * rows
        if abs(after[0] - 1) <= _PRODUCT_TOLERANCE:
            after = np.ones(1)
            rows = after / before.values
        return Change(rows, np.ones(1), after)


def _identity(tensor: Tensor) -> int:
    """Return a number that tensors with the same memory share."""
    return tensor.data_ptr() or id(tensor)  # an empty tensor has no address


# -- rules by which steps turn the scale of their input into another -----------------------

_MIXES = (
    "moves or mixes neurons that are rescaled by different factors, and where each of them ends "
    "up depends on the input"
)


def _argument(walk: Walk, node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a step, given to its module, by position or by name."""
    if node.op == "call_module":
        return getattr(walk.modules[str(node.target)], name)
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _cast(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale if device or precision change, but not to integers."""
    arguments = (*node.args, *node.kwargs.values())
    dtypes = [argument for argument in arguments if isinstance(argument, torch.dtype)]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise walk.refusal(node, "rounds a rescaled value")
    return walk.only_input(node)


def _pool(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale: the step acts within channels."""
    return walk.kept(node, "channels")


def _pad(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale if the padding is zero; modules pad within channels."""
    value = _argument(walk, node, 3, "value")
    if isinstance(value, fx.Node) or value:
        raise walk.refusal(node, f"pads a rescaled value with {value!r}")
    return walk.kept(node, *["channels"] * (node.op == "call_module"))


def _flatten(walk: Walk, node: fx.Node) -> Scale:
    """Flatten the axes that the step names."""
    start = _argument(walk, node, 1, "start_dim", 0)
    return _flatten_axes(walk, node, start, _argument(walk, node, 2, "end_dim", -1))


def _flatten_axes(walk: Walk, node: fx.Node, start: Any, end: Any) -> Scale:
    """Return where neurons lie after the axes behind that of the samples are flattened."""
    scale = walk.only_input(node)
    if scale.is_uniform:
        return scale
    last = (-1, scale.ndim - 1) if scale.layout == "channels" else (-1,)
    if start != 1 or end not in last:
        raise walk.refusal(node, _MIXES)
    flat = {"channels": "blocks", "last": "tiles"}
    return Scale(scale.values, flat.get(scale.layout, scale.layout))


def _view(walk: Walk, node: fx.Node) -> Scale:
    """Allow shapes that keep the samples and flatten the rest: (len(x), -1) or (-1, number)."""
    shape = node.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    keeps_samples = len(shape) == 2 and (
        _is_sample_count(shape[0]) or (shape[0] == -1 and isinstance(shape[1], int))
    )
    return _flatten_axes(walk, node, 1 if keeps_samples else None, -1)


def _is_sample_count(node: Any) -> bool:
    """Return whether a value is x.size(0), x.shape[0] or x.size()[0]."""
    if not isinstance(node, fx.Node):
        return False
    if node.target == "size":
        return node.args[1:] == (0,)
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    shape = node.args[0]
    return isinstance(shape, fx.Node) and (
        (shape.target == "size" and len(shape.args) == 1)
        or (shape.target is getattr and shape.args[1] == "shape")
    )


def _reduce(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale if the axes that are reduced are not those of samples and neurons."""
    scale = walk.only_input(node)
    if scale.is_uniform:
        return scale
    dims = _argument(walk, node, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        raise walk.refusal(node, _MIXES)
    if scale.layout == "channels":
        dims = {dim % scale.ndim for dim in dims}
        if not dims & {0, 1}:
            ndim = (
                scale.ndim if _argument(walk, node, 2, "keepdim", False) else scale.ndim - len(dims)
            )
            return Scale(scale.values, "last" if ndim == 2 else "channels", ndim)
    elif scale.layout == "last" and max(dims) < -1:
        return scale
    raise walk.refusal(node, _MIXES)


def _norm(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale, and note the change of a batch norm, an affine map in evaluation mode."""
    name = str(node.target)
    module = walk.modules[name]
    scale = walk.only_input(node)
    if module.running_mean is None:
        raise walk.refusal(node, "normalizes by the batch, since it keeps no running statistics")
    values = scale.spread(module.num_features)
    along_features = scale.is_uniform or (
        scale.layout == "channels" or isinstance(module, nn.BatchNorm1d)
    )
    if values is None or not along_features:
        raise walk.refusal(node, _MIXES)
    walk.check_changeable(node)
    walk.norms[name] = values
    return scale


def _sum(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale that two values share; a number has scale 1, unless it is zero."""
    operands = (_argument(walk, node, 0, "input"), _argument(walk, node, 1, "other"))
    return _same(walk, node, [part for part in operands if isinstance(part, fx.Node) or part])


def _join(walk: Walk, node: fx.Node) -> Scale:
    """Keep the single factor that several values share."""
    scale = _same(walk, node, node.all_input_nodes)
    if not scale.is_uniform:
        raise walk.refusal(node, _MIXES)
    return scale


def _same(walk: Walk, node: fx.Node, operands: Sequence[Any]) -> Scale:
    """Return the scale that all operands have; numbers have scale 1."""
    scales = [walk.scales[part] if isinstance(part, fx.Node) else ONE for part in operands]
    if not all(scale.equals(scales[0]) for scale in scales):
        raise walk.refusal(
            node,
            "puts values together that are rescaled by different factors ("
            + ", ".join(
                f"{scale.values[0]:.10g}" if scale.is_uniform else f"{len(scale.values)} neurons"
                for scale in scales
            )
            + ")",
        )
    return scales[0]


def _multiply(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale of a value that is multiplied by a number, or by a value with scale 1."""
    if isinstance(_argument(walk, node, 0, "input"), int | float):
        return walk.scales[node.all_input_nodes[0]]
    return _divide(walk, node)


def _divide(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale of the first operand; a second one may mix neurons by broadcasting."""
    if node.kwargs.get("rounding_mode") is not None:
        raise walk.refusal(node, "rounds a rescaled value")
    scale = walk.only_input(node)
    if not scale.is_uniform and len(node.all_input_nodes) > 1:
        raise walk.refusal(node, _MIXES)
    return scale


def _one(walk: Walk, node: fx.Node) -> Scale:
    """Return scale 1: the result, such as a shape, does not depend on the scale."""
    return ONE


def _attribute(walk: Walk, node: fx.Node) -> Scale:
    if node.args[1] in {"shape", "dtype", "device", "ndim"}:
        return ONE
    raise walk.refusal(node, f"takes the attribute {node.args[1]!r} of a rescaled value")


# The steps of torch that pass scales on, by the names of modules, functions and methods without
# underscores and the number of axes: "maxpool" is nn.MaxPool1d, F.max_pool2d, torch.max_pool1d
_RULES: dict[Rule, str] = {
    # f(c x) = c f(x) for each number alone
    Walk.only_input: "identity relu leakyrelu prelu rrelu dropout abs neg contiguous clone detach "
    "float double half bfloat16 cpu cuda",
    _cast: "to",
    _pool: "maxpool avgpool adaptiveavgpool adaptivemaxpool lppool interpolate upsample "
    "upsamplingnearest upsamplingbilinear zeropad reflectionpad replicationpad circularpad",
    # numbers are moved or added up
    Walk.kept: "unflatten pixelshuffle pixelunshuffle channelshuffle fold unfold permute transpose "
    "movedim unsqueeze chunk split unbind narrow select getitem expand expandas repeat t",
    _pad: "constantpad pad",
    _flatten: "flatten",
    _view: "reshape view",
    _reduce: "mean sum amax amin squeeze",
    _sum: "add sub",
    _join: "cat concat stack maximum minimum",
    _multiply: "mul",
    _divide: "truediv div",
    _one: "size dim numel",
    _attribute: "getattr",
}
_RULE_OF = {name: rule for rule, names in _RULES.items() for name in names.split()}


def _find_rule(node: fx.Node, modules: Mapping[str, nn.Module]) -> Rule | None:
    """Return the rule by which a step passes the scale of its input on."""
    if node.op == "call_module" and is_plain(modules[str(node.target)], BATCH_NORMS):
        return _norm
    return _RULE_OF.get(step_name(node, modules))


def step_name(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Return the name that a module, function and method of torch share; empty for any other."""
    step: Any = node.target
    if node.op == "call_module":
        step = None if has_own_forward(modules[step]) else type(modules[step])
    if not isinstance(step, str):  # of torch, or an operator of Python
        origin = getattr(step, "__module__", "").partition(".")[0]
        step = getattr(step, "__name__", "") if origin in {"torch", "_operator", "builtins"} else ""
    return re.sub(r"_|[123]d$", "", step.lower())

"""How positive scales pass through a network: what is positively homogeneous, and what is not.

A value in the forward pass of a rescaled network is that of the old one times a scale, one
positive number for all of it or one for each neuron. `Walk` follows the graph that torch.fx
records; each step hands on the scale of what it takes, by one row of the table of rules, or
refuses. See `relflat_sk.reparameterize` for the notation.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from relflat_sk.layers import WEIGHT_LAYERS

__all__ = ["KINDS", "NORMS", "Change", "Walk", "describe_step", "is_plain"]

Floats = NDArray[np.float64]

PRODUCT_TOLERANCE = 1e-6  # of factors multiplied in float32; what is left goes into one weight
NORMS = (_BatchNorm, nn.SyncBatchNorm)
ROUNDING = 1e-12  # of two scales multiplied in float64 along different branches

_MIXES = (
    "moves or mixes neurons that are rescaled by different factors, so that where they end up "
    "cannot be told without an input"
)


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of the kinds and computes what they do."""
    return (
        isinstance(module, kinds)
        and "forward" not in vars(module)
        and any(type(module).forward is kind.forward for kind in kinds)
    )


@dataclass(frozen=True, eq=False)
class _Scale:
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
        return bool((self.values == 1).all())

    @property
    def is_uniform(self) -> bool:
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

    def equals(self, other: "_Scale") -> bool:
        return (
            self.values.shape == other.values.shape
            and (self.is_uniform or (self.layout, self.ndim) == (other.layout, other.ndim))
            and bool(np.isclose(self.values, other.values, rtol=ROUNDING, atol=0).all())
        )


ONE = _Scale(np.ones(1))


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


def _plan_layer(taken: _Scale, features: int, factor: Floats | None) -> Change:
    """Multiply the whole weight."""
    rows = np.ones(1) if factor is None else factor
    out = taken.values * rows
    if abs(out[0] - 1) <= PRODUCT_TOLERANCE:
        out = np.ones(1)
        rows = out / taken.values
    return Change(rows, np.ones(1), out)


def _plan_neurons(taken: _Scale, features: int, factor: Floats | None) -> Change | None:
    """Multiply the rows asked for, undo in the columns what came before."""
    columns = taken.spread(features)
    rows = np.ones(1) if factor is None else factor
    return None if columns is None else Change(rows, columns, rows)


_Plan = Callable[[_Scale, int, Floats | None], Change | None]


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


@dataclass
class Walk:
    """One way through the graph, collecting what has to change."""

    module: nn.Module
    graph: fx.Graph
    kind: _Kind
    factors: dict[str, Floats]
    scales: dict[fx.Node, _Scale] = field(default_factory=dict)
    layers: dict[str, Change] = field(default_factory=dict)
    norms: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules: dict[str, Any] = dict(self.module.named_modules())
        self.leads_to_layer: set[fx.Node] = set()
        for node in reversed(self.graph.nodes):
            if any(user in self.leads_to_layer or self.is_layer(user) for user in node.users):
                self.leads_to_layer.add(node)

    def run(self) -> None:
        """Give every node its scale.

        Raises
        ------
        ValueError
            If a node does not pass on the scale of what it takes.
        """
        for node in self.graph.nodes:
            self.scales[node] = self._step(node)

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

    def _step(self, node: fx.Node) -> _Scale:
        if self.is_layer(node):
            return _pass_layer(self, node)
        if not self.scaled(node):
            return ONE
        self.check_hooks(node)
        rule = _find_rule(node, self.modules)
        if rule is None or node.kwargs.get("out") is not None:
            raise self.refusal(
                node,
                "follows rescaled layers, but does not pass positive factors on: f(c x) = c f(x) "
                "does not hold for it, or is not known to hold",
            )
        return rule(self, node)


_Rule = Callable[[Walk, fx.Node], _Scale]


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


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _only_input(walk: Walk, node: fx.Node) -> _Scale:
    """Return the scale of the first input, if it is the only one that is scaled."""
    first = node.args[0] if node.args else node.all_input_nodes[0]
    if any(taken is not first for taken in walk.scaled(node)):
        raise walk.refusal(node, "takes a rescaled value in a place where it cannot be undone")
    return walk.scales[first] if isinstance(first, fx.Node) else ONE


def _pass_layer(walk: Walk, node: fx.Node) -> _Scale:
    """Find out how a layer has to change."""
    name = str(node.target)
    layer = walk.modules[name]
    taken = _only_input(walk, node)
    linear = isinstance(layer, nn.Linear)
    features = layer.in_features if linear else layer.in_channels
    fits = taken.is_uniform or (taken.layout == "channels") != linear
    change = walk.kind.plan(taken, features, walk.factors.get(name)) if fits else None
    if change is None:
        raise walk.refusal(
            node,
            f"takes {features} features, which cannot be matched with the {len(taken.values)} "
            "neurons that are rescaled before it",
        )
    if change.is_none:
        return ONE
    _check_own(walk, node)
    out = _Scale(change.out, "last" if linear else "channels", layer.weight.ndim)
    if not out.is_one and node not in walk.leads_to_layer:
        raise ValueError(walk.kind.unfinished.format(name=name, out=out.values[0]))
    walk.layers[name] = change
    return out


def _check_own(walk: Walk, node: fx.Node) -> None:
    """Refuse to change tensors that are computed, or used in more than one place."""
    name = str(node.target)
    module = walk.modules[name]
    if not {"weight", "bias"} <= module._parameters.keys():
        raise walk.refusal(
            node,
            "has a weight or bias that is computed from other tensors (weight norm, pruning or "
            "another parametrization), which cannot be rescaled; make it permanent first",
        )
    walk.check_hooks(node)
    calls = sum(other.op == "call_module" and other.target == name for other in walk.graph.nodes)
    if calls > 1:
        raise walk.refusal(node, f"is called {calls} times, with one weight for all calls")
    own = {_identity(tensor) for tensor in _tensors(module)}
    users = {
        other
        for other, candidate in walk.modules.items()
        if candidate is not module
        and any(_identity(tensor) in own for tensor in _tensors(candidate))
    }
    named: dict[Any, Tensor] = {
        **dict(walk.module.named_parameters(remove_duplicate=False)),
        **dict(walk.module.named_buffers(remove_duplicate=False)),
    }
    users |= {
        str(other.target)
        for other in walk.graph.nodes
        if other.op == "get_attr"
        and other.target in named
        and _identity(named[other.target]) in own
    }
    if users:
        raise walk.refusal(node, f"shares its weights with {sorted(users)}")


def _tensors(module: nn.Module) -> list[Tensor]:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def _identity(tensor: Tensor) -> int:
    return tensor.data_ptr() or id(tensor)  # an empty tensor has no address


# ---- rules for everything that is not a layer


def _keep(walk: Walk, node: fx.Node) -> _Scale:
    """Each number on its own, f(c x) = c f(x)."""
    return _only_input(walk, node)


def _cast(walk: Walk, node: fx.Node) -> _Scale:
    """Change the device or the precision, but not to integers."""
    wanted = [part for part in (*node.args, *node.kwargs.values()) if isinstance(part, torch.dtype)]
    if not all(dtype.is_floating_point for dtype in wanted):
        raise walk.refusal(node, "rounds a rescaled value")
    return _only_input(walk, node)


def _keep_uniform(walk: Walk, node: fx.Node) -> _Scale:
    """Numbers move, or are added up."""
    scale = _only_input(walk, node)
    if not scale.is_uniform:
        raise walk.refusal(node, _MIXES)
    return scale


def _pool(walk: Walk, node: fx.Node) -> _Scale:
    """Within channels."""
    scale = _only_input(walk, node)
    if not scale.is_uniform and scale.layout != "channels":
        raise walk.refusal(node, _MIXES)
    return scale


def _pad_module(walk: Walk, node: fx.Node) -> _Scale:
    return _if_zero(walk, node, walk.modules[str(node.target)].value, _pool)


def _pad_function(walk: Walk, node: fx.Node) -> _Scale:
    return _if_zero(walk, node, _argument(node, 3, "value"), _keep_uniform)


def _if_zero(walk: Walk, node: fx.Node, value: Any, rule: _Rule) -> _Scale:
    if isinstance(value, fx.Node) or value:
        raise walk.refusal(node, f"pads a rescaled value with {value!r}")
    return rule(walk, node)


def _flatten_module(walk: Walk, node: fx.Node) -> _Scale:
    module = walk.modules[str(node.target)]
    return _flatten(walk, node, module.start_dim, module.end_dim)


def _flatten_function(walk: Walk, node: fx.Node) -> _Scale:
    return _flatten(
        walk, node, _argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1)
    )


def _flatten(walk: Walk, node: fx.Node, start: Any, end: Any) -> _Scale:
    scale = _only_input(walk, node)
    if scale.is_uniform:
        return scale
    last = (-1, scale.ndim - 1) if scale.layout == "channels" else (-1,)
    if start != 1 or end not in last:
        raise walk.refusal(node, _MIXES)
    flat = {"channels": "blocks", "last": "tiles"}
    return _Scale(scale.values, flat.get(scale.layout, scale.layout))


def _view(walk: Walk, node: fx.Node) -> _Scale:
    """Keep the samples apart and flatten the rest: (len(x), -1), or (-1, number)."""
    shape = node.args[1:]
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    keeps_samples = len(shape) == 2 and (
        _is_sample_count(shape[0]) or (shape[0] == -1 and isinstance(shape[1], int))
    )
    return _flatten(walk, node, 1 if keeps_samples else None, -1)


def _is_sample_count(node: Any) -> bool:
    """Whether a value is x.size(0), x.shape[0] or x.size()[0]."""
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


def _reduce(walk: Walk, node: fx.Node) -> _Scale:
    """Drop axes other than those of samples and neurons."""
    scale = _only_input(walk, node)
    if scale.is_uniform:
        return scale
    dims = _argument(node, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        raise walk.refusal(node, _MIXES)
    if scale.layout == "channels":
        dims = {dim % scale.ndim for dim in dims}
        if not dims & {0, 1}:
            ndim = scale.ndim if _argument(node, 2, "keepdim", False) else scale.ndim - len(dims)
            return _Scale(scale.values, "last" if ndim == 2 else "channels", ndim)
    elif scale.layout == "last" and max(dims) < -1:
        return scale
    raise walk.refusal(node, _MIXES)


def _norm(walk: Walk, node: fx.Node) -> _Scale:
    """Carry the scale through the affine map that batch norm is in evaluation mode."""
    name = str(node.target)
    module = walk.modules[name]
    scale = _only_input(walk, node)
    if module.running_mean is None:
        raise walk.refusal(node, "normalizes by the batch, since it keeps no running statistics")
    values = scale.spread(module.num_features)
    along_features = scale.is_uniform or (
        scale.layout == "channels" or isinstance(module, nn.BatchNorm1d)
    )
    if values is None or not along_features:
        raise walk.refusal(node, _MIXES)
    _check_own(walk, node)
    walk.norms[name] = values
    return scale


def _sum(walk: Walk, node: fx.Node) -> _Scale:
    """Two values of the same scale; a number has scale 1, unless it is zero."""
    operands = (_argument(node, 0, "input"), _argument(node, 1, "other"))
    return _same(walk, node, [part for part in operands if isinstance(part, fx.Node) or part])


def _join(walk: Walk, node: fx.Node) -> _Scale:
    scale = _same(walk, node, node.all_input_nodes)
    if not scale.is_uniform:
        raise walk.refusal(node, _MIXES)
    return scale


def _same(walk: Walk, node: fx.Node, operands: Sequence[Any]) -> _Scale:
    scales = [walk.scales[part] if isinstance(part, fx.Node) else ONE for part in operands]
    if not all(scale.equals(scales[0]) for scale in scales):
        raise walk.refusal(
            node,
            "puts values together that are rescaled by different factors ("
            + ", ".join(_short(scale) for scale in scales)
            + ")",
        )
    return scales[0]


def _short(scale: _Scale) -> str:
    return f"{scale.values[0]:.10g}" if scale.is_uniform else f"{len(scale.values)} neurons"


def _multiply(walk: Walk, node: fx.Node) -> _Scale:
    """Let a rescaled value be the one that is multiplied, by a number or another value."""
    if isinstance(_argument(node, 0, "input"), int | float):
        return walk.scales[node.all_input_nodes[0]]
    return _multiply_first(walk, node)


def _multiply_first(walk: Walk, node: fx.Node) -> _Scale:
    scale = _only_input(walk, node)
    if not scale.is_uniform and len(node.all_input_nodes) > 1:
        raise walk.refusal(node, _MIXES)
    return scale


def _divide(walk: Walk, node: fx.Node) -> _Scale:
    if node.kwargs.get("rounding_mode") is not None:
        raise walk.refusal(node, "rounds a rescaled value")
    return _multiply_first(walk, node)


def _one(walk: Walk, node: fx.Node) -> _Scale:
    """Answer a question whose answer does not depend on the scale, such as the shape."""
    return ONE


def _attribute(walk: Walk, node: fx.Node) -> _Scale:
    if node.args[1] in {"shape", "dtype", "device", "ndim"}:
        return ONE
    raise walk.refusal(node, f"takes the attribute {node.args[1]!r} of a rescaled value")


_RULES: dict[_Rule, tuple[Any, ...]] = {  # modules, functions and names of tensor methods
    _keep: (
        *(nn.Identity, nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU),
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
        *(F.relu, F.relu_, torch.relu, torch.relu_, F.leaky_relu, F.leaky_relu_),
        *(F.prelu, torch.prelu, F.rrelu, torch.rrelu, torch.abs, torch.neg, operator.neg),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
        *("relu", "relu_", "abs", "neg", "contiguous", "clone", "detach"),
        *("float", "double", "half", "bfloat16", "cpu", "cuda"),
    ),
    _cast: ("to",),
    _pool: (
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d),
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
        *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
        *(nn.LPPool1d, nn.LPPool2d, nn.LPPool3d),
        *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, F.interpolate),
        *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d),
        *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d),
        *(nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d),
        *(nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    ),
    _keep_uniform: (
        *(nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Fold, nn.Unfold),
        *(torch.permute, torch.transpose, torch.movedim, torch.unsqueeze, torch.chunk),
        *(torch.split, torch.unbind, torch.narrow, torch.select, operator.getitem),
        *("permute", "transpose", "movedim", "unsqueeze", "chunk", "split", "unbind", "narrow"),
        *("select", "expand", "expand_as", "repeat", "unflatten", "t"),
    ),
    _pad_module: (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    _pad_function: (F.pad,),
    _flatten_module: (nn.Flatten,),
    _flatten_function: (torch.flatten, "flatten"),
    _view: (torch.reshape, "reshape", "view"),
    _reduce: (
        *(torch.mean, torch.sum, torch.amax, torch.amin, torch.squeeze),
        *("mean", "sum", "amax", "amin", "squeeze"),
    ),
    _sum: (operator.add, operator.sub, torch.add, torch.sub, "add", "add_", "sub", "sub_"),
    _join: (torch.cat, torch.concat, torch.stack, torch.maximum, torch.minimum),
    _multiply: (operator.mul, torch.mul, "mul"),
    _multiply_first: ("mul_",),
    _divide: (operator.truediv, torch.div, "div", "div_"),
    _one: ("size", "dim", "numel"),
    _attribute: (getattr,),
}
_RULE_OF = {step: rule for rule, steps in _RULES.items() for step in steps}


def _find_rule(node: fx.Node, modules: Mapping[str, nn.Module]) -> _Rule | None:
    if node.op in {"call_function", "call_method"}:
        return _RULE_OF.get(node.target)
    if node.op != "call_module":
        return None
    module = modules[str(node.target)]
    if is_plain(module, NORMS):
        return _norm
    return None if "forward" in vars(module) else _RULE_OF.get(type(module))

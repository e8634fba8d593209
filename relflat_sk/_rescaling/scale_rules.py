"""The table of rules by which steps of a forward pass turn the scale of their input into another.

Layers with a weight matrix have no rule: `relflat_sk._rescaling.walk` treats them.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from relflat_sk._network import has_own_forward
from relflat_sk._rescaling.scales import ONE, Scale
from relflat_sk._rescaling.tracing import BATCH_NORMS, is_plain
from relflat_sk._rescaling.walk import Rule, Walk

__all__ = ["find_rule"]

_MIXES = (
    "moves or mixes neurons that are rescaled by different factors, and where each of them ends "
    "up depends on the input"
)


def _argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of a call, whether it was given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def _keep(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale: the step acts on each number alone, with f(c x) = c f(x)."""
    return walk.only_input(node)


def _cast(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale if device or precision change, but not to integers."""
    arguments = (*node.args, *node.kwargs.values())
    dtypes = [argument for argument in arguments if isinstance(argument, torch.dtype)]
    if not all(dtype.is_floating_point for dtype in dtypes):
        raise walk.refusal(node, "rounds a rescaled value")
    return walk.only_input(node)


def _keep_uniform(walk: Walk, node: fx.Node) -> Scale:
    """Keep a single factor: the step moves numbers or adds them up."""
    scale = walk.only_input(node)
    if not scale.is_uniform:
        raise walk.refusal(node, _MIXES)
    return scale


def _pool(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale: the step acts within channels."""
    scale = walk.only_input(node)
    if not scale.is_uniform and scale.layout != "channels":
        raise walk.refusal(node, _MIXES)
    return scale


def _pad_module(walk: Walk, node: fx.Node) -> Scale:
    return _if_zero(walk, node, walk.modules[str(node.target)].value, _pool)


def _pad_function(walk: Walk, node: fx.Node) -> Scale:
    return _if_zero(walk, node, _argument(node, 3, "value"), _keep_uniform)


def _if_zero(walk: Walk, node: fx.Node, value: Any, rule: Rule) -> Scale:
    """Apply a rule to padding if it pads with zeros."""
    if isinstance(value, fx.Node) or value:
        raise walk.refusal(node, f"pads a rescaled value with {value!r}")
    return rule(walk, node)


def _flatten_module(walk: Walk, node: fx.Node) -> Scale:
    module = walk.modules[str(node.target)]
    return _flatten(walk, node, module.start_dim, module.end_dim)


def _flatten_function(walk: Walk, node: fx.Node) -> Scale:
    return _flatten(
        walk, node, _argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1)
    )


def _flatten(walk: Walk, node: fx.Node, start: Any, end: Any) -> Scale:
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
    return _flatten(walk, node, 1 if keeps_samples else None, -1)


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
    dims = _argument(node, 1, "dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        raise walk.refusal(node, _MIXES)
    if scale.layout == "channels":
        dims = {dim % scale.ndim for dim in dims}
        if not dims & {0, 1}:
            ndim = scale.ndim if _argument(node, 2, "keepdim", False) else scale.ndim - len(dims)
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
    operands = (_argument(node, 0, "input"), _argument(node, 1, "other"))
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
            + ", ".join(_short(scale) for scale in scales)
            + ")",
        )
    return scales[0]


def _short(scale: Scale) -> str:
    """Describe a scale for error messages."""
    return f"{scale.values[0]:.10g}" if scale.is_uniform else f"{len(scale.values)} neurons"


def _multiply(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale of a value that is multiplied by a number, or by a value with scale 1."""
    if isinstance(_argument(node, 0, "input"), int | float):
        return walk.scales[node.all_input_nodes[0]]
    return _multiply_first(walk, node)


def _multiply_first(walk: Walk, node: fx.Node) -> Scale:
    """Keep the scale of the first operand; a second one may mix neurons by broadcasting."""
    scale = walk.only_input(node)
    if not scale.is_uniform and len(node.all_input_nodes) > 1:
        raise walk.refusal(node, _MIXES)
    return scale


def _divide(walk: Walk, node: fx.Node) -> Scale:
    if node.kwargs.get("rounding_mode") is not None:
        raise walk.refusal(node, "rounds a rescaled value")
    return _multiply_first(walk, node)


def _one(walk: Walk, node: fx.Node) -> Scale:
    """Return scale 1: the result, such as a shape, does not depend on the scale."""
    return ONE


def _attribute(walk: Walk, node: fx.Node) -> Scale:
    if node.args[1] in {"shape", "dtype", "device", "ndim"}:
        return ONE
    raise walk.refusal(node, f"takes the attribute {node.args[1]!r} of a rescaled value")


_RULES: dict[Rule, tuple[Any, ...]] = {  # modules, functions and names of tensor methods
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


def find_rule(node: fx.Node, modules: Mapping[str, nn.Module]) -> Rule | None:
    """Return the rule by which a step passes the scale of its input on."""
    if node.op in {"call_function", "call_method"}:
        return _RULE_OF.get(node.target)
    if node.op != "call_module":
        return None
    module = modules[str(node.target)]
    if is_plain(module, BATCH_NORMS):
        return _norm
    return None if has_own_forward(module) else _RULE_OF.get(type(module))

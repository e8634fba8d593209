"""Record the forward pass of a network as a graph of steps, without data, by torch.fx."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from relflat_sk._network import check_stored, has_own_forward, weight_kind

BATCH_NORMS = (_BatchNorm, nn.SyncBatchNorm)


def is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module is of one of the kinds and computes the same as they do."""
    return (
        isinstance(module, kinds)
        and not has_own_forward(module)
        and any(type(module).forward is kind.forward for kind in kinds)
    )


def is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer with a weight matrix that computes ``W x + b``."""
    kind = weight_kind(module)
    return kind is not None and is_plain(module, (kind,))


class _Tracer(fx.Tracer):
    """Traces through custom modules, but not through subclasses that only rename a layer."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            super().is_leaf_module(m, module_qualified_name)
            or is_plain_layer(m)
            or is_plain(m, BATCH_NORMS)
        )


def trace(module: nn.Module) -> fx.Graph:
    """Record the forward pass in evaluation mode, on a copy that shares the parameters."""
    check_stored(module)
    if any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers())):
        raise ValueError(
            "the network has lazy layers, which have no weights yet; run it once on data first."
        )
    tracer = _Tracer()
    if tracer.is_leaf_module(module, ""):
        graph = fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("x"),)))
        return graph
    # tracing runs the user's code, which may leave proxies behind in attributes
    root = copy_module(module, {id(parameter): parameter for parameter in module.parameters()})
    try:
        return tracer.trace(root.eval(), concrete_args=_defaults(root))
    except Exception as error:
        raise ValueError(
            f"torch.fx cannot follow the forward pass of the {type(module).__name__}, so it is "
            "not known which function the network computes. Usually the reason is control flow "
            f"that depends on data. torch.fx says: {error}"
        ) from error


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the arguments of `forward` that have a constant as their default."""
    return {
        argument.name: argument.default
        for argument in inspect.signature(module.forward).parameters.values()
        if argument.default is None or isinstance(argument.default, bool | int | float | str)
    }


def copy_module(module: nn.Module, shared: dict[int, Any]) -> nn.Module:
    """Make a deep copy of a network."""
    try:
        return copy.deepcopy(module, shared)
    except RuntimeError as error:
        raise ValueError(
            f"the {type(module).__name__} cannot be copied. If it stores a hidden value of its "
            "last forward pass, run it once under torch.no_grad(); if a weight is computed "
            f"(pruning, weight norm), make it permanent. torch says: {error}"
        ) from error


def describe_step(node: fx.Node, modules: Mapping[str, nn.Module]) -> str:
    """Describe a step of the forward pass for error messages."""
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

"""Run one network on one batch, to find out how its nets can be stacked."""

import copy
import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._losses import Loss, explain_ending
from relflat_sk._network import (
    Recorder,
    Tail,
    choose_curvatures,
    find_ending,
    find_layer,
    find_link,
    find_norms,
    keep_graph,
    primary_output,
    record_order,
)
from relflat_sk._numerics import full_precision
from relflat_sk._penalty import RelativeFlatnessPenalty
from relflat_sk.fleet._stackable import NotStackable

__all__ = ["Probe", "check_penalty", "copy_network", "probe"]


@dataclass(frozen=True)
class Probe:
    """A network's outputs on a batch, and its last layer."""

    output: Tensor
    target: Tensor
    unused: Set[str]
    last: str | None
    at_last: bool = True
    earlier: Mapping[str, int] = field(default_factory=dict)
    is_piecewise_linear: bool = True
    divisor: float = 1.0


def probe(net: Any, module: nn.Module, x: Tensor, y: Tensor) -> Probe:
    """Run a network, and check that its penalty can be computed for many networks at once."""
    loss = Loss(net.criterion_)
    if not net.flatness_weight > 0:
        with torch.enable_grad():
            output = primary_output(module(x))
        problem = explain_ending(loss.criterion, find_ending(output))
        if problem is not None:
            raise NotStackable(problem)  # its own fit raises the error
        net._check_output(loss, output)
        target = loss.read_target(output, y)
        return Probe(output.detach(), target.values, _find_unused(module, output), None)
    if net.flatness_normalize:
        raise NotStackable("flatness_normalize=True is computed for single nets only")
    with record_order(module) as recorder:
        module(x)
    order = recorder.order
    layers = order if net.flatness_layer == "all" else net._layers()
    names = list(dict.fromkeys(find_layer(module, layer, order) for layer in layers))
    last = module.get_submodule(order[-1])
    recorded = {name: module.get_submodule(name) for name in (*names, order[-1])}
    with torch.enable_grad(), Recorder(recorded, keep_graph) as recorder:
        output = primary_output(module(x))
    _check_last(recorder, order[-1], last, output)
    net._check_output(loss, output)
    target = loss.read_target(output, y)
    each = loss.each_divisor(output, target.relevant)
    if isinstance(each, Tensor):
        raise NotStackable("with a penalty, its criterion must weigh all samples equally")
    earlier = [recorder[name] for name in names if name != order[-1]]
    if earlier and _runs_otherwise(module):
        raise NotStackable(
            "with a penalty at earlier layers, it must have no convolution, normalisation or "
            "attention"
        )
    if any(type(one.layer) is not nn.Linear or one.check()[0].ndim != 2 for one in earlier):
        raise NotStackable("a penalised layer must be a Linear, one row per sample")
    tail = Tail(loss, output, target, recorder[order[-1]], full_precision)
    ways = choose_curvatures(tail, [*earlier, recorder[order[-1]]], _Ways(), together=True)
    if "many classes" in ways:
        raise NotStackable("with a penalty, it has too many classes")
    return Probe(
        output.detach(),
        target.values,
        _find_unused(module, output),
        order[-1],
        order[-1] in names,
        {record.name: record.check()[0].shape[-1] for record in earlier},
        "gradients" in ways,
        float(each),
    )


def _check_last(recorder: Recorder, name: str, last: nn.Module, output: Tensor) -> None:
    """Refuse a last layer behind which there is more of the network."""
    if recorder.calls.count(name) > 1:
        raise NotStackable("with a penalty, its last layer must be called once")
    if find_link(output, recorder[name].node) != "identity":
        raise NotStackable("with a penalty, its last layer must be its output")
    if type(last) is not nn.Linear or output.ndim != 2:
        raise NotStackable("with a penalty, its last layer must be a Linear, one row per sample")


def copy_network(module: nn.Module) -> nn.Module:
    """Copy a network."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise NotStackable("torch cannot copy its network") from error


def check_penalty(net: Any, module: nn.Module, x: Tensor, y: Tensor, *, weighted: bool) -> None:
    """Refuse a network whose penalty a net by itself refuses in its first step.

    A chain of layers needs no such check: it uses no weight outside of the layer's call, and each
    row of its output depends on one row of each layer.
    """
    penalty = RelativeFlatnessPenalty(*net._penalty_settings())
    weights = torch.ones(len(x), dtype=torch.float64, device=x.device) if weighted else None
    try:
        # its own fit warns and raises
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            with penalty.capture(module):
                output = primary_output(module(x))
            penalty(net.criterion_, output, y, weights)
    except ValueError as error:
        raise NotStackable(f"with a penalty, {error}") from error


def _find_unused(module: nn.Module, output: Tensor) -> set[str]:
    """Return the parameters that an output does not depend on; the output's graph is freed."""
    if not output.requires_grad:
        raise NotStackable("its output depends on no parameter")  # its own fit raises the error
    names, parameters = zip(*module.named_parameters(), strict=True)
    with torch.enable_grad():
        found = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(names, found, strict=True) if gradient is None}


def _runs_otherwise(module: nn.Module) -> bool:
    """Return whether a penalty at an earlier layer lets some layers run in another way."""
    kinds = nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d
    return any(isinstance(part, kinds) for part in module.modules()) or bool(find_norms(module))


class _Ways:
    """The names of the ways to a curvature."""

    def closed_form(self, record: Any, features: Tensor, curvature: Any) -> str:
        return "closed form"

    def many_classes(self, record: Any, features: Tensor, curvature: Any) -> str:
        return "many classes"

    def gradients(self, records: Any, base: Tensor, curvature: Any) -> str:
        return "gradients"

    def products(self, records: Any) -> str:
        return "products"

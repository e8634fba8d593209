"""Run one network on one batch, to find out how its nets can be stacked."""

import copy
import warnings
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import joblib
import torch
from torch import Tensor, nn

from relflat_sk._engine import Member, NeedsOwnLoop
from relflat_sk._losses import Loss, ManyClasses, explain_ending, name_criterion
from relflat_sk._network import (
    Recorder,
    Tail,
    cast_inputs,
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
from relflat_sk._random import fork_rng


@dataclass(frozen=True)
class Probe:
    """A network in training mode, and what its outputs on a batch show of it.

    `masks` has the shapes of the masks of dropout, without the samples; `last` and `earlier` are
    layers that a penalty needs, the latter with the number of their inputs.
    """

    module: nn.Module
    output: Tensor
    target: Tensor
    unused: Set[str]
    masks: Mapping[str, tuple[int, ...]]
    last: str | None = None
    at_last: bool = True
    earlier: Mapping[str, int] = field(default_factory=dict)
    is_piecewise_linear: bool = True

    def refuse_criterion(self, criterion: Any) -> NeedsOwnLoop:
        """Return the reason why a criterion has no penalty in a stack."""
        return NeedsOwnLoop(
            "with a penalty, its criterion must be MSELoss, BCEWithLogitsLoss without weights, "
            "or CrossEntropyLoss of class indices without weights, with reduction='mean', got "
            f"{name_criterion(criterion)} (reduction={getattr(criterion, 'reduction', None)!r}, "
            f"labels of {self.target.dtype} and shape {tuple(self.target.shape)})"
        )


def probe(member: Member) -> Probe:
    """Run a network, and check that its penalty can be computed for many networks at once."""
    weight = next(member.module.parameters())
    x = cast_inputs(member.inputs[: member.batch_size], member.module, weight.device)
    y = member.targets[: member.batch_size].to(weight.device)
    module = _copy(member.module).train()
    with fork_rng(weight.device):
        ran = _copy(module)
        masks = _find_masks(ran, x)
        _check_state(module, ran)
        # a network may hold results of its forward pass, and torch cannot copy it then
        tried = _copy(module)
        if not member.net.flatness_weight:
            output, target = _run(member.net, tried, x, y)
            return Probe(module, output.detach()[:1], target, _find_unused(tried, output), masks)
        _check_penalty(member, tried, x, y)
        return _probe_penalty(member.net, module, tried, x, y, masks)


def _run(net: Any, module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Run a network without penalty; return the output with its graph, and the target."""
    loss = Loss(net.criterion_)
    with torch.enable_grad():
        output = primary_output(module(x))
    problem = explain_ending(loss.criterion, find_ending(output))
    if problem is not None:
        raise NeedsOwnLoop(problem)  # its own fit raises the error
    net._check_output(loss, output)
    return output, loss.read_target(output, y).values


def _probe_penalty(
    net: Any,
    module: nn.Module,
    tried: nn.Module,
    x: Tensor,
    y: Tensor,
    masks: Mapping[str, tuple[int, ...]],
) -> Probe:
    """Find the penalised layers, and how their curvature is known."""
    if net.flatness_normalize:
        raise NeedsOwnLoop("flatness_normalize=True is computed for single nets only")
    with record_order(tried) as order_of:
        tried(x)
    order = order_of.order
    layers = order if net.flatness_layer == "all" else net._layers()
    names = list(dict.fromkeys(find_layer(tried, layer, order) for layer in layers))
    recorded = {name: tried.get_submodule(name) for name in (*names, order[-1])}
    with torch.enable_grad(), Recorder(recorded, keep_graph) as recorder:
        output = primary_output(tried(x))
    last = recorder[order[-1]]
    if recorder.calls.count(order[-1]) > 1:
        raise NeedsOwnLoop("with a penalty, its last layer must be called once")
    if find_link(output, last.node) != "identity":
        raise NeedsOwnLoop("with a penalty, its last layer must be its output")
    if type(last.layer) is not nn.Linear or output.ndim != 2:
        raise NeedsOwnLoop("with a penalty, its last layer must be a Linear, one row per sample")
    loss = Loss(net.criterion_)
    net._check_output(loss, output)
    target = loss.read_target(output, y)
    earlier = [recorder[name] for name in names if name != order[-1]]
    if earlier and _runs_otherwise(tried):
        raise NeedsOwnLoop(
            "with a penalty at earlier layers, it must have no convolution, normalisation or "
            "attention"
        )
    if any(type(one.layer) is not nn.Linear or one.check()[0].ndim != 2 for one in earlier):
        raise NeedsOwnLoop("a penalised layer must be a Linear, one row per sample")
    tail = Tail(loss, output, target, last, full_precision)
    ways = choose_curvatures(tail, [*earlier, last], _Ways(), together=True)
    if "many classes" in ways:
        raise NeedsOwnLoop("with a penalty, it has too many classes")
    return Probe(
        module,
        output.detach()[:1],
        target.values,
        _find_unused(tried, output),
        masks,
        order[-1],
        order[-1] in names,
        {record.name: record.check()[0].shape[-1] for record in earlier},
        "gradients" in ways,
    )


def _copy(module: nn.Module) -> nn.Module:
    """Copy a network."""
    try:
        return copy.deepcopy(module)
    except RuntimeError as error:
        raise NeedsOwnLoop("torch cannot copy its network") from error


def _find_masks(module: nn.Module, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Find the shapes of the outputs of layers of dropout, without the samples."""
    found: dict[str, list[tuple[int, ...]]] = {
        name: [] for name, part in module.named_modules() if type(part) is nn.Dropout and part.p
    }
    for name, shapes in found.items():
        module.get_submodule(name).register_forward_hook(
            lambda part, args, output, shapes=shapes: shapes.append(tuple(output.shape[1:]))
        )
    with torch.no_grad():
        module(x)
    if any(len(shapes) != 1 for shapes in found.values()):
        raise NeedsOwnLoop("its network does not use each layer of dropout once")
    return {name: shapes[0] for name, shapes in found.items()}


def _check_state(module: nn.Module, ran: nn.Module) -> None:
    """Refuse a network whose forward pass changes what it holds in Python, such as a counter.

    A stack runs one copy for all its nets. Results that the pass leaves in new attributes are
    harmless, for nothing reads them.
    """
    torchs = vars(nn.Module())
    for name, part in module.named_modules():
        after = vars(ran.get_submodule(name))
        for key, value in vars(part).items():
            if key not in torchs and value is not None and not _is_same(value, after.get(key)):
                where = f"{name}.{key}" if name else key
                raise NeedsOwnLoop(f"its network changes its attribute {where} in each pass")


def _is_same(value: Any, other: Any) -> bool:
    """Return whether a value equals its copy, which holds no tensors but plain ones."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    if value is other:
        return True
    with suppress(Exception):  # what cannot be pickled may have changed
        return bool(joblib.hash(value) == joblib.hash(other))
    return False


def _check_penalty(member: Member, module: nn.Module, x: Tensor, y: Tensor) -> None:
    """Refuse a network whose penalty a net by itself refuses in its first step."""
    net = member.net
    penalty = RelativeFlatnessPenalty(*net._penalty_settings())
    weights = None
    if member.weights is not None:
        weights = torch.ones(len(x), dtype=torch.float64, device=x.device)
    try:
        # its own fit warns and raises
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            with penalty.capture(module):
                output = primary_output(module(x))
            penalty(net.criterion_, output, y, weights)
    except ValueError as error:
        raise NeedsOwnLoop(f"with a penalty, {error}") from error


def _find_unused(module: nn.Module, output: Tensor) -> set[str]:
    """Return the parameters that an output does not depend on; the output's graph is freed."""
    if not output.requires_grad:
        raise NeedsOwnLoop("its output depends on no parameter")  # its own fit raises the error
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
        return "many classes" if isinstance(curvature, ManyClasses) else "closed form"

    def gradients(self, records: Any, base: Tensor, curvature: Any) -> str:
        return "gradients"

    def products(self, records: Any) -> str:
        return "products"

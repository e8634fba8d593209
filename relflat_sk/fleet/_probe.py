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

from relflat_sk._engine.epoch import Member
from relflat_sk._engine.qualify import NeedsOwnLoop
from relflat_sk._losses.loss import Loss, explain_ending
from relflat_sk._losses.many_classes import MANY
from relflat_sk._network.batches import cast_inputs
from relflat_sk._network.borrowing import find_fused
from relflat_sk._network.network import primary_output
from relflat_sk._network.recording import LayerRecord, Recorder, keep_graph
from relflat_sk._network.tail import find_ending, find_link, is_piecewise_linear
from relflat_sk._penalty.capture import Plan
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._random import fork_rng
from relflat_sk.fleet._stack import OF_TORCH

# layers that run in another way if a penalty differentiates them twice
_OTHERWISE = (nn.MultiheadAttention, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class PenaltyLayers:
    """The layers that a penalty needs; those before the last one with the number of their inputs.

    `is_penalised` tells whether the last one is penalised as well.
    """

    last: str
    is_penalised: bool
    earlier: Mapping[str, int] = field(default_factory=dict)
    is_piecewise_linear: bool = True


@dataclass(frozen=True)
class Probe:
    """A network in training mode, and what its outputs on a batch show of it.

    `masks` has the shapes of the masks of dropout, without the samples.
    """

    module: nn.Module
    output: Tensor
    target: Tensor
    unused: Set[str]
    masks: Mapping[str, tuple[int, ...]]
    layers: PenaltyLayers | None


def probe(member: Member) -> Probe:
    """Run a network, and check that its penalty can be computed for many networks at once."""
    net, weight = member.net, next(member.module.parameters())
    x = cast_inputs(member.inputs[: member.batch_size], member.module, weight.device)
    y = member.targets[: member.batch_size].to(weight.device)
    module, loss = _copy(member.module).train(), Loss(net.criterion_)
    with fork_rng(weight.device), torch.enable_grad():
        ran = _copy(module)
        masks = _find_masks(ran, x)
        _check_state(module, ran)
        # a network may hold results of its forward pass, and torch cannot copy it then
        tried, layers = _copy(module), None
        if net.flatness_weight:
            layers = _find_layers(member, tried, x, y)
        output = primary_output(tried(x))
        problem = explain_ending(loss.criterion, find_ending(output))
        if problem is not None:
            raise NeedsOwnLoop(problem)  # its own fit raises the error
        net._check_output(loss, output)
        target = loss.read_target(output, y).values
        unused = _find_unused(tried, output)
    return Probe(module, output.detach()[:1], target, unused, masks, layers)


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
    for name, part in module.named_modules():
        after = vars(ran.get_submodule(name))
        for key in vars(part).keys() - OF_TORCH:
            value = vars(part)[key]
            if value is not None and not _is_same(value, after.get(key)):
                where = f"{name}.{key}" if name else key
                raise NeedsOwnLoop(f"its network changes its attribute {where} in each pass")


def _is_same(value: Any, other: Any) -> bool:
    """Return whether a value equals its copy, which holds no tensors but plain ones."""
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    with suppress(Exception):  # what cannot be pickled may have changed
        return value is other or bool(joblib.hash(value) == joblib.hash(other))
    return False


def _find_unused(module: nn.Module, output: Tensor) -> set[str]:
    """Return the parameters that an output does not depend on; the output's graph is freed."""
    if not output.requires_grad:
        raise NeedsOwnLoop("its output depends on no parameter")  # its own fit raises the error
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(output.sum(), parameters, allow_unused=True)
    return {name for name, gradient in zip(names, found, strict=True) if gradient is None}


# -- the layers of a penalty -----------------------------------------------------------------


def _find_layers(member: Member, module: nn.Module, x: Tensor, y: Tensor) -> PenaltyLayers:
    """Find the penalised layers; refuse a network whose penalty is not that of a stack."""
    if member.net.flatness_normalize:
        raise NeedsOwnLoop("flatness_normalize=True is computed for single nets only")
    plan = _try_penalty(member, module, x, y)
    with Recorder(plan.layers, keep_graph) as recorder:
        output = primary_output(module(x))
    *others, last = (recorder[name] for name in plan.layers)
    if last.calls > 1:
        raise NeedsOwnLoop("with a penalty, its last layer must be called once")
    if find_link(output, last.node) != "identity":
        raise NeedsOwnLoop("with a penalty, its last layer must be its output")
    if output.ndim != 2 or not _is_linear(last):
        raise NeedsOwnLoop("with a penalty, its last layer must be a Linear, one row per sample")
    parts = list(module.modules())
    if others and (any(isinstance(part, _OTHERWISE) for part in parts) or find_fused(module)):
        raise NeedsOwnLoop(
            "with a penalty at earlier layers, it must have no convolution, normalisation or "
            "attention"
        )
    if not all(map(_is_linear, others)):
        raise NeedsOwnLoop("a penalised layer must be a Linear, one row per sample")
    if output.shape[1] >= MANY:
        raise NeedsOwnLoop("with a penalty, it has too many classes")
    return PenaltyLayers(
        last.name,
        last.name in plan.penalised,
        {record.name: record.check()[0].shape[-1] for record in others},
        is_piecewise_linear(output, *(record.node for record in others)),
    )


def _try_penalty(member: Member, module: nn.Module, x: Tensor, y: Tensor) -> Plan:
    """Refuse a network whose penalty a net by itself refuses in its first step."""
    penalty = RelativeFlatnessPenalty(*member.net._penalty_settings())
    weights = None
    if member.weights is not None:
        weights = torch.ones(len(x), dtype=torch.float64, device=x.device)
    try:
        with warnings.catch_warnings():  # its own fit warns and raises
            warnings.simplefilter("ignore")
            with penalty.capture(module):
                output = primary_output(module(x))
            penalty(member.net.criterion_, output, y, weights)
    except ValueError as error:
        raise NeedsOwnLoop(f"with a penalty, {error}") from error
    return penalty.plan


def _is_linear(record: LayerRecord) -> bool:
    """Return whether a layer maps one row of each sample."""
    return type(record.layer) is nn.Linear and record.check()[0].ndim == 2

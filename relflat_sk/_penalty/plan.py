"""The layers that a penalty records in each step, found in the first forward pass."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._network import (
    ExplicitLayers,
    Layer,
    LayerRecord,
    Recorder,
    check_unshared,
    depends_on,
    find_layer,
    find_link,
    keep_graph,
    layer_input,
)
from relflat_sk._penalty.first_pass import FirstPass, check_is_of_pass

__all__ = ["Plan", "UnfinishedPlan", "find_names", "make_recorder"]


@dataclass(frozen=True)
class Plan:
    """The structure of a network, which need not be searched again in each training step."""

    asked: tuple[Layer, ...] | None
    parts: list[nn.Module]
    children: list[dict[str, nn.Module | None]]
    layers: dict[str, nn.Module]
    penalised: list[str]
    in_attention: bool
    earlier: bool
    explicit: list[nn.Module]
    twice: list[str] | None
    first: FirstPass | None

    @classmethod
    def make(
        cls,
        asked: tuple[Layer, ...] | None,
        parts: list[nn.Module],
        named: Mapping[str, nn.Module],
        penalised: list[str],
        order: list[str],
        explicit: list[nn.Module],
        first: FirstPass,
    ) -> "Plan":
        """Make the plan of a network whose layers were called in some order."""
        last = order[-1:]
        layers = {n: named[n] for n in [*(n for n in penalised if n not in last), *last]}
        owners = [named[name.rpartition(".")[0]] for name in layers]
        inside = any(isinstance(owner, nn.MultiheadAttention) for owner in owners)
        earlier = any(name != order[-1] for name in penalised)
        children = [dict(part._modules) for part in parts]
        return cls(
            asked,
            parts,
            children,
            layers,
            penalised,
            inside,
            earlier,
            # a penalty at the last layer differentiates no other part of the network again
            explicit=_behind(penalised, order, named, explicit) if earlier else [],
            twice=penalised if earlier else None,
            first=first,
        )

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Return whether the network is the one of this plan, with the same parts."""
        return (
            module is self.parts[0]
            and asked == self.asked
            and [part._modules for part in self.parts] == self.children
        )

    def recorder(self, layers: Mapping[str, nn.Module]) -> Recorder:
        """Make a recorder of the layers of a training step."""
        return make_recorder(layers, self.penalised, self.twice or ())

    def completed(
        self, output: Tensor, recorder: Recorder, explicit: ExplicitLayers, *, weighted: bool
    ) -> "Plan":
        """Read off the graph of a first batch what the order of the calls does not tell."""
        check_is_of_pass(output, recorder)
        records = [recorder[name] for name in self.penalised]
        records = [record for record in records if record.calls == 1 and record.node is not None]
        if self.asked is None:  # the term of a layer beside the criterion's input is zero
            records = [record for record in records if depends_on(output, record.node)]
        if self.first is not None:
            self.first.check(output, records, explicit, weighted=weighted)
        twice = self.twice
        if twice is None:
            is_output = find_link(output, recorder[list(self.layers)[-1]].node) is not None
            twice = [] if is_output else self.penalised
        return replace(self, twice=twice, first=None)


@dataclass(frozen=True)
class UnfinishedPlan:
    """A plan whose layers the first forward pass is about to show."""

    asked: tuple[Layer, ...] | None
    parts: list[nn.Module]
    explicit: list[nn.Module]
    recorder: Recorder
    first: FirstPass

    def finish(self) -> Plan:
        """Make the plan from the order of the recorded calls."""
        module, order = self.parts[0], self.recorder.order
        penalised = find_names(module, self.asked, order)
        named = dict(module.named_modules())
        for name in penalised:
            check_unshared(name, named)
        return Plan.make(self.asked, self.parts, named, penalised, order, self.explicit, self.first)


def _behind(
    penalised: list[str],
    order: list[str],
    named: Mapping[str, nn.Module],
    explicit: list[nn.Module],
) -> list[nn.Module]:
    """Leave out the layers up to the first penalised one, which are differentiated once only."""
    called = [order.index(name) for name in penalised if name in order]
    first = min(called, default=-1)
    before = [named.get(name) for name in order[: first + 1]]
    return [layer for layer in explicit if layer not in before]


def find_names(module: nn.Module, asked: Sequence[Layer] | None, order: list[str]) -> list[str]:
    """Return the dotted names of the layers that the user asked for."""
    if asked is None:
        return order
    return [find_layer(module, layer, order) for layer in asked]


def make_recorder(
    layers: Mapping[str, nn.Module],
    penalised: Sequence[str],
    twice: Collection[str],
    first: FirstPass | None = None,
) -> Recorder:
    """Make a recorder after which a penalised layer has a gradient if all before it is frozen."""

    def keep(
        record: LayerRecord, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor:
        if first is not None:
            first.keep_rows(record, layer_input(args, kwargs), output)
        if not output.requires_grad and record.name in penalised and torch.is_grad_enabled():
            # the layers behind can still be trained to make this one flat
            output = output.detach().requires_grad_().view_as(output)
        return keep_graph(record, args, kwargs, output)

    return Recorder(layers, keep, twice)

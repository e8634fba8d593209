"""Record the penalised layers in each step of a training, and keep what the first one found."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import warn
from relflat_sk._network.borrowing import (
    ExplicitLayers,
    eagerly,
    explicit_attention,
    find_fused,
    is_compiled,
)
from relflat_sk._network.layers import (
    Layer,
    find_layer,
    find_names,
    weight_kind,
    weight_layers,
    why_shared,
)
from relflat_sk._network.recording import LayerRecord, Recorder, find_link, keep_graph, nodes_behind
from relflat_sk._network.tail import (
    few_rows,
    find_mixed_rows,
    refuse_layers,
    uses_elsewhere,
    warn_of_other_head,
    why_not_linear,
    why_used_elsewhere,
)
from relflat_sk._numerics import without_autocast
from relflat_sk._penalty.quiet import QuietHooks


@dataclass(frozen=True)
class Plan:
    """What a training step computes at the layers of a network.

    `recorded` are the layers that steps record, `layers` the penalised ones and then the last one.
    Layers in `twice` are differentiated twice. `order` is that of the calls; `eager` says whether
    compiled parts run without compilation.
    """

    recorded: list[str]
    order: list[str]
    layers: list[str]
    penalised: list[str]
    twice: list[str]
    in_attention: bool
    eager: bool


# in so many steps of a layer, and then in those whose number is a power of two
_FIRST_CHECKS = 8


def _is_due(steps: Counter[str], name: str) -> bool:
    """Count a step of a layer, and return whether the layer is to be checked in it."""
    steps[name] += 1
    is_power = steps[name] & (steps[name] - 1) == 0
    return steps[name] <= _FIRST_CHECKS or is_power


class Capture:
    """Records the forward passes of a network in training, and what they show of its layers.

    The first pass records all layers. Later ones record those that it found, and again all of them
    if all are asked for, because training may skip some layers at random.
    """

    def __init__(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> None:
        self.plan: Plan | None = None  # since the end of the first step
        self.recorder: Recorder | None = None  # of the last pass, until the end of its step
        self.explicit = ExplicitLayers()
        self.hooks = QuietHooks()
        self._asked = asked
        self.parts = list(module.modules())
        self._children = [dict(part._modules) for part in self.parts]
        norms = find_fused(module)
        if asked == (-1,):  # nothing before the last layer is differentiated again
            layers = set(weight_layers(module).values())
            last = max((i for i, part in enumerate(self.parts) if part in layers), default=0)
            behind = set(self.parts[last:])
            norms = [norm for norm in norms if norm in behind]
        self._norms = norms
        self._named: dict[str, nn.Module] = {}
        self._all: list[str] = []  # names of the layers with a weight matrix
        self._penalised: list[str] | None = None
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}  # of layers that are to be checked
        self._row_checks = RowChecks()
        self._checked: set[str] = set()
        self._steps = Counter[str]()  # of layers whose class has a forward method of its own
        self._draws = False  # whether the first pass drew random numbers
        self._repeated: set[str] = set()  # layers that a pass called several times

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Return whether a step has shown these layers of the network, with the same parts."""
        return (
            self.plan is not None
            and module is self.parts[0]
            and asked == self._asked
            and [part._modules for part in self.parts] == self._children
        )

    @contextmanager
    def open(self, *, compiled: bool) -> Iterator[None]:
        """Record a forward pass, which runs what is differentiated twice step by step."""
        self.recorder = None  # if the forward pass fails, nothing of an earlier one is used
        module, plan = self.parts[0], self.plan
        # the first pass shows whether the network itself registers hooks of activations
        may_register = plan is None or self.hooks.registers
        may_register |= any(part._forward_hooks or part._forward_pre_hooks for part in self.parts)
        with (
            eagerly() if compiled or plan is None or plan.eager else nullcontext(),
            explicit_attention(module) if plan is None or plan.in_attention else nullcontext(),
            ExplicitLayers(self._norms if plan is None or plan.twice else []) as self.explicit,
            self._record_all() if plan is None else self._record(plan) as self.recorder,
            self.hooks.guarded(self.parts, activations=may_register),
        ):
            yield

    def _record(self, plan: Plan) -> Recorder:
        """Record a later pass."""
        # the projections inside attention are new modules in each step
        layers = {name: self.parts[0].get_submodule(name) for name in plan.recorded}
        return Recorder(layers, partial(self._keep, plan.recorded), plan.twice)

    @contextmanager
    def _record_all(self) -> Iterator[Recorder]:
        """Record the first pass; attention must run step by step until the order is known."""
        module = self.parts[0]
        self._named = dict(module.named_modules())
        layers = weight_layers(module)
        self._all = list(layers)
        names = find_names(module, self._asked, self._all)
        # behind the last layer, attention is hardly ever to be differentiated twice
        twice = names if self._asked == (-1,) else self._all
        before = torch.get_rng_state()
        with Recorder(layers, partial(self._keep, names), twice) as recorder:
            yield recorder
        self._draws = not torch.equal(before, torch.get_rng_state())
        self._find_penalised(recorder.order)

    def _keep(
        self, penalised: Collection[str], record: LayerRecord, features: Tensor, output: Tensor
    ) -> Tensor:
        """Keep input and output of a layer with their graph, and copies of rows to be checked.

        A penalised layer has a gradient also if all before it is frozen: the layers behind it can
        still be trained to make it flat.
        """
        if record.name not in self._checked or self._may_change(record):
            few, z = few_rows(record, features, output)
            self._rows[record.name] = few.clone(), z.clone()
        if not output.requires_grad and record.name in penalised and torch.is_grad_enabled():
            output = output.detach().requires_grad_().view_as(output)
        return keep_graph(record, features, output)

    def _find_penalised(self, order: list[str]) -> list[str]:
        """Find the names of the layers that are asked for, once the order of the calls is known."""
        if self._penalised is None:
            if not order:
                find_layer(self.parts[0], -1, order)  # raises: the network calls none
            self._penalised = find_names(self.parts[0], self._asked, order)
            refuse_layers(why_shared(name, self._named) for name in self._penalised)
        return self._penalised

    def _make_plan(self, recorder: Recorder, output: Tensor) -> Plan:
        """Make the plan of a pass with such an order of calls."""
        penalised, order = self._find_penalised(recorder.order), recorder.order
        behind = set(nodes_behind(output.grad_fn))
        nodes = {name: recorder[name].node for name in order}
        if any(nodes.values()) and behind.isdisjoint(nodes.values()):
            raise ValueError(
                "y_pred is not the output of the captured forward pass. Call the network once, "
                "inside `with penalty.capture(module):`, and pass y_pred = module(X)."
            )
        if self._asked is None:  # the term of a layer beside the criterion's input is zero
            penalised = [
                name
                for name in order
                if recorder[name].calls > 1 or nodes[name] is None or nodes[name] in behind
            ]
        last = order[-1]
        if self._asked is not None and -1 in self._asked:
            called = [recorder[name].layer for name in order]
            warn_of_other_head(output, recorder[last], self.parts[0], called)
        names = [*(name for name in penalised if name != last), last]
        recorded = self._all if self._asked is None else names
        earlier = len(recorded) > 1
        is_output = find_link(output, recorder[last].node) is not None
        owners = [self._named[name.rpartition(".")[0]] for name in recorded]
        twice = [] if is_output and not earlier else recorded if self._asked is None else penalised
        in_attention = any(isinstance(owner, nn.MultiheadAttention) for owner in owners)
        inside = {part for whole in self.parts if is_compiled(whole) for part in whole.modules()}
        eager = bool(twice) or not inside.isdisjoint(self._named[name] for name in recorded)
        return Plan(recorded, order, names, penalised, twice, in_attention, eager)

    def _without_skipped(self, plan: Plan, recorder: Recorder) -> list[str]:
        """Leave out layers that this pass did not call, if passes may skip them at random.

        If all layers are asked for, those that it called several times are left out as well.
        """
        repeated = {name for name in plan.penalised if recorder[name].calls > 1}
        if self._asked is not None or len(repeated) == len(plan.penalised):
            repeated.clear()  # which is an error
        for name in repeated - self._repeated:
            warn(
                f"layer {name!r} left out of a step that calls it several times: the curvature in "
                "its weight is not that of one layer."
            )
        self._repeated |= repeated
        skipped = [
            name
            for name in plan.penalised
            if not recorder[name].calls and (self._draws or name in self._checked)
        ]
        for name in set(skipped) - self._checked:
            warn(
                f"layer {name!r} was not called in this step. If the network skips it at random, "
                "its term is zero then. If it never calls this layer, name another."
            )
        return [name for name in plan.penalised if name not in skipped and name not in repeated]

    def _may_change(self, record: LayerRecord) -> bool:
        """Return whether a layer that was linear at first, behind a zero, is to be checked."""
        kind = weight_kind(record.layer)
        has_own_forward = kind is None or type(record.layer).forward is not kind.forward
        return has_own_forward and _is_due(self._steps, record.name)

    @property
    def has_recorded(self) -> bool:
        """Whether there is a forward pass whose step has not ended."""
        recorder = self.recorder
        return recorder is not None and not recorder.failed and bool(recorder.calls)

    def finish(self, output: Tensor, *, weighted: bool) -> tuple[list[LayerRecord], LayerRecord]:
        """End the step: return the records of the penalised layers and of the last one."""
        recorder, plan = self.recorder, self.plan
        assert recorder is not None
        if not len(output):
            raise ValueError(f"the batch has no samples: y_pred has shape {tuple(output.shape)}.")
        if not output.requires_grad:
            raise ValueError(
                "y_pred carries no gradient: it was detached, or the network ran in "
                "torch.no_grad() or torch.inference_mode(). Pass it as the network returned it "
                "outside of these. To measure without training, use relative_flatness."
            )
        recorder.is_finished = True
        self.recorder = None
        if plan is None or (self._asked is None and plan.order != recorder.order):
            plan = self._make_plan(recorder, output)
        names = self._without_skipped(plan, recorder)
        penalised = [recorder[name] for name in plan.layers if name in names]
        records = [record for record in penalised if record.calls == 1 and record.node is not None]
        self._check(records, output)
        self._row_checks.check(output, records, self.explicit.pull_back, weighted=weighted)
        self.plan = plan
        return penalised, recorder[plan.layers[-1]]

    def _check(self, records: Sequence[LayerRecord], output: Tensor) -> None:
        """Refuse layers at which the penalty is not that of the criterion."""
        for record in records:
            name = record.name
            if name not in self._checked:
                if uses_elsewhere(output, record):
                    raise ValueError(why_used_elsewhere(name))
                self._checked.add(name)
            if name in self._rows:
                refuse_layers([why_not_linear(record, *self._rows[name])])
        self._rows.clear()


class RowChecks:
    """Checks of whether rows of layers are samples, in outputs that arise in one way.

    Slopes show it, and they can be zero at first, at all rows or some: behind a head or a branch
    that starts at zero, for example. So a layer is checked until all its rows have had slopes.
    """

    def __init__(self) -> None:
        self._way: Any = None
        self._steps = Counter[str]()
        self._settled: set[str] = set()
        self._seen: dict[tuple[str, int], Tensor] = {}  # which rows have had slopes

    def check(
        self, output: Tensor, records: Sequence[LayerRecord], pull_back: Any, *, weighted: bool
    ) -> None:
        """Refuse layers whose rows are not those of the output."""
        way = type(output.grad_fn), weighted
        if way != self._way:
            self._way, self._steps, self._settled, self._seen = way, Counter(), set(), {}
        due = [
            record
            for record in records
            if record.name not in self._settled and _is_due(self._steps, record.name)
        ]
        if due:
            with without_autocast(output):
                seen, reasons = find_mixed_rows(output, due, pull_back, in_order=weighted)
            refuse_layers(reasons.values())
            self._settled |= {record.name for record in due} - seen.keys()
            for name, rows in seen.items():
                key = name, len(rows)
                self._seen[key] = self._seen.get(key, rows) | rows
                if bool(self._seen[key].all()):
                    self._settled.add(name)

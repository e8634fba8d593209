"""Record the penalised layers in each step of a training, and keep what the first one found."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
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
    find_names,
    weight_kind,
    weight_layers,
    why_shared,
)
from relflat_sk._network.recording import (
    LayerRecord,
    Recorder,
    find_link,
    keep_graph,
    nodes_behind,
)
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


@dataclass(frozen=True)
class Plan:
    """What a training step computes at the layers of a network.

    `recorded` are the layers that steps record, `layers` the penalised ones and then the last one.
    Layers in `twice` are differentiated twice, and with them the normalisations in `explicit`.
    `order` is that of the calls; `eager` says whether compiled parts run without compilation.
    """

    recorded: list[str]
    order: list[str]
    layers: dict[str, nn.Module]
    penalised: list[str]
    twice: list[str]
    explicit: list[nn.Module]
    in_attention: bool
    eager: bool


class Survey:
    """A network with the layers that are asked for, and what forward passes have shown of them.

    The first pass records all layers. Later ones record those that it found, and again all of them
    if all are asked for, because training may skip some layers at random.
    """

    def __init__(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> None:
        self.asked = asked
        self.parts = list(module.modules())
        self._children = [dict(part._modules) for part in self.parts]
        norms = find_fused(module)
        if asked == (-1,):  # nothing before the last layer is differentiated again
            layers = set(weight_layers(module).values())
            last = max((i for i, part in enumerate(self.parts) if part in layers), default=0)
            behind = set(self.parts[last:])
            norms = [norm for norm in norms if norm in behind]
        self.norms = norms
        self._named: dict[str, nn.Module] = {}
        self._all: list[str] = []  # names of the layers with a weight matrix
        self._penalised: list[str] | None = None
        self._rows: dict[str, tuple[Tensor, Tensor]] = {}  # of layers that are to be checked
        self._checked: set[str] = set()
        self._steps = Steps()  # of layers whose class has a forward method of its own
        self._draws = False  # whether the first pass drew random numbers
        self._repeated: set[str] = set()  # layers that a pass called several times

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Return whether this is the network, with the same parts, and the layers are the same."""
        return (
            module is self.parts[0]
            and asked == self.asked
            and [part._modules for part in self.parts] == self._children
        )

    @contextmanager
    def record_all(self) -> Iterator[Recorder]:
        """Record the first pass; attention must run step by step until the order is known."""
        module = self.parts[0]
        self._named = dict(module.named_modules())
        layers = weight_layers(module)
        self._all = list(layers)
        names = find_names(module, self.asked, self._all)
        # behind the last layer, attention is hardly ever to be differentiated twice
        twice = names if self.asked == (-1,) else self._all
        before = torch.get_rng_state()
        with Recorder(layers, partial(self._keep, names), twice) as recorder:
            yield recorder
        self._draws = not torch.equal(before, torch.get_rng_state())
        self._find_penalised(recorder.order)

    def record(self, plan: Plan) -> Recorder:
        """Record a later pass."""
        # the projections inside attention are new modules in each step
        layers = {name: self.parts[0].get_submodule(name) for name in plan.recorded}
        return Recorder(layers, partial(self._keep, plan.recorded), plan.twice)

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
            self._penalised = find_names(self.parts[0], self.asked, order)
            refuse_layers(why_shared(name, self._named) for name in self._penalised)
        return self._penalised

    def make_plan(self, recorder: Recorder, output: Tensor) -> Plan:
        """Make the plan of a pass with such an order of calls."""
        penalised, order = self._find_penalised(recorder.order), recorder.order
        behind = set(nodes_behind(output.grad_fn))
        nodes = {name: recorder[name].node for name in order}
        if any(nodes.values()) and behind.isdisjoint(nodes.values()):
            raise ValueError(
                "y_pred is not the output of the captured forward pass. Call the network once, "
                "inside `with penalty.capture(module):`, and pass the output of this call: "
                "y_pred = module(X)."
            )
        if self.asked is None:  # the term of a layer beside the criterion's input is zero
            penalised = [
                name
                for name in order
                if recorder[name].calls > 1 or nodes[name] is None or nodes[name] in behind
            ]
        last = order[-1]
        if self.asked is not None and -1 in self.asked:
            called = [recorder[name].layer for name in order]
            warn_of_other_head(output, recorder[last], self.parts[0], called)
        names = [*(name for name in penalised if name != last), last]
        recorded = self._all if self.asked is None else names
        earlier = len(recorded) > 1
        is_output = find_link(output, recorder[last].node) is not None
        owners = [self._named[name.rpartition(".")[0]] for name in recorded]
        twice = [] if is_output and not earlier else recorded if self.asked is None else penalised
        return Plan(
            recorded,
            order,
            {name: self._named[name] for name in names},
            penalised,
            twice=twice,
            explicit=self.norms if twice else [],
            in_attention=any(isinstance(owner, nn.MultiheadAttention) for owner in owners),
            eager=bool(twice) or self._are_compiled(recorded),
        )

    def _are_compiled(self, names: Sequence[str]) -> bool:
        """Return whether some layers are inside of compiled parts."""
        inside = {part for whole in self.parts if is_compiled(whole) for part in whole.modules()}
        return not inside.isdisjoint(self._named[name] for name in names)

    def without_skipped(self, plan: Plan, recorder: Recorder) -> Plan:
        """Leave out layers that this pass did not call, if passes may skip them at random.

        If all layers are asked for, those that it called several times are left out as well.
        """
        repeated = {name for name in plan.penalised if recorder[name].calls > 1}
        if self.asked is not None or len(repeated) == len(plan.penalised):
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
                f"layer {name!r} was not called in this step, and the network draws random "
                "numbers. If it skips layers at random, the term of one that it skips is zero. "
                "If it never calls this one, name another layer."
            )
        rest = [name for name in plan.penalised if name not in skipped and name not in repeated]
        return plan if len(rest) == len(plan.penalised) else replace(plan, penalised=rest)

    def _may_change(self, record: LayerRecord) -> bool:
        """Return whether a layer that was linear at first, behind a zero, is to be checked."""
        kind = weight_kind(record.layer)
        has_own_forward = kind is None or type(record.layer).forward is not kind.forward
        return has_own_forward and self._steps.is_due(record.name)

    def check_layers(self, records: Sequence[LayerRecord], output: Tensor) -> None:
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


def _inside(module: nn.Module) -> nn.Module:
    """Return the network inside of one that `torch.compile` returned, or the network itself."""
    original = module._modules.get("_orig_mod")
    return module if original is None else original


# in so many steps of a layer, and then in those whose number is a power of two
_FIRST_CHECKS = 8


class Steps:
    """Counts the steps of layers, and says in which of them a layer is to be checked."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def is_due(self, name: str) -> bool:
        """Count a step of a layer, and return whether it is to be checked."""
        self._counts[name] = step = self._counts.get(name, 0) + 1
        is_power = step & (step - 1) == 0
        return step <= _FIRST_CHECKS or is_power


class RowChecks:
    """Checks of whether rows of layers are samples, in outputs that arise in one way.

    Slopes show it, and they can be zero at first, at all rows or some: behind a head or a branch
    that starts at zero, for example. So a layer is checked until all its rows have had slopes.
    """

    def __init__(self) -> None:
        self._way: Any = None
        self._steps = Steps()
        self._settled: set[str] = set()
        self._seen: dict[tuple[str, int], Tensor] = {}  # which rows have had slopes

    def check(
        self,
        output: Tensor,
        records: Sequence[LayerRecord],
        explicit: ExplicitLayers,
        *,
        weighted: bool,
    ) -> None:
        """Refuse layers whose rows are not those of the output."""
        way = type(output.grad_fn), weighted
        if way != self._way:
            self._steps, self._settled, self._seen = Steps(), set(), {}
        due = [
            record
            for record in records
            if record.name not in self._settled and self._steps.is_due(record.name)
        ]
        if due:
            pull = partial(explicit.pull_back, linear=True)
            with without_autocast(output):
                seen, reasons = find_mixed_rows(output, due, pull, in_order=weighted)
            refuse_layers(reasons.values())
            self._settled |= {record.name for record in due} - seen.keys()
            for name, rows in seen.items():
                key = name, len(rows)
                self._seen[key] = self._seen.get(key, rows) | rows
                if bool(self._seen[key].all()):
                    self._settled.add(name)
        self._way = way


class Capture:
    """The forward passes of one training; a copy begins anew."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.explicit = ExplicitLayers()
        self.plan: Plan | None = None
        self._survey: Survey | None = None
        self._rows = RowChecks()

    def __reduce__(self) -> tuple[type["Capture"], tuple[()]]:
        return Capture, ()

    @property
    def module(self) -> nn.Module:
        """The network of the last pass."""
        assert self._survey is not None
        return self._survey.parts[0]

    def parts_of(self, module: nn.Module) -> list[nn.Module]:
        """List the modules inside of a network, which takes time for one that is new."""
        survey, original = self._survey, _inside(module)
        if survey is not None and survey.parts[0] is original:
            return survey.parts
        return list(original.modules())

    @contextmanager
    def open(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> Iterator[None]:
        """Record a forward pass, which runs what is differentiated twice step by step.

        The first one records all layers, and finds those that later ones need: the order of the
        calls is known only afterwards, and training keeps the inputs of all layers anyway.
        """
        self.recorder = None  # if the forward pass fails, nothing of an earlier one is used
        original, plan = _inside(module), self.plan
        if self._survey is None or plan is None or not self._survey.is_of(original, asked):
            self._survey, self._rows = Survey(original, asked), RowChecks()
            self.plan = plan = None
        survey = self._survey
        is_eager = plan is None or plan.eager or original is not module
        attends = plan is None or plan.in_attention
        with (
            eagerly() if is_eager else nullcontext(),
            explicit_attention(original) if attends else nullcontext(),
            ExplicitLayers(survey.norms if plan is None else plan.explicit) as self.explicit,
            survey.record_all() if plan is None else survey.record(plan) as self.recorder,
        ):
            yield

    def finish(self, output: Tensor, *, weighted: bool) -> tuple[Plan, Recorder]:
        """End the step: return what was recorded, and what is known of the network."""
        recorder, survey = self.recorder, self._survey
        if recorder is None or survey is None or recorder.failed or not recorder.calls:
            raise RuntimeError(
                "the penalty has recorded no forward pass. Call the network inside `with "
                "penalty.capture(module):` before each call of the penalty. If the network is "
                "compiled by torch.compile, capture the compiled module."
            )
        if not len(output):
            raise ValueError(
                f"the batch has no samples: y_pred has shape {tuple(output.shape)}, and the mean "
                "loss of no samples has no flatness. Leave out empty batches."
            )
        if not output.requires_grad:
            raise ValueError(
                "y_pred carries no gradient: it was detached, or the network ran in "
                "torch.no_grad() or torch.inference_mode(). Pass the output as the network "
                "returned it, outside of these. To measure without training, use "
                "relflat_sk.relative_flatness."
            )
        recorder.is_finished = True
        self.recorder, before = None, self.plan
        self.plan = None  # if this step fails, the next one begins anew
        if before is None or (survey.asked is None and before.order != recorder.order):
            plan = survey.make_plan(recorder, output)
        else:
            plan = before
        step = survey.without_skipped(plan, recorder)
        records = [recorder[name] for name in step.penalised]
        records = [record for record in records if record.calls == 1 and record.node is not None]
        survey.check_layers(records, output)
        self._rows.check(output, records, self.explicit, weighted=weighted)
        self.plan = plan
        return step, recorder

"""Record the penalised layers in each step of a training, and keep what the first one found."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._network import (
    CompiledBody,
    ExplicitLayers,
    Layer,
    LayerRecord,
    Recorder,
    ReplacedForwards,
    check_linear,
    check_rows,
    check_unshared,
    check_uses,
    depends_on,
    explicit_attention,
    few_rows,
    find_layer,
    find_link,
    find_norms,
    keep_graph,
    kept_buffers,
    layer_input,
    uses_elsewhere,
    watch_frozen,
    weight_layers,
)
from relflat_sk._numerics import without_autocast

# What the first forward pass of a training shows of a network, and later ones need not.


@dataclass(frozen=True)
class FirstPass:
    """The layers of a network in its first forward pass."""

    noticed: Collection[str] = ()
    rows: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep_rows(self, record: LayerRecord, features: Tensor, z: Tensor) -> None:
        """Copy some inputs and outputs of a layer."""
        few_features, few_z = few_rows(record, features, z)
        self.rows[record.name] = few_features.clone(), few_z.clone()

    def check(
        self,
        output: Tensor,
        records: Sequence[LayerRecord],
        explicit: ExplicitLayers,
        *,
        weighted: bool,
    ) -> None:
        """Refuse layers at which the penalty would not be that of the criterion."""
        for record in records:
            elsewhere = uses_elsewhere(output, record) or record.name in self.noticed
            check_uses(record.name, [record.name] if elsewhere else [])
            check_linear(record, *self.rows[record.name])
        with without_autocast(output):
            check_rows(output, records, partial(explicit.pull_back, linear=True), in_order=weighted)


def check_is_of_pass(output: Tensor, recorder: Recorder) -> None:
    """Refuse an output that depends on no recorded layer: that of another forward pass."""
    nodes = [recorder[name].node for name in recorder.order if recorder[name].node is not None]
    if nodes and not any(depends_on(output, node) for node in reversed(nodes)):
        raise ValueError(
            "y_pred is not the output of the captured forward pass. Call the network once, inside "
            "`with penalty.capture(module):`, and pass the output of this call: "
            "y_pred = module(X)."
        )


# The layers that a penalty records in each step, found in the first forward pass.


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


class Capture:
    """The forward passes of one training."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.explicit = ExplicitLayers()
        self._plan: Plan | UnfinishedPlan | None = None
        self._body: CompiledBody | None = None

    def open(
        self, module: nn.Module, asked: tuple[Layer, ...] | None
    ) -> AbstractContextManager[Any]:
        """Record a forward pass."""
        self.recorder = None  # if the forward pass fails, nothing of an earlier one is used
        plan = self._plan
        if not isinstance(plan, Plan) or not plan.is_of(module, asked):
            return self._make_plan(module, asked)
        if plan.in_attention or plan.explicit:
            return self._record_explicitly(module, plan)
        self.explicit = ExplicitLayers()
        self.recorder = plan.recorder(plan.layers)
        return self.recorder

    @contextmanager
    def open_compiled(
        self, compiled: nn.Module, module: nn.Module, asked: tuple[Layer, ...] | None
    ) -> Iterator[None]:
        """Record a forward pass of a compiled network."""
        code, original = compiled.forward, compiled._modules["_orig_mod"]
        assert original is not None
        outputs: list[Any] = []  # of the network and its last layer, in a step without compilation

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._body is not None:
                return self._body.run(code, *args, **kwargs)
            output = original(*args, **kwargs)
            if self.recorder is not None and self.recorder.calls:
                outputs[:] = output, self.recorder[self.recorder.calls[-1]].output
            return output

        with self.open(module, asked), ReplacedForwards([(compiled, run)]):
            yield
        plan = self._plan
        if outputs and outputs[0] is outputs[1] and isinstance(plan, Plan) and not plan.earlier:
            self._body = CompiledBody(module, list(plan.layers)[-1])

    @contextmanager
    def _record_explicitly(self, module: nn.Module, plan: Plan) -> Iterator[None]:
        """Record a forward pass that runs attention and normalisations step by step."""
        attention = explicit_attention(module) if plan.in_attention else nullcontext()
        with attention, ExplicitLayers(plan.explicit) as self.explicit:
            # the projections inside attention are new modules in each step
            layers = {name: module.get_submodule(name) for name in plan.layers}
            with plan.recorder(layers) as self.recorder:
                yield

    @contextmanager
    def _make_plan(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> Iterator[None]:
        """Record all layers in a first forward pass, and find those that later ones need."""
        # the order of the calls is known only afterwards; training keeps the inputs of all
        # layers for the backward pass anyway
        self._body = None
        parts = list(module.modules())
        explicit = find_norms(module)
        with explicit_attention(module), ExplicitLayers(explicit) as self.explicit:
            layers = weight_layers(module)
            names = find_names(module, asked, list(layers))
            # behind the last layer, attention is hardly ever to be differentiated twice
            twice = names if asked == (-1,) else layers
            with watch_frozen(module, layers) as noticed:
                first = FirstPass(noticed)
                with make_recorder(layers, names, twice, first) as recorder:
                    self.recorder = recorder
                    self._plan = UnfinishedPlan(asked, parts, explicit, recorder, first)
                    yield
            self._finish_plan()

    def _finish_plan(self) -> Plan | None:
        """Return the plan; make it if the first forward pass has just shown the layers."""
        if isinstance(self._plan, UnfinishedPlan):
            self._plan = self._plan.finish()
        return self._plan

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the network of the last forward pass."""
        assert self._plan is not None
        return self._plan.parts[0].parameters()

    def kept_buffers(self) -> AbstractContextManager[Any]:
        """Let the code of a compiled network keep what further backward passes need."""
        return nullcontext() if self._body is None else kept_buffers()

    def check(self, output: Tensor) -> None:
        """Refuse a step without a forward pass, or whose output cannot be differentiated."""
        recorder = self.recorder
        if recorder is None or recorder.failed or not recorder.calls:
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

    def finish(self, output: Tensor, *, weighted: bool) -> tuple[Plan, Recorder]:
        """End the step: return what was recorded, and what is known of the network."""
        recorder, self.recorder = self.recorder, None
        plan = self._finish_plan()
        assert recorder is not None
        assert plan is not None  # there is one for every recorder
        if plan.first is not None:
            self._plan = plan.completed(output, recorder, self.explicit, weighted=weighted)
        return plan, recorder

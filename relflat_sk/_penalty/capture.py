"""Record the penalised layers in each step of a training, and keep what the first one found."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._network.borrowing import ExplicitLayers, explicit_attention, find_fused
from relflat_sk._network.layer_checks import (
    check_linear,
    check_rows,
    check_uses,
    few_rows,
    uses_elsewhere,
    warn_of_other_head,
)
from relflat_sk._network.layer_maps import ConvolutionMap
from relflat_sk._network.layers import Layer, check_unshared, find_layer, weight_layers
from relflat_sk._network.recording import LayerRecord, Recorder, features_of, keep_graph
from relflat_sk._network.tail import depends_on, find_link
from relflat_sk._numerics import without_autocast


@dataclass(frozen=True)
class Plan:
    """What training steps record of a network, found in its first forward pass.

    `layers` are the penalised ones and then the last one. Layers in `twice` are differentiated
    twice, and with them the normalisations in `explicit`. `at_convolutions` says whether
    all penalised layers are convolutions before the last layer.
    """

    asked: tuple[Layer, ...] | None
    parts: list[nn.Module]
    children: list[dict[str, nn.Module | None]]
    layers: dict[str, nn.Module]
    penalised: list[str]
    twice: list[str]
    explicit: list[nn.Module]
    in_attention: bool
    at_convolutions: bool

    def is_of(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> bool:
        """Return whether the network is the one of this plan, with the same parts."""
        return (
            module is self.parts[0]
            and asked == self.asked
            and [part._modules for part in self.parts] == self.children
        )


class FirstPass:
    """A forward pass in which all layers of a network are recorded, to make a plan."""

    def __init__(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> None:
        self.asked = asked
        self.parts = list(module.modules())
        self.children = [dict(part._modules) for part in self.parts]
        norms = find_fused(module)
        if asked == (-1,):  # nothing before the last layer is differentiated again
            layers = set(weight_layers(module).values())
            last = max((i for i, part in enumerate(self.parts) if part in layers), default=0)
            behind = set(self.parts[last:])
            norms = [norm for norm in norms if norm in behind]
        self.norms = norms
        self.named: dict[str, nn.Module] = {}
        self.penalised: list[str] | None = None
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """Record the pass; attention must run step by step until the order is known."""
        module = self.parts[0]
        self.named = dict(module.named_modules())
        layers = weight_layers(module)
        names = _find_names(module, self.asked, list(layers))
        # behind the last layer, attention is hardly ever to be differentiated twice
        twice = names if self.asked == (-1,) else layers
        with Recorder(layers, partial(_keep, names, self.rows), twice) as self.recorder:
            yield self.recorder
        self.find_penalised()

    def find_penalised(self) -> list[str]:
        """Find the names of the penalised layers, once the order of the calls is known."""
        if self.penalised is None:
            self.penalised = _find_names(self.parts[0], self.asked, self.recorder.order)
            for name in self.penalised:
                check_unshared(name, self.named)
        return self.penalised

    def make_plan(self, output: Tensor, explicit: ExplicitLayers, *, weighted: bool) -> Plan:
        """Check the layers of the pass, and make the plan of further steps."""
        penalised, order = self.find_penalised(), self.recorder.order
        if self.asked is None:  # the term of a layer beside the criterion's input is zero
            records = [self.recorder[name] for name in penalised]
            penalised = [
                one.name
                for one in records
                if one.calls > 1 or one.node is None or depends_on(output, one.node)
            ]
        self._check(penalised, output, explicit, weighted=weighted)
        last = order[-1]
        if self.asked is not None and -1 in self.asked:
            called = [self.recorder[name].layer for name in order]
            warn_of_other_head(output, self.recorder[last], self.parts[0], called)
        names = [*(name for name in penalised if name != last), last]
        earlier = len(names) > 1
        is_output = find_link(output, self.recorder[last].node) is not None
        owners = [self.named[name.rpartition(".")[0]] for name in names]
        twice = [] if is_output and not earlier else penalised
        return Plan(
            self.asked,
            self.parts,
            self.children,
            {name: self.named[name] for name in names},
            penalised,
            twice=twice,
            explicit=self.norms if twice else [],
            in_attention=any(isinstance(owner, nn.MultiheadAttention) for owner in owners),
            at_convolutions=last not in penalised
            and all(isinstance(self.recorder[name].map, ConvolutionMap) for name in penalised),
        )

    def _check(
        self, penalised: list[str], output: Tensor, explicit: ExplicitLayers, *, weighted: bool
    ) -> None:
        """Refuse layers at which the penalty would not be that of the criterion."""
        called = [self.recorder[name] for name in self.recorder.order]
        nodes = [record.node for record in called if record.node is not None]
        if nodes and not any(depends_on(output, node) for node in reversed(nodes)):
            raise ValueError(
                "y_pred is not the output of the captured forward pass. Call the network once, "
                "inside `with penalty.capture(module):`, and pass the output of this call: "
                "y_pred = module(X)."
            )
        records = [self.recorder[name] for name in penalised]
        records = [record for record in records if record.calls == 1 and record.node is not None]
        for record in records:
            check_uses(record.name, [record.name] if uses_elsewhere(output, record) else [])
            check_linear(record, *self.rows[record.name])
        _check_rows(output, records, explicit, weighted=weighted)


def _check_rows(
    output: Tensor, records: list[LayerRecord], explicit: ExplicitLayers, *, weighted: bool
) -> None:
    """Refuse layers whose rows are not those of the output."""
    with without_autocast(output):
        check_rows(output, records, partial(explicit.pull_back, linear=True), in_order=weighted)


def _find_names(module: nn.Module, asked: Sequence[Layer] | None, order: list[str]) -> list[str]:
    """Return the dotted names of the layers that the user asked for, each once."""
    if asked is None:
        return order
    return list(dict.fromkeys(find_layer(module, layer, order) for layer in asked))


def _keep(
    penalised: Collection[str],
    rows: dict[str, tuple[Tensor, Tensor]] | None,
    record: LayerRecord,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Tensor,
) -> Tensor:
    """Keep input and output of a layer with their graph, and in a first pass copies of some rows.

    A penalised layer has a gradient also if all before it is frozen: the layers behind it can
    still be trained to make it flat.
    """
    if rows is not None:
        features, z = few_rows(record, features_of(record, args, kwargs), output)
        rows[record.name] = features.clone(), z.clone()
    if not output.requires_grad and record.name in penalised and torch.is_grad_enabled():
        output = output.detach().requires_grad_().view_as(output)
    return keep_graph(record, args, kwargs, output)


class Capture:
    """The forward passes of one training."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.explicit = ExplicitLayers()
        self._first: FirstPass | None = None  # from which the plan is to be made
        self.plan: Plan | None = None
        self._checked: tuple[Any, bool] | None = None  # how outputs whose rows were checked arose

    def open(
        self, module: nn.Module, asked: tuple[Layer, ...] | None
    ) -> AbstractContextManager[Any]:
        """Record a forward pass."""
        self.recorder = None  # if the forward pass fails, nothing of an earlier one is used
        plan = self.plan
        if plan is None or not plan.is_of(module, asked):
            return self._find_layers(module, asked)
        return self._record(module, plan)

    @contextmanager
    def _record(self, module: nn.Module, plan: Plan) -> Iterator[None]:
        """Record a forward pass, which runs what is differentiated twice step by step."""
        attention = explicit_attention(module) if plan.in_attention else nullcontext()
        with attention, ExplicitLayers(plan.explicit) as self.explicit:
            # the projections inside attention are new modules in each step
            layers = {name: module.get_submodule(name) for name in plan.layers}
            keep = partial(_keep, plan.penalised, None)
            with Recorder(layers, keep, plan.twice) as self.recorder:
                yield

    @contextmanager
    def _find_layers(self, module: nn.Module, asked: tuple[Layer, ...] | None) -> Iterator[None]:
        """Record all layers in a first forward pass, and find those that later ones need."""
        # the order of the calls is known only afterwards; training keeps the inputs of all
        # layers for the backward pass anyway
        self.plan = None
        first = FirstPass(module, asked)
        with (
            explicit_attention(module),
            ExplicitLayers(first.norms) as self.explicit,
            first.record() as self.recorder,
        ):
            self._first = first
            yield

    def finish(self, output: Tensor, *, weighted: bool) -> tuple[Plan, Recorder]:
        """End the step: return what was recorded, and what is known of the network."""
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
        self.recorder = None
        if self.plan is None:
            first, self._first = self._first, None
            assert first is not None
            self.plan = first.make_plan(output, self.explicit, weighted=weighted)
        elif (type(output.grad_fn), weighted) != self._checked:
            records = [recorder[name] for name in self.plan.penalised]
            _check_rows(output, records, self.explicit, weighted=weighted)
        self._checked = type(output.grad_fn), weighted
        return self.plan, recorder

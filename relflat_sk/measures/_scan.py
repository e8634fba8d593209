"""Passes over the data: run the network batch by batch, and record some layers; what passes give.

Memory does not grow with the number of samples: nothing of a batch is alive while the network
runs on the next one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from relflat_sk._checks import is_integer, warn
from relflat_sk._losses.curvature import pull_back
from relflat_sk._losses.loss import Loss, has_hooks, warn_of_ending
from relflat_sk._network.batches import Batch
from relflat_sk._network.borrowing import requiring_grad
from relflat_sk._network.layers import (
    Layer,
    find_layer,
    find_names,
    weight_layers,
    why_shared,
)
from relflat_sk._network.network import (
    LossRange,
    Network,
    loss_range,
    sample_weight,
    warn_of_weights,
)
from relflat_sk._network.recording import (
    LayerRecord,
    find_ending,
    find_link,
    record_order,
    record_tail,
)
from relflat_sk._network.tail import (
    Tail,
    choose_curvatures,
    few_rows,
    find_mixed_rows,
    find_uses_elsewhere,
    refuse_layers,
    warn_of_other_head,
    why_no_samples,
    why_not_linear,
    why_used_elsewhere,
)
from relflat_sk._numerics import full_precision, read_numbers
from relflat_sk.measures._quantities import Gradients, LayerPass

# -- totals of passes, and values with their standard errors ---------------------------------------


@dataclass
class Summary:
    """Totals of one pass over the data, beside the measures."""

    divisors: float | Tensor = 0.0
    losses: float | Tensor = 0.0
    n_samples: int = 0
    output_shape: torch.Size = field(default_factory=torch.Size)
    link: str | None = None
    has_labels: bool = False
    layer_weights: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    @cached_property
    def divisor(self) -> float:
        """What divides the summed loss in the mean loss; to be read after the pass.

        It is nan where the loss is: there is no curvature of it, which closed forms do not see.
        """
        return math.nan if self.has_labels and math.isnan(self.loss) else self._totals[0]

    @cached_property
    def loss(self) -> float:
        """Summed loss; nan without labels. To be read after the pass."""
        return self._totals[1]

    @property
    def mean_loss(self) -> float:
        """Mean loss; nan without labels."""
        return self.loss / self.divisor if self.divisor else math.nan

    @cached_property
    def _totals(self) -> list[float]:
        if isinstance(self.divisors, Tensor):
            return read_numbers(self.divisors, torch.as_tensor(self.losses))
        return [self.divisors, float(self.losses)]


@dataclass(frozen=True)
class Passes:
    """What the passes over the data have shown beside the values."""

    own: Summary = field(default_factory=Summary)  # of the network itself
    # at the temperature at which its logits reach the loss of `at_loss`, if there is one
    fitted: Summary | None = None
    at_loss: float | None = None  # the share of the best constant's loss that was asked for

    @property
    def n_samples(self) -> int:
        """Number of samples that were measured on."""
        return self.own.n_samples

    @property
    def risk(self) -> float:
        """Mean loss of the network itself on the data; nan without labels."""
        return self.own.mean_loss

    @property
    def compared_risk(self) -> float:
        """Mean loss to compare with a constant's: at equal loss, that of the tempered logits."""
        return (self.fitted or self.own).mean_loss


@dataclass(frozen=True)
class Measured:
    """A measured value, or the reason why there is none, which is then nan.

    The standard error is 0 for exact values, and the residual's norm for eigenvalues.
    """

    value: float
    stderr: float = 0.0
    method: str = "exact"  # as reports name it, such as "closed form" or "hutchinson"
    reason: str = ""
    passes: Passes = field(default_factory=Passes)
    terms: NDArray[np.float64] | None = None  # (n,), of the samples, whose mean is the value
    term_stderrs: NDArray[np.float64] | None = None  # (n,)
    neurons: NDArray[np.float64] | None = None  # (m,), of which the value is the largest

    @classmethod
    def without_value(cls, reason: str = "", passes: Passes | None = None) -> "Measured":
        """Make the result of a measure that has no value."""
        return cls(math.nan, math.nan, "none", reason, passes or Passes())


def range_of(network: Network, passes: Passes) -> LossRange:
    """Compute the losses of the best prediction and of the best constant one; nan without y."""
    return loss_range(network, passes.own.output_shape, passes.own.link)


# by layer and name of the measure
Results = dict[tuple[str, str], Measured]

# -- one batch -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardPass:
    """The forward pass on one batch of n samples."""

    layers: dict[str, LayerPass]
    sample_weight: Tensor
    each_divisor: float | Tensor  # of the mean loss, without the weights of the samples
    divisor: float | Tensor
    loss: float | Tensor
    output: Tensor
    target: Tensor | None
    link: str | None
    z: Tensor  # output of the last of the layers
    counting_rows: Callable[[int], Tensor | None]  # of a number of rows, as `Loss.counting_rows`

    def __len__(self) -> int:
        return len(self.sample_weight)

    def logits(self, loss: Loss) -> Tensor:
        """Return the logits: the last layer's output, where probabilities lose digits of them."""
        output = self.output.detach()
        if loss.row is not None and loss.row.link == self.link in {"softmax", "sigmoid"}:
            return self.z.reshape(output.shape)
        return loss.logits(output)

    def row_weights(self, layer: LayerPass) -> Tensor:
        """Return the weights of the samples, or of the tokens if those are a layer's rows."""
        repeats = len(layer.features) // len(self)
        # each small operation is a launch on a GPU
        return self.sample_weight.repeat_interleave(repeats) if repeats > 1 else self.sample_weight

    def counting_weights(self, layer: LayerPass) -> Tensor:
        """Return the same weights, 0 for rows of which no label counts: (n,)."""
        weights = self.row_weights(layer)
        counts = self.counting_rows(len(weights))
        return weights if counts is None else weights * counts


def _make_forward_pass(
    network: Network, batch: Batch, output: Tensor, records: Sequence[LayerRecord]
) -> ForwardPass:
    """Compute the losses of a batch, and choose how curvatures are computed."""
    refuse_layers(why_no_samples(record, output) for record in records)
    with torch.enable_grad():
        output = full_precision(network.loss.classes_second(output, batch.y))
    warn_of_ending(network.loss.criterion, find_ending(output))
    loss = network.loss.to(output.device, output.dtype)
    if batch.y is None and loss.needs_target and records:
        raise _labels_missing(loss, records[0].name)
    if batch.y is None:
        target, losses = None, output.new_full((len(output),), torch.nan)
    else:
        target = loss.read_target(output, batch.y)
        network.check_criterion(output, target.values)
        read = network.module.parameters() if loss.row is None else ()
        with torch.enable_grad(), requiring_grad(read):
            losses = loss.losses(output, target.values, each=batch.weight is not None)
        warn_of_weights(network.loss, losses, output, network.module)
    # in float64, where probabilities close to one keep their distance from it
    last = records[-1] if records else None
    tail = Tail(loss, output, target, last, lambda z: z.detach().double())
    chosen = choose_curvatures(tail, records)
    if target is None and (unknown := chosen.linear + chosen.others):
        raise _labels_missing(loss, unknown[0].name)
    shared = None if chosen.base is None else Gradients(*chosen.base)
    passes = {
        record.name: _layer_pass(record, losses, features, curvature=curvature)
        for record, features, curvature in chosen.closed
    }
    for some, gradients in ((chosen.linear, shared), (chosen.others, None)):
        for record in some:
            passes[record.name] = _layer_pass(record, losses, gradients=gradients)
    weights = sample_weight(batch, len(output), output.device)

    def total(each: float | Tensor) -> float | Tensor:
        """Sum numbers of the samples in float64, in one operation if they have no weights."""
        if not isinstance(each, Tensor):
            return each * (len(weights) if batch.weight is None else weights.sum())
        if batch.weight is None:
            return each.detach().sum(dtype=weights.dtype)
        return each.detach().double() @ weights

    each_divisor = loss.each_divisor(output, tail.relevant)
    return ForwardPass(
        layers={record.name: passes[record.name] for record in records},
        sample_weight=weights,
        each_divisor=each_divisor,
        divisor=total(each_divisor),
        loss=total(losses),
        output=output,
        target=None if target is None else target.values,
        link=None if last is None else find_link(output, last.node),
        z=output if last is None else last.check()[1],
        counting_rows=partial(loss.counting_rows, tail.relevant),
    )


def _layer_pass(
    record: LayerRecord, losses: Tensor, features: Tensor | None = None, **known: Any
) -> LayerPass:
    """Make the pass of a layer from its record, and from what is known of its curvature."""
    assert record.offset is not None
    features = full_precision(record.check()[0] if features is None else features)
    return LayerPass(record.name, record.map, features, record.offset, losses, **known)


def _labels_missing(loss: Loss, layer: str) -> ValueError:
    return ValueError(
        f"y is needed: the curvature of {type(loss.criterion).__name__} at layer {layer!r} "
        "depends on the labels here. Pass y."
    )


def scan(
    network: Network,
    layers: Sequence[Layer] | str = (-1,),
    *visits: Callable[[ForwardPass], object],
    checked: bool | None = None,
) -> Summary:
    """Run the network on all the data once, and call functions on the pass of each batch.

    Layers are found and checked with the first batches, by default if there are functions to call.
    To be used within `borrowed`.
    """
    runner = _Runner(network, layers, bool(visits) if checked is None else checked)
    summary = Summary()
    _visit_batches(runner, *visits, partial(_add_totals, summary))
    summary.order = runner.order
    return summary


def scan_again(
    network: Network, names: Sequence[str], visit: Callable[[ForwardPass], object]
) -> None:
    """Make a further pass, at layers that `scan` has found and checked."""
    _visit_batches(_Runner(network, names, checked=False, found=list(names)), visit)


def _visit_batches(runner: "_Runner", *visits: Callable[[ForwardPass], object]) -> None:
    for forward in map(runner.run, runner.network.batches()):
        for visit in visits:
            visit(forward)
        del forward  # frees this batch before the next one runs


def _record(
    network: Network, names: Sequence[str], batch: Batch
) -> tuple[Tensor, list[LayerRecord]]:
    """Run the network on a batch, and return its output and the records of some layers."""
    with record_tail(network.module, *names) as recorder:
        output = network(batch.x)
    return output, [recorder[name] for name in dict.fromkeys(names)]


def _add_totals(summary: Summary, forward: ForwardPass) -> None:
    summary.divisors = forward.divisor + summary.divisors
    summary.losses = forward.loss + summary.losses
    summary.n_samples += len(forward)
    summary.output_shape, summary.link = forward.output.shape[1:], forward.link
    summary.has_labels = forward.target is not None
    if not summary.layer_weights:
        summary.layer_weights = {name: layer.weight for name, layer in forward.layers.items()}


@dataclass
class _Runner:
    """Runs the network on batches, and finds the layers to record with the first of them."""

    network: Network
    layers: Sequence[Layer] | str
    checked: bool = True
    found: list[str] | None = None  # names of the layers to record
    order: list[str] = field(default_factory=list)
    _sizes: set[int] = field(default_factory=set)  # of batches whose rows are samples

    def run(self, batch: Batch) -> ForwardPass:
        reasons: dict[str, str] = {}
        if self.found is not None:
            output, records = _record(self.network, self.found, batch)
        else:
            # before the batch is recorded: memory holds what one pass keeps, not two
            elsewhere = self._used_elsewhere(batch)
            output, records = self._find(batch)
            reasons = self._find_reasons(output, records, elsewhere)
        # a network may mix samples in some batches only: in those of two samples or more
        if self.checked and len(output) not in self._sizes:
            fit = [record for record in records if record.name not in reasons]
            pull = partial(pull_back, create_graph=False)
            seen, mixed = find_mixed_rows(output, fit, pull, in_order=True)
            reasons |= mixed
            if all(bool(rows.any()) for rows in seen.values()):  # slopes of zero show nothing
                self._sizes.add(len(output))
        rest = [record for record in records if record.name not in reasons]
        if self.checked and (self.layers != "all" or not rest):
            refuse_layers(reasons.values())
        if self.checked and reasons:
            warn(f"{', '.join(map(repr, reasons))} left out: {' '.join(reasons.values())}")
        self.found = [record.name for record in rest]
        return _make_forward_pass(self.network, batch, output, rest)

    def _find(self, batch: Batch) -> tuple[Tensor, list[LayerRecord]]:
        """Run the first batch, and find the layers by the order in which they are called."""
        module, every = self.network.module, self.layers == "all"
        registered = list(weight_layers(module))
        # most networks register layers in the order of their calls: a guess, checked below
        guess = registered if every else [_guess(module, x, registered) for x in self.layers]
        _warn_of_batch_statistics(module)
        with record_order(module) as recorder:
            output, records = _record(self.network, guess, batch)
        self.order = recorder.order
        if every and not self.order:
            find_layer(module, -1, self.order)  # raises: the network has none
        if not (self.checked or self.order):
            return output, []
        asked = find_names(module, None if every else self.layers, self.order)
        # layers that are not called come first, and are refused
        place = {name: place for place, name in enumerate(self.order)}
        names = sorted(asked, key=lambda name: place.get(name, -1))
        if not set(names) <= set(guess):
            del output, records  # frees the first pass
            output, records = _record(self.network, names, batch)
        by_name = {record.name: record for record in records}
        records = [by_name[name] for name in names]
        if self.checked and not every and -1 in self.layers:
            called = [module.get_submodule(name) for name in self.order]
            warn_of_other_head(output, records[-1], module, called)
        return output, records

    def _find_reasons(
        self, output: Tensor, records: list[LayerRecord], elsewhere: set[str]
    ) -> dict[str, str]:
        """Say which layers cannot be measured; where they need not be, which were not recorded."""
        reasons: dict[str, str] = {}
        named = dict(self.network.module.named_modules())
        for record in records:
            name, reason = record.name, ""
            try:
                passed = record.check()
                if self.checked:
                    reason = why_shared(name, named) or why_not_linear(
                        record, *few_rows(record, *passed)
                    )
            except ValueError as error:  # it was not called once, for example
                reason = str(error)
            if not reason and name in elsewhere:
                reason = why_used_elsewhere(name)
            if reason := reason or why_no_samples(record, output):
                reasons[name] = reason
        return reasons

    def _used_elsewhere(self, batch: Batch) -> set[str]:
        """Find the layers that are called once and whose weight is used elsewhere as well."""
        module = self.network.module
        runs_other_code = any(
            has_hooks(part)
            or "forward" in vars(part)
            or not type(part).__module__.startswith(("torch.nn.", "relflat_sk."))
            for part in module.modules()
        )
        if not (self.checked and runs_other_code):
            return set()
        return find_uses_elsewhere(lambda: self.network(batch.x), weight_layers(module))


def _warn_of_batch_statistics(module: nn.Module) -> None:
    norms = [
        name
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.running_mean is None
    ]
    if norms:
        warn(
            f"batch norm without running statistics ({', '.join(map(repr, norms))}) mixes the "
            "samples of a batch, so that losses and flatness depend on batch_size."
        )


def _guess(module: nn.Module, layer: Layer, registered: list[str]) -> str:
    """Return the name of a layer if layers are called in the order of their registration."""
    if is_integer(layer) and registered:
        assert not isinstance(layer, str | nn.Module)
        within = -len(registered) <= layer < len(registered)
        return registered[layer] if within else registered[0]
    return find_layer(module, layer)

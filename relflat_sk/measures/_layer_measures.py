"""The flatness measures of the papers' Table 1, at one layer or several.

`docs/definitions.md` defines them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from relflat_sk._checks import check_integer, check_number, warn
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import Network
from relflat_sk._numerics import column_squares, inverse_spread, read_numbers, varies
from relflat_sk._random import RandomState, make_generator
from relflat_sk.measures._eigenvalues import EIGENVALUE_LIKE, EigenvalueMeasures
from relflat_sk.measures._network_measure import RESCALINGS
from relflat_sk.measures._quantities import (
    DEFLATION,
    FeatureTrace,
    Key,
    LayerPass,
    Neurons,
    Quantity,
    Trace,
    sample_terms,
)
from relflat_sk.measures._scan import (
    ForwardPass,
    Measured,
    Passes,
    Results,
    Summary,
    scan,
    scan_again,
)

# -- averages over the data: exact where that is cheap, by random probes otherwise ----------------
# All layers and quantities share a pass over the data. Where the curvature comes from gradients,
# they share the backward passes too.
#
# An exact sum and one of probes are kept in the same way: as a sum over samples and probes, with
# what it scatters between probes. Probes are drawn for each sample independently, and in pairs:
# half of the squared difference of a pair estimates the variance of a probe. The first pass draws
# one pair; the number of further probes follows from the variance, and from `max_passes`. If they
# are many, the next pass draws a deflated pair, and further passes go on with such.

# most backward passes or products for one batch that an exact sum may take before the number of
# probes is known
MOST_EXACT = {"auto": 64, "exact": math.inf, "hutchinson": 0}
_PILOT = 2  # probes for each sample in the first pass
# A pass is a forward and a backward pass over all data, or one further backward pass or product
# with the Hessian, which takes about as long.
MAX_PASSES = 100


# -- traces and quadratic forms of the Hessian --------------------------------------------------


@dataclass(frozen=True)
class TraceLike:
    """A measure that is a sum over samples of traces and quadratic forms of the Hessian."""

    # what to sum at a layer, given the features' spread
    quantity: Callable[[LayerPass, Any], Quantity]
    # from the mean quantity and the weight to the measure
    finish: Callable[[Tensor, Tensor], Tensor] = lambda value, weight: value
    # the changes of the weights under which the measure is invariant, of `REPARAMETERIZATIONS`
    same: tuple[str, ...] = ()
    # whether the quantity needs the features' spread
    normalized: bool = False
    # the quantity with the identity as Hessian, as decay adds it: (k,) or ()
    identity: Callable[[Tensor], Any] | None = None


TRACE_LIKE: dict[str, TraceLike] = {
    "relative_flatness": TraceLike(
        lambda layer, spread: Trace(layer.left_factor()),
        same=("layer", "own neurons"),
        identity=lambda weight: weight.shape[1] * column_squares(weight).sum(),
    ),
    "normalized_relative_flatness": TraceLike(
        # a feature that never varies acts as a bias: it drops out of both factors
        lambda layer, spread: Trace(layer.left_factor(spread), inverse_spread(spread)),
        same=RESCALINGS,
        normalized=True,
    ),
    "hessian_trace": TraceLike(lambda layer, spread: Trace(), identity=torch.numel),
    "trace_flatness": TraceLike(
        lambda layer, spread: Trace(),
        lambda value, weight: value * column_squares(weight).sum(),
        same=("layer",),
        identity=torch.numel,
    ),
    "neuron_flatness_sum": TraceLike(
        lambda layer, spread: Neurons(is_sum=True),
        same=RESCALINGS,
        identity=lambda weight: column_squares(weight).sum(),
    ),
    "neuron_flatness_max": TraceLike(
        lambda layer, spread: Neurons(is_sum=False), same=RESCALINGS, identity=column_squares
    ),
    # the curvature in the features, times the mean of the features' variances
    "comparable_flatness": TraceLike(
        lambda layer, spread: FeatureTrace(layer.feature_factor(spread.square().mean().sqrt())),
        same=("layer", "own neurons"),
        normalized=True,
    ),
}
# how many standard errors below zero a curvature must be to be called negative
_SURE = 4
# The measures of layers, and one that `theory` needs, the mean trace of the Hessian of the loss in
# the features of each sample, ``mean_i Tr(W^T B_i W)``: relative flatness without the factors
# ``|phi_i|^2``. Noise of deviation h in each feature raises the loss by ``h^2 / 2`` times that.
_QUANTITIES = TRACE_LIKE | {
    "feature_curvature": TraceLike(lambda layer, spread: FeatureTrace(layer.feature_factor()))
}
# the measure with a value for each neuron, of which it is the largest
LARGEST_NEURON = "neuron_flatness_max"


def warn_of_saddle(layer: str, name: str, measured: Measured) -> None:
    """Warn if a curvature is negative beyond doubt."""
    if name not in TRACE_LIKE:
        return
    if measured.value < -max(_SURE * measured.stderr, 1e-9 * abs(measured.passes.risk)):
        warn(
            f"{name} at layer {layer!r} is negative ({measured.value:.3g}): the loss curves down "
            "there, and flatness means nothing. Train further, or check gradient_norm."
        )


@dataclass(frozen=True)
class Precision:
    """How small the standard error of an estimate must be, and what the estimate may cost."""

    rtol: float = 0.01
    atol: float = 0.0
    n_probes: int | None = None
    max_passes: int = MAX_PASSES

    def __post_init__(self) -> None:
        """Refuse numbers that no estimate can have."""
        check_number("rtol", self.rtol)
        check_number("atol", self.atol, positive=False)
        reason = "one probe has no standard error"
        check_integer("n_probes", self.n_probes, minimum=2, optional=True, reason=reason)
        reason = "one pass over the data and two probes"
        check_integer("max_passes", self.max_passes, minimum=1 + _PILOT, reason=reason)

    def n_left(self, spent: int) -> float:
        """Return how many probes or products one more pass over the data may make."""
        return math.inf if self.n_probes is not None else self.max_passes - spent - 1


@dataclass(eq=False)
class _Sum:
    """A sum over samples of a quantity at a layer, exact or by so many probes."""

    layer: str
    name: str  # of the measure
    quantity: Quantity
    n_passes: float  # backward passes or products that an exact sum takes in a batch
    method: str  # as reports call an exact sum
    exact: bool
    deflatable: bool
    deflated: bool = False
    n_probes: int = 0  # 1 if it is exact
    # of each batch, or of all as one: total and, if it is not exact, scatter over the probes, of
    # the samples' sum (2, 1, k) or of each sample (2, n, k)
    parts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Layer and measure."""
        return self.layer, self.name

    def mean(self, *, each: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the mean over probes, and its standard error, of all samples or of each."""
        parts = torch.cat(list(self.parts.values()), dim=1)
        total, *rest = parts if each else parts.sum(dim=1, keepdim=True)
        scatter = rest[0] if rest else torch.zeros_like(total)
        return total / self.n_probes, (2 * scatter).sqrt() / self.n_probes


@dataclass
class TraceMeasures:
    """The measures of `TRACE_LIKE`, from sums that are filled batch by batch."""

    # If one of them is normalised, the first pass is for the features' spread, and a second one for
    # all sums, which share backward passes.

    network: Network
    names: Sequence[str]
    precision: Precision
    bar: Any  # of tqdm: one step for each probe of a batch
    random_state: RandomState
    method: str
    per_sample: bool
    weight_decay: float

    def __post_init__(self) -> None:
        """Check the method, and prepare to draw."""
        if self.method not in MOST_EXACT:
            raise ValueError(f"method must be one of {tuple(MOST_EXACT)}, got {self.method!r}.")
        self._generator = make_generator(self.random_state, self.network.device)
        self._normalized = any(_QUANTITIES[name].normalized for name in self.names)
        self._spent = 0  # passes of sums that are not finished
        self._spreads: dict[str, FeatureSpread] = {}
        self._sums: list[_Sum] = []
        self._n_batches = 0  # that a pass has added

    def add(self, forward: ForwardPass) -> None:
        """Add a batch of the first pass."""
        if not self._normalized:
            self._add_first(forward)
            return
        for name, layer in forward.layers.items():
            if name not in self._spreads:
                self._spreads[name] = FeatureSpread(layer)
            self._spreads[name].add(layer, forward.counting_weights(layer))

    def finish(self, summary: Summary) -> Results:
        """Compute the measures, with as many further passes as they need."""
        if self._normalized:
            self._spent += 1
            scan_again(self.network, list(summary.layer_weights), self._add_first)
        self._end_pass(self._sums, _PILOT)
        self._refine(summary)
        return {summed.key: self._measure(summed, summary) for summed in self._sums}

    def _add_first(self, forward: ForwardPass) -> None:
        """Add a batch of the first pass for the sums."""
        if not self._sums:
            layers = forward.layers.values()
            self._sums = [self._begin(layer, name) for layer in layers for name in self.names]
        self._add(forward, self._sums, _PILOT)

    def _begin(self, layer: LayerPass, name: str) -> _Sum:
        """Decide how a quantity is summed."""
        measure, most = _QUANTITIES[name], MOST_EXACT[self.method]
        if self.method == "auto":
            most = min(most, self.precision.n_left(self._spent))
        spread = self._spreads[layer.name].spread() if measure.normalized else None
        quantity = measure.quantity(layer, spread)
        n_passes = quantity.n_passes(layer)
        exact = n_passes <= most and self.method != "hutchinson"
        deflatable = isinstance(quantity, Trace) and quantity.is_deflatable(layer)
        deflatable = deflatable and self.method == "auto"
        method = "exact" if layer.curvature is None else "closed form"
        return _Sum(layer.name, name, quantity, n_passes, method, exact, deflatable)

    def _add(self, forward: ForwardPass, sums: Iterable[_Sum], n_probes: int) -> None:
        """Add a batch to some of the sums."""
        exact = {summed.key: summed.quantity for summed in sums if summed.exact}
        terms = sample_terms(forward.layers, exact)
        for summed in sums:
            if summed.exact:
                self._include(forward, summed, terms[summed.key].double())
        estimated = [summed for summed in sums if not summed.exact]
        drawn = {summed.key: summed.quantity for summed in estimated}
        for summed in estimated:
            if summed.deflated and isinstance(summed.quantity, Trace):
                layer = forward.layers[summed.layer]
                drawn[summed.key] = summed.quantity.deflated(layer, self._generator)
        if any(summed.deflated for summed in estimated):
            self.bar.update(DEFLATION)
        for _ in range(n_probes // 2 if drawn else 0):
            self.bar.update(2)
            pair = [sample_terms(forward.layers, drawn, self._generator) for _ in range(2)]
            for summed in estimated:
                self._include(forward, summed, *(terms[summed.key].double() for terms in pair))
        self._n_batches += 1

    def _include(self, forward: ForwardPass, summed: _Sum, *probes: Tensor) -> None:
        """Add terms (r, k) of a batch to a sum: exact ones, or a pair of probes."""
        weights = forward.row_weights(forward.layers[summed.layer])
        total = self._weigh(forward, weights, probes[0] + probes[1] if probes[1:] else probes[0])
        sums = total[None]
        if probes[1:]:
            squares = (probes[0] - probes[1]).square() / 2
            sums = torch.stack([total, self._weigh(forward, weights.square(), squares)])
        batch = self._n_batches if self.per_sample else 0
        summed.parts[batch] = summed.parts[batch] + sums if batch in summed.parts else sums

    def _weigh(self, forward: ForwardPass, weights: Tensor, rows: Tensor) -> Tensor:
        """Sum rows with their weights: over all, or over the tokens of each sample."""
        if not self.per_sample:
            return (weights @ rows)[None]
        return (weights[:, None] * rows).reshape(len(forward), -1, rows.shape[1]).sum(dim=1)

    def _end_pass(self, sums: Iterable[_Sum], n_probes: int, n_more: int = 0) -> None:
        """Count the probes and other products of a pass over all samples."""
        for summed in sums:
            summed.n_probes += 1 if summed.exact else n_probes
        self._spent += 1 + n_more + n_probes
        self._n_batches = 0

    def _refine(self, summary: Summary) -> None:
        """Draw more probes until standard errors are small, and sum exactly what costs less so."""
        estimated = [summed for summed in self._sums if not summed.exact]
        done, pair = _PILOT, DEFLATION + _PILOT
        while estimated:
            left = self.precision.n_left(self._spent)
            missing: dict[_Sum, float] = {}  # further probes
            for summed in estimated:
                needed = self._n_needed(summed, summary)
                summed.exact = (
                    self.method == "auto" and left >= summed.n_passes < needed > summed.n_probes
                )
                if needed > summed.n_probes and not summed.exact:
                    missing[summed] = needed - summed.n_probes
            exact = [summed for summed in estimated if summed.exact]
            deflated = [
                summed
                for summed, n in missing.items()
                if summed.deflatable and not summed.deflated
                if n > 2 * pair <= left and self.precision.n_probes is None
            ]
            for summed in (*exact, *deflated):  # without the plain probes
                summed.deflated, summed.n_probes, summed.parts = not summed.exact, 0, {}
            if self.precision.n_probes is not None:
                left = self.precision.n_probes - done
            n_more, n_probes = DEFLATION * any(summed.deflated for summed in missing), 0
            if left < n_more + _PILOT:
                missing, n_more = {}, 0
            elif missing:
                most = _PILOT if deflated else int(min(1.05 * max(missing.values()), left - n_more))
                n_probes = 2 * max(most // 2, 1)
            estimated = list(missing)
            if sums := [*estimated, *exact]:
                layers = {summed.layer for summed in sums}
                names = [name for name in summary.layer_weights if name in layers]
                self.bar.total = self.bar.n + (n_more + n_probes) * self.bar.n // done
                scan_again(self.network, names, partial(self._add, sums=sums, n_probes=n_probes))
                self._end_pass(sums, n_probes, n_more)
            done += n_more + n_probes

    def _n_needed(self, summed: _Sum, summary: Summary) -> float:
        """Return how many probes bring a measure's standard error below the tolerance."""
        values, stderrs = self._finish(summed, summary)
        at = values.argmax()  # one value, or the neuron that is least flat
        value, stderr = read_numbers(values.take(at), stderrs.take(at))
        allowed = max(self.precision.atol, self.precision.rtol * abs(value))
        if not math.isfinite(value) or stderr == 0:
            return 0.0
        if allowed == 0:
            return math.inf
        # independent terms have standard errors sqrt(n) times as large as their mean
        n_terms = summary.n_samples if self.per_sample else 1
        return n_terms * summed.n_probes * (stderr / allowed) ** 2

    def _finish(
        self, summed: _Sum, summary: Summary, *, each: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute a measure and its standard error: (1, k), or (n, k) of each sample."""
        measure, weight = _QUANTITIES[summed.name], summary.layer_weights[summed.layer]
        scale = (summary.n_samples if each else 1) / summary.divisor
        mean, deviation = (scale * part for part in summed.mean(each=each))
        if self.weight_decay and measure.identity is not None:
            mean = mean + self.weight_decay * measure.identity(weight)
        return measure.finish(mean, weight), measure.finish(deviation.abs(), weight)

    def _measure(self, summed: _Sum, summary: Summary) -> Measured:
        """Compute one measure at one layer from the sum of its quantity."""
        arrays: dict[str, Any] = {}
        values, stderrs = self._finish(summed, summary)
        at = values.argmax()
        value, stderr = read_numbers(values.take(at), stderrs.take(at))
        # infinite values have a warning of their own
        if not summed.exact and self.precision.n_probes is None and math.isfinite(value):
            self._warn_if_loose(summed, summary, value, stderr)
        if summed.name == LARGEST_NEURON:
            arrays["neurons"] = values[0].cpu().numpy()
        if self.per_sample:
            each = (part[:, at].cpu().numpy() for part in self._finish(summed, summary, each=True))
            arrays |= zip(("terms", "term_stderrs"), each, strict=True)
        method = summed.method if summed.exact else "hutchinson"
        return Measured(value, stderr, method, passes=Passes(summary), **arrays)

    def _warn_if_loose(self, summed: _Sum, summary: Summary, value: float, stderr: float) -> None:
        """Warn if the budget ended an estimate before its standard error was small enough."""
        precision, needed = self.precision, self._n_needed(summed, summary)
        if needed <= summed.n_probes:
            return
        what, kind = f"{summed.name} at layer {summed.layer!r}", "deflated " * summed.deflated
        reached = f"{stderr:.3g}"
        if self.per_sample:
            what = f"the terms of {what}"
            reached = f"typically {stderr * math.sqrt(summary.n_samples):.3g}"
        more = f" They take about {needed:.2g} probes." if math.isfinite(needed) else ""
        warn(
            f"max_passes={precision.max_passes} ended the estimate of {what} after "
            f"{summed.n_probes} {kind}probes. Its standard error is {reached} on a value of "
            f"{value:.3g}, more than rtol={precision.rtol:g} and atol={precision.atol:g} allow."
            f"{more} Raise max_passes, rtol or atol, or pass method='exact', which takes "
            f"{summed.n_passes:.0f} passes."
        )


class FeatureSpread:
    """Standard deviation of each feature, divided by n; 0 where the feature never varies.

    With sample weights, n is their sum, and samples of weight 0 do not count, nor do those all of
    whose labels are ignored. At the layer that puts out the logits of tokens, each token counts by
    itself; elsewhere, padding of a text can change what the others get. The normalised flatness is
    invariant only with the standard deviation, not with the variance of the paper's text. Where a
    layer shares weights between positions, the deviation is over samples and positions, one for
    each input channel. Squares are summed around the mean of the first batch.
    """

    def __init__(self, layer: LayerPass) -> None:
        self._centre = layer.map.channels(layer.features).double().mean(dim=0)
        self._sums: Any = 0.0  # of weights, of weighted rows and of their squares
        self._low, self._high = (torch.full_like(self._centre, x) for x in (math.inf, -math.inf))
        self._eps = torch.finfo(layer.features.dtype).eps
        self._columns = layer.map.column_channels()  # that each column of the weight multiplies

    def add(self, layer: LayerPass, weights: Tensor) -> None:
        """Add the features of a batch, with a weight for each row of them."""
        rows = layer.map.channels(layer.features).double()
        weights = weights.to(rows).repeat_interleave(len(rows) // len(weights))
        apart, counts = rows - self._centre, weights[:, None] > 0
        sums = weights.sum().expand(rows.shape[1]), weights @ apart, weights @ apart.square()
        self._sums = self._sums + torch.stack(sums)
        low = rows.where(counts, math.inf).amin(dim=0)
        high = rows.where(counts, -math.inf).amax(dim=0)
        self._low, self._high = torch.minimum(self._low, low), torch.maximum(self._high, high)

    def spread(self) -> Tensor:
        """Return the standard deviations for the columns of the weight: (m,)."""
        total, first, second = self._sums
        mean = first / total
        deviations = (second / total - mean.square()).clamp_min(0).sqrt()
        return torch.where(varies(self._low, self._high, self._eps), deviations, 0.0)[self._columns]


# -- the gradient -------------------------------------------------------------------------------

GRADIENT_NORM = "gradient_norm"


@dataclass
class GradientNorms:
    """The norm of the gradient of the mean loss in a layer's weight."""

    weight_decay: float
    _totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, forward: ForwardPass) -> None:
        for name, layer in forward.layers.items():
            total = layer.total(layer.loss_gradient(), forward.row_weights(layer))
            self._totals[name] = total + self._totals.get(name, 0.0)

    def finish(self, summary: Summary) -> Results:
        results, passes = {}, Passes(summary)
        for name, total in self._totals.items():
            gradient = total / summary.divisor + self.weight_decay * summary.layer_weights[name]
            results[name, GRADIENT_NORM] = Measured(float(gradient.norm()), passes=passes)
        return results


# -- all of them --------------------------------------------------------------------------------

# the measures that belong to one layer, and the changes under which they are invariant
LAYER_MEASURES: dict[str, tuple[str, ...]] = {
    **{name: measure.same for name, measure in TRACE_LIKE.items()},
    **EIGENVALUE_LIKE,
    GRADIENT_NORM: (),
}


def measure_layers(
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
    method: str = "auto",
    per_sample: bool = False,
    verbose: int = 0,
    **precision: Any,
) -> Results:
    """Measure several layers in several ways, with as few passes over the data as possible."""
    precise = Precision(**precision)
    # the first probe draws the bar: an exact measure has none
    first = {"delay": 1e-6, "mininterval": 0.0}
    bar = tqdm(desc="probes of batches", unit="probe", disable=not verbose, **first)
    groups: list[TraceMeasures | GradientNorms | EigenvalueMeasures] = []
    if traces := [name for name in names if name in _QUANTITIES]:
        how = precise, bar, random_state, method, per_sample, weight_decay
        groups.append(TraceMeasures(network, traces, *how))
    if GRADIENT_NORM in names:
        groups.append(GradientNorms(weight_decay))
    if EIGENVALUE_LIKE.keys() & set(names):
        groups.append(EigenvalueMeasures(network, precise.rtol, random_state, weight_decay))
    with bar, borrowed(network.module):
        summary = scan(network, layers, *(group.add for group in groups))
        if summary.divisor == 0:
            raise ValueError("no sample counts in the mean loss: all are ignored or weigh 0.")
        results: Results = {}
        for group in groups:
            results |= group.finish(summary)
    measured = summary.layer_weights
    return {(layer, name): results[layer, name] for layer in measured for name in names}

"""The flatness measures of the papers' Table 1, at one layer or several.

`docs/definitions.md` defines them.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import Network
from relflat_sk._numerics import column_squares, inverse_spread, read_numbers, varies
from relflat_sk._random import RandomState, make_generator
from relflat_sk._warnings import warn
from relflat_sk.measures._eigenvalues import EIGENVALUE_LIKE, EigenvalueMeasures
from relflat_sk.measures._quantities import (
    FeatureTrace,
    Key,
    LayerPass,
    Neurons,
    Quantity,
    Trace,
    draw_terms,
    exact_terms,
    is_deflatable,
    n_passes,
)
from relflat_sk.measures._results import RESCALINGS, Measured, Passes, Results, Summary
from relflat_sk.measures._scan import ForwardPass, scan, scan_again

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
_DIRECTIONS = 8  # of each sample, that deflate it
_DEFLATION = 2 * _DIRECTIONS  # products that this takes
_KEPT = 2**26  # numbers that it may keep for a batch
# A pass is a forward and a backward pass over all data, or one further backward pass or product
# with the Hessian, which takes about as long.
MAX_PASSES = 100


# -- traces and quadratic forms of the Hessian --------------------------------------------------


@dataclass(frozen=True)
class TraceLike:
    """A measure that is a sum over samples of traces and quadratic forms of the Hessian."""

    # what to sum at a layer, given the features' spread
    quantity: Callable[[LayerPass, Tensor | None], Quantity]
    # from the mean quantity and the weight to the measure
    finish: Callable[[Tensor, Tensor], Tensor] = lambda value, weight: value
    # the changes of the weights under which the measure is invariant, of `REPARAMETERIZATIONS`
    same: tuple[str, ...] = ()
    # whether the quantity needs the features' spread
    normalized: bool = False


def _normalized(layer: LayerPass, spread: Tensor | None) -> Quantity:
    """Return relative flatness in units of the features' spread."""
    assert spread is not None
    # a feature that never varies acts as a bias: it drops out of both factors
    return Trace(layer.left_factor(spread), inverse_spread(spread))


def _comparable(layer: LayerPass, spread: Tensor | None) -> Quantity:
    """Return the curvature in the features, times the mean of the features' variances."""
    assert spread is not None
    return FeatureTrace(layer.feature_factor(), scale=float(spread.square().mean()))


TRACE_LIKE: dict[str, TraceLike] = {
    "relative_flatness": TraceLike(
        lambda layer, spread: Trace(layer.left_factor()), same=("layer", "own neurons")
    ),
    "normalized_relative_flatness": TraceLike(_normalized, same=RESCALINGS, normalized=True),
    "hessian_trace": TraceLike(lambda layer, spread: Trace()),
    "trace_flatness": TraceLike(
        lambda layer, spread: Trace(),
        lambda value, weight: value * column_squares(weight).sum(),
        same=("layer",),
    ),
    "neuron_flatness_sum": TraceLike(lambda layer, spread: Neurons(is_sum=True), same=RESCALINGS),
    "neuron_flatness_max": TraceLike(lambda layer, spread: Neurons(is_sum=False), same=RESCALINGS),
    "comparable_flatness": TraceLike(_comparable, same=("layer", "own neurons"), normalized=True),
}
# The measures of layers, and one that `theory` needs, the mean trace of the Hessian of the loss in
# the features of each sample, ``mean_i Tr(W^T B_i W)``: relative flatness without the factors
# ``|phi_i|^2``. Noise of deviation h in each feature raises the loss by ``h^2 / 2`` times that.
_QUANTITIES = TRACE_LIKE | {
    "feature_curvature": TraceLike(lambda layer, spread: FeatureTrace(layer.feature_factor()))
}
# the measure with a value for each neuron, of which it is the largest
LARGEST_NEURON = "neuron_flatness_max"


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


@dataclass
class _Sum:
    """A sum over samples (1, k), or its terms (n, k), from probes or, as one probe, exact."""

    total: Tensor  # over all probes
    scatter: Tensor  # half of the squared differences of pairs, summed over pairs
    n_probes: int

    def __add__(self, other: "_Sum") -> "_Sum":
        n_probes = self.n_probes + other.n_probes
        return _Sum(self.total + other.total, self.scatter + other.scatter, n_probes)

    def mean(self) -> tuple[Tensor, Tensor]:
        """Compute the mean over the probes, and its standard error."""
        return self.total / self.n_probes, (2 * self.scatter).sqrt() / self.n_probes

    def over_samples(self) -> "_Sum":
        """Sum up the terms of the samples."""
        total, scatter = self.total.sum(dim=0), self.scatter.sum(dim=0)
        return _Sum(total, scatter, self.n_probes)

    def n_needed(self, rtol: float, atol: float) -> float:
        """Return how many probes bring the standard error down to `atol` or `rtol` of the value."""
        whole = self.over_samples()
        at = whole.total.argmax()  # one value, or the neuron that is least flat
        value, variance = whole.total[at] / self.n_probes, 2 * whole.scatter[at] / self.n_probes
        if not math.isfinite(value) or variance == 0:
            return 0.0
        allowed = max(atol, rtol * abs(float(value)))
        return float(variance) / allowed**2 if allowed else math.inf


@dataclass
class _Plan:
    """How a quantity at a layer is summed: exactly, by so many passes in each batch, or not."""

    quantity: Quantity
    n_passes: float
    method: str
    exact: bool = False
    deflatable: bool = False
    deflated: bool = False


@dataclass
class TraceMeasures:
    """The measures of `TRACE_LIKE`, from sums that are filled batch by batch.

    If one of them is normalised, the first pass is for the features' spread, and a second one for
    all sums, which share backward passes.
    """

    network: Network
    names: Sequence[str]
    precision: Precision
    bar: Any  # of tqdm: one step for each probe of a batch
    random_state: RandomState
    method: str
    per_sample: bool

    def __post_init__(self) -> None:
        """Check the method, and prepare to draw."""
        if self.method not in MOST_EXACT:
            raise ValueError(f"method must be one of {tuple(MOST_EXACT)}, got {self.method!r}.")
        self._generator = make_generator(self.random_state, self.network.device)
        self._spent = 0  # passes of sums that are not finished
        every = [_QUANTITIES[name] for name in self.names]
        self._normalized = any(one.normalized for one in every)
        self._spreads: dict[str, FeatureSpread] = {}
        self._plans: dict[Key, _Plan] = {}
        # total and scatter of a pass, or those of each batch for the terms of the samples
        self._seen: dict[Key, list[Pair]] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch of the first pass."""
        if not self._normalized:
            self._add_first(forward)
            return
        for name, layer in forward.layers.items():
            spread = self._spreads.setdefault(name, FeatureSpread())
            spread.add(layer, forward.counting_weights(layer))

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Results:
        """Compute the measures, with as many further passes as they need."""
        if self._normalized:
            self._spent += 1
            scan_again(self.network, list(summary.layer_weights), self._add_first)
        sums = self._refine(self._close(_PILOT), summary)
        return {key: self._measure(key, one, summary, weight_decay) for key, one in sums.items()}

    def _add_first(self, forward: ForwardPass) -> None:
        """Add a batch of the first pass for the sums."""
        if not self._plans:
            self._plan(forward)
        self._add(forward, self._plans, _PILOT)

    def _plan(self, forward: ForwardPass) -> None:
        """Decide which sums are exact, by the first batch."""
        for layer in forward.layers.values():
            spread = self._spreads[layer.name].spread() if self._normalized else None
            for name in self.names:
                quantity = _QUANTITIES[name].quantity(layer, spread)
                plan = _Plan(quantity, n_passes(layer, quantity), layer.method)
                plan.deflatable = is_deflatable(layer, quantity, _KEPT // _DEFLATION)
                self._plans[layer.name, name] = plan
        most = MOST_EXACT[self.method]
        if self.method == "auto":
            most = min(most, self.precision.n_left(self._spent))
        for plan in self._plans.values():
            plan.deflatable &= self.method == "auto"
            plan.exact = plan.n_passes <= most and self.method != "hutchinson"

    def _add(self, forward: ForwardPass, keys: Iterable[Key], n_probes: int) -> None:
        """Add a batch to the sums of some quantities."""
        plans = {key: self._plans[key] for key in keys}
        exact = {key: plan.quantity for key, plan in plans.items() if plan.exact}
        drawn = {key: plan.quantity for key, plan in plans.items() if not plan.exact}
        for key, trace in drawn.items():
            if plans[key].deflated and isinstance(trace, Trace):
                layer = forward.layers[key[0]]
                drawn[key] = trace.deflated(layer, _DIRECTIONS, self._generator)
        if any(plans[key].deflated for key in drawn):
            self.bar.update(_DEFLATION)
        found: dict[Key, Pair] = {}
        for key, terms in exact_terms(forward.layers, exact):
            weights = forward.row_weights(forward.layers[key[0]])
            found[key] = self._weigh(forward, weights, terms.double()), 0.0
        for _ in range(n_probes // 2 if drawn else 0):
            self.bar.update(2)
            first = dict(draw_terms(forward.layers, drawn, self._generator))
            for key, terms in draw_terms(forward.layers, drawn, self._generator):
                one, other = first.pop(key).double(), terms.double()
                weights = forward.row_weights(forward.layers[key[0]])
                total = self._weigh(forward, weights, one + other)
                scatter = self._weigh(forward, weights.square(), (one - other).square() / 2)
                found[key] = _add_pairs((total, scatter), found.get(key))
        for key, pair in found.items():
            seen = self._seen.setdefault(key, [])
            seen.append(pair if self.per_sample or not seen else _add_pairs(pair, seen.pop()))

    def _weigh(self, forward: ForwardPass, weights: Tensor, rows: Tensor) -> Tensor:
        """Sum rows with their weights: over all, or over the tokens of each sample."""
        if not self.per_sample:
            return (weights @ rows)[None]
        return (weights[:, None] * rows).reshape(len(forward), -1, rows.shape[1]).sum(dim=1)

    def _close(self, n_probes: int) -> dict[Key, _Sum]:
        """Return the sums of a pass, when all samples were added."""
        sums = {}
        for key, seen in self._seen.items():
            totals, scatters = zip(*seen, strict=True)
            total = torch.cat(totals)
            is_exact = self._plans[key].exact
            scatter = torch.zeros_like(total) if is_exact else torch.cat(scatters)
            sums[key] = _Sum(total, scatter, 1 if is_exact else n_probes)
        self._seen = {}
        return sums

    def _refine(self, sums: dict[Key, _Sum], summary: Summary) -> dict[Key, _Sum]:
        """Draw more probes until standard errors are small, and sum exactly what costs less so."""
        done = _PILOT
        self._spent += 1 + _PILOT
        probed = [key for key in sums if not self._plans[key].exact]
        while probed:
            left, n_probes = self.precision.n_left(self._spent), 0
            every = {key: self._n_needed(key, sums[key], summary) for key in probed}
            needed = {key: n for key, n in every.items() if n > sums[key].n_probes}
            dear = []
            if self.method == "auto":
                plans = {key: (n, self._plans[key].n_passes) for key, n in needed.items()}
                dear = [key for key, (n, n_exact) in plans.items() if left >= n_exact < n]
            probed = [key for key in needed if key not in dear]
            missing = {key: needed[key] - sums[key].n_probes for key in probed}
            new = self._deflate(missing, left)
            if self.precision.n_probes is not None:
                left = self.precision.n_probes - done
            n_more = _DEFLATION * any(self._plans[key].deflated for key in probed)
            if left < n_more + _PILOT:
                probed, n_more = [], 0
            if probed:
                most = _PILOT if new else int(min(1.05 * max(missing.values()), left - n_more))
                n_probes = 2 * max(most // 2, 1)
            for key in dear:
                self._plans[key].exact = True
                del sums[key]
            for key in new:
                del sums[key]  # of plain probes
            keys = [*probed, *dear]
            if keys:
                layers = {layer for layer, _ in keys}
                names = [name for name in summary.layer_weights if name in layers]
                self.bar.total = self.bar.n + (n_more + n_probes) * self.bar.n // done
                visit = partial(self._add, keys=keys, n_probes=n_probes)
                scan_again(self.network, names, visit)
            for key, more in self._close(n_probes).items():
                sums[key] = sums[key] + more if key in sums else more
            done += n_more + n_probes
            self._spent += 1 + n_more + n_probes
        return sums

    def _deflate(self, missing: dict[Key, float], left: float) -> list[Key]:
        """Deflate the probes that so many plain ones are missing of; return those that are new."""
        pair = _DEFLATION + _PILOT
        if self.precision.n_probes is not None or left < 2 * pair:
            return []
        plans = {key: self._plans[key] for key, n in missing.items() if n > 2 * pair}
        new = [key for key, plan in plans.items() if plan.deflatable and not plan.deflated]
        for key in new:
            plans[key].deflated = True
        return new

    def _n_needed(self, key: Key, found: _Sum, summary: Summary) -> float:
        """Return how many probes bring a measure's standard error below the tolerance."""
        finish, weight = _QUANTITIES[key[1]].finish, summary.layer_weights[key[0]]
        unit = abs(float(finish(found.total.new_ones(()) / summary.divisor, weight)))
        # n independent terms have standard errors of sqrt(n) times that of their mean
        n_terms = summary.n_samples if self.per_sample else 1
        terms = unit * math.sqrt(n_terms)
        return found.n_needed(self.precision.rtol / math.sqrt(n_terms), self.precision.atol / terms)

    def _measure(self, key: Key, each: _Sum, summary: Summary, weight_decay: float) -> Measured:
        """Compute one measure at one layer from the sum of its quantity."""
        plan, weight = self._plans[key], summary.layer_weights[key[0]]
        measure = _QUANTITIES[key[1]]
        decay: Tensor | float = 0.0
        if weight_decay:
            decay = weight_decay * plan.quantity.identity(weight).to(each.total)
        total, deviation = (part / summary.divisor for part in each.over_samples().mean())
        values, stderrs = (
            measure.finish(total + decay, weight),
            measure.finish(deviation.abs(), weight),
        )
        at = values.argmax()  # one value, or the neuron that is least flat
        value, stderr = read_numbers(values.take(at), stderrs.take(at))
        method = plan.method if plan.exact else "hutchinson"
        measured = Measured(value, stderr, method, passes=Passes(summary))
        if not plan.exact and self.precision.n_probes is None:
            self._warn_if_loose(key, each, measured)
        if key[1] == LARGEST_NEURON:
            measured = replace(measured, neurons=values.cpu().numpy())
        if self.per_sample:
            scale = summary.n_samples / summary.divisor
            terms, deviations = (scale * part for part in each.mean())
            measured = replace(
                measured,
                terms=measure.finish(terms + decay, weight)[:, at].cpu().numpy(),
                term_stderrs=measure.finish(deviations.abs(), weight)[:, at].cpu().numpy(),
            )
        return measured

    def _warn_if_loose(self, key: Key, each: _Sum, measured: Measured) -> None:
        """Warn if the budget ended an estimate before its standard error was small enough."""
        needed = self._n_needed(key, each, measured.passes.own)
        if needed <= each.n_probes or not math.isfinite(measured.value):
            return  # a value that is not finite has a warning of its own
        n_terms = measured.passes.n_samples if self.per_sample else 1
        what, kind = f"{key[1]} at layer {key[0]!r}", "deflated " * self._plans[key].deflated
        reached = f"{measured.stderr * math.sqrt(n_terms):.3g}"
        if n_terms > 1:
            what, reached = f"the terms of {what}", f"typically {reached}"
        more = ""
        if math.isfinite(needed):
            more = f" They take about {needed:.2g} probes."
        precision = self.precision
        warn(
            f"max_passes={precision.max_passes} ended the estimate of {what} after "
            f"{each.n_probes} {kind}probes. Its standard error is {reached} on a value of "
            f"{measured.value:.3g}, more than rtol={precision.rtol:g} and atol={precision.atol:g} "
            f"allow.{more} Raise max_passes, rtol or atol, or pass method='exact', which takes "
            f"{self._plans[key].n_passes:.0f} passes."
        )


Pair = tuple[Tensor, Tensor | float]


def _add_pairs(one: Pair, other: Pair | None) -> Pair:
    return one if other is None else (one[0] + other[0], one[1] + other[1])


class FeatureSpread:
    """Standard deviation of each feature, divided by n; 0 where the feature never varies.

    With sample weights, n is their sum, and samples of weight 0 do not count, nor do those all of
    whose labels are ignored. At the layer that puts out the logits of tokens, each token counts by
    itself; elsewhere, padding of a text can change what the others get. The normalised flatness is
    invariant only with the standard deviation, not with the variance of the paper's text. Where a
    layer shares weights between positions, the deviation is over samples and positions, one for
    each input channel. Mean and squares are Chan's update, with weights.
    """

    def __init__(self) -> None:
        # summed weight of samples and positions, mean, squares around it, minimum, maximum
        self._seen: list[Tensor] = []
        self._eps = 0.0
        self._columns = torch.empty(0)  # the channel that each column of the weight multiplies

    def add(self, layer: LayerPass, weights: Tensor) -> None:
        """Add the features of a batch, with a weight for each row of them."""
        rows = layer.map.channels(layer.features).double()
        weights = weights.to(rows).repeat_interleave(len(rows) // len(weights))
        counts = weights[:, None] > 0
        total = weights.sum()
        mean = weights @ rows / _positive(total)
        squares = weights @ (rows - mean).square()
        low = rows.where(counts, math.inf).amin(dim=0)
        high = rows.where(counts, -math.inf).amax(dim=0)
        self._include(total, mean, squares, low, high)
        self._eps = torch.finfo(layer.features.dtype).eps
        self._columns = layer.map.column_channels()

    def _include(self, *more: Tensor) -> None:
        """Include rows that have been summed up."""
        if not self._seen:
            self._seen = list(more)
            return
        total, mean, squares, low, high = self._seen
        more_total, more_mean, more_squares, more_low, more_high = more
        shift, share = more_mean - mean, more_total / _positive(total + more_total)
        self._seen = [
            total + more_total,
            mean + shift * share,
            squares + more_squares + shift.square() * total * share,
            torch.minimum(low, more_low),
            torch.maximum(high, more_high),
        ]

    def spread(self) -> Tensor:
        """Return the standard deviations for the columns of the weight: (m,)."""
        total, _, squares, low, high = self._seen
        deviations = (squares / total).sqrt()
        return torch.where(varies(low, high, self._eps), deviations, 0.0)[self._columns]


def _positive(total: Tensor) -> Tensor:
    """Return a number by which 0 can be divided, without a wait for the device."""
    return total.clamp_min(torch.finfo(total.dtype).tiny)


# -- the gradient -------------------------------------------------------------------------------

GRADIENT_NORM = "gradient_norm"


@dataclass
class GradientNorms:
    """The norm of the gradient of the mean loss in a layer's weight."""

    _totals: dict[str, Tensor] = field(default_factory=dict)

    def add(self, forward: ForwardPass) -> None:
        for name, layer in forward.layers.items():
            total = layer.total(layer.loss_gradient(), forward.row_weights(layer))
            self._totals[name] = total + self._totals.get(name, 0.0)

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Results:
        results, passes = {}, Passes(summary)
        for name, total in self._totals.items():
            gradient = total / summary.divisor + weight_decay * summary.layer_weights[name]
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
    """Measure several layers in several ways, with as few passes over the data as possible.

    Further arguments are those of `Precision`.
    """
    precise = Precision(**precision)
    # the first probe draws the bar: an exact measure has none
    first = {"delay": 1e-6, "mininterval": 0.0}
    bar = tqdm(desc="probes of batches", unit="probe", disable=not verbose, **first)
    groups: list[TraceMeasures | GradientNorms | EigenvalueMeasures] = []
    if traces := [name for name in names if name in _QUANTITIES]:
        groups.append(
            TraceMeasures(network, traces, precise, bar, random_state, method, per_sample)
        )
    if GRADIENT_NORM in names:
        groups.append(GradientNorms())
    if EIGENVALUE_LIKE.keys() & set(names):
        groups.append(EigenvalueMeasures(network, precise.rtol, random_state))
    with bar, borrowed(network.module):
        summary = scan(network, layers, *(group.add for group in groups))
        if summary.divisor == 0:
            raise ValueError(
                "no sample counts in the mean loss: every label is ignored (ignore_index) or "
                "has weight zero."
            )
        results: Results = {}
        for group in groups:
            results |= group.finish(summary, weight_decay)
    measured = summary.layer_weights
    return {(layer, name): results[layer, name] for layer in measured for name in names}

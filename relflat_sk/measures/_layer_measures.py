"""The flatness measures of the papers' Table 1, at one layer or several.

With ``H`` the Hessian of the mean loss in the layer's weight ``W`` (d x m, rows ``w_s``):

===========================  ==============================================================
relative_flatness            ``kappa = sum_st <w_s, w_t> Tr(H_st)`` [1]_, Definition 3
normalized_relative_flatness ``kappa`` of features divided by their spread, Theorem 4
trace_flatness               ``|W|_F^2 Tr(H)`` [2]_
eigenvalue_flatness          ``|W|_F^2 lambda_max(H)`` [2]_
neuron_flatness_max          ``max_j rho(j)``, rho(j) the form of H in column j of W [2]_
neuron_flatness_sum          ``sum_j rho(j)``
hessian_trace                ``Tr(H)``
hessian_max_eigenvalue       ``lambda_max(H)``
gradient_norm                norm of the gradient of the mean loss in ``W``
===========================  ==============================================================

References
----------
.. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
.. [2] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
   Neural Networks", 2020.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Layer, Network, Processes, borrowed
from relflat_sk._numerics import column_squares, inverse_spread, read_numbers, varies
from relflat_sk._random import RandomState, draw_seeds, make_generator
from relflat_sk._warnings import warn
from relflat_sk.measures._eigenvalues import EIGENVALUE_LIKE, EigenvalueMeasures
from relflat_sk.measures._quantities import Key, LayerPass, Neurons, Quantity, Trace
from relflat_sk.measures._results import EVERY_CHANGE, Flatness, Found, Summary
from relflat_sk.measures._scan import ForwardPass, scan, summarize

# -- averages over the data: exact where that is cheap, by random probes otherwise ----------------
# All layers and quantities share a pass over the data. Where the curvature comes from gradients,
# they share the backward passes too.
#
# An exact sum and one of probes are kept in the same way: as a sum over samples with the variance
# between a sample's probes, which is zero where nothing is drawn. Probes are drawn for each sample
# independently. The first pass draws two of them; the number of further probes follows from the
# variance between these.

# most backward passes or products for one batch that an exact sum may take; "auto" may always
# take that many, whatever the number of samples
METHODS = {"auto": 64, "exact": math.inf, "hutchinson": 0}
_MAX_PROBES = 10_000
_PILOT = 2  # probes for each sample in the first pass


@dataclass
class Mean:
    """The mean of a quantity, as the criterion averages.

    Shapes: `value`, `stderr` (k,), `terms`, `term_stderrs` (n, k).
    """

    value: Tensor
    stderr: Tensor
    method: str
    terms: Tensor | None = None
    term_stderrs: Tensor | None = None


@dataclass
class _Sum:
    """A sum over samples (k,), or its terms (n, k), from one or several rounds of probes."""

    value: Tensor
    variance: Tensor  # with one probe for each sample
    n_probes: int
    freedom: int

    def __add__(self, other: "_Sum") -> "_Sum":
        n_probes, freedom = self.n_probes + other.n_probes, self.freedom + other.freedom
        value = self.n_probes * self.value + other.n_probes * other.value
        variance = self.freedom * self.variance + other.freedom * other.variance
        return _Sum(value / n_probes, variance / freedom, n_probes, freedom)

    @property
    def stderr(self) -> Tensor:
        """Standard error of the value."""
        return (self.variance / self.n_probes).sqrt()

    def n_needed(self, rtol: float) -> float:
        """Return how many probes bring the standard error down to `rtol` of the value."""
        at = int(self.value.argmax())  # one value, or the neuron that is least flat
        value, variance = float(self.value[at]), float(self.variance[at])
        if not math.isfinite(value) or variance == 0:
            return 0.0
        return variance / (rtol * value) ** 2 if value else math.inf


class Sums:
    """Means of the quantities that a function names at each layer, from passes over the data."""

    def __init__(
        self,
        network: Network,
        choose: Callable[[LayerPass], Mapping[str, Quantity]],
        *,
        generator: torch.Generator,
        method: str = "auto",
        n_probes: int | None = None,
        rtol: float = 0.01,
        per_sample: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}.")
        reason = "one probe has no standard error"
        check_integer("n_probes", n_probes, minimum=2, optional=True, reason=reason)
        check_number("rtol", rtol)
        self.network = network
        self.choose = choose
        self.generator = generator
        self.method = method
        self.n_probes = n_probes
        self.rtol = rtol
        self.per_sample = per_sample
        self._quantities: dict[Key, Quantity] = {}
        self._n_passes: dict[Key, float] = {}  # of an exact sum, in each batch
        self._methods: dict[Key, str] = {}
        self._exact: set[Key] = set()
        self._totals: dict[Key, tuple[Tensor, Tensor | float]] = {}
        self._terms: dict[Key, list[tuple[Tensor, Tensor]]] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch of the first pass."""
        if not self._quantities:
            self._plan(forward)
        self._add(forward, self._quantities, _PILOT)

    def finish(self, summary: Summary) -> dict[Key, Mean]:
        """Compute means over the data, with as many further passes as the probes need."""
        divisor, n = summary.divisor, summary.n_samples
        sums, terms = self._close(_PILOT)
        most = self.n_probes or _MAX_PROBES
        # n independent terms have standard errors of sqrt(n) times that of their mean
        rtol = self.rtol / math.sqrt(n) if self.per_sample else self.rtol
        dear = self._refine(sums, terms, most, rtol)
        if dear:
            self._exact |= dear
            exact_sums, exact_terms = self._pass(dear, 1)
            sums |= exact_sums
            terms |= exact_terms
        means, scale = {}, n / divisor
        for key, one in sums.items():
            method = self._methods[key] if key in self._exact else "hutchinson"
            means[key] = Mean(one.value / divisor, one.stderr / abs(divisor), method)
            if key not in self._exact and self.n_probes is None:
                _warn_if_loose(key, means[key], self.rtol, most, n if self.per_sample else 1)
            if self.per_sample:
                means[key].terms = scale * terms[key].value
                means[key].term_stderrs = abs(scale) * terms[key].stderr
        return means

    def _plan(self, forward: ForwardPass) -> None:
        """Decide which sums are exact, by the first batch."""
        for curvature in forward.curvatures:
            for name, layer in curvature.layers.items():
                for what, quantity in self.choose(layer).items():
                    self._quantities[name, what] = quantity
                    self._n_passes[name, what] = curvature.n_passes(layer, quantity)
                    self._methods[name, what] = curvature.method
        every = self.network.processes.gather(self._n_passes)
        self._n_passes = {key: max(one[key] for one in every) for key in self._n_passes}
        most = METHODS[self.method]
        self._exact = {key for key, n in self._n_passes.items() if n <= most and most > 0}

    def _add(self, forward: ForwardPass, keys: Collection[Key], n_probes: int) -> None:
        """Add a batch to the sums of some quantities."""
        for key, mean, variance in self._estimate(forward, keys, n_probes):
            weights = forward.row_weights(forward.layers[key[0]])
            total, scatter = self._totals.get(key, (0.0, 0.0))
            scatter = scatter if variance is None else scatter + weights.square() @ variance
            self._totals[key] = total + weights @ mean, scatter
            if self.per_sample:
                terms = _sum_rows(weights[:, None] * mean, len(forward))
                scatter = torch.zeros_like(terms)
                if variance is not None:
                    scatter = _sum_rows(weights.square()[:, None] * variance, len(forward))
                self._terms.setdefault(key, []).append((terms, scatter))

    def _estimate(
        self, forward: ForwardPass, keys: Collection[Key], n_probes: int
    ) -> Iterator[tuple[Key, Tensor, Tensor | None]]:
        """Yield the samples' terms, and the variances between their probes if there are any.

        Shapes: (n, k).
        """
        for curvature in forward.curvatures:
            wanted = {key: self._quantities[key] for key in keys if key[0] in curvature.layers}
            exact = {key: quantity for key, quantity in wanted.items() if key in self._exact}
            for key, terms in curvature.sum_exactly(exact):
                yield key, terms.double(), None
            others = {key: quantity for key, quantity in wanted.items() if key not in exact}
            found: dict[Key, tuple[Tensor, Tensor]] = {}
            for j in range(1, n_probes + 1) if others else ():
                for key, drawn in curvature.draw(others, self.generator):
                    draw = drawn.double()
                    mean, squares = found.get(key, (torch.zeros_like(draw),) * 2)
                    shift = draw - mean
                    mean = mean + shift / j
                    found[key] = mean, squares + shift * (draw - mean)
            for key, (mean, squares) in found.items():
                yield key, mean, squares / (n_probes - 1)

    def _close(self, n_probes: int) -> tuple[dict[Key, _Sum], dict[Key, _Sum]]:
        """Return the sums of a pass, and their terms, when all samples were added."""
        freedom, processes = max(n_probes - 1, 1), self.network.processes
        sums, terms = {}, {}
        for key in sorted(self._totals):  # in the same order in all processes
            total, scatter = self._totals[key]
            total = processes.sum(total)
            variance = torch.zeros_like(total)
            if isinstance(scatter, Tensor):
                variance = processes.sum(scatter)
            sums[key] = _Sum(total, variance, n_probes, freedom)
        for key, batches in self._terms.items():
            each, variances = map(torch.cat, zip(*batches, strict=True))
            terms[key] = _Sum(each, variances, n_probes, freedom)
        self._totals, self._terms = {}, {}
        return sums, terms

    def _pass(
        self, keys: Collection[Key], n_probes: int
    ) -> tuple[dict[Key, _Sum], dict[Key, _Sum]]:
        """Make one more pass for some quantities."""
        layers = list(dict.fromkeys(layer for layer, _ in keys))
        scan(self.network, layers, partial(self._add, keys=keys, n_probes=n_probes))
        return self._close(n_probes)

    def _refine(
        self, sums: dict[Key, _Sum], terms: dict[Key, _Sum], most: int, rtol: float
    ) -> set[Key]:
        """Draw more probes until standard errors are small; return what costs less exactly."""
        dear: set[Key] = set()
        keys, done = [key for key in sums if key not in self._exact], _PILOT
        while True:
            needed = {key: sums[key].n_needed(rtol) for key in keys}
            if self.method == "auto":
                dear |= {key for key in keys if needed[key] > max(done, self._n_passes[key])}
            keys = [key for key in keys if needed[key] > done and key not in dear]
            if not keys or done + 2 > most:
                return dear
            missing = 1.05 * max(needed[key] for key in keys) - done
            n_probes = int(min(max(missing, 2), most - done))
            more_sums, more_terms = self._pass(keys, n_probes)
            sums |= {key: sums[key] + more for key, more in more_sums.items()}
            terms |= {key: terms[key] + more for key, more in more_terms.items()}
            done += n_probes


def _sum_rows(terms: Tensor, n: int) -> Tensor:
    """Sum terms over the rows of each sample: its tokens, where those are a layer's rows.

    Shapes: `terms` (n * t, k); returns (n, k).
    """
    return terms.reshape(n, -1, terms.shape[1]).sum(dim=1)


def _warn_if_loose(key: Key, mean: Mean, rtol: float, most: int, n_terms: int) -> None:
    """Warn if the standard error of a mean, or of its terms, is larger than asked for."""
    at = int(mean.value.argmax())
    value, stderr = float(mean.value[at]), float(mean.stderr[at]) * math.sqrt(n_terms)
    if stderr > rtol * abs(value):
        what = "standard error of", f"a {key[1]} of"
        if n_terms > 1:
            what = "typical standard error of", f"the terms of {key[1]} with a mean of"
        warn(
            f"{most} probes left a {what[0]} {stderr:.3g} on {what[1]} {value:.3g} at layer "
            f"{key[0]!r}, more than rtol={rtol:g} asks for; use method='exact'."
        )


# -- traces and quadratic forms of the Hessian --------------------------------------------------


@dataclass(frozen=True)
class TraceLike:
    """A measure that is a sum over samples of traces and quadratic forms of the Hessian."""

    # what to sum at a layer, given the features' spread if the measure is normalized
    quantity: Callable[[LayerPass, Tensor | None], Quantity]
    # from the mean quantity and the weight to the measure
    finish: Callable[[Tensor, Tensor], Tensor] = lambda value, weight: value
    # the increase of the measure if the identity is added to the Hessian, from the weight
    decay: Callable[[Tensor], Tensor] = lambda weight: torch.full((), math.nan)
    # the changes of the weights under which the measure is invariant, of `REPARAMETERIZATIONS`
    same: tuple[str, ...] = ()
    normalized: bool = False


def _normalized(layer: LayerPass, spread: Tensor | None) -> Quantity:
    """Return relative flatness in units of the features' spread."""
    assert spread is not None
    # a feature that never varies acts as a bias: it drops out of both factors
    return Trace(layer.left_factor(spread), inverse_spread(spread))


def _square(weight: Tensor) -> Tensor:
    return column_squares(weight).sum()


def _size(weight: Tensor) -> Tensor:
    return weight.new_full((), weight.numel(), dtype=torch.float64)


TRACE_LIKE: dict[str, TraceLike] = {
    "relative_flatness": TraceLike(
        lambda layer, spread: Trace(layer.left_factor()),
        decay=lambda weight: weight.shape[1] * _square(weight),
        same=("layer", "own neurons"),
    ),
    "normalized_relative_flatness": TraceLike(_normalized, same=EVERY_CHANGE, normalized=True),
    "hessian_trace": TraceLike(lambda layer, spread: Trace(), decay=_size),
    "trace_flatness": TraceLike(
        lambda layer, spread: Trace(),
        lambda value, weight: value * _square(weight),
        lambda weight: weight.numel() * _square(weight),
        same=("layer",),
    ),
    "neuron_flatness_sum": TraceLike(
        lambda layer, spread: Neurons(is_sum=True), decay=_square, same=EVERY_CHANGE
    ),
    "neuron_flatness_max": TraceLike(
        lambda layer, spread: Neurons(is_sum=False), decay=column_squares, same=EVERY_CHANGE
    ),
}
# the measure with a value for each neuron, of which it is the largest
LARGEST_NEURON = "neuron_flatness_max"


class TraceMeasures:
    """The measures of `TRACE_LIKE`, from sums that are filled batch by batch.

    If one of them is normalised, the first pass is for the features' spread, and a second one for
    all sums, which share backward passes.
    """

    def __init__(
        self, network: Network, names: Sequence[str], *, random_state: RandomState, **params: Any
    ) -> None:
        self.network = network
        self.names = names
        if network.processes.rank > 0 and random_state is not None:
            # processes must not draw the same probes for their samples
            random_state = draw_seeds(random_state, network.processes.rank)[-1]
        generator = make_generator(random_state, network.device)
        self._sums = Sums(network, self._choose, generator=generator, **params)
        self._normalized = any(TRACE_LIKE[name].normalized for name in names)
        self._spreads: dict[str, FeatureSpread] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        if not self._normalized:
            self._sums.add(forward)
            return
        for name, layer in forward.layers.items():
            spread = self._spreads.setdefault(name, FeatureSpread())
            spread.add(layer, forward.row_weights(layer))

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Found:
        """Compute the measures, with further passes where one is not enough."""
        if self._normalized:
            for spread in self._spreads.values():
                spread.combine(self.network.processes)
            scan(self.network, list(summary.layer_weights), self._sums.add)
        return {
            (layer, name): self._measure(name, mean, summary, layer, weight_decay)
            for (layer, name), mean in self._sums.finish(summary).items()
        }

    def _choose(self, layer: LayerPass) -> Mapping[str, Quantity]:
        """Return the quantities to sum at a layer, by the names of the measures."""
        spread = self._spreads[layer.name].spread() if self._normalized else None
        return {name: TRACE_LIKE[name].quantity(layer, spread) for name in self.names}

    def _measure(
        self, name: str, mean: Mean, summary: Summary, layer: str, weight_decay: float
    ) -> Flatness:
        """Compute one measure at one layer from the mean of its quantity."""
        measure, weight = TRACE_LIKE[name], summary.layer_weights[layer]

        def finish(value: Tensor) -> Tensor:
            found = measure.finish(value, weight)
            if weight_decay:
                found = found + weight_decay * measure.decay(weight).to(found.device)
            return found

        values, stderrs = finish(mean.value), measure.finish(mean.stderr, weight)
        at = values.argmax()  # one value, or the neuron that is least flat
        value, stderr = read_numbers(values.take(at), stderrs.take(at))
        found = Flatness(value, stderr, mean.method, self.network, summary)
        if name == LARGEST_NEURON:
            found.neurons, found.neuron_stderrs = values.cpu().numpy(), stderrs.cpu().numpy()
        if mean.terms is not None and mean.term_stderrs is not None:
            found.terms = finish(mean.terms)[:, at].cpu().numpy()
            found.term_stderrs = measure.finish(mean.term_stderrs, weight)[:, at].cpu().numpy()
        return found


class FeatureSpread:
    """Standard deviation of each feature, divided by n; 0 where the feature never varies.

    With sample weights, n is their sum, and samples of weight 0 do not count. The normalised
    flatness is invariant only with the standard deviation, not with the variance of the paper's
    text. Where a layer shares weights between positions, the deviation is over samples and
    positions, one for each input channel. Mean and squares are Chan's update, with weights.
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

    def combine(self, processes: Processes) -> None:
        """Include what the other processes have seen, in the same order in all of them."""
        if processes.are_several:
            device = self._seen[0].device
            every = processes.gather([array.cpu() for array in self._seen])
            self._seen = []
            for seen in every:
                self._include(*(array.to(device) for array in seen))

    def spread(self) -> Tensor:
        """Return the standard deviations for the columns of the weight. Shapes: returns (m,)."""
        total, _, squares, low, high = self._seen
        deviations = (squares / total).sqrt()
        return torch.where(varies(low, high, self._eps), deviations, 0.0)[self._columns]


def _positive(total: Tensor) -> Tensor:
    """Return a number by which 0 can be divided, without a wait for the device."""
    return total.clamp_min(torch.finfo(total.dtype).tiny)


# -- the gradient -------------------------------------------------------------------------------

GRADIENT_NORM = "gradient_norm"


class GradientNorms:
    """The norm of the gradient of the mean loss in a layer's weight."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._totals: dict[str, Tensor] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        for name, layer in forward.layers.items():
            found = layer.total(layer.loss_gradient(), forward.row_weights(layer))
            self._totals[name] = found + self._totals.get(name, 0.0)

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Found:
        """Compute the norm of the gradient of the mean loss at each layer."""
        found = {}
        for name, own in self._totals.items():
            total = self.network.processes.sum(own)
            gradient = total / summary.divisor + weight_decay * summary.layer_weights[name]
            norm = float(gradient.norm())
            found[name, GRADIENT_NORM] = Flatness(norm, 0.0, "exact", self.network, summary)
        return found


# -- all of them --------------------------------------------------------------------------------

# the measures that belong to one layer, and the changes under which they are invariant
LAYER_MEASURES: dict[str, tuple[str, ...]] = {
    **{name: measure.same for name, measure in TRACE_LIKE.items()},
    **{name: measure.same for name, measure in EIGENVALUE_LIKE.items()},
    GRADIENT_NORM: (),
}


def measure_layers(
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
    rtol: float = 0.01,
    **params: Any,
) -> Found:
    """Measure several layers in several ways, with as few passes over the data as possible.

    Further arguments are those of `Sums`.
    """
    random: dict[str, Any] = {"rtol": rtol, "random_state": random_state}
    groups: list[TraceMeasures | GradientNorms | EigenvalueMeasures] = []
    if traces := [name for name in names if name in TRACE_LIKE]:
        groups.append(TraceMeasures(network, traces, **random, **params))
    if GRADIENT_NORM in names:
        groups.append(GradientNorms(network))
    if EIGENVALUE_LIKE.keys() & set(names):
        groups.append(EigenvalueMeasures(network, **random))
    with borrowed(network.module):
        summary = summarize(network, layers, *(group.add for group in groups))
        if summary.divisor == 0:
            raise ValueError(
                "no sample counts in the mean loss: every label is ignored (ignore_index) or "
                "has weight zero."
            )
        found: Found = {}
        for group in groups:
            found |= group.finish(summary, weight_decay)
    if summary.has_labels and math.isnan(summary.loss):
        # closed forms do not see the loss, which may not be defined at these outputs
        found = {key: one.without_value() for key, one in found.items()}
    return {(layer, name): found[layer, name] for layer in summary.layer_weights for name in names}


def measure_flatness(
    network: Network, layer: Layer = -1, *, normalize: bool = False, **params: Any
) -> Flatness:
    """Measure the relative flatness of one layer."""
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    return next(iter(measure_layers(network, [name], [layer], **params).values()))


@dataclass(frozen=True)
class _FeatureTrace(Trace):
    """``Tr(W^T B_i W)`` of a layer that receives one vector for each sample."""

    def _square_norms(self, layer: LayerPass) -> Tensor:
        return torch.ones(len(layer.features), dtype=torch.float64, device=layer.features.device)


def measure_feature_curvature(
    network: Network, layer: Layer, *, random_state: RandomState = None
) -> Flatness:
    r"""Compute the mean trace of the Hessian of the loss in the features of each sample.

    It is ``mean_i Tr(W^T B_i W)``: relative flatness without the factors ``|phi_i|^2``. Noise of
    deviation h in each feature raises the loss by ``h^2 / 2`` times that, to second order.
    """
    sums = Sums(
        network,
        lambda found: {"feature curvature": _FeatureTrace(found.left_factor())},
        generator=make_generator(random_state, network.device),
    )
    with borrowed(network.module):
        summary = summarize(network, [layer], sums.add)
        (mean,) = sums.finish(summary).values()
    value, stderr = read_numbers(mean.value[0], mean.stderr[0])
    return Flatness(value, stderr, mean.method, network, summary)

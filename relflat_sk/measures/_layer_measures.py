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
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from relflat_sk._network import Layer, Network, Processes, borrowed
from relflat_sk._numerics import column_squares, inverse_spread, read_numbers, varies
from relflat_sk._random import RandomState, draw_seeds, make_generator
from relflat_sk.measures._eigenvalues import EIGENVALUE_LIKE, EigenvalueMeasures
from relflat_sk.measures._layer_pass import LayerPass
from relflat_sk.measures._quantities import (
    FeaturePairs,
    Key,
    LayerCurvature,
    Neurons,
    Quantity,
    Trace,
)
from relflat_sk.measures._results import Flatness, Found, Summary
from relflat_sk.measures._scan import ForwardPass, scan, summarize
from relflat_sk.measures._sums import Mean, Summation


class FeatureSpreads:
    """Standard deviation of each feature, divided by n; 0 where the feature never varies.

    With sample weights, n is their sum, and samples of weight 0 do not count. The normalised
    flatness is invariant only with the standard deviation, not with the variance of the paper's
    text. Where a layer shares weights between positions, the deviation is over samples and
    positions, one for each input channel.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Spread] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add the features of a batch."""
        for name, layer in forward.layers.items():
            self._running.setdefault(name, _Spread()).add(layer, forward.row_weights(layer))

    def combine(self, processes: Processes) -> None:
        """Combine the features of all processes, after their passes over the data."""
        for running in self._running.values():
            running.combine(processes)

    def of(self, layer: str) -> Tensor:
        """Return the standard deviations of the features of a layer. Shapes: returns (m,)."""
        return self._running[layer].spread()


@dataclass
class _Spread:
    """Running mean and spread of the channels of one layer, by Chan's update with weights."""

    weight: Tensor | float = 0.0  # summed over samples and positions
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    low: Tensor | float = math.inf
    high: Tensor | float = -math.inf
    eps: float = 0.0
    columns: Tensor | None = None  # the channel that each column of the weight multiplies

    def add(self, layer: LayerPass, weights: Tensor) -> None:
        """Add the features of a batch, with a weight for each row of them."""
        rows = layer.map.channels(layer.features).double()
        weights = weights.to(rows).repeat_interleave(len(rows) // len(weights))
        counts = weights[:, None] > 0
        # numbers that would be 0/0 if no sample counts are 0, without a wait for the device
        tiny = torch.finfo(rows.dtype).tiny
        total = weights.sum()
        centre = weights @ rows / total.clamp_min(tiny)
        within = weights @ (rows - centre).square()
        lows, highs = rows.where(counts, math.inf).amin(dim=0), rows.where(counts, -math.inf)
        self._include(total, centre, within, lows, highs.amax(dim=0))
        self.eps = torch.finfo(layer.features.dtype).eps
        if self.columns is None:
            self.columns = layer.map.column_channels()

    def _include(
        self, total: Tensor, centre: Tensor, within: Tensor, low: Tensor, high: Tensor
    ) -> None:
        """Include rows of some summed weight, mean, squares around it, minimum and maximum."""
        shift = centre - self.mean
        share = total / (self.weight + total).clamp_min(torch.finfo(centre.dtype).tiny)
        self.squares = self.squares + within + shift.square() * self.weight * share
        self.mean = self.mean + shift * share
        self.weight = self.weight + total
        self.low = torch.minimum(torch.as_tensor(self.low).to(low), low)
        self.high = torch.maximum(torch.as_tensor(self.high).to(high), high)

    def combine(self, processes: Processes) -> None:
        """Include what the other processes have seen, in the same order in all of them."""
        if not processes.are_several:
            return
        mine = [self.weight, self.mean, self.squares, self.low, self.high]
        arrays = [torch.as_tensor(one) for one in mine]
        self.weight = self.mean = self.squares = 0.0
        self.low, self.high = math.inf, -math.inf
        for theirs in processes.gather([array.cpu() for array in arrays]):
            self._include(*(array.to(arrays[0].device) for array in theirs))

    def spread(self) -> Tensor:
        """Return the standard deviations for the columns of the weight."""
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        deviations = torch.as_tensor(self.squares / self.weight).sqrt()
        return torch.where(varies(low, high, self.eps), deviations, 0.0)[self.columns]


@dataclass(frozen=True)
class TraceLike:
    """A measure that is a sum over samples of traces and quadratic forms of the Hessian."""

    quantity: Callable[[LayerPass, Tensor | None], Quantity]
    finish: Callable[[Tensor, Tensor], Tensor]
    decay: Callable[[Tensor], Tensor]
    normalized: bool = False


def _normalized(layer: LayerPass, spread: Tensor | None) -> Quantity:
    """Return relative flatness in units of the features' spread."""
    assert spread is not None
    # a feature that never varies acts as a bias: it drops out of both factors
    return Trace(layer.left_factor(spread), inverse_spread(spread))


def _square(weight: Tensor) -> Tensor:
    return column_squares(weight).sum()


def _unchanged(value: Tensor, weight: Tensor) -> Tensor:
    return value


_TRACE = lambda layer, spread: Trace()  # noqa: E731

TRACE_LIKE: dict[str, TraceLike] = {
    "relative_flatness": TraceLike(
        lambda layer, spread: Trace(layer.left_factor()),
        _unchanged,
        lambda weight: weight.shape[1] * _square(weight),
    ),
    "normalized_relative_flatness": TraceLike(
        _normalized, _unchanged, lambda weight: torch.full((), math.nan), normalized=True
    ),
    "hessian_trace": TraceLike(
        _TRACE, _unchanged, lambda weight: weight.new_full((), weight.numel(), dtype=torch.float64)
    ),
    "trace_flatness": TraceLike(
        _TRACE,
        lambda value, weight: value * _square(weight),
        lambda weight: weight.numel() * _square(weight),
    ),
    "neuron_flatness_sum": TraceLike(
        lambda layer, spread: Neurons(total=True), _unchanged, _square
    ),
    "neuron_flatness_max": TraceLike(
        lambda layer, spread: Neurons(total=False),
        _unchanged,
        column_squares,
    ),
}
# the measure with a value for each neuron, of which it is the largest
LARGEST_NEURON = "neuron_flatness_max"
_NORMALIZED = "normalized_relative_flatness"
# the quantity from which the normalised flatness follows, once the features' spread is known
_PAIRS = "feature pairs"


def _own_seed(random_state: RandomState, processes: Processes) -> RandomState:
    """Return the seed of the probes: processes must not draw the same ones for their samples."""
    if processes.rank == 0 or random_state is None:
        return random_state
    return draw_seeds(random_state, processes.rank)[-1]


class TraceMeasures:
    """The measures of `TRACE_LIKE`, from sums that are filled batch by batch.

    The normalised flatness takes one pass over the data if that costs less than a second one
    at all layers. Otherwise the first pass is for the features' spread and the second pass
    for all sums, which share backward passes.
    """

    def __init__(
        self,
        network: Network,
        names: Sequence[str],
        *,
        method: str,
        n_probes: int | None,
        rtol: float,
        random_state: RandomState,
        per_sample: bool = False,
    ) -> None:
        self.network = network
        self.names = names
        self.per_sample = per_sample
        normalized = any(TRACE_LIKE[name].normalized for name in names)
        self._spreads = FeatureSpreads() if normalized else None
        self._new_sums = partial(
            Summation,
            network,
            method=method,
            n_probes=n_probes,
            rtol=rtol,
            generator=make_generator(_own_seed(random_state, network.processes), network.device),
            per_sample=per_sample,
        )
        self._sums = self._new_sums(self._first_quantities)
        self._in_one_pass: bool | None = None  # decided with the first batch
        self._n_parameters = sum(p.numel() for p in network.module.parameters())

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        if self._in_one_pass is None:
            # pairs are sums over samples, without terms
            self._in_one_pass = self._spreads is None or (
                not self.per_sample
                and all(
                    self._has_cheap_pairs(curvature, layer)
                    for curvature in forward.curvatures
                    for layer in curvature.layers.values()
                )
            )
        if self._spreads is not None:
            self._spreads.add(forward)
        if self._in_one_pass:
            self._sums.add(forward)

    @property
    def totals(self) -> dict[Key, Tensor]:
        """The exact sums so far."""
        return self._sums.totals

    def adopt(self, totals: Mapping[Key, Tensor], method: str) -> None:
        """Take exact sums over all the data that were made elsewhere."""
        self._sums.adopt(totals, method)

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Found:
        """Compute the measures, with further passes where one is not enough."""
        if self._spreads is not None:
            self._spreads.combine(self.network.processes)
        means = self._sums.finish(summary)
        self._add_normalized(means)
        wanted = [(layer, name) for layer in summary.layer_weights for name in self.names]
        missing = [key for key in wanted if key not in means]
        if missing:
            again = self._new_sums(partial(self._second_quantities, missing))
            scan(self.network, list(dict.fromkeys(layer for layer, _ in missing)), again.add)
            means |= again.finish(summary)
        return {
            (layer, name): self._measure(name, means[layer, name], summary, layer, weight_decay)
            for layer, name in wanted
        }

    def _add_normalized(self, means: dict[Key, Mean]) -> None:
        """Turn means of `FeaturePairs` into normalised flatness."""
        for layer, _ in [key for key in means if key[1] == _PAIRS]:
            assert self._spreads is not None
            pairs = means.pop((layer, _PAIRS))
            value = FeaturePairs.normalize(pairs.value, self._spreads.of(layer))
            means[layer, _NORMALIZED] = Mean(value, torch.zeros_like(value), pairs.method)

    def _measure(
        self, name: str, mean: Mean, summary: Summary, layer: str, weight_decay: float
    ) -> Flatness:
        """Compute one measure at one layer from the mean of its quantity."""
        measure, weight = TRACE_LIKE[name], summary.layer_weights[layer]
        values = measure.finish(mean.value, weight)
        if weight_decay:
            values = values + weight_decay * measure.decay(weight).to(values.device)
        stderrs = measure.finish(mean.stderr, weight)
        at = values.argmax()  # one value, or the neuron that is least flat
        value, stderr = read_numbers(values.take(at), stderrs.take(at))
        found = Flatness(value, stderr, mean.method, self.network, summary)
        if name == LARGEST_NEURON:
            found.neurons, found.neuron_stderrs = values.cpu().numpy(), stderrs.cpu().numpy()
        if mean.terms is not None and mean.term_stderrs is not None:
            terms = measure.finish(mean.terms, weight)
            if weight_decay:
                terms = terms + weight_decay * measure.decay(weight).to(terms.device)
            found.terms = terms[:, at].cpu().numpy()
            found.term_stderrs = measure.finish(mean.term_stderrs, weight)[:, at].cpu().numpy()
        return found

    def _has_cheap_pairs(self, curvature: LayerCurvature, layer: LayerPass) -> bool:
        """Return whether `FeaturePairs` costs less than a second forward pass."""
        return (
            layer.is_flat
            # multiplications for each sample
            and layer.weight.shape[1] ** 2 <= self._n_parameters
            and self._sums.can_afford(curvature.n_passes(layer, FeaturePairs()))
        )

    def _first_quantities(self, layer: LayerPass) -> Mapping[Hashable, Quantity]:
        """Return the quantities that need no spread, and the pairs if one pass is enough."""
        found: dict[Hashable, Quantity] = {
            name: TRACE_LIKE[name].quantity(layer, None)
            for name in self.names
            if not TRACE_LIKE[name].normalized
        }
        return found if self._spreads is None else {**found, _PAIRS: FeaturePairs()}

    def _second_quantities(
        self, missing: Collection[Key], layer: LayerPass
    ) -> Mapping[Hashable, Quantity]:
        """Return the quantities that the first pass was not enough for."""
        spread = None if self._spreads is None else self._spreads.of(layer.name)
        return {
            name: TRACE_LIKE[name].quantity(layer, spread)
            for name in self.names
            if (layer.name, name) in missing
        }


# The norm of the gradient of the mean loss in a layer's weight: how far from stationary it is.

GRADIENT_NORM = "gradient_norm"


class GradientNorms:
    """The gradient norm at layers, from sums that are filled batch by batch."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._totals: dict[str, Tensor] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        totals = self._totals
        for name, layer in forward.layers.items():
            found = layer.total(layer.loss_gradient(), forward.row_weights(layer))
            totals[name] = totals[name] + found if name in totals else found

    def finish(self, summary: Summary, weight_decay: float = 0.0) -> Found:
        """Compute the norm of the gradient of the mean loss at each layer."""
        found = {}
        for name, own in self._totals.items():
            total = self.network.processes.sum(own)
            gradient = total / summary.divisor + weight_decay * summary.layer_weights[name]
            norm = float(gradient.norm())
            found[name, GRADIENT_NORM] = Flatness(norm, 0.0, "exact", self.network, summary)
        return found


# the measures that belong to one layer
LAYER_MEASURES = (*TRACE_LIKE, *EIGENVALUE_LIKE, GRADIENT_NORM)


def measure_layers(  # noqa: PLR0913
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
    per_sample: bool = False,
) -> Found:
    """Measure several layers in several ways, with as few passes over the data as possible."""
    with borrowed(network.module):
        groups: list[TraceMeasures | GradientNorms | EigenvalueMeasures] = []
        if traces := [name for name in names if name in TRACE_LIKE]:
            groups.append(
                TraceMeasures(
                    network,
                    traces,
                    method=method,
                    n_probes=n_probes,
                    rtol=rtol,
                    random_state=random_state,
                    per_sample=per_sample,
                )
            )
        if GRADIENT_NORM in names:
            groups.append(GradientNorms(network))
        if EIGENVALUE_LIKE.keys() & set(names):
            groups.append(EigenvalueMeasures(network, rtol=rtol, random_state=random_state))
        visits = [group.add for group in groups]
        summary = summarize(network, layers, *visits)
        if summary.divisor == 0:
            raise ValueError(
                "no sample counts in the mean loss: every label is ignored (ignore_index) or "
                "has weight zero."
            )
        return finish_measures(groups, summary, names, weight_decay)


def finish_measures(
    groups: Sequence[TraceMeasures | GradientNorms | EigenvalueMeasures],
    summary: Summary,
    names: Sequence[str],
    weight_decay: float = 0.0,
) -> Found:
    """Compute measures from the sums of a pass over the data, and with further passes if needed."""
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


# The mean curvature of the loss in the features that a layer receives.


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
    with borrowed(network.module):
        sums = Summation(
            network,
            lambda found: {"feature curvature": _FeatureTrace(found.left_factor())},
            method="auto",
            n_probes=None,
            rtol=0.01,
            generator=make_generator(random_state, network.device),
        )
        summary = summarize(network, [layer], sums.add)
        (mean,) = sums.finish(summary).values()
    value, stderr = read_numbers(mean.value[0], mean.stderr[0])
    return Flatness(value, stderr, mean.method, network, summary)

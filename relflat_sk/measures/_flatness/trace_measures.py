r"""Measures that are sums over samples of traces and quadratic forms of the Hessian.

For the table of the measures see `relflat_sk.measures._flatness.flatness`.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from relflat_sk._network import Network, Processes
from relflat_sk._numerics import column_squares, inverse_spread, read_numbers
from relflat_sk._random import RandomState, draw_seeds, make_generator
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_curvature import Key, LayerCurvature
from relflat_sk.measures._flatness.layer_pass import LayerPass
from relflat_sk.measures._flatness.scan import scan
from relflat_sk.measures._flatness.spread import FeatureSpreads
from relflat_sk.measures._flatness.summary import Flatness, Found, Summary
from relflat_sk.measures._flatness.summation import Mean, Summation
from relflat_sk.measures._flatness.terms import (
    FeaturePairs,
    Neurons,
    Quantity,
    Trace,
)

__all__ = ["LARGEST_NEURON", "TRACE_LIKE", "TraceMeasures"]


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

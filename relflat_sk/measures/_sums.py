"""Average quantities over the data: exactly where that is cheap, by random probes otherwise.

All layers and quantities share a pass over the data. Where the curvature comes from gradients,
they share the backward passes too.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Network, Processes
from relflat_sk._warnings import warn
from relflat_sk.measures._layer_pass import LayerPass
from relflat_sk.measures._quantities import Key, LayerCurvature, Quantity
from relflat_sk.measures._results import Summary
from relflat_sk.measures._scan import ForwardPass, scan, summarize

Quantities = Callable[[LayerPass], Mapping[Hashable, Quantity]]  # by name, at one layer


class ExactSums:
    """Exact sums of the quantities that take few enough backward passes or products per batch."""

    def __init__(self, quantities: Quantities, most: float, *, per_sample: bool = False) -> None:
        self.most = most
        self.per_sample = per_sample
        self.totals: dict[Key, Tensor] = {}
        self.terms: dict[Key, list[Tensor]] = {}
        self.methods: dict[Key, str] = {}
        self.to_draw: dict[Key, float] = {}
        self.too_late: set[Key] = set()
        self._left_out: set[Key] = set()
        self._quantities = quantities
        self._known: dict[str, Mapping[Hashable, Quantity]] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        for curvature in forward.curvatures:
            affordable = self._affordable(curvature)
            for key, found in curvature.sum_exactly(affordable):
                layer = curvature.layers[key[0]]
                weights, terms = forward.row_weights(layer), found.double()
                total = affordable[key].sum_terms(layer, terms, weights)
                self.totals[key] = self.totals[key] + total if key in self.totals else total
                self.methods[key] = curvature.method
                if self.per_sample:
                    weighted = sum_rows(weights[:, None] * terms, len(forward))
                    self.terms.setdefault(key, []).append(weighted)

    def combine(self, processes: Processes) -> None:
        """Add up the sums of all processes, after their passes over the data."""
        if not processes.are_several:
            return
        every = processes.gather((set(self.totals), self.to_draw, self.too_late))
        summed, drawn = ([set(one[at]) for one in every] for at in (0, 1))
        to_sum, to_draw = set.intersection(*summed), set.intersection(*drawn)
        mixed = set.union(*drawn, *(one[2] for one in every)) - to_draw
        self.totals = {key: processes.sum(self.totals[key]) for key in sorted(to_sum, key=str)}
        self.to_draw = {key: max(one[1][key] for one in every) for key in sorted(to_draw, key=str)}
        self.too_late = mixed

    def can_afford(self, n_passes: float) -> bool:
        """Return whether a quantity is summed exactly."""
        return n_passes <= self.most and self.most > 0 and math.isfinite(n_passes)

    def _affordable(self, curvature: LayerCurvature) -> dict[Key, Quantity]:
        """Return the quantities to sum, and leave the others out from this batch on."""
        affordable = {}
        for name, layer in curvature.layers.items():
            if name not in self._known:
                self._known[name] = self._quantities(layer)
            for what, quantity in self._known[name].items():
                key, n_passes = (name, what), curvature.n_passes(layer, quantity)
                if key not in self._left_out and self.can_afford(n_passes):
                    affordable[key] = quantity
                elif key not in self._left_out:
                    self._leave_out(key, quantity, n_passes)
        return affordable

    def _leave_out(self, key: Key, quantity: Quantity, n_passes: float) -> None:
        """Note that a quantity is not summed exactly."""
        self._left_out.add(key)
        begun = self.totals.pop(key, None) is not None
        self.terms.pop(key, None)
        if quantity.has_products and begun:
            self.too_late.add(key)
        elif quantity.has_products:
            self.to_draw[key] = n_passes


def sum_rows(terms: Tensor, n: int) -> Tensor:
    """Sum terms over the rows of each sample: its tokens, where those are a layer's rows.

    Shapes: `terms` (n * t, k); returns (n, k).
    """
    return terms.reshape(n, -1, terms.shape[1]).sum(dim=1)


# Sums of quantities over samples, estimated by random probes with standard errors.
#
# Probes are drawn for each sample independently. A pilot run estimates the variance between a
# sample's probes; the number of probes follows from it.

# probes for each sample in the pilot run
PILOT = 2


@dataclass
class _Probes:
    """Running mean and variance between a sample's probes, summed over samples or for each."""

    total: Tensor | float = 0.0
    scatter: Tensor | float = 0.0
    done: int = 0
    freedom: int = 0

    def add(self, mean: Tensor, variance: Tensor, n_probes: int) -> None:
        """Add a round of probes."""
        self.total = self.total + n_probes * mean
        self.scatter = self.scatter + (n_probes - 1) * variance
        self.done += n_probes
        self.freedom += n_probes - 1

    def value(self) -> Tensor:
        """Return the sum over samples (k,), or each sample's term (n, k)."""
        return torch.as_tensor(self.total / self.done)

    def variance(self) -> Tensor:
        """Return the variance of that with one probe for each sample."""
        return torch.as_tensor(self.scatter / self.freedom)

    def stderr(self) -> Tensor:
        """Return the standard error of the value."""
        return (self.variance() / self.done).sqrt()

    def n_needed(self, rtol: float) -> float:
        """Return how many probes bring the standard error down to `rtol` of the value."""
        values, variances = self.value(), self.variance()
        at = int(values.argmax())  # one value, or the neuron that is least flat
        value, variance = float(values[at]), float(variances[at])
        if not math.isfinite(value) or variance == 0:
            return 0.0
        return variance / (rtol * value) ** 2 if value else math.inf


class ProbeSums:
    """Estimated sums of quantities, with as many probes as their standard errors need."""

    def __init__(
        self, quantities: Quantities, generator: torch.Generator, *, per_sample: bool = False
    ) -> None:
        self.generator = generator
        self.per_sample = per_sample
        self._quantities = quantities
        self._known: dict[str, Mapping[Hashable, Quantity]] = {}
        self._probes: dict[Key, _Probes] = {}
        self._round: dict[Key, tuple[Tensor, Tensor]] = {}
        self._terms: dict[Key, _Probes] = {}
        self._round_terms: dict[Key, list[tuple[Tensor, Tensor]]] = {}

    def add(self, forward: ForwardPass, keys: Sequence[Key], n_probes: int = PILOT) -> None:
        """Draw probes for the samples of a batch."""
        running: dict[Key, tuple[Tensor, Tensor]] = {}
        for j in range(1, n_probes + 1):
            for key, draw in self._draw(forward, keys):
                mean, squares = running.get(key, (draw * 0, draw * 0))
                shift = draw - mean
                mean = mean + shift / j
                running[key] = mean, squares + shift * (draw - mean)
        for key, (mean, squares) in running.items():
            weights = forward.row_weights(forward.layers[key[0]])
            total, scatter = self._round.get(key, (0.0, 0.0))
            self._round[key] = (
                total + weights @ mean,
                scatter + weights.square() @ squares / (n_probes - 1),
            )
            if self.per_sample:
                column, n = weights[:, None], len(forward)
                term = sum_rows((column * mean).double(), n)
                variance = sum_rows(column.square() * squares.double() / (n_probes - 1), n)
                self._round_terms.setdefault(key, []).append((term, variance))

    def _draw(self, forward: ForwardPass, keys: Sequence[Key]) -> list[tuple[Key, Tensor]]:
        """Draw one probe for each sample and quantity."""
        drawn: list[tuple[Key, Tensor]] = []
        for curvature in forward.curvatures:
            wanted = {
                key: self._quantity(forward, key) for key in keys if key[0] in curvature.layers
            }
            drawn += curvature.draw(wanted, self.generator).items()
        return drawn

    def _quantity(self, forward: ForwardPass, key: Key) -> Quantity:
        """Return the quantity of some name."""
        layer, name = key
        if layer not in self._known:
            self._known[layer] = self._quantities(forward.layers[layer])
        return self._known[layer][name]

    def close_round(self, processes: Processes, keys: Iterable[Key], n_probes: int = PILOT) -> None:
        """Count a round of probes, when it was drawn for all samples."""
        for key in keys:
            total, variance = map(processes.sum, self._round[key])
            self._probes.setdefault(key, _Probes()).add(total, variance, n_probes)
        for key, batches in self._round_terms.items():
            means, variances = map(torch.cat, zip(*batches, strict=True))
            self._terms.setdefault(key, _Probes()).add(means, variances, n_probes)
        self._round, self._round_terms = {}, {}

    def refine(
        self,
        network: Network,
        passes: Mapping[Key, float],
        *,
        most: int,
        rtol: float,
        or_exact: bool,
    ) -> set[Key]:
        """Add rounds of probes, each a pass over the data, until standard errors are small."""
        left_out: set[Key] = set()
        keys, done = list(passes), PILOT
        while True:
            needed = {key: self._probes[key].n_needed(rtol) for key in keys}
            if or_exact:
                left_out |= {key for key in keys if needed[key] > max(done, passes[key])}
            keys = [key for key in keys if needed[key] > done and key not in left_out]
            if not keys or done + 2 > most:
                return left_out
            missing = 1.05 * max(needed[key] for key in keys) - done
            n_probes = int(min(max(missing, 2), most - done))
            layers = list(dict.fromkeys(layer for layer, _ in keys))
            scan(network, layers, partial(self.add, keys=keys, n_probes=n_probes))
            self.close_round(network.processes, keys, n_probes)
            done += n_probes

    def sums(self) -> dict[Key, tuple[Tensor, Tensor]]:
        """Return the sums over samples and their standard errors. Shapes: returns (k,)."""
        return {key: (probes.value(), probes.stderr()) for key, probes in self._probes.items()}

    def terms(self) -> dict[Key, tuple[Tensor, Tensor]]:
        """Return the terms of the sums and their standard errors. Shapes: returns (n, k)."""
        return {key: (probes.value(), probes.stderr()) for key, probes in self._terms.items()}


# most backward passes or products for one batch that an exact sum may take; "auto" may always
# take that many, whatever the number of samples
METHODS = {"auto": 64, "exact": math.inf, "hutchinson": 0}
_MAX_PROBES = 10_000


@dataclass(frozen=True)
class Mean:
    """The mean of a quantity, as the criterion averages.

    Shapes: `value`, `stderr` (k,), `terms`, `term_stderrs` (n, k).
    """

    value: Tensor
    stderr: Tensor
    method: str
    terms: Tensor | None = None
    term_stderrs: Tensor | None = None


class Summation:
    """Means of quantities over the data, from sums that are filled batch by batch."""

    def __init__(
        self,
        network: Network,
        quantities: Quantities,
        *,
        method: str,
        n_probes: int | None,
        rtol: float,
        generator: torch.Generator,
        per_sample: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {tuple(METHODS)}, got {method!r}.")
        reason = "one probe has no standard error"
        check_integer("n_probes", n_probes, minimum=2, optional=True, reason=reason)
        check_number("rtol", rtol)
        self.network = network
        self.method = method
        self.n_probes = n_probes
        self.rtol = rtol
        self.per_sample = per_sample
        self._quantities = quantities
        self._exact = ExactSums(quantities, METHODS[method], per_sample=per_sample)
        self._probes = ProbeSums(quantities, generator, per_sample=per_sample)

    def can_afford(self, n_passes: float) -> bool:
        """Return whether a quantity is summed exactly, in the pass over the data itself."""
        return self._exact.can_afford(n_passes)

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        self._exact.add(forward)
        self._probes.add(forward, list(self._exact.to_draw))

    @property
    def totals(self) -> dict[Key, Tensor]:
        """The exact sums so far."""
        return self._exact.totals

    def adopt(self, totals: Mapping[Key, Tensor], method: str) -> None:
        """Take exact sums over all the data that were made elsewhere."""
        self._exact.totals = dict(totals)
        self._exact.methods = dict.fromkeys(totals, method)

    def finish(self, summary: Summary) -> dict[Key, Mean]:
        """Compute means over the data, with as many further passes as the probes need."""
        exact, divisor, n = self._exact, summary.divisor, summary.n_samples
        exact.combine(self.network.processes)
        means = {
            key: Mean(total / divisor, torch.zeros_like(total), exact.methods[key])
            for key, total in exact.totals.items()
        }
        for key, batches in exact.terms.items():
            terms = torch.cat(batches) * (n / divisor)
            means[key] = replace(means[key], terms=terms, term_stderrs=torch.zeros_like(terms))
        to_sum = set(exact.too_late)
        if exact.to_draw:
            self._probes.close_round(self.network.processes, exact.to_draw)
            most = self.n_probes or _MAX_PROBES
            # n independent terms have standard errors of sqrt(n) times that of their mean
            rtol = self.rtol / math.sqrt(n) if self.per_sample else self.rtol
            dear = self._probes.refine(
                self.network,
                exact.to_draw,
                most=most,
                rtol=rtol,
                or_exact=self.method == "auto",
            )
            for key, (value, stderr) in self._probes.sums().items():
                means[key] = Mean(value / divisor, stderr / abs(divisor), "hutchinson")
                if self.n_probes is None and key not in dear:
                    _warn_if_loose(key, means[key], self.rtol, most, n if self.per_sample else 1)
            for key, (terms, stderrs) in self._probes.terms().items():
                scaled = terms * (n / divisor), stderrs * abs(n / divisor)
                means[key] = replace(means[key], terms=scaled[0], term_stderrs=scaled[1])
            to_sum |= dear
        return means | self._sum_exactly(to_sum)

    def _sum_exactly(self, keys: Collection[Key]) -> dict[Key, Mean]:
        """Sum some quantities exactly, in one more pass."""
        if not keys:
            return {}

        def only(layer: LayerPass) -> Mapping[Hashable, Quantity]:
            found = self._quantities(layer)
            return {what: found[what] for what in found if (layer.name, what) in keys}

        again = Summation(
            self.network,
            only,
            method="exact",
            n_probes=None,
            rtol=self.rtol,
            generator=self._probes.generator,
            per_sample=self.per_sample,
        )
        layers = sorted({layer for layer, _ in keys})
        return again.finish(summarize(self.network, layers, again.add))


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

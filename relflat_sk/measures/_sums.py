"""Average quantities over the data: exactly where that is cheap, by random probes otherwise.

All layers and quantities share a pass over the data. Where the curvature comes from gradients,
they share the backward passes too.

An exact sum and one of probes are kept in the same way: as a sum over samples with the variance
between a sample's probes, which is zero where nothing is drawn. Probes are drawn for each sample
independently. The first pass draws two of them; the number of further probes follows from the
variance between these.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Network
from relflat_sk._warnings import warn
from relflat_sk.measures._layer_pass import LayerPass
from relflat_sk.measures._quantities import Key, Quantity
from relflat_sk.measures._results import Summary
from relflat_sk.measures._scan import ForwardPass, scan

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
        self._totals: dict[Key, tuple[Tensor, Tensor]] = {}
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
            squares = weights.square()
            self._totals[key] = total + weights @ mean, scatter + squares @ variance
            if self.per_sample:
                found = weights[:, None] * mean, squares[:, None] * variance
                rows = _sum_rows(found[0], len(forward)), _sum_rows(found[1], len(forward))
                self._terms.setdefault(key, []).append(rows)

    def _estimate(
        self, forward: ForwardPass, keys: Collection[Key], n_probes: int
    ) -> Iterator[tuple[Key, Tensor, Tensor]]:
        """Yield the samples' terms, and the variances between their probes. Shapes: (n, k)."""
        for curvature in forward.curvatures:
            wanted = {key: self._quantities[key] for key in keys if key[0] in curvature.layers}
            exact = {key: quantity for key, quantity in wanted.items() if key in self._exact}
            for key, terms in curvature.sum_exactly(exact):
                yield key, terms.double(), torch.zeros_like(terms, dtype=torch.float64)
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
            total, variance = map(processes.sum, self._totals[key])
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

"""Average quantities over the data: exactly where that is cheap, by random probes otherwise.

All layers and quantities share a pass over the data. Where the curvature comes from gradients,
they share the backward passes too.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relflat_sk._checks import check_integer, check_number
from relflat_sk._network import Network
from relflat_sk._warnings import warn
from relflat_sk.measures._flatness.exact_sums import ExactSums, Quantities
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_curvature import Key
from relflat_sk.measures._flatness.layer_pass import LayerPass
from relflat_sk.measures._flatness.probe_sums import ProbeSums
from relflat_sk.measures._flatness.summary import Summary, summarize
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["METHODS", "Mean", "Summation"]

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

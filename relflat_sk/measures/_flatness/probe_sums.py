"""Sums of quantities over samples, estimated by random probes with standard errors.

Probes are drawn for each sample independently. A pilot run estimates the variance between a
sample's probes; the number of probes follows from it.
"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from relflat_sk._network import Network, Processes
from relflat_sk.measures._flatness.exact_sums import Quantities, sum_rows
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_curvature import Key
from relflat_sk.measures._flatness.scan import scan
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["PILOT", "ProbeSums"]

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

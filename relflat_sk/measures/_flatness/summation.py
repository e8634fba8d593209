"""Average quantities over the data: exactly where that is cheap, by random probes otherwise.

All layers and quantities share a pass over the data. Where the curvature comes from gradients,
they share the backward passes too.
"""

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass

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
from relflat_sk.measures._flatness.scan import scan
from relflat_sk.measures._flatness.summary import Summary
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["METHODS", "Mean", "Summation"]

# most backward passes or products for one batch that an exact sum may take; "auto" may always
# take that many, whatever the number of samples
METHODS = {"auto": 64, "exact": math.inf, "hutchinson": 0}
_MAX_PROBES = 10_000


@dataclass(frozen=True)
class Mean:
    """The mean of a quantity, as the criterion averages.

    Parameters
    ----------
    value : Tensor of shape (k,)
        In float64.
    stderr : Tensor of shape (k,)
        Standard error, zero for exact sums.
    method : {"closed form", "exact", "hutchinson"}
        How it was computed.
    """

    value: Tensor
    stderr: Tensor
    method: str


class Summation:
    """Means of quantities over the data, from sums that are filled batch by batch.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    quantities : callable
        From a layer to its quantities by name.
    method : {"auto", "exact", "hutchinson"}
        See `relflat_sk.relative_flatness`.
    n_probes : int or None
        Most probes for each sample.
    rtol : float
        Largest standard error of probes, as a share of the value.
    generator : torch.Generator
        Draws the random probes.

    Raises
    ------
    ValueError
        If an argument is out of its range.
    """

    def __init__(
        self,
        network: Network,
        quantities: Quantities,
        *,
        method: str,
        n_probes: int | None,
        rtol: float,
        generator: torch.Generator,
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
        self._quantities = quantities
        self._exact = ExactSums(quantities, METHODS[method])
        self._probes = ProbeSums(quantities, generator)

    def can_afford(self, n_passes: float) -> bool:
        """Return whether a quantity is summed exactly, in the pass over the data itself.

        Parameters
        ----------
        n_passes : float
            Backward passes or products that an exact sum takes for one batch.

        Returns
        -------
        bool
            False if it is estimated by random probes.
        """
        return self._exact.can_afford(n_passes)

    def add(self, forward: ForwardPass) -> None:
        """Add a batch.

        Parameters
        ----------
        forward : ForwardPass
            The forward pass on the batch.
        """
        self._exact.add(forward)
        self._probes.add(forward, list(self._exact.to_draw))

    def finish(self, summary: Summary) -> dict[Key, Mean]:
        """Compute means over the data, with as many further passes as the probes need.

        Parameters
        ----------
        summary : Summary
            Totals of the pass whose batches were added.

        Returns
        -------
        dict of (layer name, quantity name) to Mean
            Without quantities that have no products where an exact sum takes them.
        """
        exact, divisor = self._exact, summary.divisor
        means = {
            key: Mean(total / divisor, torch.zeros_like(total), exact.methods[key])
            for key, total in exact.totals.items()
        }
        to_sum = set(exact.too_late)
        if exact.to_draw:
            self._probes.close_round()
            most = self.n_probes or _MAX_PROBES
            dear = self._probes.refine(
                self.network,
                exact.to_draw,
                most=most,
                rtol=self.rtol,
                or_exact=self.method == "auto",
            )
            for key, (value, stderr) in self._probes.sums().items():
                means[key] = Mean(value / divisor, stderr / abs(divisor), "hutchinson")
                if self.n_probes is None and key not in dear:
                    _warn_if_loose(key, means[key], self.rtol, most)
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
        )
        summary = Summary()
        scan(self.network, sorted({layer for layer, _ in keys}), summary.add, again.add)
        return again.finish(summary)


def _warn_if_loose(key: Key, mean: Mean, rtol: float, most: int) -> None:
    """Warn if the standard error is larger than asked for."""
    at = int(mean.value.argmax())
    value, stderr = float(mean.value[at]), float(mean.stderr[at])
    if stderr > rtol * abs(value):
        warn(
            f"{most} probes left a standard error of {stderr:.3g} on a {key[1]} of {value:.3g} "
            f"at layer {key[0]!r}, more than rtol={rtol:g} asks for; use method='exact'."
        )

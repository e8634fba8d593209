"""Exact sums of quantities over samples, filled batch by batch."""

import math
from collections.abc import Callable, Hashable, Mapping

from torch import Tensor

from relflat_sk._network import Processes
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_curvature import Key, LayerCurvature
from relflat_sk.measures._flatness.layer_pass import LayerPass
from relflat_sk.measures._flatness.terms import Quantity

__all__ = ["ExactSums", "Quantities", "sum_rows"]

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

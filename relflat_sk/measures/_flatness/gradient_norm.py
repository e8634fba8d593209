"""The norm of the gradient of the mean loss in a layer's weight: how far from stationary it is."""

from torch import Tensor

from relflat_sk._network import Network
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.summary import Flatness, Found, Summary

__all__ = ["GRADIENT_NORM", "GradientNorms"]

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

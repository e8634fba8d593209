"""Standard deviations of the features that layers receive, over a pass over the data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._network import Processes
from relflat_sk._numerics import varies
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.layer_pass import LayerPass

__all__ = ["FeatureSpreads"]


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

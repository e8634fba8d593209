"""The result of a measurement: a flatness value, and the totals of the pass over the data."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from relflat_sk._losses import constant_risk
from relflat_sk._network import Network, sample_weight
from relflat_sk.measures._flatness.forward_pass import ForwardPass

__all__ = ["Flatness", "Found", "Summary"]


@dataclass
class Summary:
    """Totals of one pass over the data, beside the measures."""

    divisor: float = 0.0  # divides `loss` to give the mean loss
    loss: float = 0.0  # summed loss; nan without labels
    n_samples: int = 0
    output_shape: torch.Size = field(default_factory=torch.Size)  # of one sample
    link: str | None = None  # what the network computes behind the last measured layer
    layer_weights: dict[str, Tensor] = field(default_factory=dict)  # (d, m) each, by layer name

    def add(self, forward: ForwardPass) -> None:
        """Add a batch.

        Parameters
        ----------
        forward : ForwardPass
            The forward pass on the batch.
        """
        self.divisor += forward.divisor
        self.loss += forward.loss
        self.n_samples += len(forward)
        self.output_shape, self.link = forward.output_shape, forward.link
        if not self.layer_weights:
            self.layer_weights = {name: layer.weight for name, layer in forward.layers.items()}


@dataclass
class Flatness:
    """A flatness value, with the loss, sample count and layer weights from the same pass."""

    value: float
    stderr: float  # 0 for exact values
    method: str  # how the value was computed, such as "closed form" or "hutchinson"
    network: Network
    summary: Summary

    @property
    def risk(self) -> float:
        """Mean loss on the data; nan without labels."""
        return self.summary.loss / self.summary.divisor

    @property
    def n_samples(self) -> int:
        """Number of samples that were measured on."""
        return self.summary.n_samples

    def constant_risk(self) -> float:
        """Compute the mean loss of the best constant prediction on the same data.

        The labels are read again, the network is not run.

        Returns
        -------
        float
            In the unit of the loss; nan without labels.
        """
        targets, weights = [], []
        for batch in self.network.batches():
            if batch.y is None:
                return math.nan
            n, device = len(batch.y), batch.y.device
            shape = (n, *self.summary.output_shape)
            output = torch.empty(shape, dtype=torch.float64, device=device)
            targets.append(self.network.loss.check_target(output, batch.y))
            weights.append(sample_weight(batch, n, device))
        return constant_risk(
            self.network.loss,
            torch.cat(targets),
            torch.cat(weights),
            self.summary.output_shape,
            self.summary.link,
        )


Found = dict[tuple[str, str], Flatness]  # by layer and name of the measure

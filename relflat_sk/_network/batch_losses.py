"""The losses of batches."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relflat_sk._losses import Loss
from relflat_sk._network.batches import Batch
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network
from relflat_sk._numerics import full_precision

__all__ = ["Outcome", "mean_loss", "outcome_of", "outcomes", "sample_weight"]


@dataclass(frozen=True)
class Outcome:
    """Outputs and targets of one batch of n samples, for which losses can be computed.

    Shapes: `weight` (n,).
    """

    output: Tensor
    target: Tensor
    loss: Loss
    weight: Tensor
    weighted: bool

    def each(self) -> tuple[Tensor, Tensor]:
        """Compute each sample's own loss. Shapes: returns losses (n,), divisors (n,)."""
        if self.loss.row is not None:
            return self.loss.terms(self.output, self.target, each=True)
        # an unknown criterion may return nothing but means: give it one sample at a time
        rows = [slice(i, i + 1) for i in range(len(self.output))]
        terms = [self.loss.terms(self.output[row], self.target[row]) for row in rows]
        losses, divisors = zip(*terms, strict=True)
        return torch.cat(losses), torch.cat(divisors)

    def total(self) -> tuple[Tensor, float]:
        """Sum losses and divisors with the sample weights; their ratio is the mean loss."""
        losses, divisors = self.loss.terms(self.output, self.target, each=self.weighted)
        return self.weight @ losses.double(), float(self.weight @ divisors.detach().double())


def outcome_of(network: Network, batch: Batch, output: Tensor) -> Outcome:
    """Bring the network's output for a batch together with the batch's labels."""
    output = full_precision(network.loss.classes_second(output, batch.y))
    loss = network.loss.to(output.device, output.dtype)
    if batch.y is None:
        raise ValueError("y is needed to compute a loss. Pass y.")
    target = loss.check_target(output, batch.y.to(output.device))
    network.check_criterion(output, target)
    weight = sample_weight(batch, len(output), output.device)
    return Outcome(output, target, loss, weight, batch.weight is not None)


def outcomes(network: Network) -> Iterator[Outcome]:
    """Run the network on all batches. To be used within `borrowed`."""
    for batch in network.batches():
        yield outcome_of(network, batch, network(batch.x))


def mean_loss(network: Network) -> float:
    """Compute the mean loss over the data, in evaluation mode."""
    total, divisor = 0.0, 0.0
    with borrowed(network.module), torch.no_grad():
        for outcome in outcomes(network):
            loss, share = outcome.total()
            total += float(loss)
            divisor += share
    total, divisor = network.processes.sum_numbers(total, divisor)
    return total / divisor


def sample_weight(batch: Batch, n: int, device: torch.device) -> Tensor:
    """Return the weights of a batch's samples, ones where there are none. Shapes: returns (n,)."""
    if batch.weight is None:
        return torch.ones(n, dtype=torch.float64, device=device)
    return batch.weight.to(device)

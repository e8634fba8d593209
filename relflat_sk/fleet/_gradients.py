"""The gradients of many networks on all their training data, as `StopAtGradientNorm` needs them.

The gradients of the steps of an epoch tell mostly that a network is far from a stationary point,
so that none is computed on all data.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from relflat_sk.fleet._data import ArrayBatch, Batch

__all__ = ["FAR_GRADIENT", "RunningGradients", "gradient_norms"]

# In trainings without dropout and batch norm (5 data sets, Adam and SGD at four rates from 0.001
# to 0.5 each, batches of 8, of 32 and of all samples; 4,350 epochs at which a goal could be
# reached), no epoch ended at a gradient this much smaller than `RunningGradients.norms`. Two did
# at a tenth of this margin, both with Adam at the rate 0.5.
FAR_GRADIENT = 100.0


class RunningGradients:
    """The gradients of the steps of an epoch.

    Their mean is the gradient on all data but for the moves of the weights within the epoch. The
    last one shows if the weights have moved to a stationary point of each single sample.

    Shapes: `gradients` (k, ...).
    """

    def __init__(self, gradients: Iterable[Tensor]) -> None:
        self._gradients = list(gradients)
        self._sums = [torch.zeros_like(gradient) for gradient in self._gradients]
        self._divisors = self._gradients[0].new_zeros(len(self._gradients[0]))

    def add(self, batch: Batch | ArrayBatch) -> None:
        """Add the gradients of a step."""
        divisors = torch.as_tensor(batch.weights).sum(-1)
        for total, gradient in zip(self._sums, self._gradients, strict=True):
            total.addcmul_(gradient, divisors.view(-1, *[1] * (gradient.ndim - 1)))
        self._divisors += divisors

    def norms(self) -> list[float]:
        """Compute the norm of the mean and that of the last step; return the smaller one."""
        found: list[float] = torch.minimum(_norms(self._gradients), self.of_mean()).tolist()
        return found

    def of_mean(self) -> Tensor:
        """Compute the norm of the mean. Shapes: returns (k,)."""
        return _norms(self._sums) / self._divisors.double().cpu()


def gradient_norms(
    gradients: Sequence[Tensor],
    batches: Iterable[Batch],
    differentiate: Callable[[Batch], object],
) -> list[float]:
    """Compute the norms of the gradients on all data. Shapes: `gradients` (k, ...)."""
    running = RunningGradients(gradients)
    for batch in batches:
        differentiate(batch)
        running.add(batch)
    found: list[float] = running.of_mean().tolist()
    return found


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norms of the members over all tensors, in float64: (k,)."""
    each = [tensor.flatten(1).double().square().sum(1) for tensor in tensors]
    return torch.stack(each).sum(0).sqrt().cpu()

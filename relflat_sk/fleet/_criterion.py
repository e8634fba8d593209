r"""A criterion with its gradient and curvature, for many networks at once.

In this module and in `relflat_sk.fleet._criteria`, arrays have the members on their first axis:
outputs ``z`` are of shape (k, n, d), the features ``phi`` of the last layer (k, n, m), its weight
``W`` (k, d, m), and values (k,). The penalty is ``sum_i scale_i |phi_i|^2 Tr(W^T B_i W)`` with the
curvature ``B_i`` of sample i's loss in its output; see `relflat_sk._penalty` for one network. Means
over samples are sums with the shares of a batch, so that there is one formula with and without
sample weights.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from relflat_sk.fleet._data import Batch
from relflat_sk.fleet._slopes import PenaltySlopes, Slopes

__all__ = ["Criterion", "mean", "mean_output"]


class Criterion(ABC):
    """A criterion with its gradient and curvature."""

    takes_columns = False  # whether targets are of shape (k, n, 1)
    is_known = True  # whether there are formulas for `each` and `curvature`

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        """Compute the losses of the members' samples, which are not negative.

        Shapes: `z`, `target` (k, n, ...); returns (k, n).
        """
        raise NotImplementedError

    def loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members. Shapes: `z` (k, n, ...); returns (k,)."""
        return mean(self.each(z, batch.targets)[..., None], batch)

    @abstractmethod
    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        """Compute the losses of the members, and their gradients in the outputs.

        Shapes: `z` (k, n, ...).
        """

    def curvature(self, z: Tensor, phi: Tensor, weight: Tensor, scale: Tensor) -> PenaltySlopes:
        """Compute the penalties of the members, and their gradients.

        Shapes: `z` (k, n, d), `phi` (k, n, m), `weight` (k, d, m), `scale` (k, n, 1).
        """
        raise NotImplementedError

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        """Multiply vectors by roots of the curvatures of the samples' losses, with their graph.

        Shapes: `z`, `vectors` (k, n, d); returns (k, n, d).
        """
        raise NotImplementedError

    def gain(self, loss: Tensor, z: Tensor, batch: Batch) -> Tensor:
        """Compute what the members have gained over a constant output.

        Shapes: `loss` (k,), `z` (k, n, ...); returns (k,).
        """
        if z.shape[1] == 1:
            return torch.full_like(loss, torch.inf)
        return self.constant_loss(z, batch) - loss

    def constant_loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members' mean outputs.

        Shapes: `z` (k, n, ...); returns (k,).
        """
        return self.loss(mean_output(z, batch).expand_as(z), batch)


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Compute the means over samples. Shapes: `values` (k, n, 1); returns (k,)."""
    return (values * batch.shares).sum(dim=(1, 2))


def mean_output(z: Tensor, batch: Batch) -> Tensor:
    """Compute the mean output of each member. Shapes: `z` (k, n, d); returns (k, 1, d)."""
    return (z * batch.shares).sum(1, keepdim=True)

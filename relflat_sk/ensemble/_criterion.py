r"""A criterion with its gradient and curvature, for many networks at once.

In this module and in `relflat_sk.ensemble._criteria`, arrays have the members on their first axis:
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

from relflat_sk.ensemble._data import Batch
from relflat_sk.ensemble._slopes import PenaltySlopes, Slopes

__all__ = ["Criterion", "mean", "mean_output"]


class Criterion(ABC):
    """A criterion with its gradient and curvature.

    Parameters
    ----------
    criterion : nn.Module or callable
        The criterion of one network.
    """

    takes_columns = False  # whether targets are of shape (k, n, 1)
    is_known = True  # whether there are formulas for `each` and `curvature`

    def __init__(self, criterion: Any) -> None:
        self.criterion = criterion

    def each(self, z: Tensor, target: Tensor) -> Tensor:
        """Compute the losses of the members' samples, which are not negative.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        target : Tensor of shape (k, n, ...)
            Targets.

        Returns
        -------
        Tensor of shape (k, n)
            Losses, whose mean is that of the member.
        """
        raise NotImplementedError

    def loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            One loss for each member.
        """
        return mean(self.each(z, batch.targets)[..., None], batch)

    @abstractmethod
    def slopes(self, z: Tensor, batch: Batch) -> Slopes:
        """Compute the losses of the members, and their gradients in the outputs.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Slopes
            Losses and gradients.
        """

    def curvature(self, z: Tensor, phi: Tensor, weight: Tensor, scale: Tensor) -> PenaltySlopes:
        """Compute the penalties of the members, and their gradients.

        Parameters
        ----------
        z : Tensor of shape (k, n, d)
            Outputs.
        phi : Tensor of shape (k, n, m)
            Features of the last layer.
        weight : Tensor of shape (k, d, m)
            Weight of the last layer.
        scale : Tensor of shape (k, n, 1)
            Factors of the samples' terms.

        Returns
        -------
        PenaltySlopes
            Penalties and gradients.
        """
        raise NotImplementedError

    def root_product(self, z: Tensor, vectors: Tensor) -> Tensor:
        """Multiply vectors by roots of the curvatures of the samples' losses, with their graph.

        Parameters
        ----------
        z : Tensor of shape (k, n, d)
            Outputs.
        vectors : Tensor of shape (k, n, d)
            One vector for each sample.

        Returns
        -------
        Tensor of shape (k, n, d)
            Products ``R_i v_i`` with ``R_i R_i^T = B_i``.
        """
        raise NotImplementedError

    def gain(self, loss: Tensor, z: Tensor, batch: Batch) -> Tensor:
        """Compute what the members have gained over a constant output.

        Parameters
        ----------
        loss : Tensor of shape (k,)
            Their losses.
        z : Tensor of shape (k, n, ...)
            Their outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            Negative if a constant is better; infinite for a single sample, whose output is the
            mean.
        """
        if z.shape[1] == 1:
            return torch.full_like(loss, torch.inf)
        return self.constant_loss(z, batch) - loss

    def constant_loss(self, z: Tensor, batch: Batch) -> Tensor:
        """Compute the losses of the members' mean outputs.

        Parameters
        ----------
        z : Tensor of shape (k, n, ...)
            Outputs.
        batch : Batch
            Targets and sample weights.

        Returns
        -------
        Tensor of shape (k,)
            One loss for each member.
        """
        return self.loss(mean_output(z, batch).expand_as(z), batch)


def mean(values: Tensor, batch: Batch) -> Tensor:
    """Compute the means over samples.

    Parameters
    ----------
    values : Tensor of shape (k, n, 1)
        One number for each sample.
    batch : Batch
        Has the samples' shares.

    Returns
    -------
    Tensor of shape (k,)
        One mean for each member.
    """
    return (values * batch.shares).sum(dim=(1, 2))


def mean_output(z: Tensor, batch: Batch) -> Tensor:
    """Compute the mean output of each member.

    Parameters
    ----------
    z : Tensor of shape (k, n, d)
        Outputs.
    batch : Batch
        Has the samples' shares.

    Returns
    -------
    Tensor of shape (k, 1, d)
        Its shape broadcasts with `z`.
    """
    return (z * batch.shares).sum(1, keepdim=True)

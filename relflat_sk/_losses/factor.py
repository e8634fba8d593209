"""A matrix whose quadratic forms are summed over its columns, with what these sums need of it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Factor"]


@dataclass(frozen=True)
class Factor:
    """A matrix F, shared by all samples of all batches.

    Parameters
    ----------
    array : Tensor of shape (d, k)
        The matrix.

    Examples
    --------
    >>> Factor(torch.tensor([[0.0], [1.0], [3.0]])).half_distances
    tensor([[0.0000, 0.5000, 4.5000],
            [0.5000, 0.0000, 2.0000],
            [4.5000, 2.0000, 0.0000]])
    """

    array: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.array.shape

    def matrix(self) -> Tensor:
        """Return the matrix.

        Returns
        -------
        Tensor of shape (d, k)
            Not a copy.
        """
        return self.array

    @cached_property
    def norms(self) -> Tensor:
        """Squared norms of the rows: (d,)."""
        return self.array.square().sum(dim=1)

    @cached_property
    def half_distances(self) -> Tensor:
        """Half of the squared distances between the rows: (d, d)."""
        gaps = self.array.unsqueeze(1) - self.array
        return 0.5 * (gaps * gaps).sum(dim=2)

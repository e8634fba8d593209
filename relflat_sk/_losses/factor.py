"""A matrix whose quadratic forms are summed over its columns, with what these sums need of it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["Factor"]


@dataclass(frozen=True)
class Factor:
    """A matrix F, shared by all samples of all batches. Shapes: `array` (d, k)."""

    array: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return self.array.shape

    def matrix(self) -> Tensor:
        """Return the matrix. Shapes: returns (d, k)."""
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

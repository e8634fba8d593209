"""Rows of an array on disk, for a loader that cuts batches out of arrays."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relflat_sk._network import RowSource, check_finite
from relflat_sk._numerics import native

__all__ = ["StoredRows"]

# bytes of the chunks among which the rows of an epoch are shuffled, which stay in memory
_WINDOW = 2**26


class StoredRows:
    """Rows that are read from disk, or computed, batch by batch.

    An array that is stored in chunks, as zarr's are, gives whole chunks. They are kept in memory
    for the next batches.
    """

    device = torch.device("cpu")

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.shape = torch.Size(source.shape)
        self._size = source.chunk_rows
        self._chunks: dict[int, NDArray[np.generic]] = {}

    def __len__(self) -> int:
        return len(self._source)

    @property
    def _n_together(self) -> int:
        """The number of chunks among which rows are shuffled."""
        assert self._size is not None
        each = self._size * self.shape[1:].numel() * self._source.dtype.itemsize
        return max(1, _WINDOW // max(1, each))

    def together(self, order: Tensor, generator: torch.Generator) -> Tensor:
        """Put rows of few chunks behind each other.

        Otherwise every batch would read as many chunks as it has rows. The chunks come in random
        order, and the rows of some of them at a time, of 64 MiB, are shuffled.

        Shapes: `order` (n,); returns (n,).
        """
        if self._size is None:
            return order
        chunks = torch.from_numpy(self._source.locate(order.numpy()) // self._size)
        present, positions = torch.unique(chunks, return_inverse=True)
        rank = torch.randperm(len(present), generator=generator)
        return order[torch.argsort(rank[positions] // self._n_together, stable=True)]

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Read some rows. Shapes: `rows` (n,)."""
        numbers = rows.numpy()
        found = self._source[numbers] if self._size is None else self._from_chunks(numbers)
        tensor = torch.from_numpy(native(found))
        check_finite(tensor)
        return tensor

    def _from_chunks(self, numbers: NDArray[np.intp]) -> NDArray[np.generic]:
        """Take rows out of chunks, and forget the chunks that were read long ago."""
        assert self._size is not None
        stored = self._source.locate(numbers)
        chunks, within = stored // self._size, stored % self._size
        found = np.empty((len(numbers), *self.shape[1:]), self._source.dtype)
        for chunk in np.unique(chunks).tolist():
            if chunk not in self._chunks:
                if len(self._chunks) >= 2 * self._n_together:  # a batch may end a window
                    del self._chunks[next(iter(self._chunks))]
                self._chunks[chunk] = self._source.read_chunk(chunk)
            of_chunk = chunks == chunk
            found[of_chunk] = self._chunks[chunk][within[of_chunk]]
        return found

"""A data loader that cuts batches out of arrays, instead of collating them from single samples."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from skorch.dataset import Dataset as SkorchDataset
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

from relflat_sk._engine import Member, NeedsOwnLoop, Parts, check_net
from relflat_sk._network import RowSource, check_finite
from relflat_sk._numerics import native
from relflat_sk.training._sample_weights import Weighted, WeightedDataset, split_target

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


# arguments of torch's loader that do not change how a batch is made of its samples
_ARGUMENTS = {"batch_size", "shuffle", "drop_last"}


class _NotArrays(TypeError):
    """The data hold something from which no batch can be cut."""


class ArrayLoader(DataLoader[Any]):
    """Give the batches of torch's `DataLoader`, with the same random order, in less time.

    Shapes: `rows` (n,).
    """

    def __init__(
        self, dataset: Any, inputs: Any, targets: Any, rows: Tensor, **arguments: Any
    ) -> None:
        super().__init__(dataset, **arguments)
        self._parts = inputs, targets
        self._rows = rows
        self._shuffle = bool(arguments.get("shuffle"))
        self._devices = list({leaf.device for leaf in _leaves(self._parts)})

    @property
    def parts(self) -> tuple[Any, Any]:
        """The inputs and targets that batches are cut from."""
        return self._parts

    @property
    def n_rows(self) -> int:
        """The number of samples in an epoch, those of a dropped last batch included."""
        return len(self._rows)

    def enlarged(self, n_samples: int, n_numbers: int) -> "ArrayLoader":
        """Return a loader of the same samples in larger batches."""
        each = sum(leaf.shape[1:].numel() for leaf in _leaves(self._parts[0]))
        size = max(int(self.batch_size or 1), min(n_samples, n_numbers // max(1, each)))
        return ArrayLoader(self.dataset, *self._parts, self._rows, batch_size=size)

    def __iter__(self) -> Any:
        _draw_seed()  # torch's loader draws a seed for workers, even if it has none
        return self._batches()

    def draw_order(self) -> Tensor:
        """Draw the rows of an epoch in their order, as iteration does. Shapes: returns (n,)."""
        _draw_seed()
        return self._order()

    def _batches(self) -> Iterator[list[Any]]:
        """Cut one batch after the other."""
        size, order = int(self.batch_size or 1), self._order()
        inputs, targets = self._parts
        orders = [torch.split(order.to(device), size) for device in self._devices]
        for chunks in zip(*orders, strict=True):
            if self.drop_last and len(chunks[0]) < size:
                return
            rows = dict(zip(self._devices, chunks, strict=True))
            yield [_cut(inputs, rows), _cut(targets, rows)]

    def _order(self) -> Tensor:
        """Return the rows of an epoch; the random order is that of torch's sampler."""
        if not self._shuffle:
            return self._rows
        generator = torch.Generator().manual_seed(_draw_seed())
        order = self._rows[torch.randperm(len(self._rows), generator=generator)]
        for leaf in _leaves(self._parts[0]):
            if isinstance(leaf, StoredRows):
                return leaf.together(order, generator)
        return order


def read_member(net: Any, loader: Any, fit_params: Mapping[str, Any]) -> Member:
    """Read a net and its data for an epoch outside of its own loop; refuse what needs that."""
    parts = Parts(net.module_)
    check_net(net, parts, fit_params)
    if not isinstance(loader, ArrayLoader):
        raise NeedsOwnLoop("its batches are not cut out of arrays")
    inputs, labels = loader.parts
    targets, weights = split_target(labels)
    for name, part in (("inputs", inputs), ("targets", targets)):
        if type(part) is not Tensor:
            raise NeedsOwnLoop(f"its {name} are not one array")
    size, drop_last = int(loader.batch_size or 1), bool(loader.drop_last)
    if drop_last and loader.n_rows < size:
        raise NeedsOwnLoop("it has fewer samples than a batch, and drops them")
    size = min(size, loader.n_rows)
    return Member(
        net, parts, inputs, targets, weights, loader.draw_order, loader.n_rows, size, drop_last
    )


def _draw_seed() -> int:
    return int(torch.empty((), dtype=torch.int64).random_().item())


def make_loader(dataset: Any, arguments: dict[str, Any]) -> DataLoader[Any]:
    """Make a loader that cuts batches out of arrays if it can, and torch's loader otherwise."""
    size = arguments.get("batch_size")
    if arguments.keys() <= _ARGUMENTS and isinstance(size, int) and size > 0:
        try:
            inputs, targets, rows = _parts(dataset)
        except _NotArrays:
            pass
        else:
            if len(rows):
                return ArrayLoader(dataset, inputs, targets, rows, **arguments)
    return DataLoader(dataset, **arguments)


def _parts(dataset: Any) -> tuple[Any, Any, Tensor]:
    """Find the tensors inside a data set, and the row of each of its samples.

    Classes are compared exactly, since a subclass may return other samples.
    """
    kind = type(dataset)
    if kind is SkorchDataset:
        n = len(dataset)
        # skorch replaces missing labels by zeros
        y = torch.zeros(n, 1) if dataset.y is None else dataset.y
        return _tensors(dataset.X, n), _tensors(y, n), torch.arange(n)
    if kind is TensorDataset and len(dataset.tensors) == 2:
        n = len(dataset)
        inputs, targets = (_tensors(part, n) for part in dataset.tensors)
        return inputs, targets, torch.arange(n)
    if kind is Subset:
        inputs, targets, rows = _parts(dataset.dataset)
        return inputs, targets, rows[torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))]
    if isinstance(dataset, WeightedDataset):
        return _weighted_parts(dataset)
    raise _NotArrays


def _weighted_parts(dataset: WeightedDataset) -> tuple[Any, Any, Tensor]:
    """Find the tensors of a data set with sample weights, which are in the order of samples.

    Weights are cut like inputs and targets, so the order of samples must be that of rows.
    """
    inputs, targets, rows = _parts(dataset.dataset)
    if not torch.equal(rows, torch.arange(len(next(_leaves(inputs))))):
        raise _NotArrays
    # a copy: arrays of pandas are read-only, and others have negative strides
    weights = torch.from_numpy(np.array(dataset.weights, dtype=np.float64, order="C"))
    return inputs, Weighted(targets, weights), rows


class _SparseRows:
    """A matrix of scipy.sparse, of which the rows of a batch are made dense."""

    device = torch.device("cpu")

    def __init__(self, matrix: Any) -> None:
        self._matrix = matrix.tocsr()
        self.shape = torch.Size(self._matrix.shape)

    def __len__(self) -> int:
        return int(self._matrix.shape[0])

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        return torch.from_numpy(self._matrix[rows.numpy()].toarray())


# what rows are taken of
_Leaf = Tensor | _SparseRows | StoredRows


def _tensors(data: Any, n: int) -> Any:
    """Turn arrays of n rows into tensors that share their memory."""
    if type(data) is dict and data:
        return {name: _tensor(part, n) for name, part in data.items()}
    if type(data) in (list, tuple) and data:
        return [_tensor(part, n) for part in data]
    return _tensor(data, n)


def _tensor(data: Any, n: int) -> _Leaf:
    """Turn an array of n rows into a tensor that shares its memory."""
    if issparse(data) and data.ndim == 2 and data.shape[0] == n:
        return _SparseRows(data)
    if isinstance(data, RowSource) and len(data) == n:
        return StoredRows(data)
    if type(data) in (np.ndarray, np.memmap):
        try:
            with warnings.catch_warnings():
                # torch warns of arrays that it may not write to, and nobody writes to these
                warnings.filterwarnings("ignore", "The given NumPy array is not writ")
                data = torch.from_numpy(data)
        except (TypeError, ValueError) as error:  # such as strings, and negative strides
            raise _NotArrays from error
    if type(data) is not Tensor or data.layout is not torch.strided or data.is_quantized:
        raise _NotArrays
    if not data.ndim or len(data) != n:
        raise _NotArrays
    return data


def _leaves(data: Any) -> Iterator[_Leaf]:
    """Iterate over the tensors and sparse matrices in nested containers."""
    if isinstance(data, _Leaf):
        yield data
    else:
        for part in data.values() if isinstance(data, dict) else data:
            yield from _leaves(part)


def _cut(data: Any, rows: dict[torch.device, Tensor]) -> Any:
    """Copy some rows of all tensors; `rows` has them on each device."""
    if isinstance(data, _Leaf):
        return data.index_select(0, rows[data.device])
    if isinstance(data, Weighted):
        return Weighted(*(_cut(part, rows) for part in data))
    if isinstance(data, dict):
        return {name: _cut(part, rows) for name, part in data.items()}
    return [_cut(part, rows) for part in data]

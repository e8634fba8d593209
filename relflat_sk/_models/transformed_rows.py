"""Rows and batches that a pipeline's step transforms when they are read."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch.utils.data import DataLoader, Dataset, IterableDataset

from relflat_sk._network import RowSource, as_row_source, is_row_source, mapped_file

__all__ = ["transform"]


def transform(step: Any, X: Any, batch_size: int) -> Any:
    """Transform the inputs of a network by a step of its pipeline.

    Parameters
    ----------
    step : transformer
        A fitted step.
    X : array-like of shape (n, ...), Dataset or DataLoader
        Inputs of the step.
    batch_size : int
        Number of samples of a Dataset that are transformed at a time.

    Returns
    -------
    array-like of shape (n, ...) or DataLoader
        What the step returns. Rows of arrays on disk and of memory-mapped files, and samples of a
        data set, are transformed when they are read, batch by batch: a transformer of
        scikit-learn transforms each row by itself.
    """
    if isinstance(X, Dataset | DataLoader):
        loader = X if isinstance(X, DataLoader) else DataLoader(X, batch_size=batch_size)
        return DataLoader(_TransformedBatches(step, loader), batch_size=None)
    if is_row_source(X) or mapped_file(X) is not None:
        return RowSource(_TransformedRows(step, as_row_source(X)))
    return step.transform(X)


class _TransformedRows:
    """An array-like whose rows are transformed when they are read."""

    def __init__(self, step: Any, rows: RowSource) -> None:
        self._step = step
        self._rows = rows
        first = self[:1]
        self.shape = (len(rows), *first.shape[1:])
        self.dtype = first.dtype

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return _transformed(self._step, self._rows[rows])


class _TransformedBatches(IterableDataset[Any]):
    """The batches of a loader, whose inputs are transformed."""

    def __init__(self, step: Any, loader: DataLoader[Any]) -> None:
        self._step = step
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._loader:
            yield _transformed(self._step, np.asarray(x)), y


def _transformed(step: Any, rows: NDArray[Any]) -> NDArray[Any]:
    found = step.transform(rows)
    return np.asarray(found.toarray() if issparse(found) else found)

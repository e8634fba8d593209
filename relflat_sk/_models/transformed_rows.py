"""Inputs that a step of a pipeline transforms: arrays at once, the batches of data sets in turn."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch.utils.data import DataLoader, Dataset, IterableDataset

from relflat_sk._network.batches import split_labels
from relflat_sk._network.borrowing import autocast_off


def transform(step: Any, X: Any, batch_size: int) -> Any:
    """Transform the inputs of a network by a step of its pipeline."""
    if isinstance(X, Dataset | DataLoader):
        loader = X if isinstance(X, DataLoader) else DataLoader(X, batch_size=batch_size)
        return DataLoader(_TransformedBatches(step, loader), batch_size=None)
    return _transform(step, X)


_N_COMPARED = 64


def _is_row_wise(step: Any, rows: NDArray[Any]) -> bool:
    """Compare rows that are transformed together with those of two halves.

    Most transformers treat each row by itself. A function of the user's may divide by the mean of
    its input, for example.
    """
    together = _transformed(step, rows)
    if together.dtype.kind not in "biuf":
        return False  # text, say, for a later step
    parts = [part for part in np.array_split(rows, 2) if len(part)]
    halves = [_transformed(step, part) for part in parts]
    if {half.shape[1:] for half in halves} != {together.shape[1:]}:
        return False
    finite = np.abs(together[np.isfinite(together)])
    rounding = 1e-4 * float(finite.mean()) if finite.size else 0.0
    apart = np.concatenate(halves)
    return bool(np.isclose(apart, together, rtol=1e-4, atol=rounding, equal_nan=True).all())


class _TransformedBatches(IterableDataset[Any]):
    """The batches of a loader, whose inputs are transformed."""

    def __init__(self, step: Any, loader: DataLoader[Any]) -> None:
        self._step = step
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._loader):
            x, y = split_labels(item)
            rows = np.asarray(x)
            if number == 0 and not _is_row_wise(self._step, rows[:_N_COMPARED]):
                raise ValueError(
                    f"{self._step!r} does not transform each row by itself, so that the result "
                    "would depend on the batches of the data set. Give X as an array."
                )
            yield _transformed(self._step, rows), y


def _transform(step: Any, rows: Any) -> Any:
    """Transform rows without the caller's mixed precision, which a step made of torch would see."""
    with autocast_off():
        return step.transform(rows)


def _transformed(step: Any, rows: NDArray[Any]) -> NDArray[Any]:
    transformed = _transform(step, rows)
    return np.asarray(transformed.toarray() if issparse(transformed) else transformed)

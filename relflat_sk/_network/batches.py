"""Cut (X, y) into batches, checked and of the type that the network takes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.sparse import issparse
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
)

from relflat_sk._checks import check_integer
from relflat_sk._network.input_kinds import check_kind
from relflat_sk._network.inputs import count_samples
from relflat_sk._network.row_source import (
    RowSource,
    as_row_source,
    copy_rows,
    is_row_source,
    mapped_file,
)
from relflat_sk._numerics import native
from relflat_sk._warnings import warn

__all__ = [
    "Batch",
    "Batches",
    "LoadedBatches",
    "check_weights",
    "make_batches",
]


@dataclass(frozen=True)
class Batch:
    """Some samples of the data. Shapes: `weight` (n,)."""

    x: Any
    y: Tensor | None
    weight: Tensor | None


class LoadedBatches(IterableDataset[Any]):
    """The batches of a data loader, as a data set that can be passed on in its place."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


_READ_AGAIN = (
    " X is a stream (an IterableDataset), which is read from its beginning for each measurement: "
    "let its __iter__ return a new iterator each time."
)

_FLAT = " X is 1-D, a number for each sample. For a single sample, pass X.reshape(1, -1)."
_NOT_FINITE = "y contains NaN or infinity."

Batches = Callable[[], Iterator[Batch]]


def make_batches(
    X: Any,
    y: Any = None,
    *,
    batch_size: int = 1024,
    sample_weight: Any = None,
    in_order: bool = False,
) -> Batches:
    """Prepare passes over the data. Shapes: `sample_weight` (n,)."""
    check_integer("batch_size", batch_size, minimum=1)
    if isinstance(X, LoadedBatches):
        X = X.loader
    if isinstance(X, Dataset | DataLoader):
        if y is not None or sample_weight is not None:
            raise ValueError(
                "a Dataset or DataLoader has its own labels: leave y and sample_weight out."
            )
        loader = X if isinstance(X, DataLoader) else DataLoader(X, batch_size=batch_size)
        if in_order:
            _check_order(loader)
        _warn_of_dropped(loader)
        return lambda: _from_loader(loader)
    check_kind(X)
    inputs = _sliceable(X)
    n = count_samples(inputs)
    if n == 0:
        raise ValueError("X has no samples, and flatness is a mean over samples.")
    hint = _FLAT if getattr(inputs, "ndim", 2) == 1 else ""
    targets = None if y is None else check_labels(y, n, hint)
    weights = None if sample_weight is None else check_weights(sample_weight, n)
    return lambda: _from_arrays(inputs, targets, weights, n, batch_size)


def _check_order(loader: Any) -> None:
    """Refuse a DataLoader that may shuffle; a stream has the order that the user gave it."""
    if isinstance(loader.dataset, IterableDataset):
        return
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if not isinstance(sampler, SequentialSampler | Sequence):
        raise ValueError(
            "the terms of single samples must be in a known order, but the "
            f"{type(sampler).__name__} of the DataLoader may draw the samples in any. Pass a "
            "loader with shuffle=False, or arrays."
        )


def _warn_of_dropped(loader: Any) -> None:
    """Warn of a DataLoader with drop_last=True if it leaves out samples, or may do so."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or not batches.drop_last:
        return
    stream = isinstance(loader.dataset, IterableDataset)
    samples: Any = loader.dataset if stream else batches.sampler
    try:
        n = len(samples)
    except TypeError:  # a stream, whose length is not known
        left = "those of an incomplete batch are"
    else:
        n_left = n % batches.batch_size
        if not n_left:
            return
        left = f"{n_left} of its {n} samples are"
    warn(
        f"the DataLoader has drop_last=True: {left} left out, if it shuffles other ones in each "
        "pass, and results are of the rest. Pass a DataLoader with drop_last=False, or arrays."
    )


def check_labels(y: Any, n: int, hint: str = "") -> Any:
    """Return y as an array or tensor of n numeric labels."""
    if is_row_source(y) and y.dtype.kind in "biuf":
        y = as_row_source(y)
    else:
        y = y if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 0 or len(y) != n:
        raise ValueError(f"X has {n} samples, y has {len(y) if y.ndim else 'no'} labels.{hint}")
    if isinstance(y, np.ndarray):
        if y.dtype.kind not in "biuf":
            raise ValueError(
                f"y holds labels of type {y.dtype} such as {y.flat[0]!r}; a network takes "
                "numbers. Pass the fitted scikit-learn or skorch estimator, which knows its "
                "classes_, or encode y, for instance with sklearn.preprocessing.LabelEncoder."
            )
        if not np.isfinite(y).all():
            raise ValueError(_NOT_FINITE)
    elif isinstance(y, Tensor):
        _check_finite_labels(y)
    return y


def _check_finite_labels(y: Tensor) -> None:
    if y.is_floating_point() and not bool(torch.isfinite(y).all()):
        raise ValueError(_NOT_FINITE)


def check_weights(sample_weight: Any, n: int) -> np.ndarray:
    """Return sample weights as an array of n numbers. Shapes: returns (n,)."""
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (n,):
        raise ValueError(
            f"sample_weight must have shape ({n},), one weight per sample, got {weights.shape}."
        )
    if not (np.isfinite(weights).all() and (weights >= 0).all() and weights.sum() > 0):
        raise ValueError(
            "sample_weight must be finite, not negative, and not all zero, got values from "
            f"{weights.min():g} to {weights.max():g}."
        )
    return weights


def _sliceable(X: Any) -> Any:
    """Convert inputs to arrays or tensors that can be sliced along the samples."""
    if isinstance(X, Tensor) or issparse(X):
        return X.tocsr() if issparse(X) else X
    if isinstance(X, Mapping):
        return {name: _sliceable(value) for name, value in X.items()}
    if isinstance(X, tuple):
        return tuple(_sliceable(value) for value in X)
    if is_row_source(X):
        return as_row_source(X)
    array = X.to_numpy() if isinstance(X, pd.DataFrame | pd.Series) else np.asarray(X)
    if array.dtype.kind not in "biuf":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"X must hold numbers, got {type(X).__name__} of {array.dtype}: {error}. Encode "
                "categories first, for instance with sklearn.preprocessing.OneHotEncoder."
            ) from error
    if array.ndim == 0:
        raise TypeError(f"X must be an array of samples, got {type(X).__name__} {X!r}.")
    return array


def _from_arrays(
    X: Any, y: Any, weights: np.ndarray | None, n: int, batch_size: int
) -> Iterator[Batch]:
    """Iterate over the batches of arrays."""
    for start in range(0, n, batch_size):
        rows = slice(start, min(start + batch_size, n))
        labels = None if y is None else _take(y, rows)
        if labels is not None and isinstance(y, RowSource):
            _check_finite_labels(labels)
        weight = None if weights is None else _take(weights, rows)
        yield Batch(_take(X, rows), labels, weight)


def _take(X: Any, rows: slice) -> Any:
    """Return some samples as tensors, which share memory with the arrays where possible."""
    if isinstance(X, Mapping):
        return {name: _take(value, rows) for name, value in X.items()}
    if isinstance(X, tuple):
        return tuple(_take(value, rows) for value in X)
    part: Any = copy_rows(X, rows) if mapped_file(X) is not None else X[rows]
    if isinstance(part, Tensor):
        return part.clone() if part.is_inference() else part.detach()
    part = native(part.toarray() if issparse(part) else part)
    # torch shares memory with writeable arrays only, and not with reversed ones
    usable = part.flags.writeable and all(step >= 0 for step in part.strides)
    return torch.from_numpy(part if usable else part.copy())


def _from_loader(loader: Any) -> Iterator[Batch]:
    """Iterate over the batches of a DataLoader."""
    empty = True
    for item in loader:
        empty = False
        if not (isinstance(item, tuple | list) and len(item) == 2):
            raise TypeError(
                "a Dataset or DataLoader must give (x, y) pairs, got "
                f"{type(item).__name__}{f' of {len(item)}' if hasattr(item, '__len__') else ''}."
            )
        x, y = item
        try:
            y = torch.as_tensor(y)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"the labels of a Dataset or DataLoader must form one array, got a "
                f"{type(y).__name__}: {error}. Measure with a loader that gives tensors."
            ) from error
        yield Batch(x, y, None)
    if empty:
        stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        raise ValueError(
            "X has no samples, and flatness is a mean over samples."
            + (_READ_AGAIN if stream else "")
        )

"""Check inputs, cut them into batches, and bring them to the type that a network takes."""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
)

from relflat_sk._checks import check_integer, warn
from relflat_sk._numerics import native, native_type

Array = NDArray[Any]

# -- arrays in memory-mapped files ------------------------------------------------------------


def copy_rows(array: Any, rows: Any) -> Array:
    """Copy some rows into memory, and let go of the pages of a memory-mapped file."""
    # Without that, every page that was read would count into the memory of the process until the
    # system needs it.
    part = np.asarray(array[rows])
    mapped = mapped_file(array)
    if mapped is not None or not (part.flags.writeable and part.flags.c_contiguous):
        part = np.array(part, order="C")
    # pages that were changed but not written to the file would be lost in mode "c"
    if mapped is not None and mapped.mode != "c" and hasattr(mmap, "MADV_DONTNEED"):
        mapped.base.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
    return part


def mapped_file(array: Any) -> "np.memmap[Any, Any] | None":
    """Find the memory-mapped file that an array is a part of."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and isinstance(array.base, mmap.mmap):
            return array
        array = array.base
    return None


# -- inputs of a network, which may be dicts or tuples of arrays ---------------------------


def arrays_of(x: Any) -> Iterator[Any]:
    """Iterate over the arrays in inputs, which may be dicts, tuples and lists of them."""
    if isinstance(x, Mapping | tuple | list) and not issparse(x):
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from arrays_of(part)
    else:
        yield x


def map_arrays(change: Callable[[Any], Any], x: Any) -> Any:
    """Replace each array in inputs, which may be dicts, tuples and lists of them."""
    if isinstance(x, Mapping) and not issparse(x):
        return {name: map_arrays(change, part) for name, part in x.items()}
    if isinstance(x, tuple | list):
        parts = [map_arrays(change, part) for part in x]
        is_named = hasattr(x, "_fields")  # a namedtuple takes its parts one by one
        return type(x)(*parts) if is_named else type(x)(parts)
    return change(x)


def count_samples(X: Any) -> int:
    """Count the samples of an array, or of a dict or tuple of arrays of equal length."""
    sizes = {int(part.shape[0]) for part in arrays_of(X)}
    if len(sizes) != 1:
        raise ValueError(f"the arrays of X must have equal lengths, got {sorted(sizes)}.")
    return sizes.pop()


def take_rows(data: Any, rows: NDArray[np.intp]) -> Any:
    """Take some samples of data of any kind, as users give them to `fit`."""
    if data is None:
        return None
    if isinstance(data, Dataset):
        return Subset(data, rows.tolist())
    if isinstance(data, Mapping) and not issparse(data):  # a dok_matrix is a Mapping
        return {name: take_rows(values, rows) for name, values in data.items()}
    if isinstance(data, tuple) and not np.isscalar(data[0]):  # of arrays
        return tuple(take_rows(values, rows) for values in data)
    if isinstance(data, list | tuple):
        return [data[row] for row in rows]
    # frames, arrays, sparse matrices, tensors
    return getattr(data, "iloc", data)[rows]


def cast_inputs(x: Any, module: nn.Module, device: torch.device | None = None) -> Any:
    """Bring inputs to the network's device and floating type, as skorch's users expect."""
    # Integers become floating-point numbers, too, unless the network has an embedding that they
    # may be indices of.
    first = floating_parameter(module)
    dtype = None if first is None else first.dtype

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value if device is None else value.to(device)
        if dtype is None or value.dtype == dtype:
            return value
        kinds = nn.Embedding | nn.EmbeddingBag
        if not value.is_floating_point() and any(isinstance(m, kinds) for m in module.modules()):
            return value
        return value.to(dtype)

    return map_arrays(cast, x)


def floating_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a floating type, which inputs are expected to have, too."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def check_tensor(X: Tensor) -> None:
    """Refuse a tensor of which no rows can be taken, or whose imaginary part would be left out."""
    if X.layout is not torch.strided or X.is_complex():
        raise TypeError(
            f"X is a tensor of {X.dtype} in the layout {X.layout}; expected real numbers in a "
            "dense tensor. Pass X.to_dense() or torch.view_as_real(X)."
        )


def check_finite(x: Any) -> None:
    """Refuse NaN and infinity anywhere in the inputs."""
    for part in arrays_of(x):
        if not (isinstance(part, Tensor) and part.is_floating_point() and part.numel()):
            continue
        # the sum of finite numbers is nearly always finite, and needs no second array
        if not (torch.isfinite(part.sum()) or torch.isfinite(part).all()):
            raise ValueError("X contains NaN or infinity. Impute missing values first.")


@dataclass(frozen=True)
class Batch:
    """Some samples of the data."""

    x: Any
    y: Tensor | None
    weight: Tensor | None  # (n,)


class Weighted(NamedTuple):
    """Labels with the weights of their samples; data loaders collate both."""

    target: Any
    weight: Any  # (n,)


def split_target(y: Any) -> tuple[Any, Any]:
    """Separate the labels of a batch from its sample weights, (n,)."""
    return y if isinstance(y, Weighted) else (y, None)


class LoadedBatches(IterableDataset[Any]):
    """The batches of a data loader, as a data set that can be passed on in its place."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


_NO_SAMPLES = "X has no samples, and flatness is a mean over samples."
_READ_AGAIN = (
    " X is a stream (an IterableDataset), which is read from its beginning for each measurement: "
    "let its __iter__ return a new iterator each time."
)

_FLAT = " X is 1-D, a number for each sample. For a single sample, pass X.reshape(1, -1)."

Batches = Callable[[], Iterator[Batch]]


def make_batches(
    X: Any,
    y: Any = None,
    *,
    batch_size: int = 1024,
    sample_weight: Any = None,
    in_order: bool = False,
) -> Batches:
    """Prepare passes over the data."""
    check_integer("batch_size", batch_size, minimum=1)
    if isinstance(X, LoadedBatches):
        X = X.loader
    if isinstance(X, Dataset | DataLoader):
        if y is not None or sample_weight is not None:
            raise ValueError("a Dataset or DataLoader has its own labels: leave out y and weights.")
        loader = X if isinstance(X, DataLoader) else DataLoader(X, batch_size=batch_size)
        if in_order:
            _check_order(loader)
        _warn_of_dropped(loader)
        return lambda: _from_loader(loader)
    inputs = _sliceable(X)
    n = count_samples(inputs)
    if n == 0:
        raise ValueError(_NO_SAMPLES)
    hint = _FLAT if getattr(inputs, "ndim", 2) == 1 else ""
    targets = None if y is None else check_labels(y, n, hint)
    weights = None if sample_weight is None else check_weights(sample_weight, n)

    def batches() -> Iterator[Batch]:
        for start in range(0, n, batch_size):
            take = partial(_take, slice(start, min(start + batch_size, n)))
            labels, shares = (None if part is None else take(part) for part in (targets, weights))
            yield Batch(map_arrays(take, inputs), labels, shares)

    return batches


def _check_order(loader: Any) -> None:
    """Refuse a DataLoader that may shuffle; a stream has the order that the user gave it."""
    if isinstance(loader.dataset, IterableDataset):
        return
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if not isinstance(sampler, SequentialSampler | Sequence):
        raise ValueError(
            f"terms of samples need a known order, but the {type(sampler).__name__} of the "
            "DataLoader may draw the samples in any. Pass a loader with shuffle=False, or arrays."
        )


def _warn_of_dropped(loader: Any) -> None:
    """Warn of a DataLoader with drop_last=True if it leaves out samples, or may do so."""
    batches = loader.batch_sampler
    if not isinstance(batches, BatchSampler) or not batches.drop_last:
        return
    is_stream = isinstance(loader.dataset, IterableDataset)  # whose length is not known
    if is_stream or len(batches.sampler) % batches.batch_size:  # type: ignore[arg-type]
        warn(
            "the DataLoader has drop_last=True: the samples of an incomplete batch are left out, "
            "other ones in each pass if it shuffles. Pass one with drop_last=False, or arrays."
        )


def check_labels(y: Any, n: int, hint: str = "") -> Any:
    """Return y as an array or tensor of n numeric labels."""
    y = y if isinstance(y, Tensor) else np.asarray(y)
    if y.ndim == 0 or len(y) != n:
        raise ValueError(f"X has {n} samples, y has {len(y) if y.ndim else 'no'} labels.{hint}")
    if isinstance(y, np.ndarray) and y.dtype.kind not in "biuf":
        raise ValueError(
            f"y holds labels of type {y.dtype} such as {y.flat[0]!r}; networks take numbers. Pass "
            "the fitted estimator, which knows its classes_, or encode y, as LabelEncoder does."
        )
    is_whole = isinstance(y, Tensor) and not y.is_floating_point()  # needs no wait for a device
    finite = True if is_whole else (torch if isinstance(y, Tensor) else np).isfinite(y).all()
    if not bool(finite):
        raise ValueError("y contains NaN or infinity.")
    return y


def check_weights(sample_weight: Any, n: int) -> np.ndarray:
    """Return sample weights as an array of n numbers: (n,)."""
    weights = np.asarray(sample_weight, dtype=np.float64, order="C")
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
    if issparse(X):
        return X.tocsr()
    if isinstance(X, Mapping):
        return {name: _sliceable(value) for name, value in X.items()}
    if isinstance(X, tuple):
        return tuple(_sliceable(value) for value in X)
    if isinstance(X, Tensor):
        check_tensor(X)
        return X
    try:
        array = X.to_numpy() if isinstance(X, pd.DataFrame | pd.Series) else np.asarray(X)
        if array.dtype.kind in "OSU":
            array = array.astype(np.float64)
        native_type(array.dtype)
        len(array)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"X must hold a row of numbers for each sample, got {type(X).__name__}: {error}. "
            "Encode categories and dates, and join batches in one array or a torch Dataset."
        ) from error
    return array


def _take(rows: slice, X: Any) -> Tensor:
    """Return some rows as a tensor, which shares memory with the array where possible."""
    part: Any = copy_rows(X, rows) if mapped_file(X) is not None else X[rows]
    if isinstance(part, Tensor):
        return part.clone() if part.is_inference() else part.detach()
    part = native(part.toarray() if issparse(part) else part)
    # torch shares memory with writeable arrays only, and not with reversed ones
    usable = part.flags.writeable and all(step >= 0 for step in part.strides)
    return torch.from_numpy(part if usable else part.copy())


def pair_labels(item: Any) -> Any:
    """Return what a loader gives as it is, or a dict with labels, as of transformers, as a pair."""
    if isinstance(item, Mapping) and "labels" in item and len(item) > 1:
        return {name: part for name, part in item.items() if name != "labels"}, item["labels"]
    return item


def split_labels(item: Any) -> tuple[Any, Any]:
    """Split what a loader gives into inputs and labels."""
    item = pair_labels(item)
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise TypeError(
            'a Dataset or DataLoader must give (x, y) pairs, or dicts with "labels", got '
            f"{type(item).__name__}{f' of {len(item)}' if hasattr(item, '__len__') else ''}."
        )
    return item[0], item[1]


def _from_loader(loader: Any) -> Iterator[Batch]:
    """Iterate over the batches of a DataLoader."""
    item = None
    for item in loader:
        x, y = split_labels(item)
        y, weight = split_target(y)
        try:
            y = torch.as_tensor(y)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"the labels of a Dataset or DataLoader must form one array, got a "
                f"{type(y).__name__}: {error}. Measure with a loader that gives tensors."
            ) from error
        yield Batch(x, y, None if weight is None else weight.double())
    if item is None:
        stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        raise ValueError(_NO_SAMPLES + (_READ_AGAIN if stream else ""))

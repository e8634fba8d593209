"""Check inputs, cut them into batches, and bring them to the type that a network takes."""

import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler

from relflat_sk._checks import check_integer
from relflat_sk._numerics import native
from relflat_sk._warnings import warn

# -- arrays in memory-mapped files ------------------------------------------------------------

Array = NDArray[Any]


def copy_rows(array: Any, rows: Any) -> Array:
    """Copy some rows into memory, and let go of the pages of a memory-mapped file.

    Without that, every page that was read would count into the memory of the process until the
    system needs it.

    Shapes: `rows` (m,); returns (m, ...).
    """
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


# -- inputs that hold no numbers, or cannot be cut into batches ----------------------------

# how many columns or samples an error message names
_NAMED = 5


def check_kind(X: Any) -> None:
    """Refuse inputs that would fail, or become wrong numbers, further on."""
    if isinstance(X, Tensor):
        _check_tensor(X)
    elif isinstance(X, pd.DataFrame):
        _check_columns(X)
    elif hasattr(X, "__arrow_c_stream__") and hasattr(X, "columns"):
        names = X.column_names if hasattr(X, "column_names") else X.columns  # pyarrow, polars
        _check_columns(pd.DataFrame({name: np.asarray(X[name]) for name in names}, copy=False))
    elif isinstance(X, np.ndarray | pd.Series) and X.dtype.kind in "mM":
        raise TypeError(
            f"X holds dates or times, of type {X.dtype}, but a network takes numbers. Turn them "
            "into numbers, such as days since the first date."
        )
    elif isinstance(X, Mapping | tuple) and not issparse(X):  # a dok_matrix is a Mapping
        for part in X.values() if isinstance(X, Mapping) else X:
            check_kind(part)
    elif isinstance(X, list):
        _check_list(X)
    elif isinstance(X, Iterator):
        raise TypeError(
            f"X is a {type(X).__name__}, which can be read only once. Pass arrays, or a torch "
            "IterableDataset whose __iter__ returns a new iterator each time."
        )


def _check_tensor(X: Tensor) -> None:
    """Refuse tensors of which no rows can be taken."""
    if X.is_meta:
        raise TypeError("X is a tensor on the meta device, which holds no values. Pass data.")
    if X.layout is not torch.strided:
        raise TypeError(
            f"X is a sparse tensor ({X.layout}), of which no batches can be cut. Pass "
            "X.to_dense(), or a matrix of scipy.sparse, of which one batch at a time is made dense."
        )
    if X.is_complex():
        raise TypeError(
            f"X holds complex numbers ({X.dtype}), but networks are measured and trained with real "
            "numbers. Pass torch.view_as_real(X), for example."
        )


def _check_columns(X: pd.DataFrame) -> None:
    """Refuse columns that hold no numbers."""
    # most frames hold nothing but numbers, which their types tell; booleans are numeric, too
    other = [i for i, kind in enumerate(X.dtypes) if not pd.api.types.is_numeric_dtype(kind)]
    reasons = {X.columns[i]: _without_numbers(X.iloc[:, i]) for i in other}
    bad = {name: reason for name, reason in reasons.items() if reason}
    if bad:
        named = ", ".join(f"{name!r} ({reason})" for name, reason in list(bad.items())[:_NAMED])
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise TypeError(
            f"X has columns that hold no numbers: {named}{more}. Encode categories, for instance "
            "with sklearn.preprocessing.OneHotEncoder, and turn dates into numbers, both in a "
            "ColumnTransformer in front of the network."
        )


def _without_numbers(column: pd.Series) -> str:
    """Say of which type a column is if it holds no numbers; nothing otherwise."""
    kind = column.dtype
    if not (getattr(kind, "kind", "O") in "mM" or isinstance(kind, pd.PeriodDtype)):
        try:
            column.to_numpy(dtype=np.float64, na_value=np.nan)
        except (TypeError, ValueError):
            pass
        else:
            return ""
    example = column.dropna().head(1).tolist()
    return f"{kind}, such as {example[0]!r}" if example else str(kind)


def _check_list(X: list[Any]) -> None:
    """Refuse lists of batches, and lists of samples with their labels."""
    first = X[0] if X else None
    if isinstance(first, Mapping) or (isinstance(first, tuple | list) and _differ(first)):
        what = f"{len(X)} {type(first).__name__}s, like the batches or samples of a loader"
    elif _differ(X):
        shapes = list(dict.fromkeys(tuple(part.shape) for part in X))
        what = f"arrays of different shapes, such as {shapes[0]} and {shapes[1]}"
    else:
        return
    raise TypeError(
        f"X is a list of {what}. Expected one array with a row for each sample: put batches "
        "together with torch.cat or numpy.concatenate, or pass a torch Dataset of pairs (x, y)."
    )


def _differ(parts: Any) -> bool:
    """Return whether these are arrays or tensors of more than one shape."""
    are_arrays = all(isinstance(part, Tensor | np.ndarray) for part in parts)
    return are_arrays and len({tuple(part.shape) for part in parts}) > 1


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


def cast_inputs(x: Any, module: nn.Module, device: torch.device | None = None) -> Any:
    """Bring inputs to the network's device and floating type, as skorch's users expect.

    Integers become floating-point numbers, too, unless the network has an embedding that they
    may be indices of.
    """
    first = floating_parameter(module)
    dtype = None if first is None else first.dtype

    def cast(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value if device is None else value.to(device)
        if dtype is None or value.dtype == dtype or (not value.is_floating_point() and embeds()):
            return value
        return value.to(dtype)

    def embeds() -> bool:
        kinds = nn.Embedding | nn.EmbeddingBag
        return any(isinstance(part, kinds) for part in module.modules())

    return map_arrays(cast, x)


def floating_parameter(module: nn.Module) -> nn.Parameter | None:
    """Return the first parameter of a floating type, which inputs are expected to have, too."""
    return next((p for p in module.parameters() if p.is_floating_point()), None)


def check_finite(x: Any) -> None:
    """Refuse NaN and infinity anywhere in the inputs."""
    for part in arrays_of(x):
        if not (isinstance(part, Tensor) and part.is_floating_point() and part.numel()):
            continue
        # the sum of finite numbers is nearly always finite, and needs no second array
        if not (torch.isfinite(part.sum()) or torch.isfinite(part).all()):
            raise ValueError(
                "X contains NaN or infinity. Impute missing values first, for instance with "
                "sklearn.impute.SimpleImputer in a pipeline."
            )


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
    left = "those of an incomplete batch are"  # of a stream, whose length is not known
    if not isinstance(loader.dataset, IterableDataset):
        n = len(batches.sampler)  # type: ignore[arg-type]
        left = f"{n % batches.batch_size} of its {n} samples are"
        if not n % batches.batch_size:
            return
    warn(
        f"the DataLoader has drop_last=True: {left} left out, if it shuffles other ones in each "
        "pass, and results are of the rest. Pass a DataLoader with drop_last=False, or arrays."
    )


def check_labels(y: Any, n: int, hint: str = "") -> Any:
    """Return y as an array or tensor of n numeric labels."""
    if not isinstance(y, Tensor):
        y = np.asarray(y)
    if y.ndim == 0 or len(y) != n:
        raise ValueError(f"X has {n} samples, y has {len(y) if y.ndim else 'no'} labels.{hint}")
    if isinstance(y, np.ndarray) and y.dtype.kind not in "biuf":
        raise ValueError(
            f"y holds labels of type {y.dtype} such as {y.flat[0]!r}; a network takes "
            "numbers. Pass the fitted scikit-learn or skorch estimator, which knows its "
            "classes_, or encode y, for instance with sklearn.preprocessing.LabelEncoder."
        )
    _check_finite_labels(y)
    return y


def _check_finite_labels(y: Any) -> None:
    """Refuse NaN and infinity in labels; whole numbers on a device need no wait."""
    isfinite = np.isfinite if isinstance(y, np.ndarray) else torch.isfinite
    is_whole = isinstance(y, Tensor) and not y.is_floating_point()
    if not is_whole and not bool(isfinite(y).all()):
        raise ValueError("y contains NaN or infinity.")


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
    if issparse(X):
        return X.tocsr()
    if isinstance(X, Mapping):
        return {name: _sliceable(value) for name, value in X.items()}
    if isinstance(X, tuple):
        return tuple(_sliceable(value) for value in X)
    if isinstance(X, Tensor):
        return X
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
        take = partial(_take, slice(start, min(start + batch_size, n)))
        labels, shares = (None if part is None else take(part) for part in (y, weights))
        yield Batch(map_arrays(take, X), labels, shares)


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
        try:
            y = torch.as_tensor(y)
        except (RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"the labels of a Dataset or DataLoader must form one array, got a "
                f"{type(y).__name__}: {error}. Measure with a loader that gives tensors."
            ) from error
        yield Batch(x, y, None)
    if item is None:
        stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
        raise ValueError(
            "X has no samples, and flatness is a mean over samples."
            + (_READ_AGAIN if stream else "")
        )

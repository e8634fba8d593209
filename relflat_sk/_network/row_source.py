"""Arrays of which rows are read when they are needed: on disk, memory-mapped, or computed."""

import mmap
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.sparse import issparse
from torch import Tensor

Array = NDArray[Any]


def is_row_source(X: Any) -> bool:
    """Return whether rows of an array have to be read before they can be used."""
    if isinstance(X, RowSource):
        return True
    if isinstance(X, np.ndarray | Tensor | pd.Series | pd.DataFrame) or issparse(X):
        return False
    return (
        isinstance(getattr(X, "shape", None), tuple)
        and len(X.shape) > 0
        and isinstance(getattr(X, "dtype", None), np.dtype)
        and hasattr(X, "__getitem__")
    )


def is_on_disk(X: Any) -> bool:
    """Return whether rows of an array are best read when they are needed, and not before."""
    return is_row_source(X) or mapped_file(X) is not None


def as_row_source(X: Any) -> "RowSource":
    """Wrap an array of which rows are to be read when they are needed."""
    return X if isinstance(X, RowSource) else RowSource(X)


class RowSource:
    """An array of which rows are read when they are needed. Shapes: `numbers` (m,)."""

    def __init__(self, array: Any, numbers: NDArray[np.intp] | None = None) -> None:
        if array.dtype.kind not in "biuf":
            raise TypeError(
                f"X must hold numbers, got {type(array).__name__} of {array.dtype}. Encode "
                "categories before the array is stored."
            )
        self._array = array
        self._numbers = numbers
        n = array.shape[0] if numbers is None else len(numbers)
        self.shape: tuple[int, ...] = (int(n), *map(int, array.shape[1:]))
        self.dtype: np.dtype[Any] = array.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def chunk_rows(self) -> int | None:
        """How many rows are stored together and read in one go; None if this is not known."""
        chunks = getattr(self._array, "chunks", None)
        return chunks[0] if isinstance(chunks, tuple) and isinstance(chunks[0], int) else None

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype=dtype)

    def __getitem__(self, rows: Any) -> Array:
        """Read some rows: a row by its number, or several by a slice or an array of numbers."""
        if isinstance(rows, tuple):  # scikit-learn asks for array[rows, ...]
            rows, *others = rows
            if any(other is not ... for other in others):
                raise IndexError(
                    f"an array on disk is read by whole rows here, got the index {others} of other "
                    "axes: read the rows first, as in array[rows][:, columns]."
                )
        if np.ndim(rows) == 0 and not isinstance(rows, slice):
            position = range(len(self))[int(rows)]
            row: Array = self[position : position + 1][0]
            return row
        if self._numbers is None and isinstance(rows, slice):
            return copy_rows(self._array, slice(*rows.indices(len(self))))
        return self._read(self.locate(np.arange(len(self))[rows]))

    def subset(self, rows: NDArray[np.intp]) -> "RowSource":
        """Choose rows without reading them. Shapes: `rows` (m,)."""
        return RowSource(self._array, self.locate(rows))

    def locate(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return which rows of the stored array some rows are.

        Shapes: `rows` (m,); returns (m,).
        """
        return rows if self._numbers is None else self._numbers[rows]

    def read_chunk(self, chunk: int) -> Array:
        """Read the rows that are stored together. Shapes: returns (k, ...)."""
        assert self.chunk_rows is not None
        return copy_rows(self._array, slice(chunk * self.chunk_rows, (chunk + 1) * self.chunk_rows))

    def _read(self, numbers: NDArray[np.intp]) -> Array:
        """Read rows of the stored array, each of them once and in its order."""
        wanted, positions = np.unique(numbers, return_inverse=True)
        if isinstance(self._array, np.ndarray) or not len(wanted):
            found = copy_rows(self._array, wanted)
        elif hasattr(self._array, "oindex"):
            found = np.asarray(self._array.oindex[wanted])
        else:
            runs = np.split(wanted, np.flatnonzero(np.diff(wanted) > 1) + 1)
            parts = [copy_rows(self._array, slice(int(run[0]), int(run[-1]) + 1)) for run in runs]
            found = np.concatenate(parts)
        return found[positions]


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
        mapped._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    return part


def mapped_file(array: Any) -> "np.memmap[Any, Any] | None":
    """Find the memory-mapped file that an array is a part of."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None:
            return array
        array = array.base
    return None

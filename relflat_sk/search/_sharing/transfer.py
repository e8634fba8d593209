"""Send estimators between processes, also those with classes of a script or a notebook.

joblib pickles by cloudpickle, which sends the classes and functions of a script, a notebook or
another function by their code. A skorch net, however, pickles its module by Python's pickle, which
sends a class by its name only, and the other process does not know the name.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import skorch.net

from relflat_sk._network import mapped_file

__all__ = ["ByPath", "ByValue", "packed"]

_LOCK = threading.Lock()


class ByValue:
    """A value whose classes and functions are pickled by their code.

    Unpickled, it is the value itself.

    Parameters
    ----------
    value : object
        The value.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (_dumps(self.value),)


class ByPath:
    """A memory-mapped array, which other processes map from its file.

    Unpickled, it is the array, read-only.

    Parameters
    ----------
    array : ndarray of any shape
        The array.
    file : path-like
        The file.
    offset : int
        Where it begins in the file, in bytes.
    """

    def __init__(self, array: Any, file: Any, offset: int) -> None:
        self.array, self.file, self.offset = array, file, offset

    def __reduce__(self) -> Any:
        array, file = self.array, self.file
        order = "C" if array.flags.c_contiguous else "F"
        return np.memmap, (file, array.dtype, "r", self.offset, array.shape, order)

    @classmethod
    def wrap(cls, value: Any) -> Any:
        """Return a value to pickle in place of another.

        Parameters
        ----------
        value : object
            Anything.

        Returns
        -------
        object
            The value itself if it is no part of a file, or one with gaps between its elements.
            Changes in memory (mode "c") are not in the file.
        """
        mapped = mapped_file(value)
        if mapped is None or mapped.mode == "c" or not (mapped.filename and value.flags.forc):
            return value
        whole = mapped  # parts have the offset of the whole
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        return cls(value, mapped.filename, whole.offset + value.ctypes.data - whole.ctypes.data)


class _Packed:
    """Bytes of a pickled value, which become the value itself when they are unpickled again."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (self.content,)


def packed(value: Any) -> Any:
    """Pickle a value now, so that nothing can fail on its way to another process.

    Parameters
    ----------
    value : object
        The value.

    Returns
    -------
    object
        Arrives as the value; None if the value cannot be pickled: it holds an open file, say.
    """
    try:
        return _Packed(_dumps(value))
    except Exception:  # pickling runs code of any class
        return None


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    with _nets_pickle_by_value():
        cloudpickle.dump(value, buffer)
    return buffer.getvalue()


@contextmanager
def _nets_pickle_by_value() -> Iterator[None]:
    """Let skorch nets pickle their modules by cloudpickle."""
    with _LOCK, mock.patch.object(skorch.net, "pickle", cloudpickle):
        yield

"""Send estimators between processes, also those with classes of a script or a notebook.

joblib pickles by cloudpickle, which sends the classes and functions of a script, a notebook or
another function by their code. A skorch net, however, pickles its module by Python's pickle, which
sends a class by its name only, and the other process does not know the name.
"""

import io
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import cloudpickle
import numpy as np
import skorch.net

from relflat_sk._network import mapped_file

_LOCK = threading.Lock()


class ByValue:
    """A value whose classes and functions are pickled by their code.

    Unpickled, it is the value itself.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (_dumps(self.value),)


class ByPath:
    """An array in a file, which other processes open by its path.

    Unpickled, it is the array, read-only.
    """

    def __init__(self, open_file: Callable[..., Any], *arguments: Any) -> None:
        self.open_file, self.arguments = open_file, arguments

    def __reduce__(self) -> Any:
        return self.open_file, self.arguments

    @classmethod
    def wrap(cls, value: Any) -> Any:
        """Return a value to pickle in place of another."""
        h5py = sys.modules.get("h5py")
        if h5py is not None and isinstance(value, h5py.Dataset):
            return cls(_open_hdf5, *_place_in_hdf5(value))
        mapped = mapped_file(value)
        if mapped is None or mapped.mode == "c" or not (mapped.filename and value.flags.forc):
            return value
        whole = mapped  # parts have the offset of the whole
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        offset = whole.offset + value.ctypes.data - whole.ctypes.data
        order = "C" if value.flags.c_contiguous else "F"
        return cls(np.memmap, mapped.filename, value.dtype, "r", offset, value.shape, order)


def _place_in_hdf5(rows: Any) -> tuple[Path, str]:
    """Return the file of a data set of h5py, and its name there."""
    file = Path(rows.file.filename).absolute()
    if rows.file.mode != "r" or not file.exists():
        raise ValueError(
            "worker processes read rows of h5py from their file, which must be on disk and open "
            f"for reading: h5py.File(path, 'r'). Got {rows.file}."
        )
    return file, rows.name


def _open_hdf5(file: Path, name: str) -> Any:
    return import_module("h5py").File(file, "r")[name]  # the user's library


def packed(value: Any) -> bytes | None:
    """Pickle a value now, so that nothing can fail on its way to another process."""
    try:
        return _dumps(value)
    except Exception:  # pickling runs code of any class
        return None


def unpacked(content: bytes | None) -> Any:
    """Return the value that `packed` has pickled."""
    return None if content is None else cloudpickle.loads(content)


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

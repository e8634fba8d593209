"""Send estimators between processes, also those with classes of a script or a notebook.

joblib pickles by cloudpickle, which sends the classes and functions of a script, a notebook or
another function by their code. A skorch net, however, pickles its module by Python's pickle, which
sends a class by its name only, and the other process does not know the name.
"""

import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import torch
from skorch import NeuralNet
from torch import Tensor

from relflat_sk._network.batches import mapped_file


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
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles by cloudpickle what skorch nets pickle by Python's pickle: their torch parts."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, NeuralNet):
            # what the net pickles itself, and apart from it its torch parts
            prefixes = tuple(obj.cuda_dependent_attributes_)
            parts = {name: one for name, one in vars(obj).items() if name.startswith(prefixes)}
            without = object.__new__(type(obj))
            vars(without).update({name: x for name, x in vars(obj).items() if name not in parts})
            return _make_net, (type(obj), without.__getstate__(), parts)
        if type(obj) is Tensor and obj.is_cuda:
            return _on_device, (obj.detach().cpu(), obj.device.type)
        return super().reducer_override(obj)


def _make_net(kind: type, state: Any, parts: dict[str, Any]) -> Any:
    net: Any = object.__new__(kind)
    net.__setstate__(state)
    vars(net).update(parts)
    return net


def _on_device(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor on its device, if this machine has it."""
    return tensor.to(device) if torch.cuda.is_available() else tensor

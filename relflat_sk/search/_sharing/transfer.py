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
import skorch.net

__all__ = ["ByValue", "packed"]

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

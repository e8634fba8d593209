"""Describe values as short texts that are equal exactly if training with them is equal.

The texts are the same in every process and in every version of Python: they hold no hashes of
Python and no addresses. Classes and functions of the user have a checksum of their source, without
comments, so that an edit of the network is noticed. Those of installed libraries have their name
only: another version of a library may continue a study.
"""

import functools
import inspect
import io
import math
import re
import sys
import textwrap
import tokenize
import zlib
from collections.abc import Mapping, Set
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from scipy import sparse
from torch import nn

from relflat_sk._network import as_row_source, copy_rows, is_row_source

__all__ = ["changed_params", "describe", "digest", "same"]

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}
_SOURCE = re.compile(r" \(source [0-9a-f]{8}\)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LONGEST = 300  # characters; a longer text is cut, and ends in a checksum
_DEEPEST = 6
_BLOCK = 2**24  # bytes of an array that are read at a time
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor)$"
)
_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_SKIPPED_AT_BEGIN = {tokenize.STRING, tokenize.NEWLINE}  # docstrings, and the end of their line
_LAYOUT = {tokenize.NEWLINE: "\n", tokenize.INDENT: ">", tokenize.DEDENT: "<"}


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value, such as a parameter of an estimator.

    Parameters
    ----------
    value : object
        Any value.
    depth : int, default=0
        How many objects the value is nested in.

    Returns
    -------
    str
        The description.

    Examples
    --------
    >>> from skorch.callbacks import EarlyStopping
    >>> from relflat_sk import MLP
    >>> describe({"hidden": (4,), "module": MLP, "callbacks": [EarlyStopping(patience=3)]})
    "{'callbacks': [skorch.EarlyStopping(patience=3)], 'hidden': [4], 'module': relflat_sk.MLP}"
    """
    text = _describe(value, depth)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({zlib.crc32(text.encode()):08x})"
    return text


def _describe(value: Any, depth: int) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or type(value) in {bool, int, float, complex, str, bytes}:
        return repr(value)
    if isinstance(value, Mapping | list | tuple | Set):
        return _describe_container(value, depth + 1)
    if isinstance(value, nn.Module):
        weights = {name: digest(one) for name, one in value.state_dict().items()}
        text = _ADDRESS.sub("", f"{value!r} {weights}")
        return f"{_name(type(value))}({zlib.crc32(text.encode()):08x})"
    found = digest(value)
    if found is not None:
        return f"{type(value).__name__} of shape {found}"
    return _describe_code(value, depth) or _describe_object(value, depth)


def _describe_container(value: Any, depth: int) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(describe(one, depth) for one in value if _matters(one)) + "]"
    if isinstance(value, Set):
        return "{" + ", ".join(sorted(describe(one, depth) for one in value)) + "}"
    items = sorted((repr(key), describe(one, depth)) for key, one in value.items())
    return "{" + ", ".join(f"{key}: {one}" for key, one in items) + "}"


def _describe_code(value: Any, depth: int) -> str:
    """Describe a class or function; empty if the value is neither."""
    if isinstance(value, functools.partial):
        parts = [value.func, *value.args, value.keywords]
        return "partial(" + ", ".join(describe(one, depth + 1) for one in parts) + ")"
    if isinstance(value, MethodType):
        return f"{describe(value.__self__, depth + 1)}.{value.__name__}"
    if isinstance(value, type) or (callable(value) and hasattr(value, "__name__")):
        return _name(value)
    return ""


def _describe_object(value: Any, depth: int) -> str:
    """Describe any other object by its class and its parameters or public attributes."""
    name = _name(type(value))
    if isinstance(value, np.random.RandomState):
        return f"{name}({describe(value.get_state(legacy=False), depth + 1)})"
    if isinstance(value, torch.Generator):
        return f"{name}({digest(value.get_state())})"
    if isinstance(value, np.random.Generator):
        return f"{name}({zlib.crc32(repr(value.bit_generator.state).encode()):08x})"
    if depth > _DEEPEST:
        return name
    if hasattr(value, "get_params"):
        params = changed_params(value, depth + 1)
    elif getattr(value, "__dict__", None) and not isinstance(value, Path):
        params = {
            key: describe(one, depth + 1)
            for key, one in sorted(vars(value).items())
            if not key.startswith("_")
        }
    else:
        return f"{name}({_ADDRESS.sub('', repr(value))})"
    return f"{name}({', '.join(f'{key}={one}' for key, one in params.items())})"


def changed_params(estimator: Any, depth: int = 0) -> dict[str, str]:
    """Describe the parameters of an estimator or callback that differ from their defaults.

    Parameters
    ----------
    estimator : object
        Has scikit-learn's `get_params`.
    depth : int, default=0
        How many objects the estimator is nested in.

    Returns
    -------
    dict of str to str
        Descriptions by name, without nested parameters and those without effect on the result.
    """
    found = {}
    for name, value in sorted(estimator.get_params(deep=False).items()):
        if not _WITHOUT_EFFECT.search(name):
            text = describe(value, depth)
            if text != _describe_default(type(estimator), name, depth):
                found[name] = text
    return found


def _describe_default(kind: type, name: str, depth: int) -> str | None:
    """Describe the default of a constructor's argument; None if it has none."""
    for one in kind.__mro__:
        if "__init__" in vars(one) and one is not object:
            argument = inspect.signature(one.__init__).parameters.get(name)  # type: ignore[misc]
            if argument is not None and argument.default is not argument.empty:
                return describe(argument.default, depth)
    return None


def _matters(value: Any) -> bool:
    """Return whether a value in a list changes training; skorch's loggers do not."""
    one = value[1] if isinstance(value, tuple) and len(value) == 2 else value
    return type(one).__module__ != "skorch.callbacks.logging"


def _name(code: Any) -> str:
    """Name a class or function; those of the user have a checksum of their source.

    A library is known by its top folder, since its modules may move, and the user's own code by
    no folder, since a script that runs is a module of another name than one that is imported.
    """
    name = str(getattr(code, "__qualname__", code.__name__)).rpartition("<locals>.")[2]
    # ufuncs of numpy 1 and of scipy have no module, their type has
    module = getattr(code, "__module__", None) or type(code).__module__
    top = module.partition(".")[0]
    if _is_installed(module, top):
        return f"{top}.{name}"
    source = _source(code)
    return f"{name} (source {zlib.crc32(source.encode()):08x})" if source else name


def _is_installed(module: str, top: str) -> bool:
    if top == _PACKAGE or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def _source(code: Any) -> str:
    """Return the source of a user's class or function; empty if it is not known.

    A class is read method by method, which also works in notebooks. Its base classes count if
    they are the user's. A lambda has no lines of its own, so that its source is not used.
    """
    if isinstance(code, FunctionType):
        return "" if code.__name__ == "<lambda>" else _normalised_source(code)
    if not isinstance(code, type):
        return ""
    parts = []
    for one in code.__mro__:
        if not _is_installed(one.__module__, one.__module__.partition(".")[0]):
            for key, value in sorted(vars(one).items()):
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(inner, FunctionType):
                    source = _normalised_source(inner)
                    if not source:
                        return ""
                    parts.append(f"{key} {source}")
                elif type(value) in {bool, int, float, str} and not key.startswith("__"):
                    parts.append(f"{key} {value!r}")
    return "\n".join(parts)


def _normalised_source(function: FunctionType) -> str:
    """Return the source of a function without comments, docstrings and spaces."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return ""
    parts = ["\n"]
    for token in tokens:
        begins = parts[-1] in _LAYOUT.values()
        if token.type in _TOKENS or (begins and token.type in _SKIPPED_AT_BEGIN):
            continue
        parts.append(_LAYOUT.get(token.type) or re.sub(r"\s", "", token.string))
    # Python 3.12 and later read f-strings piece by piece, and double braces as one
    return "".join(parts).replace("{{", "{").replace("}}", "}")


def digest(data: Any) -> str | None:
    """Return shape and checksum of data.

    Parameters
    ----------
    data : object
        An array, a data frame, a list of samples, a sparse matrix, or a dict or tuple of these.

    Returns
    -------
    str or None
        A text that changes with the data; None if they are none of these.

    Examples
    --------
    >>> digest([[1, 2], [3, 4]]) == digest(np.array([[1, 2], [3, 4]]))
    True
    >>> print(digest(object()))
    None
    """
    if sparse.issparse(data):
        matrix = data.tocsr()
        parts = [_checksum(one) for one in (matrix.data, matrix.indices, matrix.indptr)]
        return f"{data.shape} {' '.join(map(str, parts))}"
    if isinstance(data, Mapping):
        found = {str(key): digest(one) for key, one in sorted(data.items())}
        return None if None in found.values() else str(found)
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        # numpy has no bfloat16
        data = (data if data.dtype != torch.bfloat16 else data.view(torch.int16)).numpy()
    on_disk = is_row_source(data)
    if not (on_disk or hasattr(data, "__array__") or isinstance(data, list)):
        return None
    try:
        array = as_row_source(data) if on_disk else np.asarray(data)
    except (TypeError, ValueError):  # no numbers; lists of unequal length
        return None
    if not array.ndim:
        return None
    return f"{array.shape} {_checksum(array)}"


def _checksum(array: Any) -> int:
    """Compute the checksum of an array's bytes, block by block: it may be on disk."""
    if array.dtype == object:
        array = array.astype(str)
    if 0 in array.shape:
        return zlib.crc32(b"")
    rows = max(1, _BLOCK // max(1, math.prod(array.shape[1:]) * array.dtype.itemsize))
    checksum = 0
    for start in range(0, len(array), rows):
        block = copy_rows(array, slice(start, start + rows))
        checksum = zlib.crc32(block.reshape(-1).view(np.uint8).data, checksum)
    return checksum


def same(then: str | None, now: str | None) -> bool:
    """Return whether two descriptions are of the same value, as far as one can tell.

    Parameters
    ----------
    then : str or None
        One description; None for a value that is not given.
    now : str or None
        The other one.

    Returns
    -------
    bool
        True also if they differ in a checksum of a source that only one of them has.

    Examples
    --------
    >>> same("Net (source 01234567)", "Net"), same("Net (source 01234567)", "Other")
    (True, False)
    """
    if then == now or then is None or now is None:
        return then == now
    if _SOURCE.search(then) and _SOURCE.search(now):
        return False
    return _SOURCE.sub("", then) == _SOURCE.sub("", now)

"""Describe values in short texts that are the same in every process.

Classes and functions of the user have a checksum of their source: an edited comment counts.
"""

import inspect
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import torch
from torch.utils.data import Dataset

from relflat_sk._checks import warn

PLAIN = (type(None), bool, int, float, str)  # the types that Optuna stores
_DEEPEST, _LONG = 6, 100


def plain_repr(value: Any) -> str:
    """Return the `repr` of a value without addresses, which differ in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value by its contents, those that are long by a checksum."""
    text = _describe(value, depth)
    return text if len(text) <= 200 else f"{text[:200]}... ({joblib.hash(text)[:8]})"


def _describe(value: Any, depth: int) -> str:  # noqa: C901, PLR0911
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().double().numpy()
    if isinstance(value, np.ndarray):
        return f"{value.shape} {_hash(np.ascontiguousarray(value))}"
    if inspect.isclass(value) or inspect.isroutine(value):
        return _describe_code(value)
    if depth > _DEEPEST:
        return _describe_code(type(value))
    if isinstance(value, Mapping):
        items = (f"{key!r}: {describe(item, depth + 1)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple) and len(value) < _LONG:
        return "[" + ", ".join(describe(item, depth + 1) for item in value) + "]"
    if hasattr(value, "get_params"):  # those of estimators have a name of their own
        held = {} if hasattr(value, "fit") else value.get_params(deep=False)
    elif isinstance(value, torch.nn.Module):
        plain = {n: x for n, x in vars(value).items() if isinstance(x, PLAIN) and n != "training"}
        held = {**plain, "layers": plain_repr(value), **value.state_dict()}
    elif hasattr(value, "shape") or not getattr(value, "__dict__", None):
        return f"{type(value).__name__} {getattr(value, 'shape', '')} {_hash(value)}"
    else:
        # data may be in private attributes, where others hold what they have computed
        is_data = isinstance(value, Dataset)
        held = {n: x for n, x in vars(value).items() if is_data or not n.startswith("_")}
    return _describe_code(type(value)) + (describe(held, depth + 1) if held else "")


def _hash(value: Any) -> str:
    """Return a checksum of a value's contents, or of its text if they cannot be read."""
    try:
        return str(joblib.hash(value))[:8]
    except Exception as error:  # pickling runs code of any class
        text = plain_repr(value)
        warn(
            f"{text} cannot be pickled ({type(error).__name__}: {error}). So a search that is "
            "resumed notices another one only if its repr is another one."
        )
        return str(joblib.hash(text))[:8]


# Python's parser, by which `inspect` finds a class, fails in several threads at once
_PARSER = threading.Lock()


def _describe_code(code: Any) -> str:
    """Name a class or function; those of the user have a checksum of their source."""
    name = str(getattr(code, "__qualname__", code)).rpartition("<locals>.")[2]
    sources = []
    for part in code.__mro__ if inspect.isclass(code) else [code]:
        if _is_of_user(part):
            try:
                with _PARSER:
                    sources.append(inspect.getsource(part))
            except (OSError, TypeError):  # typed at a prompt
                sources.append(plain_repr(part))
    return f"{name} ({joblib.hash(sources)[:8]})" if sources else name


def _is_of_user(code: Any) -> bool:
    """Return whether a class or function is no library's."""
    module = getattr(code, "__module__", None) or type(code).__module__
    top = module.partition(".")[0]
    if top == __name__.partition(".")[0] or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)

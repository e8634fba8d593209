"""Describe values as short texts that are equal exactly if training with them is equal.

The texts are the same in every process and in every version of Python: they hold no hashes of
Python and no addresses. Classes and functions of the user have a checksum of their source, without
comments, so that an edit of the network is noticed. Those of installed libraries have their name
only: another version of a library may continue a study. Numbers and texts that a function gets from
around it, and those that a module holds, have a checksum of their own.
"""

import functools
import inspect
import io
import re
import sys
import textwrap
import tokenize
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from relflat_sk.search._trial.digests import digest
from relflat_sk.search._trial.lambdas import source_of_lambda

__all__ = ["changed_params", "describe", "same", "with_contents"]

_PACKAGE = __name__.partition(".")[0]
_INSTALLED = {"site-packages", "dist-packages"}
# checksums that a text may lack: its source is not known, or an earlier version had none
_CHECKSUMS = [re.compile(rf" \({kind} [0-9a-f]{{8}}\)") for kind in ("source", "contents")]
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
_LONGEST = 300  # characters; a longer text is cut, and ends in a checksum
_DEEPEST = 6
# parameters that change the time that training takes, or what it shows, but not its result
_WITHOUT_EFFECT = re.compile(
    r"(^|__)(_.*|verbose|n_jobs|memory|device|num_workers|pin_memory|persistent_workers"
    r"|prefetch_factor)$"
)
_TOKENS = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_SKIPPED_AT_BEGIN = {tokenize.STRING, tokenize.NEWLINE}  # docstrings, and the end of their line
_LAYOUT = {tokenize.NEWLINE: "\n", tokenize.INDENT: ">", tokenize.DEDENT: "<"}


def describe(value: Any, depth: int = 0) -> str:
    """Describe a value, such as a parameter of an estimator."""
    text = _describe(value, depth)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({_crc(text)})"
    return text


def _describe(value: Any, depth: int) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Mapping | list | tuple | Set):
        return _describe_container(value, depth + 1)
    if isinstance(value, nn.Module):
        weights = {name: digest(one) for name, one in value.state_dict().items()}
        text = _ADDRESS.sub("", f"{value!r} {weights}")
        return with_contents(f"{_name(type(value))}({_crc(text)})", _held(value))
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
        return f"{name}({_crc(repr(value.bit_generator.state))})"
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
    """Describe the parameters of an estimator or callback that differ from their defaults."""
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
    return with_contents(f"{name} (source {_crc(source)})" if source else name, _captured(code))


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def with_contents(text: str, parts: Sequence[str]) -> str:
    """Append a checksum of what a value holds to its description."""
    return f"{text} (contents {_crc(repr(parts))})" if parts else text


def _captured(code: Any) -> list[str]:
    """Describe the numbers and texts that a user's function gets from around it."""
    if not isinstance(code, FunctionType):
        return []
    cells = zip(code.__code__.co_freevars, code.__closure__ or (), strict=True)
    defaults = [*(code.__defaults__ or ()), *(code.__kwdefaults__ or {}).items()]
    found = [(name, cell.cell_contents) for name, cell in cells if cell != CellType()]
    return _plain_values([*found, ("defaults", tuple(defaults))] if defaults else found)


def _held(module: nn.Module) -> list[str]:
    """Describe the numbers and texts in the modules of a user's own classes."""
    own = [
        (f"{name}.{key}", value)
        for name, part in module.named_modules()
        if not _is_installed(type(part).__module__, type(part).__module__.partition(".")[0])
        for key, value in sorted(vars(part).items())
        if not key.startswith("_") and key != "training"
    ]
    return _plain_values(own)


def _plain_values(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Describe those values that nothing changes in place: numbers, texts, tuples of these."""
    return [f"{name}={value!r}" for name, value in named if _is_plain(value)]


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in _PLAIN


def _is_installed(module: str, top: str) -> bool:
    if top == _PACKAGE or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _INSTALLED.isdisjoint(Path(file).parts)


def _source(code: Any) -> str:
    """Return the source of a user's class or function; empty if it is not known.

    A class is read method by method, which also works in notebooks. Its base classes count if
    they are the user's.
    """
    if isinstance(code, FunctionType):
        return (source_of_lambda if code.__name__ == "<lambda>" else _normalised_source)(code)
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


def same(then: str | None, now: str | None) -> bool:
    """Return whether two descriptions are of the same value, as far as one can tell."""
    if then is None or now is None:
        return then == now
    for checksum in _CHECKSUMS:
        if not (checksum.search(then) and checksum.search(now)):
            then, now = checksum.sub("", then), checksum.sub("", now)
    return then == now

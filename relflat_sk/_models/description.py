"""Describe a model in a warning, so that users recognise the candidate of their search."""

import inspect
import re
from typing import Any

__all__ = ["describe"]

_LONGEST = 60  # characters of a parameter's value
_UNTOLD = {"verbose", "_params_to_validate"}  # the second is a note of skorch to itself


def describe(model: Any) -> str:
    """Return a model's class, with the parameters that differ from their defaults."""
    kind = type(model)
    given = model.get_params(deep=False) if hasattr(model, "get_params") else {}
    defaults = _defaults(kind)
    changed = [
        f"{name}={_shorten(value)}"
        for name, value in given.items()
        if name not in _UNTOLD and repr(value) != repr(defaults.get(name))
    ]
    return f"{kind.__name__}({', '.join(changed)})"


def _defaults(kind: type) -> dict[str, Any]:
    """Collect the defaults of a constructor, and of those that it passes arguments on to."""
    defaults: dict[str, Any] = {}
    for parent in reversed(kind.__mro__):
        if "__init__" in vars(parent) and parent is not object:
            arguments = inspect.signature(vars(parent)["__init__"]).parameters.values()
            defaults |= {argument.name: argument.default for argument in arguments}
    return defaults


def _shorten(value: Any) -> str:
    """Write a parameter on one line."""
    text = (
        value.__name__
        if isinstance(value, type)
        else " ".join(re.sub(r" at 0x\w+", "", repr(value)).split())
    )
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."

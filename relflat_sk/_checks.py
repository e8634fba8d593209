"""Check arguments in the same way in all modules, and warn at the line of the user's code."""

import difflib
import inspect
import math
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relflat_sk.exceptions import FlatnessWarning


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer, NumPy's included; booleans are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, NumPy's included; booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_integer(
    name: str, value: Any, *, minimum: int, optional: bool = False, reason: str = ""
) -> None:
    """Refuse a value that is not an integer of at least `minimum`."""
    fits = is_integer(value) and value >= minimum
    least = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
    _check(fits, name, value, least, optional, reason)


def check_boolean(name: str, value: Any) -> None:
    """Refuse a value that is not True or False, NumPy's included."""
    fits = isinstance(value, bool | np.bool_)
    _check(fits, name, value, "True or False")


def check_number(
    name: str,
    value: Any,
    *,
    positive: bool | None = True,
    optional: bool = False,
    reason: str = "",
) -> None:
    """Refuse a value that is not a finite positive number; ``positive=None`` takes any sign."""
    fits, kind = is_number(value) and math.isfinite(value), "a finite number"
    if positive:
        fits, kind = fits and value > 0, "a finite positive number"
    elif positive is False:
        fits, kind = fits and value >= 0, "a finite number of at least 0"
    _check(fits, name, value, kind, optional, reason)


def check_kind(fits: bool, name: str, value: Any, kind: str) -> None:
    """Refuse a value that is not of a kind."""
    if not fits:
        raise TypeError(f"{name} must be {kind}, got {value!r}.")


def check_probability(name: str, value: Any) -> None:
    """Refuse a value that is not between 0 and 1, both left out."""
    _check(is_number(value) and 0 < value < 1, name, value, "a probability between 0 and 1")


def _check(
    fits: bool, name: str, value: Any, kind: str, optional: bool = False, reason: str = ""
) -> None:
    if not (fits or (optional and value is None)):
        ending = f": {reason}." if reason else "."
        raise ValueError(f"{name} must be {kind}{' or None' * optional}, got {value!r}{ending}")


def check_device(device: Any) -> None:
    """Refuse a device that torch cannot compute on, or on which there are no values."""
    if device is None:
        return
    try:
        torch.zeros((), device=device).item()
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise ValueError(
            f"device={device!r} cannot be used here: {reason}. Pass device='cpu', or install a "
            "torch that supports the device."
        ) from error


_MOST_MEANT = 4  # names in a suggestion
_CLOSE = 0.55  # "btch" stands for "batch_size"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Ask which of some names a wrong name stands for."""
    names = sorted(names)
    endings = [name.split("__", i)[-1] for i in range(name.count("__") + 1)]
    same_end = [other for ending in endings for other in names if other.endswith(f"__{ending}")]
    close = difflib.get_close_matches(name, names, n=_MOST_MEANT, cutoff=_CLOSE)
    meant = " or ".join(map(repr, list(dict.fromkeys([*same_end, *close]))[:_MOST_MEANT]))
    return f" Did you mean {meant}?" if meant else ""


@contextmanager
def naming_parameters(estimator: Any, params: Mapping[str, Any]) -> Iterator[None]:
    """List the public parameters, and say what was meant, where `set_params` refuses a name."""
    try:
        yield
    except ValueError as error:
        params_now = estimator.get_params()
        known = [key for key in params_now if not key.split("__")[-1].startswith("_")]
        wrong = re.search(r"Invalid parameter '(\w+)'", str(error))
        refused = [name for name in params if wrong and wrong[1] in name.split("__")]
        if wrong is None or not refused:
            raise
        before = refused[0].split("__")[: refused[0].split("__").index(wrong[1])]
        holder = params_now.get("__".join(before), estimator)
        beside = sorted(key.split("__")[-1] for key in known if key.split("__")[:-1] == before)
        meant = did_you_mean(wrong[1], beside) or did_you_mean(refused[0], known)
        raise ValueError(
            f"Invalid parameter {wrong[1]!r} for estimator {type(holder).__name__}.{meant} Valid "
            f"parameters are: {beside}."
        ) from error


# -- warnings ------------------------------------------------------------------------------

_PACKAGE = str(Path(__file__).parent) + os.sep
# code of Python and of installed packages, such as scikit-learn's loop over folds
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
_INSTALLED = ("<frozen ", *(path + os.sep for path in _PATHS))
# what has been said at lines of the user's code: file, line and text
_SAID: set[tuple[str, int, str]] = set()


def warn(
    message: str,
    category: type[Warning] = FlatnessWarning,
    said: set[tuple[str, int]] | None = None,  # lines of the user's code
) -> None:
    """Warn at the line of the user's code that led here.

    The same text is said once at a line, for instance of nets that differ in their seeds. Python's
    own rule for that forgets whenever any code changes filters, as scikit-learn does in each fit.
    With `said`, installed code that calls the package for many models, such as a search, leads to
    one warning at a line, whatever it says.
    """
    frames = list(traceback.walk_stack(inspect.currentframe()))
    files = [frame.f_code.co_filename for frame, _ in frames]
    outside = [i for i, file in enumerate(files) if not file.startswith(_PACKAGE)]
    users = [i for i in outside if not files[i].startswith(_INSTALLED)]
    place = next(iter([*users, *outside]), len(files) - 1)
    if said is not None and users[:1] != outside[:1]:
        line = files[place], frames[place][1]
        if line in said:
            return
        said.add(line)
        message += " Of further models that are scored at this line, nothing is said."
    saying = files[place], frames[place][1], message
    if saying in _SAID and _action(message, category) == "default":
        return
    _SAID.add(saying)
    warnings.warn(message, category, stacklevel=place + 1)


def _action(message: str, category: type[Warning]) -> str:
    """Return what the user's filters do with a warning; they may ask for each one."""
    for action, text, kind, *_ in warnings.filters:
        if issubclass(category, kind) and (text is None or text.match(message)):
            return action
    return "default"

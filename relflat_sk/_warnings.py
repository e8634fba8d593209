"""Warn at the user's line of code, and only once of each thing."""

import inspect
import operator
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from relflat_sk.exceptions import FlatnessWarning

_PACKAGE = str(Path(__file__).parent) + os.sep
# code of Python and of installed packages, such as scikit-learn's loop over folds
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
_INSTALLED = ("<frozen ", *(path + os.sep for path in _PATHS))
_ONCE = {"default", "module", "once"}  # actions of filters


@dataclass
class _Shown:
    """The warnings that a run of a program, or of a notebook's cell, has shown."""

    place: Sequence[Any] = (None, None)
    warnings: set[Hashable] = field(default_factory=set)


_SHOWN = _Shown()


def warn(message: str, category: type[Warning] = FlatnessWarning) -> None:
    """Warn at the line of the user's code that led here.

    Python shows a warning once for each line of code, but forgets what it has shown when filters
    change, and scikit-learn changes them for each fold. Here, identical warnings at a line are
    shown once in a run of a program, or of a notebook's cell. Filters such as "always" and "error"
    apply as usual.
    """
    frames = [frame for frame, _ in traceback.walk_stack(inspect.currentframe())]
    files = [frame.f_code.co_filename for frame in frames]
    outside = [i for i, file in enumerate(files) if not file.startswith(_PACKAGE)] or [-1]
    users = [i for i in outside if not files[i].startswith(_INSTALLED)] or outside
    frame, program = frames[users[0]], frames[users[-1]].f_code
    if _action(message, category, frame) in _ONCE:
        place = program, getattr(warnings, "_showwarnmsg_impl", None)  # may collect warnings
        # by identity: a cell that runs again is another program with equal code
        if any(map(operator.is_not, place, _SHOWN.place)):
            _SHOWN.place, _SHOWN.warnings = place, set()
        warning = message, category, files[users[0]], frame.f_lineno
        if warning in _SHOWN.warnings:
            return
        _SHOWN.warnings.add(warning)
    warnings.warn(message, category, stacklevel=users[0] % len(frames) + 1)


def _action(message: str, category: type[Warning], frame: FrameType) -> str:
    """Return what the filters ask for: the action of the first that matches."""
    module, line = str(frame.f_globals.get("__name__")), frame.f_lineno
    for action, text, parent, name, number in warnings.filters:
        if (
            issubclass(category, parent)
            and number in {0, line}
            and _matches(text, message)
            and _matches(name, module)
        ):
            return str(action)
    return "default"


def _matches(pattern: Any, text: str) -> bool:
    """Return whether a filter's pattern, None for any text, matches."""
    return pattern is None or re.match(pattern, text) is not None

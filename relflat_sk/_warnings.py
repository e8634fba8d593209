"""Warn at the line of the user's code that called into the package."""

import os
import sys
import warnings
from pathlib import Path
from types import FrameType

from relflat_sk.exceptions import FlatnessWarning

__all__ = ["warn"]

_PACKAGE = str(Path(__file__).parent) + os.sep


def warn(message: str, category: type[Warning] = FlatnessWarning) -> None:
    """Warn the code that called into the package.

    Parameters
    ----------
    message : str
        What is doubtful, and what to do about it.
    category : type, default=FlatnessWarning
        The warning's class.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of the package."""
    return frame.f_code.co_filename.startswith(_PACKAGE)

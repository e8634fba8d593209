"""Warn at the line of the user's code that led to a warning."""

import inspect
import os
import sysconfig
import traceback
import warnings
from pathlib import Path

from relflat_sk.exceptions import FlatnessWarning

_PACKAGE = str(Path(__file__).parent) + os.sep
# code of Python and of installed packages, such as scikit-learn's loop over folds
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
_INSTALLED = ("<frozen ", *(path + os.sep for path in _PATHS))


def warn(
    message: str,
    category: type[Warning] = FlatnessWarning,
    said: set[tuple[str, int]] | None = None,  # lines of the user's code
) -> None:
    """Warn at the line of the user's code that led here.

    With `said`, installed code that calls the package for many models, such as a search, leads to
    one warning at a line. Python's own rule for that forgets whenever any code changes filters.
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
    warnings.warn(message, category, stacklevel=place + 1)

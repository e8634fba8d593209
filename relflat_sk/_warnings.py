"""Warn at the line of the user's code that led to a warning."""

import inspect
import os
import sysconfig
import traceback
import warnings
from pathlib import Path

from relflat_sk.exceptions import FlatnessWarning

PACKAGE = str(Path(__file__).parent) + os.sep
# code of Python and of installed packages, such as scikit-learn's loop over folds
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
INSTALLED = ("<frozen ", *(path + os.sep for path in _PATHS))
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
    outside = [i for i, file in enumerate(files) if not file.startswith(PACKAGE)]
    users = [i for i in outside if not files[i].startswith(INSTALLED)]
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

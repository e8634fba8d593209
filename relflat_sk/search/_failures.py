"""Tell failures of a candidate from failures of the call that trains it.

A candidate that cannot be trained fails again when it is trained again, so its failure is a
result. A full disk or a wrong test set is not: the next call may have mended it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# the end of an error of the call, for a search
KEPT = (
    " The candidate is not recorded, and those that were finished before are kept: call fit again "
    "with the same storage and study_name."
)


class CallError(RuntimeError):
    """Training or measuring failed for a reason that is not the candidate's."""


class StorageFailedError(CallError):
    """The storage of a study failed."""


@contextmanager
def blame_call(what: str, advice: str) -> Iterator[None]:
    """Turn failures into errors of the call."""
    try:
        yield
    except (CallError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CallError(f"{what}: {root_of(error)} {advice}{KEPT}") from error


@contextmanager
def blame_storage(study: Any) -> Iterator[None]:
    """Explain failures in a block that only reads or writes a study."""
    try:
        yield
    except CallError:  # of the weights
        raise
    except Exception as error:
        raise StorageFailedError(
            f"the storage of study {study.study_name!r} failed: {root_of(error)} Mend it, and call "
            "fit again with the same storage and study_name, which trains what it does not hold."
        ) from error


def root_of(error: BaseException) -> str:
    """Return the first line of the error that an error was raised from."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None and str(cause).strip("()"):
        root = cause
    first = (str(root).splitlines() or [repr(root)])[0]
    return f"{type(root).__name__}: {first}".rstrip(".") + "."

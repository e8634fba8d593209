"""Tell failures of a candidate from failures of the call that trains it.

A candidate that cannot be trained fails again when it is trained again, so its failure is a
result. A full disk or a wrong test set is not: the next call may have mended it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ADVICE = {  # by words in the error
    ("disk is full", "no space left", "file too large", "disk quota", "disk i/o"): (
        "Free space on its disk."
    ),
    ("readonly", "read-only", "permission denied", "permitted"): (
        "Give a place that this process may write to."
    ),
    ("locked", "lock timeout"): (
        "Another program holds the lock: end it, or wait until it is done."
    ),
    ("unable to open", "no such table", "does not exist", "moved", "out of step"): (
        "It was deleted, moved or replaced: put it back, or give another storage."
    ),
    ("connection", "refused", "could not connect", "could not translate", "timeout"): (
        "Check that the server runs, and that it can be reached with this user and password."
    ),
    ("no such file",): "The file was deleted or moved: put it back, or give another storage.",
}


# the end of an error of the call, for a search
KEPT = (
    " The candidate is not recorded, and those that were finished before are kept: call fit again "
    "with the same storage and study_name."
)


class CallError(RuntimeError):
    """Training or measuring failed for a reason that is not the candidate's."""


@contextmanager
def blame_call(what: str, advice: str) -> Iterator[None]:
    """Turn failures into errors of the call."""
    try:
        yield
    except (CallError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise CallError(f"{what}: {why}. {advice}{KEPT}") from error


@contextmanager
def blame_storage(study: Any) -> Iterator[None]:
    """Explain failures in a block that only reads or writes a study."""
    try:
        yield
    except CallError:  # of the weights
        raise
    except Exception as error:
        raise StorageFailedError(
            f"the storage of study {study.study_name!r} failed: {explain(error)} Then call fit "
            "again with the same storage and study_name: candidates that the storage holds are not "
            "trained again."
        ) from error


class StorageFailedError(CallError):
    """The storage of a study failed."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def explain(error: BaseException) -> str:
    """Return the root of an error and what to do about it."""
    chain = list(_chain(error))
    *_, root = [cause for cause in chain if str(cause).strip("()")] or chain
    lines = str(root).splitlines() or [repr(root)]
    text = f"{type(root).__name__}: {lines[0]}"
    words_of_all = " ".join(map(str, [text, *chain])).lower()
    advice = [
        advice for words, advice in _ADVICE.items() if any(word in words_of_all for word in words)
    ]
    return " ".join([text.rstrip(".") + ".", *advice[:1]])

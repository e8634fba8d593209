"""Tell failures of a candidate from failures of the call that trains it.

A candidate that cannot be trained fails again when it is trained again, so its failure is a
result. A full disk or a wrong test set is not: the next call may have mended it.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError

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


class StorageFailedError(CallError):
    """The storage of a study failed, while a candidate was trained."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"the storage failed: {explain(error)}")


def failure_record(error: Exception) -> dict[str, Any]:
    """Return what is recorded of a candidate that failed."""
    if isinstance(error, CallError):
        raise error
    if is_of_storage(error):
        raise StorageFailedError(error) from error
    return {"reason": f"{type(error).__name__}: {error}", "failed": True}


@contextmanager
def blame_call(what: str, advice: str) -> Iterator[None]:
    """Turn failures into errors of the call."""
    try:
        yield
    except (CallError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if is_of_storage(error):
            raise
        why = f"{type(error).__name__}: {error}".rstrip(".")
        raise CallError(f"{what}: {why}. {advice}{KEPT}") from error


@contextmanager
def blame_storage() -> Iterator[None]:
    """Turn failures in a block that only reads or writes a trial into errors of the storage."""
    try:
        yield
    except UpdateFinishedTrialError:  # another process has given the trial up
        raise
    except Exception as error:
        raise StorageFailedError(error) from error


def is_of_storage(error: BaseException) -> bool:
    """Return whether a storage of studies raised an error, or an earlier one that led to it."""
    # sqlalchemy's by name, because it takes a tenth of the time that `import relflat_sk` takes
    return any(
        isinstance(one, StorageFailedError | StorageInternalError)
        or any(kind.__module__.startswith("sqlalchemy.") for kind in type(one).__mro__)
        for one in _chain(error)
    )


def has_storage_failed(error: BaseException) -> bool:
    """Return whether a search ends with an error because its storage failed.

    A candidate's own errors are recorded and end no search, and `StorageGuard` lets those of
    callbacks pass, so that files that cannot be read or written are those of a journal.
    """
    of_files = OSError, json.JSONDecodeError
    of_journal = any(isinstance(one, of_files) for one in _chain(error))
    return is_of_storage(error) or (of_journal and not isinstance(error, CallError))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the one that it was raised from, and so on."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def explain(error: BaseException) -> str:
    """Return the root of an error and what to do about it."""
    chain = list(_chain(error))
    *_, root = [one for one in chain if str(one).strip("()")] or chain
    lines = str(root).splitlines() or [repr(root)]
    text = f"{type(root).__name__}: {lines[0]}"
    known = " ".join(map(str, [text, *chain])).lower()
    advice = [one for words, one in _ADVICE.items() if any(word in known for word in words)]
    return " ".join([text.rstrip(".") + ".", *advice[:1]])

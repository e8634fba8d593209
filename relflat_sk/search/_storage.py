"""Open the storage of a study; keep Optuna's log silent, and passwords out of messages."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

from relflat_sk._warnings import warn
from relflat_sk.search._provenance import MADE_WITH

LOCK_TIMEOUT = 60  # seconds to wait for a lock: SQLite's own 5 are few, PostgreSQL waits forever
# how names of files end
_OF_DATABASES = {".db", ".sqlite", ".sqlite3"}
_OF_JOURNALS = {".log", ".journal"}
_UNNAMED = "no-name-"  # how Optuna's names begin for studies that were given none
# the log levels that quiet searches of this process have found
_LEVELS: list[int] = []
_LEVEL_LOCK = threading.Lock()
# drivers of PostgreSQL that take its command-line options
_POSTGRESQL = {"postgresql", "postgresql+psycopg2", "postgresql+psycopg"}


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage."""
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str | Path):
        raise TypeError(
            "storage must be the URL of a database, a file such as 'minima.db', an optuna storage "
            f"or None, got {storage!r}."
        )
    file = file_of(storage)
    if file is not None:
        _check_file(file)
    if file is None or not is_file(storage):
        return _open_database(str(storage))
    if file.suffix in _OF_JOURNALS:
        _remove_half_line(file)
        return JournalStorage(JournalFileBackend(str(file)))
    return _open_database(f"sqlite:///{file}")


def _check_file(file: Path) -> None:
    """Refuse a file that this process cannot make, or not write to."""
    folder = file.parent
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {str(folder)!r} for the storage {str(file)!r}: make it first, or "
            "give a file in another folder."
        )
    if file.is_dir():
        raise ValueError(
            f"the storage {str(file)!r} is a folder: give a file, such as "
            f"{str(file / 'minima.log')!r}."
        )
    # databases and journals make files beside theirs, to lock it
    for place, kind in ((folder, "folder"), (file, "file")):
        if place.exists() and not os.access(place, os.W_OK):
            raise ValueError(
                f"this process may not write to the {kind} {str(place)!r} of the storage "
                f"{str(file)!r}, because it is read-only or belongs to another user. Give a file "
                "in another folder, or change the permissions."
            )


def _open_database(url: str) -> RDBStorage:
    """Open a database, which waits for locks and mends lost connections."""
    if url.startswith("sqlite:"):
        return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": LOCK_TIMEOUT}})
    settings: dict[str, Any] = {"pool_pre_ping": True}  # a server may restart while a net trains
    if url.partition(":")[0] in _POSTGRESQL and "options=" not in url:
        settings["connect_args"] = {"options": f"-c lock_timeout={LOCK_TIMEOUT}s"}
    return RDBStorage(url, engine_kwargs=settings)


def file_of(storage: Any) -> Path | None:
    """Return the file that a search's argument `storage` names."""
    if is_file(storage):
        return Path(storage).expanduser()
    name = storage.removeprefix("sqlite:///") if isinstance(storage, str) else ""
    # SQLite's own URLs, `file:...?uri=true`, also name databases in memory
    if name in ("", storage, ":memory:") or name.startswith("file:"):
        return None
    return Path(name.partition("?")[0])


def is_file(storage: Any) -> bool:
    """Return whether a storage is given as a file."""
    if isinstance(storage, str):
        return "://" not in storage and Path(storage).suffix in _OF_DATABASES | _OF_JOURNALS
    return isinstance(storage, Path)


def _remove_half_line(file: Path) -> None:
    """Remove half a line at the end of a journal, which nobody could read with another appended.

    A process that was killed, and a full disk, leave one.
    """
    if not file.exists():
        return
    lock = JournalFileSymlinkLock(str(file))
    lock.acquire()
    try:
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    finally:
        lock.release()


def warn_of_same(study: optuna.Study, storage: BaseStorage) -> None:
    """Warn if a study without a name trains what another one in its storage holds already."""
    if not study.study_name.startswith(_UNNAMED) or study.get_trials(deepcopy=False):
        return
    made = study.user_attrs.get(MADE_WITH)
    others = optuna.get_all_study_summaries(storage, include_best_trial=False)
    same = [
        (other.datetime_start, other.study_name)
        for other in others
        if other.study_name != study.study_name
        and other.user_attrs.get(MADE_WITH) == made
        and other.datetime_start is not None
    ]
    if same:
        _, newest = max(same)
        warn(
            f"the storage holds study {newest!r} of the same estimator, data and settings. "
            "Without a study_name, this search does not resume it, but trains all candidates in a "
            f"new study, {study.study_name!r}. To resume it, pass study_name={newest!r}."
        )


@contextmanager
def log_level(quiet: bool) -> Iterator[None]:
    """Silence Optuna's log for a while."""
    if not quiet:
        yield
        return
    with _LEVEL_LOCK:
        _LEVELS.append(optuna.logging.get_verbosity())
        optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        with _LEVEL_LOCK:
            before = _LEVELS.pop()
            if not _LEVELS:
                optuna.logging.set_verbosity(before)


def without_password(storage: Any) -> str:
    """Return the file or URL of a storage, with its password hidden, or the storage's class."""
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(storage))

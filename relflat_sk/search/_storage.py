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

# how names of files end
_OF_DATABASES = {".db", ".sqlite", ".sqlite3"}
_OF_JOURNALS = {".log", ".journal"}
_LOG_LEVEL = threading.Lock()


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage: a URL, a file, a storage of Optuna, or the memory."""
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str | Path):
        raise TypeError(
            "storage must be the URL of a database, a file such as 'minima.db', an optuna storage "
            f"or None, got {storage!r}."
        )
    path = Path(storage).expanduser()
    if path.suffix in _OF_JOURNALS and "://" not in str(storage):
        _remove_half_line(path)
        return JournalStorage(JournalFileBackend(str(path)))
    is_file = isinstance(storage, Path) or (path.suffix in _OF_DATABASES and "://" not in storage)
    # a server may restart while a net trains
    settings = {"pool_pre_ping": True}
    return RDBStorage(f"sqlite:///{path}" if is_file else str(storage), engine_kwargs=settings)


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


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep Optuna from telling that it makes a study; for a moment, since its log level is global.

    Threads take turns, so that each finds the level of the user.
    """
    with _LOG_LEVEL:
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
        try:
            yield
        finally:
            optuna.logging.set_verbosity(before)


def without_password(storage: Any) -> str:
    """Return the file or URL of a storage, with its password hidden, or the storage's class."""
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(storage))

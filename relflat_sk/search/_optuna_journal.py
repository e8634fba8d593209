"""Adapter to the private attributes of Optuna's journal files: write whole lines only."""

import json
import os
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._file import get_lock_file

__all__ = ["WholeLinesJournal", "protect_journal"]


class WholeLinesJournal(JournalFileBackend):
    """A journal file to which lines are written as a whole, or not at all.

    Optuna writes to the end of the file, whatever is there. If the disk is full or a process is
    killed, half a line stays behind, the next line is appended to it, and nobody can read the
    file any more. If the file was deleted, Optuna creates one that begins in the middle.
    """

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append lines, after the last whole one."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        left = memoryview(lines.encode())
        with get_lock_file(self._lock), open(self._file_path, "r+b", buffering=0) as file:
            end = _end_of_lines(file)
            file.seek(end)
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except BaseException:
                file.truncate(end)
                raise


def _end_of_lines(file: Any) -> int:
    """Return where the last whole line of a file ends, and remove what follows."""
    end: int = file.seek(0, os.SEEK_END)
    whole = end
    while whole:
        begin = max(0, whole - 65536)
        file.seek(begin)
        block = file.read(whole - begin)
        found = block.rfind(b"\n")
        if found >= 0:
            whole = begin + found + 1
            break
        whole = begin
    if whole < end:
        file.truncate(whole)
    return whole


def protect_journal(storage: Any) -> None:
    """Let a journal write whole lines only."""
    backend = storage._backend if isinstance(storage, JournalStorage) else None
    if type(backend) is JournalFileBackend:
        backend.__class__ = WholeLinesJournal

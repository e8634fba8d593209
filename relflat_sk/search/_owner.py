"""Tell whether the process that owns a study or trains a trial still exists."""

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OWNER = "owner"  # user attribute of a study and of a trial


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def is_gone(owner: Sequence[Any] | None) -> bool:
    """Return whether a thread no longer exists, is the calling thread itself, or is not known."""
    if not owner:
        return True
    host, process_id, started, thread = owner
    if host != socket.gethostname():
        return False
    if started != _start_time(process_id):
        return True
    if process_id == os.getpid():
        others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
        return thread not in others
    if os.name == "posix":  # os.kill(..., 0) would end the process on Windows
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    return False


def _start_time(process_id: int) -> str | None:
    """Return when a process started, since ids are reused; None if unknown or a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


def name_owner(owner: Sequence[Any]) -> str:
    """Name a process in a message."""
    return f"process {owner[1]} on {owner[0]}"

"""Identify the process and thread that train a trial, and tell whether they are gone."""

import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from joblib.externals.loky.backend.process import LokyProcess

__all__ = ["end_with_parent", "is_gone", "this_process"]


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def is_gone(process: Sequence[Any]) -> bool:
    """Return whether a thread no longer exists, or is the calling thread itself."""
    host, process_id, started, thread = process
    if host != socket.gethostname():
        return False
    if process_id == os.getpid() and started == _start_time(process_id):
        others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
        return thread not in others
    return not _is_alive(process_id) or started != _start_time(process_id)


@cache  # one thread is enough
def end_with_parent(process_id: int) -> None:
    """Let the calling process, if it is a worker of joblib's, end soon after its parent.

    A process that is killed cannot end its workers. Without their parent, they would train their
    candidates to the end, for nobody. (On Windows, they still do.)
    """
    is_worker = isinstance(multiprocessing.current_process(), LokyProcess)
    if is_worker and process_id != os.getpid():
        threading.Thread(target=_watch_parent, args=(process_id,), daemon=True).start()


def _watch_parent(process_id: int) -> None:
    while os.getppid() == process_id:
        time.sleep(1)
    os._exit(1)


def _is_alive(process_id: int) -> bool:
    """Return whether a process of this machine runs; True where one cannot ask."""
    if os.name != "posix":  # os.kill(..., 0) would end the process on Windows
        return True
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _start_time(process_id: int) -> str | None:
    """Return when a process started, since ids are reused; None if unknown or a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]

"""Peak memory of a call, as the operating system counts it, in a process of its own.

What counts is resident memory: it includes what torch, numpy and the kernels' libraries
allocate out of sight, which counting tensors would miss. A fresh process for each call,
because an allocator keeps what an earlier call has freed; growth over what is resident when
the call starts, because the data set itself is many times larger than what a pass over it
needs, and would hide any difference. With glibc, arrays are asked from and given back to
the operating system at once, so that the peak is that of what is alive, the same in each
run; left to itself, glibc keeps some of what is freed, depending on the order.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["in_fresh_process", "peak_growth"]

# a fixed threshold, in bytes, in place of one that adapts (up to 32 MiB)
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(call: Callable[[], object]) -> int:
    """Run a call and return by how many bytes resident memory grew at its peak."""
    gc.collect()
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # sets the peak back to what is resident now
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    if _STATUS.exists():  # Linux
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # noqa: PLC0415  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def in_fresh_process(module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module arguments``, and return the number that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=os.environ | _GLIBC,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)

"""Measure the peak memory of a call, as the operating system counts it, or torch on CUDA.

Resident memory counts every allocation of torch, numpy and their kernel libraries. Each call has a
fresh process, and glibc's allocator fixed thresholds: freed memory goes back to the operating
system at once, so that the peak is the memory of the living arrays, the same in each run. Only its
growth counts, since the data would hide any difference.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

# fixed thresholds in bytes; by default glibc adapts them, up to 32 MiB
_GLIBC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(call: Callable[[], object], device: str = "cpu") -> int:
    """Return how many bytes a call takes at its peak: of a CUDA device, or of resident memory."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        at_start = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - at_start
    if _CLEAR.exists():
        _CLEAR.write_text("5")  # resets the peak to the current resident memory
    before = _peak()
    call()
    return _peak() - before


def _peak() -> int:
    """Return the peak of resident memory so far, in bytes."""
    if _STATUS.exists():  # Linux
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource  # noqa: PLC0415  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def in_fresh_process(module: str, *options: str, **variables: str) -> float:
    """Run a benchmark with this command line and further options; return the number it prints."""
    command = [sys.executable, "-m", module, *sys.argv[1:], *options]
    return float(subprocess.check_output(command, env=os.environ | variables, text=True))


def peak_in_fresh_process(module: str, *options: str) -> float:
    """Do the same where the number is a peak of memory."""
    return in_fresh_process(module, *options, **_GLIBC)

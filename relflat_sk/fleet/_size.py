"""The number of nets that are trained at a time."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from relflat_sk._checks import check_integer

__all__ = ["fleet_size", "free_memory", "memory_of_member", "why_slower"]

_AT_MOST = 32
# Floating-point operations of a batch's convolutions, up to which a CPU is faster if nets are
# stacked. Without convolutions, none of the networks of `benchmarks.costs.stacking` is slower.
_FEW = 2e7


def fleet_size(fleet: Any) -> int | None:
    """Return how many nets to train at a time."""
    if fleet is None:
        return None
    if isinstance(fleet, str):
        if fleet != "auto":
            raise ValueError(f"fleet must be a positive integer, 'auto' or None, got {fleet!r}.")
        return _AT_MOST
    check_integer("fleet", fleet, minimum=1)
    return int(fleet)


def memory_of_member(module: nn.Module, inputs: Tensor) -> int:
    """Estimate the memory that a network needs in training."""
    saved = [_bytes(inputs)]

    def note(tensor: Tensor) -> Tensor:
        saved.append(_bytes(tensor))
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        module(inputs)
    weights = sum(_bytes(one) for one in (*module.parameters(), *module.buffers()))
    return 5 * weights + 2 * sum(saved)


def why_slower(module: nn.Module, inputs: Tensor) -> str | None:
    """Return why networks train faster one by one than stacked, from their shapes."""
    if inputs.device.type != "cpu":
        return None
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(inputs)
    counts = counter.get_flop_counts()["Global"]
    n = sum(count for kind, count in counts.items() if "convolution" in str(kind))
    return f"its convolutions take {n:.2g} operations per batch" if n > _FEW else None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def free_memory(device: torch.device) -> int | None:
    """Return the free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None

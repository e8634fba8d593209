"""Batch norm without running statistics, which mixes the samples of a batch in evaluation, too."""

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from relflat_sk._network.layers import weight_layers
from relflat_sk._network.recording import Recorder
from relflat_sk._warnings import warn

__all__ = ["check_unmixed", "find_mixed"]


def find_mixed(run: Callable[[], object], module: nn.Module) -> set[str]:
    """Find the layers behind which batch norm mixes the samples of a batch."""
    norms = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and part.running_mean is None
    }
    if not norms:
        return set()
    layers = weight_layers(module)
    with torch.no_grad(), Recorder({**layers, **norms}, None) as recorder:
        run()
    calls = recorder.calls
    last = max((at for at, name in enumerate(calls) if name in norms), default=-1)
    if last >= 0:
        warn(
            f"batch norm without running statistics ({', '.join(map(repr, norms))}) mixes the "
            "samples of a batch, so that losses and flatness depend on batch_size. Train with "
            "track_running_stats=True."
        )
    return {name for name in calls[: last + 1] if name in layers}


def check_unmixed(name: str, mixed: Collection[str]) -> None:
    """Refuse a layer behind which the samples of a batch are mixed."""
    if name in mixed:
        raise ValueError(
            f"behind layer {name!r} there is a batch norm without running statistics, so that the "
            "losses of samples depend on each other, and the curvature in the weight is not that "
            "of single samples. Measure a layer behind the batch norm, or train with "
            "track_running_stats=True."
        )

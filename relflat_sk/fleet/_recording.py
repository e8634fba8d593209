"""The batches of an epoch in the histories of nets."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from relflat_sk.fleet._member import Member

__all__ = ["record_batches"]


def record_batches(
    members: Sequence[Member], recorded: Sequence[Any], sizes: Sequence[int]
) -> None:
    """Write the batches of an epoch to the histories, as the nets do.

    Shapes: `recorded` (q, k).
    """
    if isinstance(recorded[0], Tensor):
        parts = torch.stack(list(recorded)).permute(2, 1, 0).cpu().tolist()  # by member first
    else:
        parts = [[*zip(*recorded, strict=True)]]
    with _without_collector():
        _write(members, parts, sizes)


def _write(members: Sequence[Member], parts: Any, sizes: Sequence[int]) -> None:
    for member, (losses, *penalty) in zip(members, parts, strict=True):
        terms, shares = penalty or ([0.0] * len(sizes), [1.0] * len(sizes))
        history = member.net.history
        batches = [
            {
                "train_loss": loss,
                "train_batch_size": size,
                "flatness_penalty": share * term,
                "flatness_clipped": float(share < 1),
            }
            for loss, size, term, share in zip(losses, sizes, terms, shares, strict=True)
        ]
        list.__getitem__(history, -1)["batches"].extend(batches)
        history.record("train_batch_count", len(sizes))


@contextmanager
def _without_collector() -> Iterator[None]:
    """Make many objects at once without Python's search for circles after every few."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

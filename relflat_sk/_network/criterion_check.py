"""Checks of criteria that are not in the table of losses, on the first batch."""

import copy
from typing import Any

import torch
from torch import Tensor

from relflat_sk._losses import Loss, name_criterion
from relflat_sk._numerics import full_precision
from relflat_sk._random import fork_rng
from relflat_sk._warnings import warn

__all__ = ["warn_unless_mean"]

# by how much a mean of samples may differ from that of its parts, as a share of them
_ROUNDING = 1e-3
_N_CHECKED = 8


def warn_unless_mean(loss: Loss, output: Tensor, target: Tensor) -> None:
    """Warn if a criterion of a user is no mean of losses of single samples."""
    if loss.row is not None or len(output) < 4:
        return
    n = min(_N_CHECKED, len(output))
    rows = torch.linspace(0, len(output) - 1, n, device=output.device).long()
    with torch.no_grad(), fork_rng(output.device):
        try:
            output, target = output[rows], target[rows]
            # two samples show batch statistics better than many; not all losses take one alone
            apart = Loss(copy.deepcopy(loss.criterion))  # it may count its calls
            parts: Any = torch.arange(n, device=output.device).tensor_split(n // 2)
            together, *pairs = (
                float(full_precision(apart.losses(output[part], target[part])).sum())
                for part in (slice(None), *parts)
            )
        except Exception:  # of a user's code; where it matters, it raises again
            return
    size = max(abs(one) for one in (together, *pairs))
    if abs(together - sum(pairs)) > _ROUNDING * size:  # false where one of them is nan
        warn(
            f"{name_criterion(loss.criterion)} is no mean of losses of single samples: for {n} "
            f"samples it is {together / n:.6g}, and {sum(pairs) / n:.6g} as the mean of two at a "
            "time. Flatness counts the curvature of each sample's loss in its own output alone, so "
            "that the value is not that of this criterion, and depends on batch_size. Use a "
            "criterion that averages over samples."
        )

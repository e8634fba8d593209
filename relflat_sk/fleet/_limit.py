"""The limit of penalties, for many networks at once; see `relflat_sk._penalty.limit`."""

import torch
from torch import Tensor

__all__ = ["share_left"]


def share_left(limits: Tensor, of_loss: Tensor, of_penalty: Tensor) -> Tensor:
    """Return the shares of penalties that the limit leaves.

    Shapes: `limits` (k,), `of_loss, of_penalty` (r, k); returns (k,).
    """
    ratios = of_loss / of_penalty
    # 0/0 is nan: where there is no penalty, there is nothing to limit
    least = ratios.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin(0)
    return (limits * least).clamp_(0, 1)

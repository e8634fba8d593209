"""The limit of penalties, for many networks at once; see `relflat_sk._penalty.limit`."""

import torch
from torch import Tensor

__all__ = ["share_left"]


def share_left(limits: Tensor, of_loss: Tensor, of_penalty: Tensor) -> Tensor:
    """Return the shares of penalties that the limit leaves.

    Parameters
    ----------
    limits : Tensor of shape (k,)
        The limits that users have set.
    of_loss, of_penalty : Tensor of shape (r, k)
        Numbers of losses and penalties, such as norms of gradients. A penalty's are at most the
        limit times the loss's; the least of the r ratios counts.

    Returns
    -------
    Tensor of shape (k,)
        From 0 to 1.
    """
    ratios = of_loss / of_penalty
    # 0/0 is nan: where there is no penalty, there is nothing to limit
    least = ratios.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=torch.inf).amin(0)
    return (limits * least).clamp_(0, 1)

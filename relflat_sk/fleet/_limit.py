"""The gradients of losses and limited penalties, for many networks at once."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from relflat_sk._penalty import PenaltyLimit

__all__ = ["limited_gradients"]


def limited_gradients(
    limit: PenaltyLimit | None,
    gradients: Mapping[str, Tensor],
    differentiate: Callable[[Any, Any], None],
    gain: Tensor | None,
    penalty: Tensor,
) -> Tensor:
    """Compute the gradients of losses plus limited penalties; return the penalties' shares.

    `differentiate` writes sums of both to `gradients`, with factors for each of them.

    Shapes: `gradients` (k, ...), `gain`, `penalty` (k,); returns (k,).
    """
    if limit is None:
        differentiate(1.0, 1.0)
        return torch.ones_like(penalty)
    if not limit.needs_norms:
        share: Tensor = limit.share(gain, penalty)
        differentiate(1.0, share.view(-1, 1, 1))
        return share
    tensors = list(gradients.values())
    differentiate(1.0, 0.0)
    of_loss = [tensor.clone() for tensor in tensors]
    differentiate(0.0, 1.0)
    share = limit.share(gain, penalty, (_norms(of_loss), _norms(tensors)))
    for own, tensor in zip(of_loss, tensors, strict=True):
        tensor.mul_(share.view(-1, *[1] * (tensor.ndim - 1))).add_(own)
    return share


def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """Compute the norm of each network over all tensors: (k,)."""
    norms = [torch.linalg.vector_norm(tensor.flatten(1), dim=1) for tensor in tensors]
    found: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return found

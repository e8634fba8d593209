"""Gradients of loss and penalty at a head of very many classes, for the limit of the penalty.

They follow from the gradients in the head's output, over chunks of the classes: no array has the
size of the head. For the groups of variables see `relflat_sk._penalty.limit`.
"""

import torch
from torch import Tensor

from relflat_sk._losses import Slot, chunks, pull_back

__all__ = ["gradients_at_head"]


@torch.no_grad()
def gradients_at_head(
    of_loss: Tensor | None, slot: Slot, features: Tensor, weight: Tensor, *, in_weight: bool
) -> list[Tensor]:
    """Compute the gradients in shift and gain of the features, and norms of those in the weight.

    Shapes: `of_loss` (..., d), `features` (..., m), `weight` (d, m); returns (2, k).
    """
    slopes, of_penalty = slot.slopes, slot.of_z
    assert slopes is not None
    assert of_penalty is not None
    of_loss = torch.zeros_like(of_penalty) if of_loss is None else of_loss
    pair = [of_loss.reshape(of_penalty.shape), of_penalty]
    dtype, weight = slopes.rows.centre.dtype, weight.detach()
    rows = features.detach().flatten(0, -2).to(dtype)
    shift, gain = rows.new_zeros(2, 2, rows.shape[1]).unbind()
    of_weight = []
    for part in chunks(len(rows), weight):
        some = torch.stack([z[:, part] for z in pair]).to(dtype)
        found = some.transpose(1, 2) @ rows
        if features.requires_grad:
            own = weight[part].to(dtype)
            shift.add_(some.sum(dim=1) @ own)
            gain.add_((found * own).sum(dim=1))
        if in_weight:
            # the penalty depends on features and weight not only by the output
            found[1].add_(slopes.of_rows(part))
            of_weight.append(torch.linalg.vector_norm(found, dim=(1, 2)))
    gradients = [torch.stack(of_weight, dim=1)] if in_weight else []
    if features.requires_grad:
        direct = _direct(slot, features)
        if direct is not None:
            direct = direct.flatten(0, -2).to(dtype)
            shift[1].add_(direct.sum(dim=0))
            gain[1].add_((direct * rows).sum(dim=0))
        gradients += [shift, gain]
    return gradients


def _direct(slot: Slot, features: Tensor) -> Tensor | None:
    """Compute the penalty's gradient in the features with the logits held fixed."""
    tensors, slopes = zip(*slot.direct, strict=True)
    return pull_back(tensors, [features], slopes, create_graph=False)[0]

"""The penalty at the last layer, with its limit, for many networks at once.

Shapes are those of `relflat_sk.fleet._criterion`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from relflat_sk._penalty import PenaltyLimit
from relflat_sk.fleet._chain import Chain
from relflat_sk.fleet._criterion import Criterion
from relflat_sk.fleet._data import Batch
from relflat_sk.fleet._limit import limited_gradients
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._vmapped import Vmapped

__all__ = ["LastPenalty"]


class LastPenalty:
    """The penalty at the last layer, with its limit."""

    def __init__(self, criterion: Criterion, divisor: float) -> None:
        self.criterion = criterion
        self.divisor = divisor

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch, which draws nothing."""

    def finish(self) -> None:
        """End an epoch."""

    def step(
        self,
        body: Chain | Vmapped,
        batch: Batch,
        factors: Tensor,
        limit: PenaltyLimit | None,
    ) -> Tensor:
        """Compute the gradients of a batch. Shapes: `factors` (k,); returns (3, k)."""
        z, phi, weight = body.forward(batch.inputs)
        loss = self.criterion.slopes(z, batch)
        each = (factors / (self.divisor * 2 * phi.shape[2])).view(-1, 1, 1)
        term = self.criterion.curvature(z, phi, weight, batch.shares * each)

        def differentiate(of_loss: Any, of_penalty: Any) -> None:
            of_z = of_loss * loss.z + of_penalty * term.z
            of_phi = torch.addcmul(of_z @ weight, phi, of_penalty * term.of_phi)
            of_weight = torch.bmm(of_z.transpose(1, 2), phi)
            of_weight.baddbmm_(of_penalty * term.of_weight, term.rows)
            body.backward_from_last(of_z, of_phi, of_weight)

        gain = None if limit is None else self.criterion.gain(loss.value, z, batch)
        share = limited_gradients(limit, body.gradients, differentiate, gain, term.value)
        return torch.stack([loss.value, term.value, share])

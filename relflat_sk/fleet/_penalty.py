"""The penalty at the last layer, with its limit, for many networks at once.

Shapes are those of `relflat_sk.fleet._criterion`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from relflat_sk._penalty import AT_LAST_LAYER
from relflat_sk.fleet._chain import Chain
from relflat_sk.fleet._criterion import Criterion
from relflat_sk.fleet._data import Batch
from relflat_sk.fleet._limit import share_left
from relflat_sk.fleet._member import Member
from relflat_sk.fleet._slopes import PenaltySlopes, Slopes
from relflat_sk.fleet._vmapped import Vmapped

__all__ = ["LastPenalty"]


class LastPenalty:
    """The penalty at the last layer, with its limit."""

    def __init__(self, criterion: Criterion, divisor: float, learns_features: bool) -> None:
        self.criterion = criterion
        self.divisor = divisor
        self.learns_features = learns_features

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch, which draws nothing."""

    def finish(self) -> None:
        """End an epoch."""

    def step(
        self,
        body: Chain | Vmapped,
        batch: Batch,
        factors: Tensor,
        limits: Tensor | None,
    ) -> Tensor:
        """Compute the gradients of a batch. Shapes: `factors`, `limits` (k,); returns (3, k)."""
        z, phi, weight = body.forward(batch.inputs)
        loss = self.criterion.slopes(z, batch)
        each = (factors / (self.divisor * 2 * phi.shape[2])).view(-1, 1, 1)
        term = self.criterion.curvature(z, phi, weight, batch.shares * each)
        pairs = _Pairs(loss, term, phi, weight)
        if limits is None:
            share = torch.ones_like(loss.value)
        else:
            gain = self.criterion.gain(loss.value, z, batch)
            share = pairs.share(AT_LAST_LAYER * gain, limits, self.learns_features)
        body.backward_from_last(*pairs.total(share.view(-1, 1, 1)))
        return torch.stack([loss.value, term.value, share])


class _Pairs:
    """The gradients of losses and penalties at the last layer, those through the outputs included.

    Shapes: `phi` (k, n, m), `weight` (k, d, m).
    """

    def __init__(self, loss: Slopes, term: PenaltySlopes, phi: Tensor, weight: Tensor) -> None:
        (k, n, m), d = phi.shape, weight.shape[1]
        self._loss, self._term, self._phi = loss, term, phi
        self._in_z = torch.stack([loss.z, term.z], 2)
        self._in_phi = torch.bmm(self._in_z.view(k, 2 * n, d), weight).view(k, n, 2, m)
        self._in_phi.select(2, 1).addcmul_(phi, term.of_phi)
        columns = self._in_z.view(k, n, 2 * d).transpose(1, 2)
        self._in_weight = torch.bmm(columns, phi).view(k, 2, d, m)
        self._in_weight.select(1, 1).baddbmm_(term.of_weight, term.rows)

    def share(self, room: Tensor, limits: Tensor, learns_features: bool) -> Tensor:
        """Return the shares that the limit leaves. Shapes: `room`, `limits` (k,); returns (k,)."""
        norm = torch.linalg.vector_norm
        sizes = [torch.stack([room, self._term.value], 1), norm(self._in_weight, dim=(2, 3))]
        if learns_features:
            shift, gains = self._in_phi.sum(1), (self._in_phi * self._phi.unsqueeze(2)).sum(1)
            sizes += [norm(shift, dim=2), norm(gains, dim=2)]
        return share_left(limits, *torch.stack(sizes).unbind(2))

    def total(self, share: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the gradients of the losses and shares of those of the penalties.

        Shapes: `share` (k, 1, 1); returns z (k, n, d), phi (k, n, m), weight (k, d, m).
        """
        of_phi, of_weight = self._in_phi.unbind(2), self._in_weight.unbind(1)
        return (
            torch.addcmul(self._loss.z, self._term.z, share),
            torch.addcmul(of_phi[0], of_phi[1], share),
            torch.addcmul(of_weight[0], of_weight[1], share),
        )

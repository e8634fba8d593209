"""The penalty at the last layer, with its limit, for many networks at once.

Shapes are those of `relflat_sk.ensemble._criteria`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from relflat_sk._penalty import AT_LAST_LAYER
from relflat_sk.ensemble._chain import Chain
from relflat_sk.ensemble._criteria import Criterion, Slopes
from relflat_sk.ensemble._member import Member
from relflat_sk.ensemble._vmapped import Vmapped

__all__ = ["LastPenalty"]


class LastPenalty:
    """The penalty at the last layer, with its limit.

    Parameters
    ----------
    criterion : Criterion
        A criterion whose curvature is known.
    divisor : float
        What each sample adds to the divisor of the criterion's mean.
    """

    def __init__(self, criterion: Criterion, divisor: float) -> None:
        self.criterion = criterion
        self.divisor = divisor

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch, which draws nothing.

        Parameters
        ----------
        members : sequence of Member
            The nets.
        sizes : sequence of int
            The number of samples in each batch.
        """

    def finish(self) -> None:
        """End an epoch."""

    def step(
        self,
        body: Chain | Vmapped,
        x: Tensor,
        target: Tensor,
        factors: Tensor,
        limits: Tensor | None,
    ) -> Tensor:
        """Compute the gradients of a batch.

        Parameters
        ----------
        body : Chain or Vmapped
            The networks.
        x : Tensor of shape (k, n, ...)
            Inputs.
        target : Tensor of shape (k, n, ...)
            Targets.
        factors : Tensor of shape (k,)
            Weights of the penalties.
        limits : Tensor of shape (k,) or None
            Their limits.

        Returns
        -------
        Tensor of shape (3, k)
            Losses, penalties before the limit, and the shares that the limit leaves of them.
        """
        z, phi, weight = body.forward(x)
        loss = self.criterion.slopes(z, target)
        n, m = z.shape[1], weight.shape[2]
        scale = (factors / (self.divisor * n * 2 * m)).view(-1, 1, 1)
        term = self.criterion.curvature(z, phi, weight, scale)
        if limits is None:
            share = torch.ones_like(loss.value)
        else:
            share = self._share(loss, term, z, target, phi, weight, limits)
        each = share.view(-1, 1, 1)
        assert term.phi is not None
        assert term.weight is not None
        body.backward(loss.z + term.z.mul_(each), term.phi.mul_(each), term.weight.mul_(each))
        return torch.stack([loss.value, term.value, share])

    def _share(
        self,
        loss: Slopes,
        term: Slopes,
        z: Tensor,
        target: Tensor,
        phi: Tensor,
        weight: Tensor,
        limits: Tensor,
    ) -> Tensor:
        """Return the shares that the limit leaves; see `relflat_sk._penalty.limit`."""
        gain = self.criterion.gain(loss.value, z, target)
        assert term.phi is not None
        assert term.weight is not None
        ratios = [(AT_LAST_LAYER * gain / term.value.abs())[:, None]]
        pair = torch.cat([loss.z, term.z])
        twice_phi, twice_weight = torch.cat([phi, phi]), torch.cat([weight, weight])
        k = len(phi)
        in_phi = pair @ twice_weight
        in_phi[k:] += term.phi
        in_weight = pair.transpose(1, 2) @ twice_phi
        in_weight[k:] += term.weight
        shift, gains = in_phi.sum(1), (in_phi * twice_phi).sum(1)
        sums = torch.linalg.vector_norm(torch.stack([shift, gains], 1), dim=2)
        norms = torch.cat([sums, torch.linalg.vector_norm(in_weight.flatten(1), dim=1)[:, None]], 1)
        ratios.append(norms[:k] / norms[k:])
        least = torch.cat(ratios, 1).nan_to_num_(nan=torch.inf, posinf=torch.inf).amin(1)
        return (limits * least).clamp_(max=1)

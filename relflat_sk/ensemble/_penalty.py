"""The penalty at the last layer, with its limit, for many networks at once.

Shapes are those of `relflat_sk.ensemble._criteria`.
"""

import torch
from torch import Tensor

from relflat_sk._penalty import AT_LAST_LAYER
from relflat_sk.ensemble._criteria import Criterion, Slopes

__all__ = ["Penalty"]


class Penalty:
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

    def add(
        self,
        loss: Slopes,
        z: Tensor,
        target: Tensor,
        phi: Tensor,
        weight: Tensor,
        factors: Tensor,
        limits: Tensor | None,
    ) -> tuple[Slopes, Tensor, Tensor]:
        """Add the penalties to the losses, as far as the limit lets them.

        Parameters
        ----------
        loss : Slopes
            The losses.
        z : Tensor of shape (k, n, d)
            Outputs.
        target : Tensor of shape (k, n, ...)
            Targets.
        phi : Tensor of shape (k, n, m)
            Features of the last layer.
        weight : Tensor of shape (k, d, m)
            Weight of the last layer.
        factors : Tensor of shape (k,)
            Weights of the penalties.
        limits : Tensor of shape (k,) or None
            Their limits.

        Returns
        -------
        objective : Slopes
            The sums; their values are the losses alone.
        penalty, share : Tensor of shape (k,)
            The penalties before the limit, and the shares that the limit leaves of them.
        """
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
        slopes = loss.z + term.z.mul_(each), term.phi.mul_(each), term.weight.mul_(each)
        return Slopes(loss.value, *slopes), term.value, share

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
        if z.shape[1] == 1:
            gain = torch.full_like(loss.value, torch.inf)
        else:
            constant = self.criterion.loss(z.mean(1, keepdim=True).expand_as(z), target)
            gain = (constant - loss.value).clamp_(min=0)
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

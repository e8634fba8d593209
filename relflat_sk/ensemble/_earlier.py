r"""The penalty at earlier layers of a chain, with its limit, for many networks at once.

Behind these layers, the network is piecewise linear, so that their curvature is known from the
gradients of the outputs, see `relflat_sk._penalty.batch_flatness`. The penalty is differentiated
by autograd, once for all networks. Shapes are those of `relflat_sk.ensemble._criteria`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from relflat_sk._penalty import AT_EARLIER_LAYERS, n_shared
from relflat_sk.ensemble._chain import Chain
from relflat_sk.ensemble._criteria import Criterion
from relflat_sk.ensemble._limit import share_left
from relflat_sk.ensemble._member import Member
from relflat_sk.ensemble._signs import Signs
from relflat_sk.ensemble._trace import Trace

__all__ = ["EarlierPenalty"]


class EarlierPenalty:
    """The penalty at layers of a chain, with its limit.

    Parameters
    ----------
    criterion : Criterion
        A criterion whose curvature is known.
    divisor : float
        What each sample adds to the divisor of the criterion's mean.
    layers : dict of str to int
        The penalised layers before the last one, and their number of inputs, in the order of
        their random draws.
    at_last : bool
        Whether the last layer is penalised as well.
    signs : Signs
        The random signs.
    """

    def __init__(
        self,
        criterion: Criterion,
        divisor: float,
        layers: Mapping[str, int],
        at_last: bool,
        signs: Signs,
    ) -> None:
        self._criterion = criterion
        self._divisor = divisor
        self._layers = dict(layers)
        self._at_last = at_last
        self._signs = signs

    def start(self, members: Sequence[Member], sizes: Sequence[int]) -> None:
        """Begin an epoch.

        Parameters
        ----------
        members : sequence of Member
            The nets.
        sizes : sequence of int
            The number of samples in each batch.
        """
        self._signs.start(members, sizes)

    def finish(self) -> None:
        """End an epoch."""
        self._signs.finish()

    def step(
        self,
        body: Chain,
        x: Tensor,
        target: Tensor,
        factors: Tensor,
        limits: Tensor | None,
    ) -> Tensor:
        """Compute the gradients of a batch.

        Parameters
        ----------
        body : Chain
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
        n = x.shape[1]
        scale = factors / (self._divisor * n)
        with torch.enable_grad():
            trace = body.trace(x)
            value = scale * self._estimate(trace, n)
            z, phi, weight = trace.last
        loss = self._criterion.slopes(z.detach(), target)
        total = value.detach()
        tensors: list[Tensor] = []
        slopes: list[Any] = []
        if self._at_last:
            exact = (scale / (2 * weight.shape[2])).view(-1, 1, 1)
            term = self._criterion.curvature(z.detach(), phi.detach(), weight.detach(), exact)
            total = total + term.value
            tensors = [z, phi, weight]
            slopes = [term.z, term.of_phi * phi.detach(), term.of_weight @ term.rows]
        share = self._share(loss.value, total, z.detach(), target, limits)
        each = share.view(-1, 1, 1)
        trace.backward([z, value, *tensors], [loss.z, share, *(each * slope for slope in slopes)])
        return torch.stack([loss.value, total, share])

    def _estimate(self, trace: Trace, n: int) -> Tensor:
        """Return the sums over samples of ``kappa / (2 m)``, with their graph: (k,)."""
        z = trace.last[0]
        draws = [self._draw(trace, *signs) for signs in self._signs.step(n, z)]
        return torch.stack(draws).mean(0)

    def _draw(self, trace: Trace, of_outputs: Tensor, *shared: Tensor) -> Tensor:
        """Draw the squared slopes along random changes, as `RandomChanges.slopes` does."""
        z, vectors = trace.last[0], iter(shared)
        cotangent = self._criterion.root_product(z, of_outputs)
        outputs = [trace.layers[name].output for name in self._layers]
        gradients = torch.autograd.grad(z, outputs, cotangent, create_graph=True)
        squares = []
        for (name, m), gradient in zip(self._layers.items(), gradients, strict=True):
            layer, n = trace.layers[name], n_shared(m)
            columns = layer.weight @ next(vectors).transpose(1, 2) if n else layer.weight
            norms = torch.linalg.vector_norm(layer.inputs, dim=2, keepdim=True)
            slopes = (gradient * (norms * (2 * m * max(1, n)) ** -0.5)) @ columns
            squares.append(slopes.square().sum(dim=(1, 2)))
        return torch.stack(squares).sum(0)

    def _share(
        self, loss: Tensor, total: Tensor, z: Tensor, target: Tensor, limits: Tensor | None
    ) -> Tensor:
        """Return the shares that the limit leaves."""
        if limits is None:
            return torch.ones_like(loss)
        gain = self._criterion.gain(loss, z, target)
        room = torch.where(loss > 0, torch.minimum(gain, loss), gain)
        return share_left(limits, AT_EARLIER_LAYERS * room[None], total.abs()[None])

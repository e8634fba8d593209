r"""Random changes of a layer's weight, by which its relative flatness is probed in training.

For a random matrix ``D`` of the weight's shape with mean zero and
``E[D_st D_s't'] = <w_s, w_s'> 1[t = t']``, the form of the Hessian along it has the mean

.. math:: E\langle D, H D\rangle = \sum_{s,s'} \langle w_s, w_{s'}\rangle \mathrm{Tr}(H_{s,s'})
    = \kappa .

``D = W v u^T`` is such a matrix for independent ``v``, ``u`` with ``E[v v^T] = E[u u^T] = I``.
It moves the layer's output by ``(W v) (u^T phi)``, the change of the units times the reading of
the features.

``v`` are signs: one vector for each sample, or, where the slopes in the layer's output are known
and any number of changes costs little, some vectors that all samples share, so that few products
with the weight are needed. (Single columns of the identity would need none and have no more
variance, but their slope in the weight is that of few of its columns, and trains worse.) Of ``u``
there are two kinds, both without any product with patches: where a sample has one position,
``u^T phi`` is replaced by its root mean square ``|phi|``; otherwise ``u`` is a column of the
identity times ``sqrt(m)``, which has less variance than signs because neighbouring inputs are
alike; for slopes, several columns, which read different channels at the same place of the kernel.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk._network import LayerMap, chosen
from relflat_sk._numerics import inverse_spread

__all__ = ["Directions", "rademacher"]

# the signs that the bits of a byte stand for
_BYTES = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float() * 2 - 1
# vectors v that all samples of a batch share
_SHARED = 32
# columns u of each sample, where slopes are known
_CHANNELS = 16


class Directions:
    """What random changes of a layer's weight do to its output, as shares of `kappa / (2 m)`.

    Parameters
    ----------
    layer : LayerMap
    features : Tensor
        What the layer received, of n samples.
    weight : Tensor of shape (d, m)
        The weight as a matrix.
    spread : Tensor of shape (c,) or None
        Units to measure the input channels in, 0 for what never varies; None for ones.
    """

    def __init__(
        self, layer: LayerMap, features: Tensor, weight: Tensor, spread: Tensor | None
    ) -> None:
        self.layer = layer
        self.features = features
        self.weight = weight if spread is None else weight * spread[layer.column_channels()]
        self.inverse = None if spread is None else inverse_spread(spread)

    def changes(self, z: Tensor) -> Tensor:
        """Draw one change of the layer's output `z` for each sample, with its graph."""
        n, m = len(self.features), self.weight.shape[1]
        units = rademacher(n, m, self.weight) @ self.weight.T
        if self.layer.is_flat(self.features):
            return units * self._sizes(1.0)
        blocks: Tensor = self._in_blocks(units[:, :, None]) * self._planes(1, 1.0)
        return self.layer.from_rows(blocks.flatten(1, 2), z)

    def slopes(self, gradient: Tensor) -> Tensor:
        """Draw slopes along changes, given the gradient in the layer's output.

        Parameters
        ----------
        gradient : Tensor
            Of the output's shape.

        Returns
        -------
        Tensor of shape (..., k)
            Their squares sum to the estimate of all samples.
        """
        d, m = self.weight.shape
        if m <= 2 * _SHARED:  # all columns of the weight cost no more, and leave nothing to chance
            scale, columns = 1.0, self.weight
        else:
            scale, columns = _SHARED**-0.5, self.weight @ rademacher(_SHARED, m, self.weight).T
        if self.layer.is_flat(self.features):
            return (gradient * self._sizes(scale)) @ columns
        blocks = self._in_blocks(self.layer.to_rows(gradient))
        along = blocks @ self._planes(_CHANNELS, scale).transpose(2, 3)
        return along.permute(0, 3, 1, 2).reshape(-1, d) @ columns

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """Tell the groups of outputs apart: (n, groups, d / groups, P)."""
        return rows.view(len(rows), self.layer.groups, -1, rows.shape[2])

    def _sizes(self, scale: float) -> Tensor:
        """Lengths of features with one position, times ``scale / sqrt(2 m)``: (n, 1)."""
        scaled = self.features if self.inverse is None else self.features * self.inverse
        # unlike those of other roots, its slope at zero is zero
        norms = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        sizes: Tensor = norms * (scale / (2 * self.weight.shape[1]) ** 0.5)
        return sizes

    def _planes(self, at_most: int, scale: float) -> Tensor:
        """Columns of the patches, times ``scale / sqrt(2 k)``: (n, groups, k, P)."""
        layer, features, inverse = self.layer, self.features, self.inverse
        n, m = len(features), self.weight.shape[1]
        offset = int(torch.randint(layer.n_offsets, ()))
        n_channels = m // layer.n_offsets
        if n_channels <= at_most:
            k, channels = n_channels, None
        else:
            k = at_most
            first = torch.randint(n_channels, (n, 1), device=features.device)
            steps = torch.arange(k, device=features.device) * (n_channels // k)
            channels = (first + steps) % n_channels
        planes: Tensor = layer.planes(features, channels, offset) * (scale / (2 * k) ** 0.5)
        if inverse is None:
            return planes
        units = chosen(
            inverse.view(1, layer.groups, -1).expand(n, -1, -1).transpose(1, 2), channels
        )
        return planes * units.transpose(1, 2)[:, :, :, None]


def rademacher(n: int, m: int, like: Tensor) -> Tensor:
    """Draw signs of shape (n, m) from torch's random state, ten times as fast as one by one.

    Parameters
    ----------
    n, m : int
    like : Tensor
        Of the dtype and on the device that the signs are to have.

    Returns
    -------
    Tensor of shape (n, m)

    Examples
    --------
    >>> rademacher(2, 3, torch.zeros(())).abs()
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    size = -(-n * m // 64)
    words = torch.randint(-(2**63), 2**63 - 1, (size,), device=like.device)
    signs = F.embedding(words.view(torch.uint8).int(), _BYTES.to(like))
    return signs.flatten()[: n * m].view(n, m)

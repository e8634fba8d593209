r"""Random changes of a layer's weight, by which training estimates its relative flatness.

Let ``D`` be a random matrix of the weight's shape, with mean zero and
``E[D_st D_s't'] = <w_s, w_s'> 1[t = t']``. The quadratic form of the Hessian along ``D`` then has
the mean

.. math:: E\langle D, H D\rangle = \sum_{s,s'} \langle w_s, w_{s'}\rangle \mathrm{Tr}(H_{s,s'})
    = \kappa .

``D = W v u^T`` is such a matrix if ``v`` and ``u`` are independent and
``E[v v^T] = E[u u^T] = I``. It changes the layer's output by ``(W v) (u^T phi)``.

The vectors ``v`` are random signs. Each sample has one vector, or, for slopes, all samples share
some vectors: the gradient in the layer's output is then known, any number of changes costs
little, and few products with the weight are needed. (Single columns of the identity would need
no products and have no more variance. But their slopes involve few columns of the weight, and a
net trains worse with them.)

The vectors ``u`` are of two kinds, and neither takes a product with the patches of a
convolution. If a sample has one position, ``u^T phi`` is replaced by its root mean square
``|phi|``. Otherwise ``u`` is a column of the identity times ``sqrt(m)``. It has less variance
than random signs, because neighbouring inputs are alike. For slopes there are several such
columns, for different channels at the same position of the kernel.
"""

import torch
from torch import Tensor

from relflat_sk._network import LayerMap, select_channels
from relflat_sk._numerics import inverse_spread
from relflat_sk._random import rademacher

__all__ = ["RandomChanges", "n_shared"]

# number of vectors v that all samples of a batch share
_SHARED = 32
# number of columns u of each sample, for slopes
_CHANNELS = 16


def n_shared(m: int) -> int:
    """Return how many vectors ``v`` all samples share, for slopes."""
    return 0 if m <= 2 * _SHARED else _SHARED


class RandomChanges:
    """Random changes of a layer's output, scaled to estimate ``kappa / (2 m)``.

    Shapes: `weight` (d, m), `spread` (c,).
    """

    def __init__(
        self, layer: LayerMap, features: Tensor, weight: Tensor, spread: Tensor | None
    ) -> None:
        self.layer = layer
        self.features = features
        self.weight = weight if spread is None else weight * spread[layer.column_channels()]
        self.inverse = None if spread is None else inverse_spread(spread)

    def changes(self, z: Tensor) -> Tensor:
        """Draw one change of the layer's output for each sample, with its graph."""
        n, m = len(self.features), self.weight.shape[1]
        units = rademacher((n, m), self.weight) @ self.weight.T
        if self.layer.is_flat(self.features):
            return units * self._sizes(1.0)
        blocks: Tensor = self._in_blocks(units[:, :, None]) * self._planes(1, 1.0)
        return self.layer.from_rows(blocks.flatten(1, 2), z)

    def slopes(self, gradient: Tensor) -> Tensor:
        """Draw slopes along changes, given the gradient in the layer's output.

        Shapes: returns (..., k).
        """
        d, m = self.weight.shape
        scale, columns, n = 1.0, self.weight, n_shared(m)
        if n:
            scale, columns = n**-0.5, self.weight @ rademacher((n, m), self.weight).T
        if self.layer.is_flat(self.features):
            return (gradient * self._sizes(scale)) @ columns
        blocks = self._in_blocks(self.layer.to_rows(gradient))
        along = blocks @ self._planes(_CHANNELS, scale).transpose(2, 3)
        return along.permute(0, 3, 1, 2).reshape(-1, d) @ columns

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """Reshape rows (n, d, P) by groups of outputs: (n, groups, d / groups, P)."""
        return rows.view(len(rows), self.layer.groups, -1, rows.shape[2])

    def _sizes(self, scale: float) -> Tensor:
        """Return norms of features with one position, times ``scale / sqrt(2 m)``: (n, 1)."""
        scaled = self.features if self.inverse is None else self.features * self.inverse
        # vector_norm has the slope zero at zero, unlike the root of a sum of squares
        norms = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
        sizes: Tensor = norms * (scale / (2 * self.weight.shape[1]) ** 0.5)
        return sizes

    def _planes(self, n_at_most: int, scale: float) -> Tensor:
        """Return columns of the patches, times ``scale / sqrt(2 k)``: (n, groups, k, P)."""
        layer, features, inverse = self.layer, self.features, self.inverse
        n, m = len(features), self.weight.shape[1]
        offset = int(torch.randint(layer.n_offsets, ()))
        n_channels = m // layer.n_offsets
        if n_channels <= n_at_most:
            k, channels = n_channels, None
        else:
            k = n_at_most
            first = torch.randint(n_channels, (n, 1), device=features.device)
            steps = torch.arange(k, device=features.device) * (n_channels // k)
            channels = (first + steps) % n_channels
        planes: Tensor = layer.planes(features, channels, offset) * (scale / (2 * k) ** 0.5)
        if inverse is None:
            return planes
        units = select_channels(
            inverse.view(1, layer.groups, -1).expand(n, -1, -1).transpose(1, 2), channels
        )
        return planes * units.transpose(1, 2)[:, :, :, None]

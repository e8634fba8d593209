r"""Random changes of a layer's output, by which its relative flatness is probed in training.

For a random matrix ``D`` of the weight's shape with mean zero and
``E[D_st D_s't'] = <w_s, w_s'> 1[t = t']``, the form of the Hessian along it has the mean

.. math:: E\langle D, H D\rangle = \sum_{s,s'} \langle w_s, w_{s'}\rangle \mathrm{Tr}(H_{s,s'})
    = \kappa .

``D = W v u^T`` is such a matrix for independent ``v``, ``u`` with ``E[v v^T] = E[u u^T] = I``.
Each sample has its own. ``v`` are signs. (Single columns of the identity would save the product
with the weight and have no more variance, but their slope in the weight is that of few of its
columns, and trains worse.) Of ``u`` there are two kinds, both without any product with patches:
where a sample has one position, ``u^T phi`` is replaced by its root mean square ``|phi|``;
otherwise ``u`` is one column of the identity times ``sqrt(m)``, which has less variance than
signs because neighbouring inputs are alike.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from relflat_sk.layer_maps import LayerMap
from relflat_sk.numerics import inverse_spread

__all__ = ["draw_change", "rademacher"]

# the signs that the bits of a byte stand for
_BYTES = ((torch.arange(256)[:, None] >> torch.arange(8)) & 1).float() * 2 - 1


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


def draw_change(layer: LayerMap, features: Tensor, weight: Tensor, spread: Tensor | None) -> Tensor:
    """Draw what a random change of the weight does to the layer's output.

    Parameters
    ----------
    layer : LayerMap
    features : Tensor
        What the layer received, of n samples.
    weight : Tensor of shape (d, m)
        The weight as a matrix.
    spread : Tensor of shape (c,) or None
        Units to measure the input channels in, 0 for what never varies; None for ones.

    Returns
    -------
    Tensor of shape (n, d, P)
        One change per sample, with the graph of features, weight and spread.
    """
    n, (d, m) = len(features), weight.shape
    inverse = None
    if spread is not None:
        weight = weight * spread[layer.column_channels()]
        inverse = inverse_spread(spread)
    left = rademacher(n, m, weight) @ weight.T
    if layer.is_flat(features):
        scaled = features if inverse is None else features * inverse
        norms = torch.linalg.vecdot(scaled, scaled)
        # a root has no slope at zero
        size = norms.where(norms > 0, 1.0).sqrt() * (norms > 0)
        change: Tensor = left * size[:, None]
        return change[:, :, None]
    channel = torch.randint(m // layer.n_offsets, (n,), device=features.device)
    plane = layer.plane(features, channel, int(torch.randint(layer.n_offsets, ()))) * m**0.5
    if inverse is not None:
        plane = plane * inverse.view(layer.groups, -1)[:, channel].T[:, :, None]
    blocks = left.view(n, layer.groups, d // layer.groups, 1)
    changes: Tensor = blocks * plane[:, :, None]
    return changes.reshape(n, d, -1)

r"""Random changes of a layer's output, by which its relative flatness is probed in training.

For a random matrix ``D`` of the weight's shape with mean zero and
``E[D_st D_s't'] = <w_s, w_s'> 1[t = t']``, the form of the Hessian along it has the mean

.. math:: E\langle D, H D\rangle = \sum_{s,s'} \langle w_s, w_{s'}\rangle \mathrm{Tr}(H_{s,s'})
    = \kappa .

``D = W v u^T`` is such a matrix for independent ``v``, ``u`` with ``E[v v^T] = E[u u^T] = I``.
Each sample has its own: columns of the identity times ``sqrt(m)`` and a random sign, so that
nothing is multiplied with the weight or with patches. Columns are dealt out without
replacement, which has less variance over a batch than signs in all entries have. Where a sample
has one position, ``u^T phi`` is replaced by its root mean square ``|phi|``.
"""

import torch
from torch import Tensor

from relflat_sk.layer_maps import LayerMap

__all__ = ["deal", "draw_change"]


def deal(n: int, m: int, device: torch.device) -> Tensor:
    """Draw n of m numbers, each as often as any other up to once, in random order.

    Parameters
    ----------
    n, m : int
    device : torch.device

    Returns
    -------
    Tensor of shape (n,)

    Examples
    --------
    >>> deal(6, 3, torch.device("cpu")).bincount()
    tensor([2, 2, 2])
    """
    decks = [torch.randperm(m, device=device) for _ in range(-(-n // m))]
    return (decks[0] if len(decks) == 1 else torch.cat(decks))[:n]


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
    n, (d, m), device = len(features), weight.shape, features.device
    inverse = None
    if spread is not None:
        weight = weight * spread[layer.column_channels()]
        inverse = torch.where(spread > 0, 1 / spread.where(spread > 0, 1.0), 0.0)
    # signs, since changes of several layers add up
    signs = (torch.randint(0, 2, (n,), device=device) * 2 - 1).to(weight.dtype)
    left = weight.index_select(1, deal(n, m, device)).T * (m**0.5 * signs)[:, None]
    if layer.is_flat(features):
        scaled = features if inverse is None else features * inverse
        norms = torch.linalg.vecdot(scaled, scaled)
        # a root has no slope at zero
        size = norms.where(norms > 0, 1.0).sqrt() * (norms > 0)
        change: Tensor = left * size[:, None]
        return change[:, :, None]
    channel = deal(n, m // layer.n_offsets, device)
    plane = layer.plane(features, channel, int(torch.randint(layer.n_offsets, ()))) * m**0.5
    if inverse is not None:
        plane = plane * inverse.view(layer.groups, -1)[:, channel].T[:, :, None]
    blocks = left.view(n, layer.groups, d // layer.groups, 1)
    changes: Tensor = blocks * plane[:, :, None]
    return changes.reshape(n, d, -1)

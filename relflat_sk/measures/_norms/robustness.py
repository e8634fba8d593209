r"""Robustness: the number of cells of inputs in which a classifier does not change its class.

A classifier is (K, epsilon)-robust [1]_, [2]_ if its inputs can be divided into K cells such that
the loss of a training sample differs by at most epsilon from that of any input in its cell. The
0-1 loss does not differ at all (epsilon = 0) for samples of margin ``gamma`` or more in cells of
diameter ``gamma / (2 C)``, where C is a Lipschitz constant of the logits: the difference of two
logits changes at most twice as fast as one of them.

References
----------
.. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
   Section 2.3.
.. [2] Xu and Mannor, "Robustness and Generalization", Machine Learning 86, 2012.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from relflat_sk._network import Network, borrowed, find_faster_step
from relflat_sk._rescaling import AffineLayer
from relflat_sk.measures._estimate import Estimate, with_tolerance
from relflat_sk.measures._norms.over_margin import PERCENTILE, positive_margin
from relflat_sk.measures._norms.products import log_largest_rows, log_spectral_norms, only_layers

__all__ = ["log_robustness"]

_NORMS = ("linf", "l2")


def log_robustness(
    network: Network,
    *,
    percentile: float = PERCENTILE,
    norm: str = "linf",
    rtol: float = 1e-4,
) -> Estimate:
    """Compute the logarithm of the number K of cells in which a classifier is robust.

    The cells are the cubes of a grid over the smallest box that contains the data.
    """
    if norm not in _NORMS:
        raise ValueError(f"norm must be one of {sorted(_NORMS)}, got {norm!r}.")
    layers = only_layers("log_robustness", network)
    log_lipschitz, tolerance = (
        log_spectral_norms(layers, rtol) if norm == "l2" else (log_largest_rows(layers), 0.0)
    )
    ranges = _ranges(network)
    _check_chain(network, layers, norm)
    gamma = positive_margin(network, percentile)
    # a cube of side s has diameter s in the maximum norm, and s sqrt(n) in the Euclidean norm
    corner = math.sqrt(len(ranges)) if norm == "l2" else 1.0
    logs = ranges.log() + (math.log(2 * corner / gamma) + log_lipschitz)
    # from 2^52 cells on, rounding up changes nothing in floating point
    cells = torch.where(logs < 52 * math.log(2), logs.exp().ceil().clamp(min=1).log(), logs)
    return with_tolerance(Estimate(float(cells.sum())), tolerance * len(ranges))


def _check_chain(network: Network, layers: Sequence[AffineLayer], norm: str) -> None:
    """Refuse a network whose outputs may change faster than the product of its layers' norms."""
    with borrowed(network.module), torch.enable_grad():
        x = next(network.batches()).x[:1].detach().clone().requires_grad_()
        n_folded = sum(layer.norm is not None for layer in layers)
        why = find_faster_step(network(x), x, len(layers), n_folded, euclidean=norm == "l2")
    if why is not None:
        raise ValueError(
            "log_robustness needs a Lipschitz constant of the network. The product of the layers' "
            "norms is one for a chain of layers with activations of slope at most 1, and this "
            f"network is another: {why}. Use 'inverse_margin' or a norm over the margin."
        )


def _ranges(network: Network) -> Tensor:
    """Compute the range of each feature over the data, float64 of shape (number of features,)."""
    lowest, highest = [], []
    for batch in network.batches():
        if not (isinstance(batch.x, Tensor) and batch.x.is_floating_point()):
            kind = f"of {batch.x.dtype}" if isinstance(batch.x, Tensor) else type(batch.x).__name__
            raise ValueError(
                "log_robustness divides inputs of floating-point numbers into cells, but the "
                f"network takes inputs {kind}."
            )
        x = batch.x.flatten(1).double()
        lowest.append(x.amin(dim=0))
        highest.append(x.amax(dim=0))
    low, high = network.processes.join_rows(torch.stack(lowest), torch.stack(highest))
    return high.amax(dim=0) - low.amin(dim=0)

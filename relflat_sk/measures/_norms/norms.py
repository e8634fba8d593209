r"""Norms of a network's weights, divided by its margin or not: measures without any curvature.

With weights ``W_l`` of layers l = 1 .. L, batch norm folded into the layer before it, and the
margin ``gamma`` of `relflat_sk.measures._norms.margin` [1]_:

======================  ===================================================================
parameter_count         number of parameters, times the depth L or not (Section 2.1)
l2_norm                 ``sqrt(sum_l |W_l|_F^2)``
frobenius_product       ``prod_l |W_l|_F^2``
group_norm_product      ``prod_l |W_l|_{p,q}^2``: norm q over units of norms p of their weights
spectral_product        ``prod_l h_l |W_l|_2^2``
l1_path_norm            ``(sum over paths prod |w|)^2``
l2_path_norm            ``sum over paths prod w^2``
inverse_margin          ``1 / gamma^2`` [2]_
linf_lipschitz_product  ``prod_l |W_l|_{1,inf}`` (Section 2.3)
l2_lipschitz_product    ``prod_l |W_l|_2`` (Section 2.3)
log_robustness          ``log K`` of `relflat_sk.measures._norms.robustness` (Section 2.3)
======================  ===================================================================

The products and path norms have the unit of a product of L squared weights, the Lipschitz products
that of a product of L weights, `l2_norm` that of a weight, and `inverse_margin` that of one over a
squared logit. `parameter_count` and `log_robustness` have none.

*Constants.* The factors 4 per layer (2 in the l1 path norm) of [1]_, and the widths in its l2 path
norm, are left out: they are the same for all networks of one architecture.

*Convolutions* count as the linear maps that they are. ``|W|_2`` is the norm of the map from image
to image, and so is ``|W|_{1,inf}`` in a Lipschitz product. ``h_l`` is the size of the layer's
output for one sample: channels times positions, or the units of a linear layer. Paths lead from
pixel to pixel. Only ``|W|_F`` and the group norms are those of the kernel, with each weight
counted once, as in [1]_.

*Biases* count in the path norms and among the parameters only. In the path norms, each bias is a
path from an input that is always one, and so is the shift of a batch norm.

References
----------
.. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
   Sections 2.1 to 2.3.
.. [2] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR 2020.
"""

from collections.abc import Callable

from relflat_sk._network import Network, borrowed, layer_names
from relflat_sk._rescaling import fold_layers
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._norms.over_margin import PERCENTILE, estimate_from_log, log
from relflat_sk.measures._norms.path_norms import sum_over_paths
from relflat_sk.measures._norms.products import (
    frobenius_product,
    group_norm_product,
    l2_lipschitz_product,
    linf_lipschitz_product,
    other_weights,
    spectral_product,
)
from relflat_sk.measures._norms.robustness import log_robustness

__all__ = ["NORM_MEASURES"]


def parameter_count(network: Network, *, times_depth: bool = False) -> Estimate:
    """Count the numbers in all parameters of the network."""
    count = sum(parameter.numel() for parameter in network.module.parameters())
    return Estimate(float(count * (len(layer_names(network)) if times_depth else 1)))


def l2_norm(
    network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE
) -> Estimate:
    """Compute the Euclidean norm of all weights."""
    with borrowed(network.module):
        layers = fold_layers(network)
        weights = {layer.name: layer.weight for layer in layers}  # a layer called twice counts once
        squares = [float(weight.square().sum()) for weight in weights.values()]
        others = other_weights(network.module, layers)
        squares += [float(weight.double().square().sum()) for _, weight in others]
    return estimate_from_log(log(sum(squares)) / 2, network, over_margin, percentile, power=1)


def l1_path_norm(
    network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE
) -> Estimate:
    """Square the sum over all paths of products of the weights' magnitudes."""
    return estimate_from_log(2 * log(_path_sum(network, power=1)), network, over_margin, percentile)


def l2_path_norm(
    network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE
) -> Estimate:
    """Sum over all paths the products of the squared weights."""
    return estimate_from_log(log(_path_sum(network, power=2)), network, over_margin, percentile)


def inverse_margin(network: Network, *, percentile: float = PERCENTILE) -> Estimate:
    """Compute one over the square of the margin."""
    return estimate_from_log(0.0, network, over_margin=True, percentile=percentile)


# each takes a network, and keyword arguments of its own
NORM_MEASURES: dict[str, Callable[..., Estimate]] = {
    "parameter_count": parameter_count,
    "l2_norm": l2_norm,
    "frobenius_product": frobenius_product,
    "group_norm_product": group_norm_product,
    "spectral_product": spectral_product,
    "l1_path_norm": l1_path_norm,
    "l2_path_norm": l2_path_norm,
    "inverse_margin": inverse_margin,
    "linf_lipschitz_product": linf_lipschitz_product,
    "l2_lipschitz_product": l2_lipschitz_product,
    "log_robustness": log_robustness,
}


def _path_sum(network: Network, power: int) -> float:
    with borrowed(network.module):
        return sum_over_paths(network, fold_layers(network), power)

r"""Norms of a network's weights, divided by its margin or not: measures without any curvature.

With weights ``W_l`` of layers l = 1 .. L, batch norm folded into the layer before it, and the
margin ``gamma`` of `relflat_sk.measures._norms.margin` [1]_:

===================  ======================================================================
l2_norm              ``sqrt(sum_l |W_l|_F^2)``
frobenius_product    ``prod_l |W_l|_F^2``
spectral_product     ``prod_l h_l |W_l|_2^2``
l1_path_norm         ``(sum over paths prod |w|)^2``
l2_path_norm         ``sum over paths prod w^2``
inverse_margin       ``1 / gamma^2`` [2]_
===================  ======================================================================

The products and path norms have the unit of a product of L squared weights, `l2_norm` that of a
weight, and `inverse_margin` that of one over a squared logit.

*Constants.* The factors 4 per layer (2 in the l1 path norm) of [1]_, and the widths in its l2 path
norm, are left out: they are the same for all networks of one architecture.

*Convolutions* count as the linear maps that they are. ``|W|_2`` is the norm of the map from image
to image. ``h_l`` is the size of the layer's output for one sample: channels times positions, or
the units of a linear layer. Paths lead from pixel to pixel. Only ``|W|_F`` is that of the kernel,
with each weight counted once, as in [1]_.

*Biases* count in the path norms only. There each bias is a path from an input that is always
one, and so is the shift of a batch norm.

References
----------
.. [1] B. Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
   Section 2.2.
.. [2] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR 2020.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from relflat_sk._network import Network, borrowed
from relflat_sk._rescaling import AffineLayer, fold_layers
from relflat_sk._warnings import warn
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._norms.margin import margin
from relflat_sk.measures._norms.operator_norm import is_iterated, operator_norm
from relflat_sk.measures._norms.path_norms import sum_over_paths

__all__ = ["NORM_MEASURES"]

_LARGEST = math.log(sys.float_info.max)


def l2_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Compute the Euclidean norm of all weights.

    Parameters
    ----------
    network : Network
        A network whose batch norms, if any, directly follow a layer with a weight matrix.
    over_margin : bool, default=False
        Divide by the margin, which needs a classifier and labelled data.

    Returns
    -------
    Estimate
        Exact. Parameters with fewer than two axes, such as biases, do not count.
    """
    with borrowed(network.module):
        layers = fold_layers(network)
        weights = {layer.name: layer.weight for layer in layers}  # a layer called twice counts once
        squares = [float(weight.square().sum()) for weight in weights.values()]
        others = _other_weights(network.module, layers)
        squares += [float(weight.double().square().sum()) for _, weight in others]
    return _estimate(_log(sum(squares)) / 2, network, over_margin, power=1)


def frobenius_product(network: Network, *, over_margin: bool = False) -> Estimate:
    """Multiply the squared Frobenius norms of all layers' weights.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.

    Returns
    -------
    Estimate
        Exact.
    """
    with borrowed(network.module):
        layers = _only_layers("frobenius_product", network)
        logs = [_log(float(layer.weight.square().sum())) for layer in layers]
    return _estimate(sum(logs), network, over_margin)


def spectral_product(
    network: Network, *, over_margin: bool = False, rtol: float = 1e-4
) -> Estimate:
    """Multiply the squared spectral norms of all layers, times the sizes of their outputs.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.
    rtol : float, default=1e-4
        Relative tolerance of each squared spectral norm of a convolution that is too large to
        be written as a matrix. It limits the residual in Lanczos' iteration; the residual
        bounds the error, and is usually far larger than it.

    Returns
    -------
    Estimate
        Exact, or "lanczos" with a standard error that adds up the tolerances.
    """
    with borrowed(network.module):
        layers = _only_layers("spectral_product", network)
        logs = [
            math.log(layer.output_shape.numel()) + 2 * _log(operator_norm(layer, rtol))
            for layer in layers
        ]
        n_iterated = sum(map(is_iterated, layers))
    product = _estimate(sum(logs), network, over_margin)
    if not n_iterated:
        return product
    return Estimate(product.value, n_iterated * rtol * product.value, "lanczos")


def l1_path_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Square the sum over all paths of products of the weights' magnitudes.

    Parameters
    ----------
    network : Network
        A network that `path_norms.sum_over_paths` can follow.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.

    Returns
    -------
    Estimate
        Exact.
    """
    return _estimate(2 * _log(_path_sum(network, power=1)), network, over_margin)


def l2_path_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Sum over all paths the products of the squared weights.

    Parameters
    ----------
    network : Network
        A network that `path_norms.sum_over_paths` can follow.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.

    Returns
    -------
    Estimate
        Exact.
    """
    return _estimate(_log(_path_sum(network, power=2)), network, over_margin)


def inverse_margin(network: Network) -> Estimate:
    """Compute one over the square of the margin.

    Parameters
    ----------
    network : Network
        A classifier with labelled data.

    Returns
    -------
    Estimate
        In 1 over squared logits; nan, with a `FlatnessWarning`, if the margin is not positive.
    """
    return _estimate(0.0, network, over_margin=True)


# each takes a network, and keyword arguments of its own
NORM_MEASURES: dict[str, Callable[..., Estimate]] = {
    "l2_norm": l2_norm,
    "frobenius_product": frobenius_product,
    "spectral_product": spectral_product,
    "l1_path_norm": l1_path_norm,
    "l2_path_norm": l2_path_norm,
    "inverse_margin": inverse_margin,
}


def _estimate(log_norm: float, network: Network, over_margin: bool, power: int = 2) -> Estimate:
    """Return a norm from its logarithm, divided by a power of the margin if asked for."""
    if over_margin:
        gamma = margin(network)
        if not gamma > 0:
            warn(
                f"the margin is {gamma:.3g}, not positive: about 5% of the samples or more are "
                "classified wrongly, so a norm over the margin means nothing and is given as nan. "
                "Train until the network fits the training data, and measure on those."
            )
            return Estimate(math.nan)
        log_norm -= power * math.log(gamma)
    if log_norm > _LARGEST:
        warn(f"the norm is exp({log_norm:.6g}), too large for a float: it is given as infinite.")
        return Estimate(math.inf)
    return Estimate(math.exp(log_norm))


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _path_sum(network: Network, power: int) -> float:
    with borrowed(network.module):
        return sum_over_paths(network, fold_layers(network), power)


def _other_weights(
    module: nn.Module, layers: Sequence[AffineLayer]
) -> Iterator[tuple[str, Tensor]]:
    """List weights outside the called layers: of embeddings, recurrent cells, unused layers."""
    called: list[Any] = [layer.map.layer for layer in layers]
    known_layers, known_weights = {id(one) for one in called}, {id(one.weight) for one in called}
    for name, owner in module.named_modules():
        if id(owner) in known_layers or isinstance(owner, ParametrizationList):
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in known_weights:
                yield f"{name}.{key}".removeprefix("."), parameter.detach()


def _only_layers(measure: str, network: Network) -> Sequence[AffineLayer]:
    """List the layers of a network, and refuse one that has weights elsewhere."""
    layers = fold_layers(network)
    others = [name for name, _ in _other_weights(network.module, layers)]
    if others:
        raise ValueError(
            f"{measure} is a product over the linear and convolutional layers that are called, "
            f"but the network has other weights: {', '.join(others)}."
        )
    return layers

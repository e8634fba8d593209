r"""Norms of a network's weights, over its margin or not: the rivals that look at no curvature.

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

Each stands in the unit of a squared weight, or product of them, but for `l2_norm`.

*Constants.* The factors 4 per layer (2 in the l1 path norm) of [1]_, and the widths in its l2 path
norm, which are the same for all networks of one architecture, are left out.

*Convolutions* are the linear maps they are: ``|W|_2`` is the norm of the map from
image to image, h_l counts all numbers that it puts out for one sample (channels times
positions; of a linear layer its units), and paths lead from pixel to pixel. Only
``|W|_F`` is that of the kernel, each weight counted once, as in [1]_.

*Biases* count in no norm but those of paths, where each is a path from an input that is always
one, as a batch norm's shift then is too.

References
----------
.. [1] B. Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
   Section 2.2.
.. [2] Y. Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR 2020.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from relflat_sk._network import Network, borrowed
from relflat_sk._rescaling import AffineLayer, fold_layers
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._norms.margin import margin
from relflat_sk.measures._norms.operator_norm import is_iterated, operator_norm
from relflat_sk.measures._norms.path_norms import sum_over_paths

__all__ = ["NORMS"]

_LARGEST = math.log(sys.float_info.max)


def l2_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Compute the Euclidean norm of all weights.

    Parameters
    ----------
    network : Network
    over_margin : bool, default=False
        Divide by the margin.

    Returns
    -------
    Estimate
        Parameters with fewer than two axes, such as biases, are no weights.

    Raises
    ------
    ValueError
        If a batch norm cannot be folded into the layer before it, or there is no margin to
        divide by.
    """
    with borrowed(network.module):
        layers = fold_layers(network)
        weights = {layer.name: layer.weight for layer in layers}  # once, if called twice
        squares = [float(weight.square().sum()) for weight in weights.values()]
        others = _other_weights(network.module, layers)
        squares += [float(one.double().square().sum()) for _, one in others]
    return _estimate(_log(sum(squares)) / 2, network, over_margin, power=1)


def frobenius_product(network: Network, *, over_margin: bool = False) -> Estimate:
    """Multiply the squared Frobenius norms of all layers' weights.

    Parameters
    ----------
    network : Network
    over_margin : bool, default=False
        Divide by the square of the margin.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        If there are weights that belong to no linear or convolutional layer, a batch norm
        cannot be folded into the layer before it, or there is no margin to divide by.
    """
    with borrowed(network.module):
        layers = _only_layers("frobenius_product", network)
        logs = [_log(float(layer.weight.square().sum())) for layer in layers]
    return _estimate(sum(logs), network, over_margin)


def spectral_product(
    network: Network, *, over_margin: bool = False, rtol: float = 1e-4
) -> Estimate:
    """Multiply the squared spectral norms of all layers, times the numbers of their outputs.

    Parameters
    ----------
    network : Network
    over_margin : bool, default=False
        Divide by the square of the margin.
    rtol : float, default=1e-4
        Relative tolerance of each squared spectral norm, where a convolution is too large to
        write out: of the residual in Lanczos' iteration, which bounds the error, and is as a
        rule far larger.

    Returns
    -------
    Estimate
        Exact, or "lanczos"; the standard error is then what the tolerances amount to.

    Raises
    ------
    ValueError
        If there are weights that belong to no linear or convolutional layer, a batch norm
        cannot be folded into the layer before it, or there is no margin to divide by.
    """
    with borrowed(network.module):
        layers = _only_layers("spectral_product", network)
        logs = [
            math.log(layer.given.numel()) + 2 * _log(operator_norm(layer, rtol)) for layer in layers
        ]
        n_iterated = sum(map(is_iterated, layers))
    found = _estimate(sum(logs), network, over_margin)
    if not n_iterated:
        return found
    return Estimate(found.value, n_iterated * rtol * found.value, "lanczos")


def l1_path_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Square the sum over all paths of products of the weights' magnitudes.

    Parameters
    ----------
    network : Network
    over_margin : bool, default=False
        Divide by the square of the margin.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        See `path_norms.sum_over_paths`; if a batch norm cannot be folded into the layer
        before it, or there is no margin to divide by.
    """
    with borrowed(network.module):
        total = sum_over_paths(network, fold_layers(network), power=1)
    return _estimate(2 * _log(total), network, over_margin)


def l2_path_norm(network: Network, *, over_margin: bool = False) -> Estimate:
    """Sum over all paths the products of the squared weights.

    Parameters
    ----------
    network : Network
    over_margin : bool, default=False
        Divide by the square of the margin.

    Returns
    -------
    Estimate

    Raises
    ------
    ValueError
        See `path_norms.sum_over_paths`; if a batch norm cannot be folded into the layer
        before it, or there is no margin to divide by.
    """
    with borrowed(network.module):
        total = sum_over_paths(network, fold_layers(network), power=2)
    return _estimate(_log(total), network, over_margin)


def inverse_margin(network: Network) -> Estimate:
    """Compute one over the square of the margin.

    Parameters
    ----------
    network : Network

    Returns
    -------
    Estimate
        nan, with a `FlatnessWarning`, if the margin is not positive.

    Raises
    ------
    ValueError
        If there is no margin, see `relflat_sk.measures._norms.margin.sample_margins`.
    """
    return _estimate(0.0, network, over_margin=True)


# from a network, and keyword arguments of its own, to the measure
NORMS: dict[str, Callable[..., Estimate]] = {
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
            _warn(
                f"the margin is {gamma:.3g}, not positive: some 5% of the samples or more are "
                "classified wrongly, and a norm over the margin means nothing. It is given as nan. "
                "Train until the training data are fit, and measure on those."
            )
            return Estimate(math.nan)
        log_norm -= power * math.log(gamma)
    if log_norm > _LARGEST:
        _warn(f"the norm is exp({log_norm:.6g}), too large for a number: it is given as infinite.")
        return Estimate(math.inf)
    return Estimate(math.exp(log_norm))


def _warn(message: str) -> None:
    warnings.warn(message, FlatnessWarning, stacklevel=6)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _other_weights(
    module: nn.Module, layers: Sequence[AffineLayer]
) -> Iterator[tuple[str, Tensor]]:
    """List weights that no call of a layer uses: of embeddings, recurrent cells, ..."""
    called: list[Any] = [layer.map.layer for layer in layers]
    known = {id(layer) for layer in called}, {id(layer.weight) for layer in called}
    for name, owner in module.named_modules():
        if id(owner) in known[0] or isinstance(owner, ParametrizationList):
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in known[1]:
                yield f"{name}.{key}".removeprefix("."), parameter.detach()


def _only_layers(measure: str, network: Network) -> Sequence[AffineLayer]:
    layers = fold_layers(network)
    others = [name for name, _ in _other_weights(network.module, layers)]
    if others:
        raise ValueError(
            f"{measure} is a product over the linear and convolutional layers that are called, "
            f"but the network has other weights: {', '.join(others)}."
        )
    return layers

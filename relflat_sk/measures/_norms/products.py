"""Products of a norm over all layers, and the Lipschitz constants that they bound."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from relflat_sk._checks import is_number
from relflat_sk._network import Network, borrowed
from relflat_sk._rescaling import AffineLayer, fold_layers
from relflat_sk.measures._estimate import Estimate, with_tolerance
from relflat_sk.measures._norms.operator_norm import is_iterated, operator_norm
from relflat_sk.measures._norms.over_margin import PERCENTILE, estimate_from_log, log

__all__ = [
    "frobenius_product",
    "group_norm_product",
    "l2_lipschitz_product",
    "linf_lipschitz_product",
    "log_largest_rows",
    "log_spectral_norms",
    "only_layers",
    "other_weights",
    "spectral_product",
]


def frobenius_product(
    network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE
) -> Estimate:
    """Multiply the squared Frobenius norms of all layers' weights.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.
    percentile : float, default=5
        Percentile of the samples' margins that is the margin.

    Returns
    -------
    Estimate
        Exact.
    """
    layers = only_layers("frobenius_product", network)
    total = sum(log(float(layer.weight.square().sum())) for layer in layers)
    return estimate_from_log(total, network, over_margin, percentile)


def group_norm_product(
    network: Network,
    *,
    p: float = 1.0,
    q: float = math.inf,
    over_margin: bool = False,
    percentile: float = PERCENTILE,
) -> Estimate:
    r"""Multiply the squared group norms ``|W|_{p,q}`` of all layers' weights [1]_.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    p : float, default=1
        Of the norm over the weights of each row of W, those that lead to one hidden unit or
        channel; 1 or more, or infinite.
    q : float, default=inf
        Of the norm over the rows' norms. With ``p = q = 2`` this is `frobenius_product`.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.
    percentile : float, default=5
        Percentile of the samples' margins that is the margin.

    Returns
    -------
    Estimate
        Exact.

    Raises
    ------
    ValueError
        If `p` or `q` is less than 1.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 2.2.

    Examples
    --------
    >>> from relflat_sk import measure
    >>> net = nn.Linear(2, 2)
    >>> net.weight.data = torch.tensor([[1.0, -2.0], [2.0, 2.0]])
    >>> round(measure("group_norm_product", net, torch.eye(2), criterion=nn.MSELoss()), 6)
    16.0
    """
    for name, value in (("p", p), ("q", q)):
        if not (is_number(value) and value >= 1):
            raise ValueError(
                f"{name} must be a number of at least 1, or math.inf, got {value!r}: below 1 there "
                "is no norm."
            )
    layers = only_layers("group_norm_product", network)
    rows = [torch.linalg.vector_norm(layer.weight, ord=p, dim=1) for layer in layers]
    total = sum(2 * log(float(torch.linalg.vector_norm(norms, ord=q))) for norms in rows)
    return estimate_from_log(total, network, over_margin, percentile)


def spectral_product(
    network: Network,
    *,
    over_margin: bool = False,
    percentile: float = PERCENTILE,
    rtol: float = 1e-4,
) -> Estimate:
    """Multiply the squared spectral norms of all layers, times the sizes of their outputs.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the square of the margin, which needs a classifier and labelled data.
    percentile : float, default=5
        Percentile of the samples' margins that is the margin.
    rtol : float, default=1e-4
        Relative tolerance of each squared spectral norm of a convolution that is too large to
        be written as a matrix. It limits the residual in Lanczos' iteration; the residual
        bounds the error, and is usually far larger than it.

    Returns
    -------
    Estimate
        Exact, or "lanczos" with a standard error that adds up the tolerances.
    """
    layers = only_layers("spectral_product", network)
    sizes = sum(math.log(layer.output_shape.numel()) for layer in layers)
    norms, tolerance = log_spectral_norms(layers, rtol)
    product = estimate_from_log(sizes + 2 * norms, network, over_margin, percentile)
    return with_tolerance(product, 2 * tolerance * product.value)


def l2_lipschitz_product(
    network: Network,
    *,
    over_margin: bool = False,
    percentile: float = PERCENTILE,
    rtol: float = 1e-4,
) -> Estimate:
    """Multiply the spectral norms of all layers [1]_.

    In a chain of layers, with activations of slope at most 1, the product bounds how fast the
    outputs change with the inputs, both in the Euclidean norm.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the margin, which needs a classifier and labelled data.
    percentile : float, default=5
        Percentile of the samples' margins that is the margin.
    rtol : float, default=1e-4
        As in `spectral_product`.

    Returns
    -------
    Estimate
        Exact, or "lanczos" with a standard error that adds up the tolerances.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 2.3.

    Examples
    --------
    >>> from relflat_sk import measure
    >>> net = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data = torch.tensor([[3.0, 4.0]])
    >>> net[2].weight.data = torch.tensor([[2.0]])
    >>> round(measure("l2_lipschitz_product", net, torch.eye(2), criterion=nn.MSELoss()), 6)
    10.0
    """
    norms, tolerance = log_spectral_norms(only_layers("l2_lipschitz_product", network), rtol)
    product = estimate_from_log(norms, network, over_margin, percentile, power=1)
    return with_tolerance(product, tolerance * product.value)


def linf_lipschitz_product(
    network: Network, *, over_margin: bool = False, percentile: float = PERCENTILE
) -> Estimate:
    """Multiply the norms of all layers as maps between vectors with the maximum norm [1]_.

    In a chain of layers, with activations of slope at most 1, the product bounds how fast the
    largest change of an output grows with the largest change of an input.

    Parameters
    ----------
    network : Network
        A network that has weights in linear and convolutional layers only.
    over_margin : bool, default=False
        Divide by the margin, which needs a classifier and labelled data.
    percentile : float, default=5
        Percentile of the samples' margins that is the margin.

    Returns
    -------
    Estimate
        Exact.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 2.3.

    Examples
    --------
    >>> from relflat_sk import measure
    >>> net = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    >>> net[0].weight.data = torch.tensor([[3.0, 4.0]])
    >>> net[2].weight.data = torch.tensor([[2.0]])
    >>> round(measure("linf_lipschitz_product", net, torch.eye(2), criterion=nn.MSELoss()), 6)
    14.0
    """
    norms = log_largest_rows(only_layers("linf_lipschitz_product", network))
    return estimate_from_log(norms, network, over_margin, percentile, power=1)


def log_spectral_norms(layers: Sequence[AffineLayer], rtol: float) -> tuple[float, float]:
    """Add up the logarithms of the layers' spectral norms.

    Parameters
    ----------
    layers : sequence of AffineLayer
        The layers.
    rtol : float
        As in `spectral_product`.

    Returns
    -------
    tuple of (float, float)
        The sum, and its tolerance; 0 if it is exact.
    """
    tolerance = rtol / 2 * sum(map(is_iterated, layers))
    return sum(log(operator_norm(layer, rtol)) for layer in layers), tolerance


def log_largest_rows(layers: Sequence[AffineLayer]) -> float:
    """Add up the logarithms of the layers' norms as maps of vectors with the maximum norm.

    Parameters
    ----------
    layers : sequence of AffineLayer
        The layers.

    Returns
    -------
    float
        The sum over layers of the logarithm of ``max_j sum_k |A_jk|``, where A is the map from a
        layer's input to its output.
    """
    total = 0.0
    for layer in layers:
        ones = layer.weight.new_ones((1, *layer.input_shape))
        total += log(float(layer.apply(ones, layer.weight.abs()).max()))
    return total


def other_weights(module: nn.Module, layers: Sequence[AffineLayer]) -> Iterator[tuple[str, Tensor]]:
    """List weights outside the called layers: of embeddings, recurrent cells, unused layers.

    Parameters
    ----------
    module : nn.Module
        The network's module.
    layers : sequence of AffineLayer
        Its called layers.

    Yields
    ------
    tuple of (str, Tensor)
        Name and value of each parameter with two axes or more.
    """
    called: list[Any] = [layer.map.layer for layer in layers]
    known_layers, known_weights = {id(one) for one in called}, {id(one.weight) for one in called}
    for name, owner in module.named_modules():
        if id(owner) in known_layers or isinstance(owner, ParametrizationList):
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in known_weights:
                yield f"{name}.{key}".removeprefix("."), parameter.detach()


def only_layers(measure: str, network: Network) -> list[AffineLayer]:
    """List the called layers of a network, and refuse one that has weights elsewhere.

    Parameters
    ----------
    measure : str
        Name of the measure, for the message.
    network : Network
        The network.

    Returns
    -------
    list of AffineLayer
        In forward order, with batch norm folded in.

    Raises
    ------
    ValueError
        If there are other weights.
    """
    with borrowed(network.module):
        layers = fold_layers(network)
        # in training mode, spectral norm changes its buffers whenever a weight is read
        others = [name for name, _ in other_weights(network.module, layers)]
    if others:
        raise ValueError(
            f"{measure} is a product over the linear and convolutional layers that are called, "
            f"but the network has other weights: {', '.join(others)}."
        )
    return layers

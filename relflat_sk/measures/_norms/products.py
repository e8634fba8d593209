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
    """Multiply the squared Frobenius norms of all layers' weights."""
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
    r"""Multiply the squared group norms ``|W|_{p,q}`` of all layers' weights [1]_."""
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
    """Multiply the squared spectral norms of all layers, times the sizes of their outputs."""
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
    """
    norms = log_largest_rows(only_layers("linf_lipschitz_product", network))
    return estimate_from_log(norms, network, over_margin, percentile, power=1)


def log_spectral_norms(layers: Sequence[AffineLayer], rtol: float) -> tuple[float, float]:
    """Add up the logarithms of the layers' spectral norms."""
    tolerance = rtol / 2 * sum(map(is_iterated, layers))
    return sum(log(operator_norm(layer, rtol)) for layer in layers), tolerance


def log_largest_rows(layers: Sequence[AffineLayer]) -> float:
    """Add up the logarithms of the layers' norms as maps of vectors with the maximum norm."""
    total = 0.0
    for layer in layers:
        ones = layer.weight.new_ones((1, *layer.input_shape))
        total += log(float(layer.apply(ones, layer.weight.abs()).max()))
    return total


def other_weights(module: nn.Module, layers: Sequence[AffineLayer]) -> Iterator[tuple[str, Tensor]]:
    """List weights outside the called layers: of embeddings, recurrent cells, unused layers."""
    called: list[Any] = [layer.map.layer for layer in layers]
    known_layers, known_weights = {id(one) for one in called}, {id(one.weight) for one in called}
    for name, owner in module.named_modules():
        if id(owner) in known_layers or isinstance(owner, ParametrizationList):
            continue
        for key, parameter in owner.named_parameters(recurse=False):
            if parameter.ndim > 1 and id(parameter) not in known_weights:
                yield f"{name}.{key}".removeprefix("."), parameter.detach()


def only_layers(measure: str, network: Network) -> list[AffineLayer]:
    """List the called layers of a network, and refuse one that has weights elsewhere."""
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

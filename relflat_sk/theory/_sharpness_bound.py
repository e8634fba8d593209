"""The right-hand side of Theorem 1 of Neyshabur et al. (2017), from a network's constants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from relflat_sk._checks import check_number, is_number
from relflat_sk._losses import name_criterion
from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import Network, mean_loss
from relflat_sk.theory._chain import Chain, map_chains
from relflat_sk.theory._sharpness_conditions import sample_constants

__all__ = ["SharpnessBound", "sharpness_bound"]

# Lipschitz constants of losses in the outputs, in the Euclidean norm: the largest gradients are
# those of a sample that is given to a wrong class with certainty
_LIPSCHITZ = {nn.CrossEntropyLoss: math.sqrt(2), nn.BCEWithLogitsLoss: 1.0}


@dataclass(frozen=True)
class SharpnessBound:
    """The terms of Theorem 1, with constants of order one left out.

    Parameters
    ----------
    total : float
        The sum of the three terms, in the unit of the loss.
    empirical_risk : float
        Mean loss on the sample.
    sharpness : float
        The bound on the expected sharpness.
    complexity : float
        The square root that pays for the weights' size in units of the noise.
    mu, c_2, c_3 : float
        Constants with which the conditions C1 to C3 hold at all layers and samples.
    gammas : tuple of float
        ``gamma_i`` of each layer.
    """

    total: float
    empirical_risk: float
    sharpness: float
    complexity: float
    mu: float
    c_2: float
    c_3: float
    gammas: tuple[float, ...]


def sharpness_bound(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    sigma: float | Sequence[float],
    *,
    delta: float = 0.05,
    lipschitz: float | None = None,
    criterion: Any = None,
    batch_size: int = 16,
    device: Any = None,
) -> SharpnessBound:
    r"""Compute the right-hand side of the bound on the risk of a ReLU network with noisy weights.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        See `sharpness_conditions`; with two layers or more.
    X : array-like of n samples
        Inputs of the sample that the model was trained on.
    y : array-like of shape (n, ...)
        Labels, as in training.
    sigma : float or sequence of float
        Standard deviation of the noise on the weights, one for each layer in forward order or one
        for all.
    delta : float, default=0.05
        Probability with which the bound may fail.
    lipschitz : float, optional
        Lipschitz constant of the loss in the outputs, in the Euclidean norm. Known for
        `torch.nn.CrossEntropyLoss` (the root of 2) and `torch.nn.BCEWithLogitsLoss` (1) that take
        means without weights.
    criterion : torch loss, optional
        Needed for a bare module; an estimator knows its own.
    batch_size : int, default=16
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.

    Returns
    -------
    SharpnessBound
        Frozen, with `total` and its terms.

    Raises
    ------
    ValueError
        If the network is not a chain of two linear layers or more with ReLU in between, an argument
        is out of its range, or `lipschitz` is needed.

    Warns
    -----
    FlatnessWarning
        If samples are zero, which have no part in mu, C_2 and C_3.

    Notes
    -----
    Theorem 1 of [1]_ bounds the risk under noise :math:`\nu_i \sim N(0, \sigma_i^2)` on the weights
    of layer i of d, up to constants of order one, by the mean loss plus

    .. math::
        &\Bigl[\prod_i (1 + \gamma_i) - 1 + \prod_i (1 + \gamma_i C_2 C_\delta)
        \Bigl(\prod_i (1 + \gamma_i C_3 C_\delta) - 1\Bigr)\Bigr] C_L |f_w(x)| \\
        &+ \sqrt{\frac1n \Bigl(\sum_i \frac{|W_i|_F^2}{\sigma_i^2} + \ln\frac{2n}{\delta}\Bigr)},
        \qquad \gamma_i = \frac{\sigma_i \sqrt{h_i h_{i-1}}}{\mu^2 |W_i|_F}, \quad
        C_\delta = 2 \sqrt{\ln(d h / \delta)}

    with h the largest width and C_L the Lipschitz constant of the loss. Here the constants of order
    one are 1, mu and C_2, C_3 are the worst of all layers and of all samples that are not zero, and
    :math:`|f_w(x)|` is the mean over samples. So the result shows how the terms depend on the
    network and the noise, and is no guarantee; `pac_bayes_bound` is one. The paper has no biases;
    here they count only in the outputs. Compare the formula with the printed one before you cite
    it.

    References
    ----------
    .. [1] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017,
       Section 4.

    Examples
    --------
    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 2))
    >>> X = torch.randn(20, 3)
    >>> y = net(X).argmax(dim=1)
    >>> small, large = (
    ...     sharpness_bound(net, X, y, sigma, criterion=nn.CrossEntropyLoss())
    ...     for sigma in (1e-4, 1e-3)
    ... )
    >>> small.sharpness < large.sharpness, small.complexity > large.complexity
    (True, True)
    """
    check_number("delta", delta)
    if delta >= 1:
        raise ValueError(f"delta must be a probability below 1, got {delta!r}.")
    check_number("lipschitz", lipschitz, optional=True)
    network = to_network(model, X, y, DataOptions(criterion, batch_size, device))
    slope = _lipschitz(network) if lipschitz is None else lipschitz
    chains = map_chains(network, _summary)
    sizes, shapes, _ = chains[0]
    norms = torch.cat([norm for *_, norm in chains])
    sigmas = _sigmas(sigma, len(sizes))
    n, widths = len(norms), [shapes[0][1], *(shape[0] for shape in shapes)]
    mu, c_2, c_3 = _worst(network)
    gammas = tuple(
        one * math.sqrt(width * before) / (mu**2 * size) if mu and size else math.inf
        for one, size, (width, before) in zip(sigmas, sizes, shapes, strict=True)
    )
    c_delta = 2 * math.sqrt(math.log(len(sizes) * max(widths) / delta))
    if math.inf in (c_2, c_3, *gammas):
        sharpness = math.inf  # no constants satisfy the conditions
    else:
        spread = _product(gammas, 1.0) - 1
        switched = _product(gammas, c_2 * c_delta) * (_product(gammas, c_3 * c_delta) - 1)
        sharpness = (spread + switched) * slope * float(norms.mean())
    weights = sum((size / one) ** 2 for one, size in zip(sigmas, sizes, strict=True))
    complexity = math.sqrt((weights + math.log(2 * n / delta)) / n)
    risk = mean_loss(network)
    return SharpnessBound(
        risk + sharpness + complexity, risk, sharpness, complexity, mu, c_2, c_3, gammas
    )


def _summary(chain: Chain) -> tuple[list[float], list[tuple[int, int]], Tensor]:
    """Return the weights' norms and shapes, and the norms of the outputs, (n,)."""
    sizes = [float(weight.norm()) for weight in chain.weights]
    shapes = [(weight.shape[0], weight.shape[1]) for weight in chain.weights]
    return sizes, shapes, chain.outputs[-1].norm(dim=1)


def _worst(network: Network) -> tuple[float, float, float]:
    """Find the constants with which the conditions hold at all layers and samples."""
    values: dict[str, list[Tensor]] = {"C1": [], "C2": [], "C3": []}
    for (condition, *_), constants in sample_constants(network).items():
        values[condition].append(constants)
    if not values["C1"]:
        raise ValueError(
            "sharpness_bound needs a network of two layers or more: the conditions are about the "
            "layers between others."
        )
    c_1, c_2, c_3 = (torch.cat(parts) for parts in values.values())
    return float(c_1.min()), float(c_2.max()), float(c_3.max())


def _product(gammas: Sequence[float], factor: float) -> float:
    return math.prod(1 + factor * gamma for gamma in gammas)


def _sigmas(sigma: float | Sequence[float], n_layers: int) -> list[float]:
    """Return the noise of each layer, after a check."""
    sigmas = [float(sigma)] * n_layers if is_number(sigma) else list(sigma)  # type: ignore[arg-type]
    if len(sigmas) != n_layers:
        raise ValueError(
            f"sigma must be one number, or one for each of the {n_layers} layers, got "
            f"{len(sigmas)}."
        )
    for one in sigmas:
        check_number("sigma", one)
    return sigmas


def _lipschitz(network: Network) -> float:
    """Look up the Lipschitz constant of the loss."""
    criterion = network.loss.criterion
    own = (getattr(criterion, name, None) for name in ("weight", "pos_weight"))
    weighted = any(weight is not None for weight in own)
    # the sum over the outputs of a sample has larger gradients than their mean
    if type(criterion) not in _LIPSCHITZ or weighted or criterion.reduction != "mean":
        raise ValueError(
            f"the Lipschitz constant of {name_criterion(criterion)} is not known: pass lipschitz=, "
            "the largest norm of its gradient in the outputs of a sample."
        )
    return _LIPSCHITZ[type(criterion)]

r"""Measures of how much the loss rises when the weights are disturbed, by name.

========================  ================================================================
fisher_rao_norm           ``sqrt(mean_i <w, grad l_i>^2)`` [1]_
pac_bayes_flatness        ``1/sigma^2`` of the largest noise that the risk tolerates [2]_
pac_bayes_magnitude_...   the same with noise in proportion to each weight
expected_sharpness        mean rise of the loss under noise of ``alpha (10 |w| + 1)`` [3]_
keskar_sharpness          largest rise in a box of ``alpha (|w| + 1)``, relative [4]_
adaptive_sharpness        largest, or mean, rise in a box of ``rho |w|`` [5]_
========================  ================================================================

References
----------
.. [1] Liang et al., "Fisher-Rao Metric, Geometry, and Complexity of Neural Networks",
   AISTATS 2019.
.. [2] Jiang et al., "Fantastic Generalization Measures and Where to Find Them", ICLR
   2020.
.. [3] Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017.
.. [4] Keskar et al., "On Large-Batch Training for Deep Learning", ICLR 2017.
.. [5] Andriushchenko et al., "A Modern Look at the Relationship between Sharpness and
   Generalization", ICML 2023.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from relflat_sk._checks import check_number
from relflat_sk._losses import ProbabilityNLLLoss
from relflat_sk._network import Network, mean_loss
from relflat_sk._random import RandomState, draw_seeds
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._sharpness.fisher_rao import fisher_rao_norm
from relflat_sk.measures._sharpness.joint_eigenvalue import joint_eigenvalue_flatness
from relflat_sk.measures._sharpness.pac_bayes import (
    pac_bayes_flatness,
    pac_bayes_magnitude_flatness,
)
from relflat_sk.measures._sharpness.perturbation import (
    Weights,
    check_draws,
    estimate_mean,
    map_weights,
    noisy_risks,
    square_norm,
    weights_of,
)
from relflat_sk.measures._sharpness.worst_case import largest_rise

__all__ = [
    "SHARPNESS_MEASURES",
    "adaptive_sharpness",
    "expected_sharpness",
    "keskar_sharpness",
    "sharpness_curve",
]


def sharpness_curve(
    network: Network,
    alphas: Sequence[float],
    *,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> pd.DataFrame:
    r"""Measure expected sharpness, and the norm of the weights in units of the noise."""
    check_draws(n_draws)
    seeds = draw_seeds(random_state, n_draws)
    weights, loss = weights_of(network), mean_loss(network)
    rows = []
    for alpha in alphas:
        deviation = _deviation(weights, alpha)
        rise = estimate_mean(noisy_risks(network, deviation, seeds) - loss)
        rows.append((float(alpha), _divergence(weights, deviation), rise.value, rise.stderr))
    return pd.DataFrame(rows, columns=["alpha", "kl", "expected_sharpness", "stderr"])


def expected_sharpness(
    network: Network,
    *,
    alpha: float = 5e-4,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure the mean rise of the loss under noise of deviation ``alpha (10 |w| + 1)``."""
    check_draws(n_draws)
    return _mean_rise(network, _deviation(weights_of(network), alpha), n_draws, random_state)


def _mean_rise(
    network: Network, deviation: Weights, n_draws: int, random_state: RandomState
) -> Estimate:
    seeds = draw_seeds(random_state, n_draws)
    return estimate_mean(noisy_risks(network, deviation, seeds) - mean_loss(network))


def _deviation(weights: Weights, alpha: float) -> Weights:
    check_number("alpha", alpha)
    return map_weights(lambda value: alpha * (10 * value.abs() + 1), weights)


def _divergence(weights: Weights, deviation: Weights) -> float:
    """Kullback-Leibler divergence of N(w, deviation^2) from N(0, deviation^2), in nats."""
    shares = map_weights(lambda w, s: w.double() / s.double(), weights, deviation)
    return square_norm(shares) / 2


def keskar_sharpness(
    network: Network,
    *,
    alpha: float = 5e-4,
    n_steps: int = 20,
    n_restarts: int = 0,
    random_state: RandomState = None,
) -> Estimate:
    """Measure the largest rise of the loss in a box of ``alpha (|w| + 1)``, over 1 + loss."""
    check_number("alpha", alpha)
    radius = map_weights(lambda value: alpha * (value.abs() + 1), weights_of(network))
    loss, rise = largest_rise(
        network, radius, n_steps=n_steps, n_restarts=n_restarts, random_state=random_state
    )
    if loss <= -1:
        raise ValueError(
            f"keskar_sharpness divides by 1 + loss, and the mean loss is {loss:g}; use "
            "adaptive_sharpness for losses below -1."
        )
    return Estimate(rise / (1 + loss), 0.0, "ascent")


def adaptive_sharpness(  # noqa: PLR0913
    network: Network,
    *,
    kind: str = "worst",
    rho: float = 1e-3,
    norm: str = "linf",
    normalize_logits: bool = False,
    n_steps: int = 20,
    n_restarts: int = 0,
    n_draws: int = 10,
    random_state: RandomState = None,
) -> Estimate:
    """Measure how much the loss rises when each weight moves by a share of itself."""
    check_number("rho", rho)
    check_draws(n_draws)
    if kind not in {"worst", "average"}:
        raise ValueError(f"kind must be 'worst' or 'average', got {kind!r}.")
    network = with_unit_logits(network) if normalize_logits else network
    radius = map_weights(lambda value: rho * value.abs(), weights_of(network))
    if kind == "average":
        return _mean_rise(network, radius, n_draws, random_state)
    _, rise = largest_rise(
        network,
        radius,
        norm=norm,
        n_steps=n_steps,
        n_restarts=n_restarts,
        random_state=random_state,
    )
    return Estimate(rise, 0.0, "ascent")


# from the network's output, as the criterion takes it, to logits, and back
_LOGITS: dict[type, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    nn.CrossEntropyLoss: (lambda z: z, lambda z: z),
    nn.NLLLoss: (lambda z: z, lambda z: z.log_softmax(dim=1)),
    ProbabilityNLLLoss: (
        lambda p: (p + torch.finfo(p.dtype).tiny).log(),
        lambda z: z.softmax(dim=1),
    ),
}


def with_unit_logits(network: Network) -> Network:
    """Make a network whose logits are centred and of norm one, for each sample."""
    criterion = type(network.loss.criterion)
    if criterion not in _LOGITS:
        raise ValueError(
            f"normalize_logits needs a classifier trained with one of "
            f"{[known.__name__ for known in _LOGITS]}, got {criterion.__name__}."
        )
    to_logits, from_logits = _LOGITS[criterion]

    def forward(x: Any) -> Tensor:
        return from_logits(_unit(to_logits(_check_logits(network(x)))))

    return replace(network, forward=forward)


def _check_logits(output: Tensor) -> Tensor:
    if output.ndim != 2:
        raise ValueError(
            f"normalize_logits needs outputs of shape (n, n_classes), got {tuple(output.shape)}."
        )
    return output


def _unit(logits: Tensor) -> Tensor:
    return nn.functional.normalize(logits - logits.mean(dim=1, keepdim=True), dim=1)


# each takes a network, and keyword arguments of its own
SHARPNESS_MEASURES: dict[str, Callable[..., Estimate]] = {
    "fisher_rao_norm": fisher_rao_norm,
    "joint_eigenvalue_flatness": joint_eigenvalue_flatness,
    "pac_bayes_flatness": pac_bayes_flatness,
    "pac_bayes_magnitude_flatness": pac_bayes_magnitude_flatness,
    "expected_sharpness": expected_sharpness,
    "keskar_sharpness": keskar_sharpness,
    "adaptive_sharpness": adaptive_sharpness,
}

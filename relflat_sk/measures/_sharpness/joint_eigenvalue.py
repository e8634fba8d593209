r"""The largest eigenvalue of the Hessian in all weights of a network together.

With ``w`` the weights of all layers as one vector and ``H`` the Hessian of the mean loss in ``w``,
the measure is :math:`\kappa = \|w\|^2 \lambda_{\max}(H)` [1]_, first row of Table 1.

References
----------
.. [1] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
   Neural Networks", 2020.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relflat_sk._network import MathAttention, Network, borrowed, outcomes
from relflat_sk._random import RandomState
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._lanczos import largest_eigenvalue
from relflat_sk.measures._sharpness.perturbation import (
    Weights,
    square_norm,
    torch_recurrence,
    weights_of,
    with_weights,
)

__all__ = ["joint_eigenvalue_flatness"]


def joint_eigenvalue_flatness(
    network: Network, *, rtol: float = 0.01, random_state: RandomState = None
) -> Estimate:
    """Measure ``|w|^2 lambda_max(H)`` with the Hessian in all weights together."""
    weights = {name: value for name, value in weights_of(network).items() if value.ndim >= 2}
    like = list(weights.values())

    def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        parts = torch.split(torch.from_numpy(vector), [value.numel() for value in like])
        pairs = zip(parts, like, strict=True)
        products = _product(network, weights, [part.to(w).reshape(w.shape) for part, w in pairs])
        return torch.cat([one.double().flatten() for one in products]).cpu().numpy()

    size = sum(value.numel() for value in like)
    value, error = largest_eigenvalue(
        product, size, rtol=rtol, random_state=random_state, where="in all weights"
    )
    square = square_norm(weights)
    return Estimate(square * value, square * error, "lanczos")


def _product(network: Network, weights: Weights, vector: list[Tensor]) -> list[Tensor]:
    """Multiply the Hessian of the mean loss in the weights with a vector, in one pass."""
    total, divisor = [torch.zeros_like(part) for part in vector], 0.0
    with (
        borrowed(network.module),
        torch_recurrence(network.module),
        MathAttention(),
        torch.enable_grad(),
    ):
        leaves = {name: value.detach().requires_grad_() for name, value in weights.items()}
        inputs = list(leaves.values())
        for outcome in outcomes(with_weights(network, leaves)):
            loss, share = outcome.total()
            divisor += share
            if loss.requires_grad:
                slopes = torch.autograd.grad(
                    loss, inputs, create_graph=True, materialize_grads=True
                )
                along = torch.stack([
                    (a * b).sum() for a, b in zip(slopes, vector, strict=True)
                ]).sum()
                if along.requires_grad:
                    more = torch.autograd.grad(along, inputs, materialize_grads=True)
                    total = [a + b for a, b in zip(total, more, strict=True)]
                del slopes, along
            del loss, outcome  # frees this batch before the next one runs
    (divisor,) = network.processes.sum_numbers(divisor)
    return [network.processes.sum(part) / divisor for part in total]

r"""The Fisher-Rao norm: how fast each sample's loss changes along the weights themselves.

With ``l_i`` the loss of sample i, the norm is :math:`\sqrt{\frac1n \sum_i \langle w, \nabla_w
l_i \rangle^2}` [1]_. One Jacobian-vector product of a batch gives the derivative of the outputs
along the weights; its inner products with the losses' gradients in the outputs are the slopes.
The product is computed forward, or, where an operation of the network has no forward
derivative, by differentiating backward twice.

References
----------
.. [1] Liang, Poggio, Rakhlin and Stokes, "Fisher-Rao Metric, Geometry, and
   Complexity of Neural Networks", AISTATS 2019.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relflat_sk._network import MathAttention, Network, borrowed, outcomes
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._sharpness.perturbation import (
    Weights,
    map_weights,
    torch_recurrence,
    weights_of,
    with_weights,
)

__all__ = ["fisher_rao_norm"]


def fisher_rao_norm(network: Network) -> Estimate:
    """Measure ``sqrt(mean_i <w, grad l_i>^2)`` over all weights, biases included."""
    weights = weights_of(network)
    with borrowed(network.module), torch_recurrence(network.module), MathAttention():
        try:
            with torch.no_grad(), forward_ad.dual_level():
                return _norm(with_weights(network, map_weights(_dual, weights)), _tangent)
        except NotImplementedError:  # an operation without a forward derivative
            with torch.enable_grad():
                leaves = map_weights(lambda w: w.clone().requires_grad_(), weights)
                return _norm(with_weights(network, leaves), partial(_twice_backward, leaves))


def _norm(network: Network, tangent_of: Callable[[Tensor], Tensor]) -> Estimate:
    """Compute the norm, given the derivative of a batch's output along the weights."""
    squares, divisor, n = 0.0, 0.0, 0.0
    for outcome in outcomes(network):
        tangent = tangent_of(outcome.output)
        with torch.enable_grad():
            output = forward_ad.unpack_dual(outcome.output).primal  # type: ignore[no-untyped-call]
            output = output.detach().requires_grad_()
            losses, divisors = replace(outcome, output=output).each()
            (gradient,) = torch.autograd.grad(losses.sum(), output)
        slopes = (gradient * tangent).reshape(len(output), -1).sum(dim=1).double()
        squares += float(outcome.weight @ slopes.square())
        divisor += float(outcome.weight @ divisors.detach().double())
        n += float(outcome.weight.sum())
        del outcome, tangent, losses  # frees this batch before the next one runs
    squares, divisor, n = network.processes.sum_numbers(squares, divisor, n)
    return Estimate(math.sqrt(squares / n) * n / divisor)


def _dual(weight: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(weight, weight)  # type: ignore[no-untyped-call]
    return dual


def _tangent(output: Tensor) -> Tensor:
    tangent: Tensor | None = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(output) if tangent is None else tangent


def _twice_backward(weights: Weights, output: Tensor) -> Tensor:
    """Compute ``J w``, with J the output's Jacobian, as the derivative of ``<J^T u, w>`` in u."""
    u = torch.zeros_like(output, requires_grad=True)
    if not output.requires_grad:
        return u.detach()
    pulled_back = torch.autograd.grad(
        output, list(weights.values()), u, create_graph=True, allow_unused=True
    )
    along = [
        (part * w.detach()).sum()
        for part, w in zip(pulled_back, weights.values(), strict=True)
        if part is not None
    ]
    tangent: Tensor = torch.autograd.grad(torch.stack(along).sum(), u)[0]
    return tangent

r"""The Fisher-Rao norm: how fast each sample's loss changes along the weights themselves.

With ``l_i`` the loss of sample i, :math:`\sqrt{\frac1n \sum_i \langle w, \nabla_w l_i
\rangle^2}` [1]_. The inner products are the slopes of the losses along what one
Jacobian-vector product says of the outputs. It is taken forward, or, where an operation of
the network has no forward derivative, by differentiating backward twice.

References
----------
.. [1] T. Liang, T. Poggio, A. Rakhlin and J. Stokes, "Fisher-Rao Metric, Geometry, and
   Complexity of Neural Networks", AISTATS 2019.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relflat_sk._network import Network, borrowed, outcomes
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._sharpness.perturbation import Weights, at, own_recurrence, own_weights

__all__ = ["fisher_rao_norm"]


def fisher_rao_norm(network: Network) -> Estimate:
    """Measure ``sqrt(mean_i <w, grad l_i>^2)`` over all weights, biases included.

    Parameters
    ----------
    network : Network

    Returns
    -------
    Estimate
        Exact, in the unit of the loss. The samples' losses are those whose mean the criterion
        takes: class weights count, divided by their mean.

    Raises
    ------
    ValueError
        Without labels.
    """
    weights = own_weights(network)
    with borrowed(network.module), own_recurrence(network.module):
        try:
            with torch.no_grad(), forward_ad.dual_level():
                return _norm(at(network, _duals(weights)), _tangent)
        except NotImplementedError:  # an operation without a forward derivative
            with torch.enable_grad():
                leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
                return _norm(at(network, leaves), partial(_twice_backward, leaves))


def _norm(network: Network, tangent_of: Callable[[Tensor], Tensor]) -> Estimate:
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
        del outcome, tangent, losses  # nothing of a batch is alive when the next one is run
    return Estimate(math.sqrt(squares / n) * n / divisor)


def _duals(weights: Weights) -> Weights:
    return {
        name: forward_ad.make_dual(w, w)  # type: ignore[no-untyped-call]
        for name, w in weights.items()
    }


def _tangent(output: Tensor) -> Tensor:
    found: Tensor | None = forward_ad.unpack_dual(output).tangent  # type: ignore[no-untyped-call]
    return torch.zeros_like(output) if found is None else found


def _twice_backward(weights: Weights, output: Tensor) -> Tensor:
    """Differentiate ``<J^T u, w>``, J the Jacobian of the output, in u: ``J w``."""
    u = torch.zeros_like(output, requires_grad=True)
    if not output.requires_grad:
        return u.detach()
    found = torch.autograd.grad(
        output, list(weights.values()), u, create_graph=True, allow_unused=True
    )
    along = [
        (part * w.detach()).sum()
        for part, w in zip(found, weights.values(), strict=True)
        if part is not None
    ]
    tangent: Tensor = torch.autograd.grad(torch.stack(along).sum(), u)[0]
    return tangent

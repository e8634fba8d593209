r"""Takeuchi's criterion at a classifier's head, or a regressor's.

With ``g_i`` the gradient of the loss of sample i in the last layer's weight,
``C = mean_i g_i g_i^T``, and ``H`` the Hessian of the mean loss there, the criterion is
``Tr(H^-1 C) / n``, an estimate of the gap in the unit of the loss [1]_. ``H`` is singular, since a
softmax does not depend on the mean of its logits. So ``ridge`` times its diagonal is added to it:
the diagonal scales as ``H`` does, so that a rescaling of neurons leaves the criterion as it is,
which a multiple of the identity would not. Weights without any curvature, as those of a dead
neuron, do not count.

References
----------
.. [1] Thomas et al., "On the Interplay between Noise and Curvature and its Effect on
   Optimization and Generalization", AISTATS 2020.
"""

import math

import torch

from relflat_sk._checks import check_number
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.network import Network
from relflat_sk._numerics import or_one
from relflat_sk.measures._results import RESCALINGS, Estimate, NetworkMeasure, NotApplicableError
from relflat_sk.measures._scan import ForwardPass, scan

# largest size of the weight for which the Hessian is written out
_DENSE = 2**12
# smallest curvature that is not rounding, as a share of the largest
_ROUNDING = 1e-14


class _Moments:
    """Sums over samples of the Hessian and of the gradients' outer products at one layer.

    Shapes: `hessian`, `outer` (d * m, d * m).
    """

    def __init__(self) -> None:
        self.hessian = self.outer = torch.zeros(())

    def add(self, forward: ForwardPass) -> None:
        (layer,) = forward.layers.values()
        size = layer.map.weight.numel()
        if size > _DENSE or not layer.is_flat:
            raise NotApplicableError(
                "takeuchi_criterion inverts the Hessian in the last layer's weight, of at most "
                f"{_DENSE} numbers, which one vector for each sample is multiplied with; layer "
                f"{layer.name!r} has {size} and features of shape {tuple(layer.features.shape)}."
            )
        if forward.target is None:
            raise ValueError("y is needed: takeuchi_criterion takes gradients of losses. Pass y.")
        weights, phi = forward.row_weights(layer), layer.features.double()
        gradients = layer.map.transpose(layer.features, layer.loss_gradient()).double().flatten(1)
        self.outer = self.outer + (weights[:, None] * gradients).T @ gradients
        rows = []
        for unit in torch.eye(layer.weight.shape[0]).to(phi):
            product = layer.product(unit.expand(len(phi), -1)[:, :, None])[:, :, 0].double()
            along = (product * weights[:, None]).T[:, :, None] * phi  # (d, n, m)
            rows.append((along.transpose(1, 2) @ phi).transpose(0, 1).flatten(1))
        self.hessian = self.hessian + torch.cat(rows)


def _takeuchi_criterion(network: Network, *, ridge: float = 1e-3) -> Estimate:
    """Solve with the Hessian in units in which its diagonal is one."""
    check_number("ridge", ridge)
    moments = _Moments()
    with borrowed(network.module):
        summary = scan(network, [-1], moments.add)
    hessian, outer = moments.hessian, moments.outer
    diagonal = hessian.diagonal()
    curved = diagonal > _ROUNDING * diagonal.abs().amax()
    scale = or_one(diagonal.where(curved, 0.0)).sqrt()
    hessian, outer = ((one / scale / scale[:, None])[curved][:, curved] for one in (hessian, outer))
    root, failed = torch.linalg.cholesky_ex(hessian + ridge * torch.eye(len(hessian)).to(hessian))
    bent_down = bool((diagonal < -_ROUNDING * diagonal.abs().amax()).any())
    if (failed or bent_down) and math.isfinite(summary.loss):
        raise NotApplicableError(
            "the Hessian in the last layer's weight has negative eigenvalues, so the point is no "
            "minimum, and takeuchi_criterion has no meaning there. Train further."
        )
    # sums stand for means: n cancels in H^-1 C, and 1 / n is that of the criterion
    return Estimate(float(torch.cholesky_solve(outer, root).trace()) / summary.divisor)


TAKEUCHI = {"takeuchi_criterion": NetworkMeasure(_takeuchi_criterion, RESCALINGS, of_loss=True)}

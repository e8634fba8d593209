"""The best constant prediction, to which a trained network's loss is compared."""

import math

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from relflat_sk._losses.loss import Loss
from relflat_sk._losses.row import LINKS

__all__ = ["constant_risk"]


def constant_risk(
    loss: Loss, targets: Tensor, weight: Tensor, output_shape: torch.Size, link: str | None
) -> float:
    """Compute the mean loss of the best constant prediction.

    Parameters
    ----------
    loss : Loss
        The criterion.
    targets : Tensor of shape (n, ...)
        From `Loss.check_target`.
    weight : Tensor of shape (n,)
        Sample weights.
    output_shape : torch.Size
        Shape of the network's output for one sample.
    link : str or None
        What turns the last layer's output into the network's, from
        `relflat_sk._network.find_link`.

    Returns
    -------
    float
        In the unit of the loss; nan if no best prediction is found, as for a loss without
        lower bound.

    Examples
    --------
    The best constant for squared errors is the mean, and its mean loss is the variance:

    >>> targets = torch.tensor([[0.0], [2.0]])
    >>> mse = Loss(torch.nn.MSELoss())
    >>> constant_risk(mse, targets, torch.ones(2), torch.Size([1]), "identity")
    1.0
    """
    weight = weight.double()
    targets = targets.double() if targets.is_floating_point() else targets
    loss = loss.to(targets.device, torch.float64)

    def risk(constant: Tensor) -> Tensor:
        constant = constant.reshape(output_shape)
        output = constant.expand(len(targets), *output_shape)
        losses, divisors = loss.terms(output, targets, each=bool((weight != 1).any()))
        return (weight * losses).sum() / (weight * divisors).sum()

    # the formulas do not hold if the network turns logits into something else by mistake
    usual = link in {None, "identity"} or loss.has_closed_form(link)
    if usual and loss.row is not None and loss.row.best_constant is not None:
        best = loss.row.best_constant(loss.criterion, targets, weight, output_shape)
        return risk(best).item()

    def risk_and_slope(constant: np.ndarray) -> tuple[float, np.ndarray]:
        with torch.enable_grad():
            z = torch.tensor(constant, requires_grad=True, device=targets.device)
            value = risk(LINKS[link or "identity"](z))
            (slope,) = torch.autograd.grad(value, z)
        return value.item(), slope.cpu().numpy()

    start = np.zeros(output_shape.numel())
    found = minimize(risk_and_slope, start, jac=True, method="L-BFGS-B")
    return float(found.fun) if found.success else math.nan

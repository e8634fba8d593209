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
    """Compute the mean loss of the best constant prediction. Shapes: `weight` (n,)."""
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

"""What is known of each criterion: targets, divisors, best constants, curvature in closed form."""

from relflat_sk._losses.curvature import ClosedForm, Curvature, product_curvature, pull_back
from relflat_sk._losses.loss import Loss, Target, as_criterion
from relflat_sk._losses.table import LINKS, TABLE, ProbabilityNLLLoss

__all__ = [
    "LINKS",
    "TABLE",
    "ClosedForm",
    "Curvature",
    "Loss",
    "ProbabilityNLLLoss",
    "Target",
    "as_criterion",
    "product_curvature",
    "pull_back",
]

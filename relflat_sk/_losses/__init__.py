"""The table of criteria: targets, divisors, best constants, curvature in closed form."""

from relflat_sk._losses.array_losses import (
    ARRAY_LOSSES,
    ArrayLoss,
    find_array_loss,
    namespace,
    transposed,
)
from relflat_sk._losses.best_constant import constant_risk
from relflat_sk._losses.class_losses import ProbabilityNLLLoss
from relflat_sk._losses.criterion import as_criterion, name_criterion
from relflat_sk._losses.curvature import ClosedForm, Curvature, product_curvature, pull_back
from relflat_sk._losses.endings import explain_ending, warn_of_ending
from relflat_sk._losses.factor import Factor
from relflat_sk._losses.loss import Loss, weighted_loss
from relflat_sk._losses.many_classes import MANY, ManyClasses, Rows
from relflat_sk._losses.row import LINKS, Target
from relflat_sk._losses.table import TABLE

__all__ = [
    "ARRAY_LOSSES",
    "LINKS",
    "MANY",
    "TABLE",
    "ArrayLoss",
    "ClosedForm",
    "Curvature",
    "Factor",
    "Loss",
    "ManyClasses",
    "ProbabilityNLLLoss",
    "Rows",
    "Target",
    "as_criterion",
    "constant_risk",
    "explain_ending",
    "find_array_loss",
    "name_criterion",
    "namespace",
    "product_curvature",
    "pull_back",
    "transposed",
    "warn_of_ending",
    "weighted_loss",
]

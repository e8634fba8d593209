"""The table of criteria: targets, divisors, best constants, curvature in closed form."""

from relflat_sk._losses.array_losses import (
    ARRAY_LOSSES,
    ArrayLoss,
    find_array_loss,
    namespace,
    transposed,
)
from relflat_sk._losses.curvature import (
    ClosedForm,
    Curvature,
    Factor,
    check_twice,
    product_curvature,
    pull_back,
)
from relflat_sk._losses.loss import (
    Loss,
    as_criterion,
    constant_risk,
    explain_ending,
    name_criterion,
    warn_of_ending,
    weighted_loss,
)
from relflat_sk._losses.many_classes import MANY, ManyClasses
from relflat_sk._losses.table import LINKS, TABLE, ProbabilityNLLLoss, Target

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
    "Target",
    "as_criterion",
    "check_twice",
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

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

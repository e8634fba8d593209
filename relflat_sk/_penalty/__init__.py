"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.batch_flatness import changes_of_rows, n_shared, slopes_of_rows
from relflat_sk._penalty.capture import Plan
from relflat_sk._penalty.limit import PenaltyLimit, constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

__all__ = [
    "PenaltyLimit",
    "Plan",
    "RelativeFlatnessPenalty",
    "changes_of_rows",
    "constant_loss",
    "n_shared",
    "slopes_of_rows",
]

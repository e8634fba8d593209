"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.limit import PenaltyLimit, constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._penalty.random_changes import n_shared

__all__ = [
    "PenaltyLimit",
    "RelativeFlatnessPenalty",
    "constant_loss",
    "n_shared",
]

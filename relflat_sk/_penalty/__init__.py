"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.batch_flatness import n_shared
from relflat_sk._penalty.limit import PenaltyLimit, constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

__all__ = [
    "PenaltyLimit",
    "RelativeFlatnessPenalty",
    "constant_loss",
    "n_shared",
]

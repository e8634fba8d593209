"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.limit import constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

__all__ = ["RelativeFlatnessPenalty", "constant_loss"]

"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.limit import AT_LAST_LAYER, constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

__all__ = ["AT_LAST_LAYER", "RelativeFlatnessPenalty", "constant_loss"]

"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.gradient_limit import GradientLimit
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty

__all__ = ["GradientLimit", "RelativeFlatnessPenalty"]

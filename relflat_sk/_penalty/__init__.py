"""Relative flatness of a training batch, differentiable."""

from relflat_sk._penalty.limit import AT_EARLIER_LAYERS, AT_LAST_LAYER, constant_loss
from relflat_sk._penalty.penalty import RelativeFlatnessPenalty
from relflat_sk._penalty.random_changes import n_shared

__all__ = [
    "AT_EARLIER_LAYERS",
    "AT_LAST_LAYER",
    "RelativeFlatnessPenalty",
    "constant_loss",
    "n_shared",
]

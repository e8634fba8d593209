"""Search for flat minima: train candidates, rank them by flatness, predict with their mean."""

from relflat_sk.search._cross_validation import (
    FlattestWithin,
    RelativeFlatnessPenaltyCV,
    flattest_within,
)
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._rank_models import rank_models
from relflat_sk.search._search import FlatMinimaSearch

__all__ = [
    "FlatMinimaSearch",
    "FlattestWithin",
    "MinimaObjective",
    "RelativeFlatnessPenaltyCV",
    "flattest_within",
    "rank_models",
]

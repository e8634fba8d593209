"""Search for flat minima: train candidates, rank them by flatness, predict with their mean."""

from relflat_sk.search._flattest_within import FlattestWithin, flattest_within
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._penalty_cv import RelativeFlatnessPenaltyCV
from relflat_sk.search._rank_models import rank_models
from relflat_sk.search._search import Choice, FlatMinimaSearch
from relflat_sk.search._workers import optimize_study

__all__ = [
    "Choice",
    "FlatMinimaSearch",
    "FlattestWithin",
    "MinimaObjective",
    "RelativeFlatnessPenaltyCV",
    "flattest_within",
    "optimize_study",
    "rank_models",
]

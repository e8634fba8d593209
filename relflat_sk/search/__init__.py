"""Train candidates, rank the minima by flatness, hand one out."""

from relflat_sk.search._flattest_within import flattest_within
from relflat_sk.search._search import FlatMinimaSearch
from relflat_sk.search._trial import MinimaObjective

__all__ = ["FlatMinimaSearch", "MinimaObjective", "flattest_within"]

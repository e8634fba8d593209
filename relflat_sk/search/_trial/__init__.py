"""One trial: a candidate trained on all the data, measured and stored."""

from relflat_sk.search._trial.objective import MinimaObjective
from relflat_sk.search._trial.space import Space
from relflat_sk.search._trial.weights import ARTIFACT

__all__ = ["ARTIFACT", "MinimaObjective", "Space"]

"""One trial of a search: a candidate is trained on all the data, measured and recorded."""

from relflat_sk.search._trial.objective import MinimaObjective
from relflat_sk.search._trial.space import Space
from relflat_sk.search._trial.weights import ARTIFACT

__all__ = ["ARTIFACT", "MinimaObjective", "Space"]

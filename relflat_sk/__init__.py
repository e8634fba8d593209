"""Relative flatness of trained networks for scikit-learn, skorch and Optuna."""

from relflat_sk.callbacks import StopAtGradientNorm, StopAtLoss
from relflat_sk.correlation import correlate
from relflat_sk.exceptions import FlatnessWarning, LayerNotFoundError
from relflat_sk.measures import (
    flatness_report,
    get_measure_names,
    measure,
    relative_flatness,
)
from relflat_sk.minima import rank_minima
from relflat_sk.models import MLP
from relflat_sk.nets import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk.objective import MinimaObjective
from relflat_sk.penalty import RelativeFlatnessPenalty
from relflat_sk.plots import FlatnessGapDisplay, MinimaRankingDisplay
from relflat_sk.reparameterize import reparameterize
from relflat_sk.scorer import FlatnessScorer
from relflat_sk.study import FlatMinimaSearch

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  (grouped by what one does with them)
    # measuring
    "relative_flatness",
    "measure",
    "flatness_report",
    "get_measure_names",
    # scoring
    "FlatnessScorer",
    # training
    "RelativeFlatnessRegularizedNet",
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedRegressor",
    "MLP",
    "StopAtLoss",
    "StopAtGradientNorm",
    "RelativeFlatnessPenalty",
    # searching and ranking
    "MinimaObjective",
    "FlatMinimaSearch",
    "rank_minima",
    "correlate",
    # theory
    "reparameterize",
    # plots
    "FlatnessGapDisplay",
    "MinimaRankingDisplay",
    # errors and warnings
    "FlatnessWarning",
    "LayerNotFoundError",
]

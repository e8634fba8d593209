"""Relative flatness of trained networks for scikit-learn, skorch and Optuna."""

from relflat_sk.callbacks import StopAtGradientNorm, StopAtLoss
from relflat_sk.conditions import sharpness_conditions
from relflat_sk.correlation import correlate
from relflat_sk.exceptions import FlatnessWarning, LayerNotFoundError
from relflat_sk.granulated import granulated_kendall
from relflat_sk.label_noise_plots import LabelNoiseDisplay
from relflat_sk.measure_plots import MeasurePanelsDisplay
from relflat_sk.measures import (
    flatness_report,
    get_measure_names,
    measure,
    relative_flatness,
)
from relflat_sk.minima import rank_minima
from relflat_sk.minima_plots import FlatnessGapDisplay, MinimaRankingDisplay
from relflat_sk.model_plots import LayerFlatnessDisplay, SharpnessKLDisplay
from relflat_sk.models import MLP
from relflat_sk.mutual_information import conditional_mutual_information
from relflat_sk.neighbours import label_constancy
from relflat_sk.nets import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk.objective import MinimaObjective
from relflat_sk.penalty import RelativeFlatnessPenalty
from relflat_sk.reparameterize import reparameterize
from relflat_sk.representativeness import generalization_bound, representativeness
from relflat_sk.robustness import feature_robustness
from relflat_sk.sam import SharpnessAwareMixin
from relflat_sk.scorer import FlatnessScorer
from relflat_sk.selection import flattest_within
from relflat_sk.study import FlatMinimaSearch
from relflat_sk.training_plots import FlatnessHistoryDisplay

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
    "SharpnessAwareMixin",
    "MLP",
    "StopAtLoss",
    "StopAtGradientNorm",
    "RelativeFlatnessPenalty",
    # searching and ranking
    "MinimaObjective",
    "FlatMinimaSearch",
    "rank_minima",
    "correlate",
    "granulated_kendall",
    "conditional_mutual_information",
    "flattest_within",
    # theory
    "sharpness_conditions",
    "feature_robustness",
    "representativeness",
    "generalization_bound",
    "label_constancy",
    "reparameterize",
    # plots
    "FlatnessGapDisplay",
    "MinimaRankingDisplay",
    "MeasurePanelsDisplay",
    "LabelNoiseDisplay",
    "LayerFlatnessDisplay",
    "FlatnessHistoryDisplay",
    "SharpnessKLDisplay",
    # errors and warnings
    "FlatnessWarning",
    "LayerNotFoundError",
]

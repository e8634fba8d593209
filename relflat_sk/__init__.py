"""Relative flatness of trained networks for scikit-learn, skorch and Optuna."""

from relflat_sk.exceptions import FlatnessWarning, LayerNotFoundError
from relflat_sk.fleet import FleetTrainer, fleet_training
from relflat_sk.measures import (
    FlatnessScorer,
    flatness_report,
    get_measure_names,
    measure,
    register_measure,
    relative_flatness,
)
from relflat_sk.minima import (
    conditional_mutual_information,
    correlate,
    granulated_kendall,
    rank_minima,
)
from relflat_sk.plots import (
    FlatnessGapDisplay,
    FlatnessHistoryDisplay,
    HyperparameterDisplay,
    LabelNoiseDisplay,
    LayerFlatnessDisplay,
    MeasurePanelsDisplay,
    MinimaRankingDisplay,
    SharpnessKLDisplay,
    TrainingCurvesDisplay,
)
from relflat_sk.search import FlatMinimaSearch, MinimaObjective, flattest_within, optimize_study
from relflat_sk.theory import (
    feature_robustness,
    generalization_bound,
    label_constancy,
    neuron_robustness,
    pac_bayes_bound,
    reparameterize,
    representativeness,
    sharpness_conditions,
    worst_feature_robustness,
)
from relflat_sk.training import (
    MLP,
    RelativeFlatnessPenalty,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
    SharpnessAwareMixin,
    StopAtGradientNorm,
    StopAtLoss,
)

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022  (grouped by what one does with them)
    # measuring
    "relative_flatness",
    "measure",
    "flatness_report",
    "get_measure_names",
    "register_measure",
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
    "FleetTrainer",
    "fleet_training",
    # searching and ranking
    "MinimaObjective",
    "FlatMinimaSearch",
    "optimize_study",
    "rank_minima",
    "correlate",
    "granulated_kendall",
    "conditional_mutual_information",
    "flattest_within",
    # theory
    "sharpness_conditions",
    "feature_robustness",
    "worst_feature_robustness",
    "neuron_robustness",
    "representativeness",
    "generalization_bound",
    "label_constancy",
    "pac_bayes_bound",
    "reparameterize",
    # plots
    "FlatnessGapDisplay",
    "MinimaRankingDisplay",
    "MeasurePanelsDisplay",
    "LabelNoiseDisplay",
    "LayerFlatnessDisplay",
    "FlatnessHistoryDisplay",
    "SharpnessKLDisplay",
    "TrainingCurvesDisplay",
    "HyperparameterDisplay",
    # errors and warnings
    "FlatnessWarning",
    "LayerNotFoundError",
]

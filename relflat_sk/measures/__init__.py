"""Measures of flatness, by name and as a scikit-learn scorer."""

# for the packages above, not public
from relflat_sk.measures._api import evaluate, flatness_report, measure, relative_flatness
from relflat_sk.measures._layer_measures import (
    measure_feature_curvature as measure_feature_curvature,
)
from relflat_sk.measures._layer_measures import measure_flatness as measure_flatness
from relflat_sk.measures._layer_measures import measure_layers as measure_layers
from relflat_sk.measures._measure_network import check_arguments as check_arguments
from relflat_sk.measures._measure_network import check_at_loss as check_at_loss
from relflat_sk.measures._measure_network import check_layers as check_layers
from relflat_sk.measures._measure_network import (
    criterion_has_curvature as criterion_has_curvature,
)
from relflat_sk.measures._measure_network import measure_network as measure_network
from relflat_sk.measures._minimum import ConstantComparison as ConstantComparison
from relflat_sk.measures._minimum import compare_with_constant as compare_with_constant
from relflat_sk.measures._minimum import has_vanished as has_vanished
from relflat_sk.measures._names import find_measure as find_measure
from relflat_sk.measures._names import find_measures as find_measures
from relflat_sk.measures._names import get_measure_names, register_measure
from relflat_sk.measures._names import hold_functions as hold_functions
from relflat_sk.measures._own import OwnMeasure as OwnMeasure
from relflat_sk.measures._perturbation import draw_noise as draw_noise
from relflat_sk.measures._perturbation import parameters_of as parameters_of
from relflat_sk.measures._perturbation import square_norm as square_norm
from relflat_sk.measures._perturbation import weights_of as weights_of
from relflat_sk.measures._perturbation import with_weights as with_weights
from relflat_sk.measures._results import Flatness
from relflat_sk.measures._scan import find_measured_layer as find_measured_layer
from relflat_sk.measures._score import count_errors as count_errors
from relflat_sk.measures._scorer import FlatnessScorer
from relflat_sk.measures._scorer import MeasureSpec as MeasureSpec
from relflat_sk.measures._scorer import flatness_columns as flatness_columns
from relflat_sk.measures._scorer import read_measure as read_measure
from relflat_sk.measures._sensitivity import layer_sensitivity
from relflat_sk.measures._sharpness import sharpness_curve as sharpness_curve

__all__ = [
    "Flatness",
    "FlatnessScorer",
    "evaluate",
    "flatness_report",
    "get_measure_names",
    "layer_sensitivity",
    "measure",
    "register_measure",
    "relative_flatness",
]

"""Measures of flatness, by name and as a scikit-learn scorer."""

# for the packages above, not public
from relflat_sk.measures._api import check_name as check_name
from relflat_sk.measures._api import (
    evaluate,
    flatness_report,
    get_measure_names,
    measure,
    relative_flatness,
)
from relflat_sk.measures._flatness import Flatness
from relflat_sk.measures._flatness import find_measured_layer as find_measured_layer
from relflat_sk.measures._flatness import measure_flatness as measure_flatness
from relflat_sk.measures._flatness import measure_layers as measure_layers
from relflat_sk.measures._history import flatness_columns as flatness_columns
from relflat_sk.measures._measure_network import check_arguments as check_arguments
from relflat_sk.measures._measure_network import measure_network as measure_network
from relflat_sk.measures._minimum import ConstantComparison as ConstantComparison
from relflat_sk.measures._minimum import compare_with_constant as compare_with_constant
from relflat_sk.measures._registry import check_names as check_names
from relflat_sk.measures._scorer import FlatnessScorer
from relflat_sk.measures._sharpness import sharpness_curve as sharpness_curve

__all__ = [
    "Flatness",
    "FlatnessScorer",
    "evaluate",
    "flatness_report",
    "get_measure_names",
    "measure",
    "relative_flatness",
]

"""Measures of flatness, by name and as a scikit-learn scorer."""

from relflat_sk.measures._api import flatness_report, measure, relative_flatness
from relflat_sk.measures._measure_network import get_measure_names
from relflat_sk.measures._minimum import ConstantComparison
from relflat_sk.measures._scorer import FlatnessScorer
from relflat_sk.measures._sensitivity import layer_sensitivity

__all__ = [
    "ConstantComparison",
    "FlatnessScorer",
    "flatness_report",
    "get_measure_names",
    "layer_sensitivity",
    "measure",
    "relative_flatness",
]

"""Measures from the Hessian of the loss in one layer's weight."""

from relflat_sk.measures._flatness.feature_curvature import measure_feature_curvature
from relflat_sk.measures._flatness.flatness import (
    LAYER_MEASURES,
    measure_flatness,
    measure_layers,
)
from relflat_sk.measures._flatness.scan import find_measured_layer
from relflat_sk.measures._flatness.stacked_pass import plan_stacked_pass
from relflat_sk.measures._flatness.summary import Flatness, Summary, summarize
from relflat_sk.measures._flatness.trace_measures import LARGEST_NEURON, TRACE_LIKE

__all__ = [
    "LARGEST_NEURON",
    "LAYER_MEASURES",
    "TRACE_LIKE",
    "Flatness",
    "Summary",
    "find_measured_layer",
    "measure_feature_curvature",
    "measure_flatness",
    "measure_layers",
    "plan_stacked_pass",
    "summarize",
]

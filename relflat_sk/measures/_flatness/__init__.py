"""Measures from the Hessian of the loss in one layer's weight."""

from relflat_sk.measures._flatness.flatness import (
    LAYER_MEASURES,
    measure_flatness,
    measure_layers,
    summarize,
)
from relflat_sk.measures._flatness.layer_curvature import observe
from relflat_sk.measures._flatness.summary import Flatness, Summary
from relflat_sk.measures._flatness.trace_measures import TRACE_LIKE

__all__ = [
    "LAYER_MEASURES",
    "TRACE_LIKE",
    "Flatness",
    "Summary",
    "measure_flatness",
    "measure_layers",
    "observe",
    "summarize",
]

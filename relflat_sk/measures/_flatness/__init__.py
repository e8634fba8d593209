"""Measures from the Hessian of the loss in one layer's weight."""

from relflat_sk.measures._flatness.flatness import (
    EIGENVALUE_LIKE,
    TRACE_LIKE,
    Flatness,
    layer_names,
    measure_eigenvalues,
    measure_flatness,
    measure_gradients,
    measure_layers,
    see_network,
)
from relflat_sk.measures._flatness.layer_curvature import observe

__all__ = [
    "EIGENVALUE_LIKE",
    "TRACE_LIKE",
    "Flatness",
    "layer_names",
    "measure_eigenvalues",
    "measure_flatness",
    "measure_gradients",
    "measure_layers",
    "observe",
    "see_network",
]

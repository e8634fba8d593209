"""How the loss or the accuracy reacts to changes of the weights."""

from relflat_sk.measures._sharpness.pac_bayes import count_errors
from relflat_sk.measures._sharpness.perturbation import (
    Weights,
    add_weights,
    draw_noise,
    square_norm,
    weights_of,
    with_weights,
)
from relflat_sk.measures._sharpness.sharpness import SHARPNESS_MEASURES, sharpness_curve

__all__ = [
    "SHARPNESS_MEASURES",
    "Weights",
    "add_weights",
    "count_errors",
    "draw_noise",
    "sharpness_curve",
    "square_norm",
    "weights_of",
    "with_weights",
]

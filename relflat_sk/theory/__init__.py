"""The generalisation bound by relative flatness, its parts, and the conditions they rest on."""

from relflat_sk._rescaling import reparameterize
from relflat_sk.theory._bound import generalization_bound
from relflat_sk.theory._label_constancy import label_constancy
from relflat_sk.theory._representativeness import representativeness
from relflat_sk.theory._robustness import feature_robustness
from relflat_sk.theory._sharpness_conditions import sharpness_conditions

__all__ = [
    "feature_robustness",
    "generalization_bound",
    "label_constancy",
    "reparameterize",
    "representativeness",
    "sharpness_conditions",
]

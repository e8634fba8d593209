"""The generalisation bound by relative flatness, its parts, and the conditions they rest on."""

from relflat_sk.theory._bound import (
    GeneralizationBound,
    Smoothing,
    generalization_bound,
    representativeness,
)
from relflat_sk.theory._label_constancy import label_constancy
from relflat_sk.theory._pac_bayes_bound import PacBayesBound, pac_bayes_bound
from relflat_sk.theory._reparameterize import reparameterize
from relflat_sk.theory._robustness import (
    WorstRobustness,
    feature_robustness,
    neuron_robustness,
    worst_feature_robustness,
)
from relflat_sk.theory._sharpness import SharpnessBound, sharpness_bound, sharpness_conditions

__all__ = [
    "GeneralizationBound",
    "PacBayesBound",
    "SharpnessBound",
    "Smoothing",
    "WorstRobustness",
    "feature_robustness",
    "generalization_bound",
    "label_constancy",
    "neuron_robustness",
    "pac_bayes_bound",
    "reparameterize",
    "representativeness",
    "sharpness_bound",
    "sharpness_conditions",
    "worst_feature_robustness",
]

"""The generalisation bound by relative flatness, its parts, and the conditions they rest on."""

from relflat_sk._rescaling import reparameterize
from relflat_sk.theory._bound import generalization_bound
from relflat_sk.theory._condition_parts import activation_curve, interaction_factors
from relflat_sk.theory._label_constancy import label_constancy
from relflat_sk.theory._neuron_robustness import neuron_robustness
from relflat_sk.theory._pac_bayes_bound import PacBayesBound, pac_bayes_bound
from relflat_sk.theory._representativeness import representativeness
from relflat_sk.theory._robustness import feature_robustness
from relflat_sk.theory._sharpness_bound import SharpnessBound, sharpness_bound
from relflat_sk.theory._sharpness_conditions import sharpness_conditions
from relflat_sk.theory._worst_robustness import worst_feature_robustness

__all__ = [
    "PacBayesBound",
    "SharpnessBound",
    "activation_curve",
    "feature_robustness",
    "generalization_bound",
    "interaction_factors",
    "label_constancy",
    "neuron_robustness",
    "pac_bayes_bound",
    "reparameterize",
    "representativeness",
    "sharpness_bound",
    "sharpness_conditions",
    "worst_feature_robustness",
]

r"""The flatness measures of the papers' Table 1, at one layer or several.

With ``H`` the Hessian of the mean loss in the layer's weight ``W`` (d x m, rows ``w_s``):

===========================  ==============================================================
relative_flatness            ``kappa = sum_st <w_s, w_t> Tr(H_st)`` [1]_, Definition 3
normalized_relative_flatness ``kappa`` of features divided by their spread, Theorem 4
trace_flatness               ``|W|_F^2 Tr(H)`` [2]_
eigenvalue_flatness          ``|W|_F^2 lambda_max(H)`` [2]_
neuron_flatness_max          ``max_j rho(j)``, rho(j) the form of H in column j of W [2]_
neuron_flatness_sum          ``sum_j rho(j)``
hessian_trace                ``Tr(H)``
hessian_max_eigenvalue       ``lambda_max(H)``
gradient_norm                norm of the gradient of the mean loss in ``W``
===========================  ==============================================================

References
----------
.. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
.. [2] Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
   Neural Networks", 2020.
"""

import math
from collections.abc import Sequence
from typing import Any

from relflat_sk._network import Layer, Network, borrowed
from relflat_sk._random import RandomState
from relflat_sk.measures._flatness.eigenvalue import EIGENVALUE_LIKE, EigenvalueMeasures
from relflat_sk.measures._flatness.gradient_norm import GRADIENT_NORM, GradientNorms
from relflat_sk.measures._flatness.summary import Flatness, Found, Summary, summarize
from relflat_sk.measures._flatness.trace_measures import TRACE_LIKE, TraceMeasures

__all__ = ["LAYER_MEASURES", "finish_measures", "measure_flatness", "measure_layers"]

# the measures that belong to one layer
LAYER_MEASURES = (*TRACE_LIKE, *EIGENVALUE_LIKE, GRADIENT_NORM)


def measure_layers(  # noqa: PLR0913
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
    per_sample: bool = False,
) -> Found:
    """Measure several layers in several ways, with as few passes over the data as possible."""
    with borrowed(network.module):
        groups: list[TraceMeasures | GradientNorms | EigenvalueMeasures] = []
        if traces := [name for name in names if name in TRACE_LIKE]:
            groups.append(
                TraceMeasures(
                    network,
                    traces,
                    method=method,
                    n_probes=n_probes,
                    rtol=rtol,
                    random_state=random_state,
                    per_sample=per_sample,
                )
            )
        if GRADIENT_NORM in names:
            groups.append(GradientNorms(network))
        if EIGENVALUE_LIKE.keys() & set(names):
            groups.append(EigenvalueMeasures(network, rtol=rtol, random_state=random_state))
        visits = [group.add for group in groups]
        summary = summarize(network, layers, *visits)
        if summary.divisor == 0:
            raise ValueError(
                "no sample counts in the mean loss: every label is ignored (ignore_index) or "
                "has weight zero."
            )
        return finish_measures(groups, summary, names, weight_decay)


def finish_measures(
    groups: Sequence[TraceMeasures | GradientNorms | EigenvalueMeasures],
    summary: Summary,
    names: Sequence[str],
    weight_decay: float = 0.0,
) -> Found:
    """Compute measures from the sums of a pass over the data, and with further passes if needed."""
    found: Found = {}
    for group in groups:
        found |= group.finish(summary, weight_decay)
    if summary.has_labels and math.isnan(summary.loss):
        # closed forms do not see the loss, which may not be defined at these outputs
        found = {key: one.without_value() for key, one in found.items()}
    return {(layer, name): found[layer, name] for layer in summary.layer_weights for name in names}


def measure_flatness(
    network: Network, layer: Layer = -1, *, normalize: bool = False, **params: Any
) -> Flatness:
    """Measure the relative flatness of one layer."""
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    return next(iter(measure_layers(network, [name], [layer], **params).values()))

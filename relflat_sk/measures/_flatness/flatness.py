r"""The flatness measures of the papers' Table 1, at one layer or several.

With ``H`` the Hessian of the mean loss in the layer's weight ``W`` (d x m, rows ``w_s``):

===========================  ==============================================================
relative_flatness            ``kappa = sum_st <w_s, w_t> Tr(H_st)`` [1]_, Definition 3
normalized_relative_flatness the same after dividing features by their spread, Theorem 4
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
.. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
.. [2] H. Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
   Neural Networks", 2020.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from relflat_sk._network import Layer, Network, borrowed
from relflat_sk._random import RandomState
from relflat_sk.measures._flatness.eigenvalue import Eigenvalue, StreamedHessians
from relflat_sk.measures._flatness.forward_pass import ForwardPass
from relflat_sk.measures._flatness.scan import scan
from relflat_sk.measures._flatness.summary import Flatness, Found, Summary
from relflat_sk.measures._flatness.trace_measures import TRACE_LIKE, TraceMeasures

__all__ = [
    "EIGENVALUE_LIKE",
    "LAYER_MEASURES",
    "measure_flatness",
    "measure_layers",
    "summarize",
]

# from the eigenvalue and the weight to the measure
EIGENVALUE_LIKE: dict[str, Callable[[float, Tensor], float]] = {
    "hessian_max_eigenvalue": lambda value, weight: value,
    "eigenvalue_flatness": lambda value, weight: value * float(weight.square().sum()),
}

GRADIENT_NORM = "gradient_norm"
# every measure that belongs to one layer
LAYER_MEASURES = (*TRACE_LIKE, *EIGENVALUE_LIKE, GRADIENT_NORM)


def measure_layers(
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
) -> Found:
    """Measure several layers in several ways, in one pass over the data if possible.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    names : sequence of str
        Some of `LAYER_MEASURES`.
    layers : sequence of int, str or nn.Module, or "all"
        The layers to measure at.
    method, n_probes, rtol, random_state
        See `relflat_sk.relative_flatness`.
    weight_decay : float, default=0
        Coefficient ``wd`` of the optimiser, whose ``wd/2 |W|^2`` counts into the loss.

    Returns
    -------
    dict of (layer name, measure name) to Flatness
        Layers in forward order.

    Raises
    ------
    ValueError
        If an argument is out of its range, data or layers do not fit the network, or no
        sample counts.
    """
    with borrowed(network.module):
        summary = Summary()
        traces = TraceMeasures(
            network,
            [name for name in names if name in TRACE_LIKE],
            method=method,
            n_probes=n_probes,
            rtol=rtol,
            random_state=random_state,
        )
        gradients = _Gradients() if GRADIENT_NORM in names else None
        hessians = StreamedHessians(network) if EIGENVALUE_LIKE.keys() & set(names) else None
        parts = [part for part in (traces, gradients, hessians) if part is not None]
        scan(network, layers, summary.add, *(part.add for part in parts))
        if summary.divisor == 0:
            raise ValueError(
                "no sample counts in the mean loss: every label is ignored (ignore_index) or "
                "has weight zero."
            )
        found = traces.finish(summary, weight_decay)
        if gradients is not None:
            found |= gradients.finish(network, summary, weight_decay)
        if hessians is not None:
            for layer in summary.layer_weights:
                top = hessians.largest(layer, summary, rtol=rtol, random_state=random_state)
                found |= _eigenvalue_measures(top, network, summary, weight_decay)
    return {(layer, name): found[layer, name] for layer in summary.layer_weights for name in names}


class _Gradients:
    """Gradients of the summed loss in the layers' weights, filled batch by batch."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, forward: ForwardPass) -> None:
        """Add a batch."""
        for name, layer in forward.layers.items():
            found = layer.total(layer.loss_gradient(), forward.row_weights(layer))
            self.totals[name] = self.totals[name] + found if name in self.totals else found

    def finish(self, network: Network, summary: Summary, weight_decay: float) -> Found:
        """Compute the norm of the gradient of the mean loss at each layer."""
        found = {}
        for name, total in self.totals.items():
            gradient = total / summary.divisor + weight_decay * summary.layer_weights[name]
            norm = float(gradient.norm())
            found[name, GRADIENT_NORM] = Flatness(norm, 0.0, "exact", network, summary)
        return found


def _eigenvalue_measures(
    top: Eigenvalue, network: Network, summary: Summary, weight_decay: float
) -> Found:
    """Compute the measures of a layer from the largest eigenvalue of its Hessian."""
    return {
        (top.layer, name): Flatness(
            value=measure(top.value + weight_decay, top.weight),
            stderr=measure(top.error, top.weight),
            method="lanczos",
            network=network,
            summary=summary,
        )
        for name, measure in EIGENVALUE_LIKE.items()
    }


def measure_flatness(
    network: Network, layer: Layer = -1, *, normalize: bool = False, **params: Any
) -> Flatness:
    """Measure the relative flatness of one layer.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.
    layer : int, str or nn.Module, default=-1
        Where to measure.
    normalize : bool, default=False
        Whether to measure features in units of their standard deviation.
    **params
        See `measure_layers`.

    Returns
    -------
    Flatness
        The value, with its standard error and the mean loss.
    """
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    return next(iter(measure_layers(network, [name], [layer], **params).values()))


def summarize(network: Network) -> Summary:
    """Compute the totals of a pass over the data without measuring anything.

    Parameters
    ----------
    network : Network
        The network, with its loss and data.

    Returns
    -------
    Summary
        The loss, the number of samples and the shape of the outputs.
    """
    summary = Summary()
    with borrowed(network.module):
        scan(network, [-1], summary.add)
    return summary

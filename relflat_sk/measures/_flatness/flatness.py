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
===========================  ==============================================================

References
----------
.. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
.. [2] H. Petzka et al., "Feature-Robustness, Flatness and Generalization Error for Deep
   Neural Networks", 2020.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relflat_sk._network import Layer, Network, borrowed, find_layer, record_order, sample_weight
from relflat_sk._numerics import inverse_spread, varies
from relflat_sk.measures._flatness.eigenvalue import largest_eigenvalue
from relflat_sk.measures._flatness.layer_curvature import LayerView, observe
from relflat_sk.measures._flatness.summation import Pass, Sums, sum_quantities
from relflat_sk.measures._flatness.terms import Neurons, Quantity, Trace, left_factor

__all__ = [
    "EIGENVALUE_LIKE",
    "TRACE_LIKE",
    "Flatness",
    "layer_names",
    "measure_eigenvalues",
    "measure_flatness",
    "measure_gradients",
    "measure_layers",
    "see_network",
]


@dataclass(frozen=True)
class TraceLike:
    """A measure that is a sum over samples of traces and quadratic forms of the Hessian.

    Parameters
    ----------
    quantity : callable
        From the weight (d, m) and the features' spread (m,) to the quantity to sum.
    finish : callable
        From the mean of the quantity and the weight to the measure.
    decay : callable
        What an identity added to the Hessian adds to the measure, from the weight.
    normalized : bool
        Whether the features' spread is needed, one more pass over the data.
    """

    quantity: Callable[[Tensor, Tensor | None], Quantity]
    finish: Callable[[Tensor, Tensor], Tensor]
    decay: Callable[[Tensor], Tensor]
    normalized: bool = False


def _normalized(weight: Tensor, spread: Tensor | None) -> Quantity:
    assert spread is not None
    # a feature that never varies acts as a bias: it drops out of both factors
    return Trace(left_factor(weight * spread), inverse_spread(spread))


def _square(weight: Tensor) -> Tensor:
    return weight.square().sum()


def _itself(value: Tensor, weight: Tensor) -> Tensor:
    return value


_TRACE = lambda weight, spread: Trace()  # noqa: E731

TRACE_LIKE: dict[str, TraceLike] = {
    "relative_flatness": TraceLike(
        lambda weight, spread: Trace(left_factor(weight)),
        _itself,
        lambda weight: weight.shape[1] * _square(weight),
    ),
    "normalized_relative_flatness": TraceLike(
        _normalized, _itself, lambda weight: torch.full((), math.nan), normalized=True
    ),
    "hessian_trace": TraceLike(_TRACE, _itself, lambda weight: torch.tensor(float(weight.numel()))),
    "trace_flatness": TraceLike(
        _TRACE,
        lambda value, weight: value * _square(weight),
        lambda weight: weight.numel() * _square(weight),
    ),
    "neuron_flatness_sum": TraceLike(lambda weight, spread: Neurons(total=True), _itself, _square),
    "neuron_flatness_max": TraceLike(
        lambda weight, spread: Neurons(total=False),
        _itself,
        lambda weight: weight.square().sum(dim=0),
    ),
}


@dataclass
class Flatness:
    """A flatness with what else the same pass over the data showed."""

    value: float
    stderr: float
    method: str  # "closed form", "exact", "hutchinson" or "lanczos"
    network: Network
    seen: Pass

    @property
    def risk(self) -> float:
        """Mean loss; nan without labels."""
        return self.seen.loss / self.seen.divisor

    @property
    def n_samples(self) -> int:
        """How many samples were measured on."""
        return self.seen.n_samples

    def constant_risk(self) -> float:
        """Compute the mean loss of the best constant prediction on the same data.

        Returns
        -------
        float
            nan without labels. Goes through the labels again, not through the network.
        """
        targets, weights = [], []
        for batch in self.network.batches():
            if batch.y is None:
                return math.nan
            n, device = len(batch.y), batch.y.device
            shape = (n, *self.seen.output_shape)
            output = torch.empty(shape, dtype=torch.float64, device=device)
            targets.append(self.network.loss.check_target(output, batch.y))
            weights.append(sample_weight(batch, n, device))
        return self.network.loss.constant_risk(
            torch.cat(targets), torch.cat(weights), self.seen.output_shape, self.seen.link
        )


def measure_layers(
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    random_state: int | np.random.RandomState | None = None,
    weight_decay: float = 0.0,
) -> dict[tuple[str, str], Flatness]:
    """Measure several layers in several ways, in one pass over the data if possible.

    Parameters
    ----------
    network : Network
    names : sequence of str
        Keys of `TRACE_LIKE`.
    layers : sequence of int, str or nn.Module, or "all"
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
        If an argument is out of its range, or data or layers do not fit the network.
    """
    with borrowed(network.module):
        spreads: dict[str, Tensor] = {}
        if any(TRACE_LIKE[name].normalized for name in names):
            spreads = feature_spreads(network, layers)

        def quantities(view: LayerView) -> Mapping[Hashable, Quantity]:
            spread = spreads.get(view.name)
            return {name: TRACE_LIKE[name].quantity(view.weight, spread) for name in names}

        sums, seen = sum_quantities(
            network,
            layers,
            quantities,
            method=method,
            n_probes=n_probes,
            rtol=rtol,
            random_state=random_state,
        )
    return {
        (layer, name): _result(
            TRACE_LIKE[name], sums[layer, name], layer, network, seen, weight_decay
        )
        for layer in seen.weights
        for name in names
    }


def _result(
    measure: TraceLike, sums: Sums, layer: str, network: Network, seen: Pass, weight_decay: float
) -> Flatness:
    weight = seen.weights[layer]
    values = measure.finish(sums.value, weight)
    if weight_decay:
        values = values + weight_decay * measure.decay(weight).to(values.device)
    at = int(values.argmax())  # one value, or the neuron that is least flat
    stderrs = measure.finish(sums.stderr, weight)
    return Flatness(
        value=float(values[at]),
        stderr=float(stderrs[at]),
        method=sums.method,
        network=network,
        seen=seen,
    )


def measure_flatness(
    network: Network, layer: Layer = -1, *, normalize: bool = False, **params: Any
) -> Flatness:
    """Measure the relative flatness of one layer.

    Parameters
    ----------
    network : Network
    layer : int, str or nn.Module
    normalize : bool
    **params
        See `measure_layers`.

    Returns
    -------
    Flatness
    """
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    return next(iter(measure_layers(network, [name], [layer], **params).values()))


# from the eigenvalue and the weight to the measure
EIGENVALUE_LIKE: dict[str, Callable[[float, Tensor], float]] = {
    "hessian_max_eigenvalue": lambda value, weight: value,
    "eigenvalue_flatness": lambda value, weight: value * float(_square(weight)),
}


def measure_eigenvalues(
    network: Network,
    names: Sequence[str],
    layer: Layer,
    *,
    rtol: float = 0.01,
    random_state: int | np.random.RandomState | None = None,
    weight_decay: float = 0.0,
) -> dict[tuple[str, str], Flatness]:
    """Measure one layer by the largest eigenvalue of its Hessian.

    Parameters
    ----------
    network : Network
    names : sequence of str
        Keys of `EIGENVALUE_LIKE`.
    layer : int, str or nn.Module
    rtol : float
        Relative tolerance of the eigenvalue.
    random_state : int, RandomState or None
    weight_decay : float, default=0

    Returns
    -------
    dict of (layer name, measure name) to Flatness
        The standard error is the norm of the eigenvector's residual.
    """
    with borrowed(network.module):
        found = largest_eigenvalue(network, layer, rtol=rtol, random_state=random_state)
    return {
        (found.layer, name): Flatness(
            value=EIGENVALUE_LIKE[name](found.value + weight_decay, found.weight),
            stderr=EIGENVALUE_LIKE[name](found.error, found.weight),
            method="lanczos",
            network=network,
            seen=found.seen,
        )
        for name in names
    }


def measure_gradients(
    network: Network, layers: Sequence[Layer] | str, *, weight_decay: float = 0.0
) -> dict[tuple[str, str], Flatness]:
    """Measure how far from stationary the mean loss is: its gradient's norm, layer by layer.

    Parameters
    ----------
    network : Network
    layers : sequence of int, str or nn.Module, or "all"
    weight_decay : float, default=0

    Returns
    -------
    dict of (layer name, "gradient_norm") to Flatness
    """
    totals: dict[str, Tensor] = {}
    seen = Pass()
    with borrowed(network.module):
        for view in observe(network, layers):
            seen.look(view)
            for name, layer in view.layers.items():
                rows = layer.loss_gradient
                rows = rows * view.weights(len(rows))[:, None, None]
                found = layer.map.total(layer.features, rows.to(layer.features.dtype)).double()
                totals[name] = totals[name] + found if name in totals else found
            del view, layer
    return {
        (name, "gradient_norm"): Flatness(
            value=float((total / seen.divisor + weight_decay * seen.weights[name]).norm()),
            stderr=0.0,
            method="exact",
            network=network,
            seen=seen,
        )
        for name, total in totals.items()
    }


def see_network(network: Network) -> Pass:
    """See what a pass over the data shows beside any measure: loss, samples, outputs.

    Parameters
    ----------
    network : Network

    Returns
    -------
    Pass
    """
    seen = Pass()
    with borrowed(network.module):
        for view in observe(network, [-1]):
            seen.look(view)
            del view
    return seen


def layer_names(network: Network) -> list[str]:
    """List the layers with a weight matrix in forward order, by running one batch.

    Parameters
    ----------
    network : Network

    Returns
    -------
    list of str
    """
    with borrowed(network.module), torch.no_grad(), record_order(network.module) as recorder:
        network(next(network.batches()).x)
    if not recorder.order:
        find_layer(network.module, -1)  # says that there is none
    return recorder.order


@dataclass
class _Spread:
    """Running mean and spread of features, by Chan's update."""

    n: int = 0
    mean: Tensor | float = 0.0
    squares: Tensor | float = 0.0
    low: Tensor | float = math.inf
    high: Tensor | float = -math.inf

    def add(self, rows: Tensor) -> None:
        size, centre = len(rows), rows.mean(dim=0)
        shift = centre - self.mean
        share = size / (self.n + size)
        self.squares = (
            self.squares + (rows - centre).square().sum(dim=0) + shift.square() * self.n * share
        )
        self.mean = self.mean + shift * share
        self.n += size
        self.low = torch.minimum(torch.as_tensor(self.low).to(rows), rows.amin(dim=0))
        self.high = torch.maximum(torch.as_tensor(self.high).to(rows), rows.amax(dim=0))

    def spread(self, eps: float) -> Tensor:
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        return torch.where(
            varies(low, high, eps), torch.as_tensor(self.squares / self.n).sqrt(), 0.0
        )


def feature_spreads(network: Network, layers: Sequence[Layer] | str) -> dict[str, Tensor]:
    """Compute the standard deviation of each feature, 0 where it never varies.

    To be used within `borrowed`.

    Parameters
    ----------
    network : Network
    layers : sequence of int, str or nn.Module, or "all"

    Returns
    -------
    dict of str to Tensor of shape (m,)
        float64, divided by n. The standard deviation, not the variance of the paper's
        text: only with it is the normalised flatness invariant. Of a layer with shared
        weights, over samples and positions, and one for each input channel.
    """
    running: dict[str, _Spread] = {}
    eps = 0.0
    columns = {}
    for view in observe(network, layers):
        for name, layer in view.layers.items():
            rows = layer.map.channels(layer.features)
            running.setdefault(name, _Spread()).add(rows.double())
            columns[name] = layer.map.column_channels()
            eps = torch.finfo(layer.features.dtype).eps
        del view, layer
    return {name: found.spread(eps)[columns[name]] for name, found in running.items()}

"""A table of measures, layer by layer."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from relflat_sk._models import DataOptions, joined, name_layers
from relflat_sk._network import Layer
from relflat_sk.measures._flatness import LARGEST_NEURON, Flatness
from relflat_sk.measures._measure_network import check_layers, counts_decay, measure_network
from relflat_sk.measures._names import NEURONS, find_measures, get_measure_names
from relflat_sk.measures._non_finite import warn_of_non_finite
from relflat_sk.measures._own import OwnMeasure
from relflat_sk.measures._registry import describe_invariance

__all__ = ["flatness_report"]


def flatness_report(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    measures: Any = None,
    layers: Layer | Sequence[Layer] = "all",
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    sample_weight: Any = None,
    process_group: Any = None,
    **params: Any,
) -> pd.DataFrame:
    """Measure all layers in all ways, with as few passes over the data as possible.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        The trained model; see `relative_flatness`.
    X : array, data frame, tensor, dict or Dataset of n samples
        The inputs, as the model takes them.
    y : array of shape (n, ...)
        Labels, as in training; None where they do not matter.
    measures : str, callable or sequence of these, optional
        One or some of `get_measure_names`, all of them if None, or functions of model, X and y;
        see `register_measure`. With None, a measure that does not apply to the network is nan,
        with a warning that says why. "neuron_flatness", which must be named, has one row for
        each neuron that feeds a layer, and its number in the column `neuron`.
    layers : int, str, nn.Module, a sequence of these, or "all", default="all"
        Where to measure, each layer as in `relative_flatness`. "all" leaves out layers whose
        weight is used in several places, with a warning that names them; a head that is tied to
        an embedding stays, see `relative_flatness`.
    criterion : torch loss, optional
        The loss; needed for a bare module only.
    batch_size : int, default=1024
        Samples in one forward pass.
    device : str or torch.device, optional
        Where to compute; where the model is if None.
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss; one if None.
    process_group : torch.distributed.ProcessGroup or "world", optional
        The processes that hold the data, see `relative_flatness`.
    **params : dict
        `method`, `n_probes`, `rtol` and `random_state` as in `relative_flatness`,
        `weight_decay` as in `measure`, and arguments of the measures of the whole network.

    Returns
    -------
    DataFrame
        One row per layer and measure. Columns are `measure`, `layer` (the name, empty for
        measures of the whole network), `position` (of the layer in forward order, missing for
        measures of the whole network), `value`, `stderr` (0 for exact values, the residual's
        norm for eigenvalues), `method`, `n_samples` and `invariance`, the changes of weights
        that change neither the network's function nor the measure, if no weights are tied.

    Raises
    ------
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If an argument is of the wrong type.
    ValueError
        If a name is not that of a measure, `measures` or `layers` is empty, layers are chosen for
        measures of the whole network only, or a measure in `measures` does not apply to the
        network. With None, such a measure is nan.

    Warns
    -----
    FlatnessWarning
        If a measure does not apply to the network, or is not finite because weights are not.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> model = LinearRegression(fit_intercept=False).fit(X, y)
    >>> report = flatness_report(model, X, y, measures=["relative_flatness", "hessian_trace"])
    >>> report[["measure", "value"]].values.tolist()
    [['relative_flatness', 20.0], ['hessian_trace', 5.0]]
    """
    names = find_measures(get_measure_names() if measures is None else measures, neurons=True)
    if "layer" in params:
        raise TypeError(
            f"flatness_report has no argument layer={params['layer']!r}: pass "
            f"layers={params['layer']!r}, which takes a layer or a list of layers."
        )
    if "per_sample" in params:
        raise TypeError(
            "flatness_report has no argument per_sample: it has one row for each layer and "
            "measure. Use measure(name, ..., per_sample=True) for the terms of the samples."
        )
    check_layers(names, layers)
    layers = name_layers(model, layers)
    if params.get("weight_decay") and measures is None:
        names = [name for name in names if counts_decay(name)]
    options = DataOptions(criterion, batch_size, device, sample_weight)
    measured = [LARGEST_NEURON if name == NEURONS else name for name in names]
    with joined(model, X, y, options, process_group) as network:
        found = measure_network(network, measured, layers, refuse=measures is not None, **params)
    warn_of_non_finite(found)
    layer_order = list(dict.fromkeys(layer for layer, _ in found))
    order = next(iter(found.values())).summary.order
    rows = [
        {"measure": str(name), "layer": layer, "position": order.index(layer) if layer else None}
        | row
        for layer in layer_order
        for name in dict.fromkeys(names)
        for row in _rows(name, found, layer)
    ]
    integers = {"position": "Int64"} | ({"neuron": "Int64"} if NEURONS in names else {})
    return pd.DataFrame(rows).astype(integers)


def _rows(
    name: str, found: Mapping[tuple[str, str], Flatness], layer: str
) -> Iterator[dict[str, Any]]:
    """Yield the row of a measure at a layer, or a row for each neuron; none if it is no layer's."""
    result = found.get((layer, LARGEST_NEURON if name == NEURONS else name))
    if result is None:
        return
    known = {"method": result.method, "n_samples": result.n_samples}
    if isinstance(name, OwnMeasure):
        known["invariance"] = name.invariance
    else:
        known["invariance"] = describe_invariance(LARGEST_NEURON if name == NEURONS else name)
    if name != NEURONS:
        yield {"value": result.value, "stderr": result.stderr, **known}
        return
    assert result.neurons is not None
    assert result.neuron_stderrs is not None
    for j, (value, stderr) in enumerate(zip(result.neurons, result.neuron_stderrs, strict=True)):
        yield {"value": float(value), "stderr": float(stderr), **known, "neuron": j}

"""Measures of flatness, of any model, by name."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from relflat_sk._models import DataOptions, name_layer, to_network
from relflat_sk._network import Layer
from relflat_sk.measures._flatness import Flatness
from relflat_sk.measures._measure_network import counts_decay, measure_network
from relflat_sk.measures._registry import INVARIANCES, describe_invariance

__all__ = [
    "check_name",
    "evaluate",
    "flatness_report",
    "get_measure_names",
    "measure",
    "relative_flatness",
]

_AGGREGATES: dict[str, Callable[[Any], float]] = {"max": max, "sum": sum}


def get_measure_names() -> list[str]:
    """List the names that `measure` and `FlatnessScorer` take.

    Returns
    -------
    list of str
        Sorted.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted(INVARIANCES)


def check_name(name: str) -> None:
    """Refuse names that are no measure.

    Raises
    ------
    ValueError
        Lists the measures there are.
    """
    if name not in INVARIANCES:
        raise ValueError(f"there is no measure {name!r}; choose from {get_measure_names()}.")


def evaluate(  # noqa: PLR0913
    name: str,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    sample_weight: Any = None,
    **params: Any,
) -> Flatness:
    """Measure and return all that one pass over the data showed, the mean loss included.

    Parameters
    ----------
    name : str
        One of `get_measure_names`.
    model, X, y, layer, criterion, batch_size, device
        See `relative_flatness`.
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss.
    **params
        Further arguments of the measure, such as `method` or `n_probes`.

    Returns
    -------
    Flatness
        With attributes `value`, `stderr`, `risk` (the mean loss), `n_samples` and
        `method`, and the method `constant_risk`.

    Raises
    ------
    ValueError
        If there is no measure of that name.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[0.0], [1.0], [2.0]], [0.0, 1.0, 3.0]
    >>> found = evaluate("relative_flatness", LinearRegression().fit(X, y), X, y)
    >>> round(found.risk, 4), round(found.constant_risk(), 4)
    (0.0556, 1.5556)
    """
    check_name(name)
    options = DataOptions(criterion, batch_size, device, sample_weight)
    network = to_network(model, X, y, options)
    return next(
        iter(measure_network(network, [name], [name_layer(model, layer)], **params).values())
    )


def measure(
    name: str,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    aggregate: str | None = None,
    **params: Any,
) -> float:
    """Measure a model by the measure's name, at one layer or over all of them.

    Parameters
    ----------
    name : str
        One of `get_measure_names`.
    model, X, y, layer
        See `relative_flatness`.
    aggregate : {"max", "sum"} or None, default=None
        Take the largest value, or the sum, over all layers with a weight, instead of
        `layer` alone: the network-wide measures of the papers.
    **params
        Further arguments, see `relative_flatness`; and `weight_decay`, the optimiser's, to
        be counted into the loss as ``weight_decay / 2 * |W|^2``.

    Returns
    -------
    float

    Raises
    ------
    ValueError
        If there is no measure or aggregate of that name.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> measure("relative_flatness", LinearRegression(fit_intercept=False).fit(X, y), X, y)
    20.0
    """
    check_name(name)
    if aggregate is None:
        return evaluate(name, model, X, y, layer=layer, **params).value
    if aggregate not in _AGGREGATES:
        raise ValueError(f"aggregate must be 'max', 'sum' or None, got {aggregate!r}.")
    report = flatness_report(model, X, y, measures=[name], **params)
    return float(_AGGREGATES[aggregate](report["value"]))


def flatness_report(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any,
    *,
    measures: Sequence[str] | None = None,
    layers: Sequence[Layer] | str = "all",
    criterion: Any = None,
    batch_size: int = 1024,
    device: Any = None,
    sample_weight: Any = None,
    **params: Any,
) -> pd.DataFrame:
    """Measure all layers in all ways, sharing passes over the data.

    Parameters
    ----------
    model, X, y, criterion, batch_size, device
        See `relative_flatness`.
    measures : sequence of str, optional
        Some of `get_measure_names`, all of them if None; what does not apply to the network
        is then nan, with a warning that says why.
    layers : sequence of int, str or nn.Module, or "all", default="all"
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss.
    **params
        `method`, `n_probes`, `rtol` and `random_state` as in `relative_flatness`, and
        `weight_decay` as in `measure`.

    Returns
    -------
    DataFrame
        One row per layer and measure, with columns `measure`, `layer` (empty for what
        belongs to the whole network), `value`, `stderr` (0 for exact values, the residual's
        norm for eigenvalues), `method`, `n_samples` and `invariance`, which names the
        changes of weights that leave both function and measure alone.

    Raises
    ------
    ValueError
        If there is no measure of a name.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> model = LinearRegression(fit_intercept=False).fit(X, y)
    >>> report = flatness_report(model, X, y, measures=["relative_flatness", "hessian_trace"])
    >>> report[["measure", "value"]].values.tolist()
    [['relative_flatness', 20.0], ['hessian_trace', 5.0]]
    """
    names = get_measure_names() if measures is None else list(measures)
    for name in names:
        check_name(name)
    if params.get("weight_decay") and measures is None:
        names = [name for name in names if counts_decay(name)]
    options = DataOptions(criterion, batch_size, device, sample_weight)
    network = to_network(model, X, y, options)
    found = measure_network(network, names, layers, refuse=measures is not None, **params)
    order = {name: at for at, name in enumerate(dict.fromkeys(layer for layer, _ in found))}
    rows = [
        {
            "measure": name,
            "layer": layer,
            "value": one.value,
            "stderr": one.stderr,
            "method": one.method,
            "n_samples": one.n_samples,
            "invariance": describe_invariance(name),
        }
        for (layer, name), one in sorted(
            found.items(), key=lambda item: (order[item[0][0]], names.index(item[0][1]))
        )
    ]
    return pd.DataFrame(rows)


def relative_flatness(  # noqa: PLR0913
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    criterion: Any = None,
    normalize: bool = False,
    method: str = "auto",
    n_probes: int | None = None,
    rtol: float = 0.01,
    batch_size: int = 1024,
    device: Any = None,
    random_state: int | np.random.RandomState | None = None,
    return_stderr: bool = False,
) -> float | tuple[float, float]:
    r"""Measure how flat the loss is around a trained model, at one layer; small is flat.

    Unlike the Hessian's trace or largest eigenvalue, the value stays the same when scale
    moves between layers without changing what the network computes.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        A torch module, a skorch net, a scikit-learn linear model, MLP or SGD model, or a
        pipeline, search object or `TransformedTargetRegressor` around one. It is given
        back bit by bit as it was.
    X : array, data frame, tensor, dict, Dataset, ... of n samples
        Whatever the model takes; of a pipeline, what goes into its first step.
    y : array of shape (n, ...), optional
        Labels as the model was trained with, strings included. They do not matter for
        softmax, logistic and squared losses without class weights, and may be left out.
    layer : int, str or nn.Module, default=-1
        Position among the layers with a weight matrix, in forward order (-1: the last),
        dotted module name, or the module itself.
    criterion : torch loss, optional
        Needed for a bare module; an estimator knows its own.
    normalize : bool, default=False
        Measure features in units of their standard deviation (Theorem 4), which makes the
        value independent of the scale of every single feature too.
    method : {"auto", "exact", "hutchinson"}, default="auto"
        "auto" is exact where a closed form or few Hessian-vector products do it, and takes
        random probes otherwise, or exact products where they cost less than the probes.
    n_probes : int, optional
        Most random probes per sample; as many as `rtol` needs if None.
    rtol : float, default=0.01
        Probes are added until the standard error is at most this share of the value.
    batch_size : int, default=1024
        Samples in one forward pass; memory grows with it, the result does not change.
    device : str or torch.device, optional
        Where to compute; where the model is if None. The model itself is not moved.
    random_state : int, RandomState or None, default=None
        For the probes.
    return_stderr : bool, default=False
        Also return the standard error, 0 for exact values.

    Returns
    -------
    float or (float, float)
        :math:`\kappa`, in the unit of the loss (nats for cross-entropy); 1/n is in.

    Raises
    ------
    LayerNotFoundError
        If there is no such layer with a weight matrix; lists the ones there are.
    TypeError
        If there is no network in the model, or the layer is of an unsupported kind.
    ValueError
        If data, labels, criterion and network do not fit together.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.

    Notes
    -----
    Definition 3 of [1]_, for a network :math:`f(x) = g(W \phi(x) + b)` and blocks
    :math:`H_{s,t}` of the Hessian of the mean loss between rows s and t of W:

    .. math:: \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t})
        = \frac1n \sum_i |\phi(x_i)|^2 \, \mathrm{Tr}(W^\top B_i W),

    with :math:`B_i` the Hessian of the i-th loss in the layer's output. For softmax
    cross-entropy at the last layer the trace is the variance of the rows of W under the
    predicted probabilities: the price is that of one forward pass.

    The value means something at a minimum of the loss: a network with constant output is
    perfectly flat and useless.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    For linear regression it is the ridge penalty, ``2 mean(|x|^2) |w|^2``:

    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = np.array([[1.0], [2.0]]), np.array([2.0, 4.0])
    >>> regression = LinearRegression(fit_intercept=False).fit(X, y)
    >>> relative_flatness(regression, X, y), 2 * 2.5 * 2.0**2
    (20.0, 20.0)
    """
    found = evaluate(
        "normalized_relative_flatness" if normalize else "relative_flatness",
        model,
        X,
        y,
        layer=layer,
        criterion=criterion,
        method=method,
        n_probes=n_probes,
        rtol=rtol,
        batch_size=batch_size,
        device=device,
        random_state=random_state,
    )
    return (found.value, found.stderr) if return_stderr else found.value

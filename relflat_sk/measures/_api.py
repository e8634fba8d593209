"""Measure any model by the name of a measure."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._checks import warn
from relflat_sk._models.network_of import open_model
from relflat_sk._network.layers import Layer
from relflat_sk._network.network import Network
from relflat_sk.measures._layer_measures import MAX_PASSES
from relflat_sk.measures._measure_network import (
    OF_DATA,
    SAME,
    Measure,
    check_layers,
    counts_decay,
    find_measure,
    find_measures,
    get_measure_names,
    measure_network,
    measure_opened,
    name_of,
    takes_loss,
    warn_of_non_finite,
)
from relflat_sk.measures._minimum import warn_of_vanished
from relflat_sk.measures._network_measure import NotApplicableError
from relflat_sk.measures._scan import Measured, Results


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
    output: str | int | None = None,
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
        One or some of `get_measure_names`, all numbers if None, or functions of model, X and y,
        see `measure`. A measure that does not apply to the network is nan, with a
        warning that says why.
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
    output : str or int, optional
        Which part of a network's output the criterion gets: the key of a mapping, or the position
        in a tuple. By default a tensor, the first of a tuple, or a mapping's "logits".
    **params : dict
        `method`, `n_probes`, `rtol`, `atol`, `max_passes`, `verbose`, `random_state` and
        `at_loss` as in `relative_flatness`, `weight_decay` as in `measure`, and arguments of the
        measures of the whole network.

    Returns
    -------
    DataFrame
        One row per layer and measure. Columns are `measure`, `layer` (the name, empty for
        measures of the whole network), `position` (of the layer in forward order, missing for
        measures of the whole network), `method`, `invariance` (the changes of weights that
        change neither the network's function nor the measure, if no weights are tied),
        `n_samples`, `value` and `stderr` (0 for exact values, the residual's norm for
        eigenvalues). pandas leaves out columns in the middle where a screen is narrow.

    Raises
    ------
    LayerNotFoundError
        If there is no such layer.
    TypeError
        If an argument is of the wrong type, or `measures` is empty.
    ValueError
        If a name is not that of a measure, `layers` is empty, or layers are chosen for measures of
        the whole network only.

    Warns
    -----
    FlatnessWarning
        If a measure does not apply to the network, is not finite, or is zero up to rounding, or
        the loss of `at_loss` is reached at no temperature.

    See Also
    --------
    relative_flatness : One number, at one layer.
    LayerFlatnessDisplay : Draw the flatness of all layers.
    get_measure_names : The names of the measures.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> model = LinearRegression(fit_intercept=False).fit(X, y)
    >>> report = flatness_report(model, X, y, measures=["relative_flatness", "hessian_trace"])
    >>> report[["measure", "value"]].values.tolist()
    [['relative_flatness', 20.0], ['hessian_trace', 5.0]]
    """
    columns = find_measures(get_measure_names() if measures is None else measures)
    check_layers([*columns.values()], layers)
    if measures is None:
        if params.get("weight_decay"):
            columns = {name: name for name in columns if counts_decay(name)}
        if params.get("at_loss") is not None:
            columns = {name: name for name in columns if takes_loss(name)}
    network = open_model(
        model, X, y,
        criterion=criterion, batch_size=batch_size, device=device, sample_weight=sample_weight,
        output=output,
    )  # fmt: skip
    tolerated = (TypeError, ValueError) if measures is None else NotApplicableError
    results = measure_network(
        network,
        list(columns.values()),
        layers,
        tolerates=lambda name, error: isinstance(error, tolerated),
        per_sample=False,
        **params,
    )
    _warn_of_doubtful(network, results)
    order = next(iter(results.values())).passes.own.order
    report = pd.DataFrame(
        [
            (name, layer, order.index(layer) if layer else None, measured.method,
             ", ".join(SAME.get(name, ["unknown"])) or "none", measured.passes.n_samples,
             measured.value, measured.stderr)
            for layer in dict.fromkeys(layer for layer, _ in results)
            for name in columns
            if (measured := results.get((layer, name))) is not None
        ],
        columns=["measure", "layer", "position", "method", "invariance", "n_samples", "value",
                 "stderr"],
    )  # fmt: skip
    return report.astype({"position": "Int64"})


def _warn_of_doubtful(network: Network, results: Results) -> None:
    reasons = [(measured.reason, name) for (_, name), measured in results.items()]
    for reason in dict.fromkeys(reason for reason, _ in reasons if reason):
        names = dict.fromkeys(name for why, name in reasons if why == reason)
        warn(f"{', '.join(names)} is nan: {reason}.")
    warn_of_non_finite(network, results)
    warn_of_vanished(network, results)


def _measure_one(network: Network, measure: Measure, **params: Any) -> Measured:
    """Measure a model that was opened; refuse one without a value, and warn of a doubtful one."""
    measured = measure_opened(network, measure, **params)
    if measured.reason:
        raise ValueError(f"{measured.reason}.")
    _warn_of_doubtful(network, {("", name_of(measure)): measured})
    return measured


def _refuse_scoring(model: Any, name: Any, function: str) -> TypeError | None:
    """Return or raise an error if scikit-learn calls the function that calls this, as a scorer.

    Its loops over folds turn what a scorer raises into nan, and choose the first candidate. They
    end with what a scorer returns, if that is no number.
    """
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame and frame.f_back
    module = str(frame.f_globals.get("__name__")) if frame else ""
    # `sklearn.utils.parallel.delayed` calls what users ask it to call
    if not module.startswith("sklearn.") or module.startswith("sklearn.utils."):
        return None
    scorer = "" if name == "relative_flatness" else repr(name)
    refusal = TypeError(
        f"{function}, which is no scorer: scikit-learn takes the largest score for the best, and "
        f"small is flat; use FlatnessScorer({scorer})"
    )
    if hasattr(model, "fit") and module.startswith((
        "sklearn.model_selection.",
        "sklearn.metrics.",
    )):
        return refusal
    raise refusal


Floats = NDArray[np.float64]

# nan if one of the values is nan
_AGGREGATES: dict[str, Callable[[Any], float]] = {"max": np.max, "sum": np.sum}


@overload
def measure(
    name: Any,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    aggregate: str | None = None,
    per_sample: Literal[False] = False,
    **params: Any,
) -> float: ...
@overload
def measure(
    name: Any,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    aggregate: str | None = None,
    per_sample: Literal[True],
    **params: Any,
) -> Floats: ...
def measure(
    name: Any,
    model: Any,
    X: Any,
    y: Any = None,
    *,
    layer: Layer = -1,
    aggregate: str | None = None,
    per_sample: bool = False,
    **params: Any,
) -> float | Floats:
    """Measure a model by the name of a measure, at one layer or over all of them.

    Parameters
    ----------
    name : str or callable
        One of `get_measure_names`, or a function ``f(model, X, y)`` of your own, see the notes.
    model : nn.Module or fitted estimator
        The trained model; see `relative_flatness`.
    X : array, data frame, tensor, dict or Dataset of n samples
        The inputs, as the model takes them.
    y : array of shape (n, ...), optional
        Labels, as in training; may be left out where they do not matter.
    layer : int, str or nn.Module, default=-1
        Position among the layers with a weight matrix, in forward order, dotted name, or the
        module itself.
    aggregate : {"max", "sum"} or None, default=None
        Return the largest value or the sum over all layers with a weight matrix, instead of
        the value at `layer`. These are the network-wide measures of the papers. A measure of the
        whole network has one value, which both return.
    per_sample : bool, default=False
        Return the samples' terms, whose mean is the value, see `relative_flatness`. Only for
        measures that are means over samples: relative flatness, the Hessian's trace and the
        neurons' flatness. `neuron_flatness_max` has the terms of the least flat neuron. A
        DataLoader that shuffles raises a ValueError.
    **params : dict
        Further arguments, see `relative_flatness`. `weight_decay` is the optimiser's, to be
        counted into the loss as ``weight_decay / 2 * |W|^2``. "comparable_flatness" is measured
        at equal loss always, with ``at_loss=0.1`` if nothing else is given.

    Returns
    -------
    float or ndarray
        The measure, in the unit of the loss for flatness; with `per_sample` of shape (n,).

    Raises
    ------
    ValueError
        If there is no measure or aggregate of that name, no terms of single samples, or no layer.
    TypeError
        If the model comes before the name.

    See Also
    --------
    get_measure_names : The names of the measures.
    flatness_report : Several measures at all layers, in one table.
    FlatnessScorer : A measure as a scorer of scikit-learn.

    Notes
    -----
    The name comes first, and not the model as in all other functions, so that
    ``functools.partial(measure, "hessian_trace")`` is a function of model, X and y, as skorch's
    `EpochScoring` takes it.

    A function of your own can be passed wherever the name of a measure is expected. It returns a
    number, small where the minimum is good, or a pair of a number and its standard error. It gets
    the model and the data as they were passed; a torch module is in evaluation mode, and the model
    is restored afterwards. Further arguments of the function become arguments of the measure;
    those named `sample_weight` and `random_state` get the weights and the seed of the call. Weight
    decay cannot be counted into it, and it belongs to the network as a whole: it has no layer. In
    a table, its column has the function's ``__name__``: lambdas and `functools.partial` have none.

    Examples
    --------
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = [[1.0], [2.0]], [2.0, 4.0]
    >>> measure("relative_flatness", LinearRegression(fit_intercept=False).fit(X, y), X, y)
    20.0
    >>> X = [[1.0, 0.0], [0.0, 2.0], [1.0, 2.0]]
    >>> model = LinearRegression(fit_intercept=False).fit(X, [1.0, 2.0, 3.0])
    >>> round(measure("neuron_flatness_max", model, X), 4)
    5.3333
    >>> def coefficient_norm(model, X, y, order=2):
    ...     return np.linalg.norm(model.coef_, ord=order)
    >>> round(measure(coefficient_norm, model, X, [1.0, 2.0, 3.0], order=1), 4)
    2.0
    """
    refusal: Any = _refuse_scoring(model, name, "measure")
    if refusal is not None:
        return refusal  # type: ignore[no-any-return]
    if isinstance(model, str):
        raise TypeError(f"measure takes the name before the model, got the model {model!r}")
    checked = find_measure(name)
    if aggregate is None:
        of_data = {key: params.pop(key) for key in OF_DATA & params.keys()}
        network = open_model(model, X, y, **of_data, in_order=per_sample)
        measured = _measure_one(network, checked, layer=layer, per_sample=per_sample, **params)
        return measured.value if measured.terms is None else measured.terms
    if per_sample:
        raise ValueError(
            f"per_sample=True gives terms at one layer, but aggregate={aggregate!r} asks for all."
        )
    if aggregate not in _AGGREGATES:
        raise ValueError(f"aggregate must be 'max', 'sum' or None, got {aggregate!r}.")
    report = flatness_report(model, X, y, measures=[checked], **params)
    return float(_AGGREGATES[aggregate](report["value"].to_numpy()))


class _Options(TypedDict, total=False):
    """The arguments of `relative_flatness` that do not change what it returns."""

    layer: Layer
    criterion: Any
    normalize: bool
    method: str
    n_probes: int | None
    rtol: float
    atol: float
    max_passes: int
    batch_size: int
    device: Any
    sample_weight: Any
    random_state: int | np.random.RandomState | None
    verbose: int
    at_loss: float | None
    output: str | int | None


@overload
def relative_flatness(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    per_sample: Literal[False] = False,
    return_stderr: Literal[False] = False,
    **options: Unpack[_Options],
) -> float: ...
@overload
def relative_flatness(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    per_sample: Literal[False] = False,
    return_stderr: Literal[True],
    **options: Unpack[_Options],
) -> tuple[float, float]: ...
@overload
def relative_flatness(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    per_sample: Literal[True],
    return_stderr: Literal[False] = False,
    **options: Unpack[_Options],
) -> Floats: ...
@overload
def relative_flatness(
    model: Any,
    X: Any,
    y: Any = None,
    *,
    per_sample: Literal[True],
    return_stderr: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Floats, Floats]: ...
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
    atol: float = 0.0,
    max_passes: int = MAX_PASSES,
    batch_size: int = 1024,
    device: Any = None,
    sample_weight: Any = None,
    random_state: int | np.random.RandomState | None = None,
    per_sample: bool = False,
    return_stderr: bool = False,
    verbose: int = 0,
    at_loss: float | None = None,
    output: str | int | None = None,
) -> float | tuple[float, float] | Floats | tuple[Floats, Floats]:
    r"""Measure how flat the loss is around a trained model, at one layer; small is flat.

    Unlike the Hessian's trace or largest eigenvalue, the value stays the same when scale
    moves between layers without changing the function that the network computes.

    Parameters
    ----------
    model : nn.Module or fitted estimator
        A torch module, a skorch net, a scikit-learn linear model, MLP or SGD model, or a
        pipeline, search object or `TransformedTargetRegressor` around one. The model is not
        changed.
    X : array, data frame, tensor, dict or Dataset of n samples
        The inputs, as the model takes them; for a pipeline, the input of its first step.
    y : array of shape (n, ...), optional
        Labels as the model was trained with, strings included. They do not matter for
        softmax, logistic and squared losses without class weights, and may be left out.
    layer : int, str or nn.Module, default=-1
        Position among the layers with a weight matrix, in forward order (-1: the last),
        dotted module name, or the module itself.
    criterion : torch loss, optional
        The loss; needed for a bare module only: estimators and causal LMs know their own. Its mean
        is measured, whatever its `reduction` is: the value of a sum would grow with the samples.
    normalize : bool, default=False
        Measure features in units of their standard deviation (Theorem 4), which makes the value
        independent of the scale of every single feature.
    method : {"auto", "exact", "hutchinson"}, default="auto"
        "auto" is exact where a closed form or few Hessian-vector products are enough.
        Otherwise it draws random probes, or takes all products if that costs less. "exact" takes
        all products, whatever `max_passes` is.
    n_probes : int, optional
        Most random probes per sample, in place of `max_passes`, without a warning.
    rtol : float, default=0.01
        Probes are added until the standard error is at most this share of the value. With
        `per_sample`, this holds for the root mean square of the terms' standard errors.
    atol : float, default=0.0
        A standard error that is small enough for any value, in the unit of the loss. A value near
        zero never meets `rtol`.
    max_passes : int, default=100
        Most passes over the data for an estimate, of at least 3: a pass is a forward and a
        backward pass, or one probe, which takes about as long. Checks of the first batch come in
        addition.
    batch_size : int, default=1024
        Samples in one forward pass; memory grows with it, the result does not change.
    device : str or torch.device, optional
        Where to compute; where the model is if None. The model itself is not moved.
    sample_weight : array of shape (n,), optional
        Weight of each sample in the mean loss; one if None. Whole numbers have the effect of
        repeated samples. Not with a Dataset.
    random_state : int, RandomState or None, default=None
        Seeds the probes, which differ from call to call if None.
    per_sample : bool, default=False
        Return the terms :math:`|\phi(x_i)|^2 \mathrm{Tr}(W^\top B_i W)` of the samples instead of
        their mean. Weights of samples and classes are in, so that the plain mean of the terms is
        the value. A sample with several positions or tokens has one term. The terms are in the
        order of the samples; a DataLoader that shuffles raises a ValueError.
    return_stderr : bool, default=False
        Whether to return the standard error as well, which is 0 for exact values; with
        `per_sample`, one for each term.
    verbose : int, default=0
        1 shows a progress bar of the probes.
    at_loss : float, optional
        A share of the best constant prediction's loss, such as 0.05: measure the network whose
        outputs are divided by the temperature at which its mean loss on X is that share. So
        networks can be compared that were trained to different losses, saturated ones included.
        With label smoothing, or labels that are probabilities, it is a share of what the loss is
        above their entropy. Squared errors are divided by the temperature instead of the outputs,
        as by a variance.
        None: the network as it is.
    output : str or int, optional
        Which part of a network's output the criterion gets: the key of a mapping, or the position
        in a tuple. By default a tensor, the first of a tuple, or a mapping's "logits".

    Returns
    -------
    float or ndarray of shape (n,), or a pair of these
        :math:`\kappa`, a mean over samples in the unit of the loss (nats for cross-entropy), or its
        terms; with `return_stderr`, also the standard errors.

    Raises
    ------
    LayerNotFoundError
        If there is no such layer with a weight matrix; the message lists the layers.
    TypeError
        If there is no network in the model, or the layer is of an unsupported kind.
    ValueError
        If data, labels, criterion and network do not fit together. With `at_loss`, if the loss is
        reached at no temperature, or the criterion has none.
    sklearn.exceptions.NotFittedError
        If the estimator is not fitted.

    Warns
    -----
    FlatnessWarning
        If the value is doubtful: negative, zero for lack of curvature in the criterion or because
        the network is dead or saturated, or nan, with the likely cause. If `max_passes` ended an
        estimate, with the standard error that it reached. If ``layer=-1`` is not the head,
        because a parameter that is no layer multiplies its output. If the network of a net was
        initialised again after `fit`.

    See Also
    --------
    measure : Any measure by its name.
    flatness_report : All layers, in one table.
    FlatnessScorer : The negative flatness as a scorer of scikit-learn.

    Notes
    -----
    Definition 3 of [1]_, for a network :math:`f(x) = g(W \phi(x) + b)` and blocks
    :math:`H_{s,t}` of the Hessian of the mean loss between rows s and t of W:

    .. math:: \kappa = \sum_{s,t} \langle w_s, w_t \rangle \mathrm{Tr}(H_{s,t})
        = \frac1n \sum_i |\phi(x_i)|^2 \, \mathrm{Tr}(W^\top B_i W),

    with :math:`B_i` the Hessian of the i-th loss in the layer's output. For softmax
    cross-entropy at the last layer the trace is the variance of the rows of W under the
    predicted probabilities, and costs no more than one forward pass.

    The value is meaningful at a minimum of the loss only: a network with constant output is
    perfectly flat and useless.

    Random probes have signs of their own for each sample, so each term is estimated without
    bias, and the standard error falls with the number of samples as well. n terms need n times as
    many probes as their mean to be as precise, so "auto" soon computes them exactly.

    At a head that is tied to the embedding, H is the Hessian in the head's copy of the weight, as
    if the embedding had a copy of its own. Layers whose weight is used a second time are refused,
    by another layer or by a function, as in a tied autoencoder.

    At a temperature T, the last layer's terms are
    :math:`|\phi(x_i)|^2 \mathrm{Tr}(W^\top B(z_i / T) W) / T^2` with logits :math:`z_i`. They do
    not change when the logits are multiplied by a number. Of two temperatures with the same loss,
    the larger one is taken. For squared errors, the value is :math:`\kappa` divided by the mean
    loss, times the loss of `at_loss`.

    References
    ----------
    .. [1] Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.

    Examples
    --------
    For linear regression it is the ridge penalty, ``2 mean(|x|^2) |w|^2``:

    >>> import numpy as np
    >>> from sklearn.linear_model import LinearRegression
    >>> X, y = np.array([[1.0], [2.0]]), np.array([2.0, 4.0])
    >>> regression = LinearRegression(fit_intercept=False).fit(X, y)
    >>> relative_flatness(regression, X, y), 2 * 2.5 * 2.0**2
    (20.0, 20.0)

    The terms of the samples show where the loss is sharp:

    >>> relative_flatness(regression, X, y, per_sample=True).tolist()
    [8.0, 32.0]

    A classifier that is more confident is as flat at equal loss:

    >>> from sklearn.linear_model import LogisticRegression
    >>> X, y = np.array([[-2.0], [-1.0], [1.0], [3.0]]), [0, 0, 1, 1]
    >>> classifier = LogisticRegression(C=10).fit(X, y)
    >>> before = relative_flatness(classifier, X, y, at_loss=0.1)
    >>> classifier.coef_ *= 100
    >>> classifier.intercept_ *= 100
    >>> bool(np.isclose(relative_flatness(classifier, X, y, at_loss=0.1), before))
    True
    """
    name = "normalized_relative_flatness" if normalize else "relative_flatness"
    refusal: Any = _refuse_scoring(model, name, "relative_flatness")
    if refusal is not None:
        return refusal  # type: ignore[no-any-return]
    network = open_model(
        model, X, y,
        criterion=criterion, batch_size=batch_size, device=device, sample_weight=sample_weight,
        in_order=per_sample, output=output,
    )  # fmt: skip
    measured = _measure_one(
        network, name, layer=layer, method=method, n_probes=n_probes, rtol=rtol, atol=atol,
        max_passes=max_passes, random_state=random_state, per_sample=per_sample, verbose=verbose,
        at_loss=at_loss,
    )  # fmt: skip
    if measured.terms is not None and measured.term_stderrs is not None:
        return (measured.terms, measured.term_stderrs) if return_stderr else measured.terms
    return (measured.value, measured.stderr) if return_stderr else measured.value

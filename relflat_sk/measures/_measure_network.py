"""All measures by name, and of a network, with as few passes over the data as they take together.

`SAME` says under which changes of the weights, that leave the network's function as it is, each
measure is invariant. The tests check it, `flatness_report` shows it, and the documentation prints
it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from numbers import Integral
from typing import Any

import torch
from sklearn.base import BaseEstimator

from relflat_sk._checks import check_number, did_you_mean, is_number, warn
from relflat_sk._models.network_of import name_layers
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer, find_non_finite, weight_layers
from relflat_sk._network.network import Network
from relflat_sk._random import alone
from relflat_sk.measures._equal_loss import at_equal_loss
from relflat_sk.measures._functions import arguments_of, measure_by_function
from relflat_sk.measures._layer_measures import (
    GRADIENT_NORM,
    LAYER_MEASURES,
    TRACE_LIKE,
    measure_layers,
    warn_of_saddle,
)
from relflat_sk.measures._network_measure import NetworkMeasure, NotApplicableError
from relflat_sk.measures._norms import NORM_MEASURES
from relflat_sk.measures._scan import Measured, Passes, Results, scan
from relflat_sk.measures._sharpness import SHARPNESS_MEASURES
from relflat_sk.minima._ranking import AT_EQUAL_LOSS
from relflat_sk.minima._table import column_of, is_reserved

# the name of a measure, or a function of model, X and y
Measure = str | Callable[..., Any]
# whether a measure of some name has no value, rather than that its error is raised
Tolerates = Callable[[str, Exception], bool]

# -- the measures -------------------------------------------------------------------------------


def _network_flatness(network: Network, **options: Any) -> Measured:
    """Return the largest eigenvalue flatness of all layers."""
    of_layers = measure_layers(network, ["eigenvalue_flatness"], "all", **options)
    return max(of_layers.values(), key=lambda layer: (math.isnan(layer.value), layer.value))


# measures of the network as a whole, each with arguments of its own
NETWORK_WIDE: dict[str, NetworkMeasure] = {
    "network_flatness": NetworkMeasure(
        _network_flatness,
        ("layer",),
        of_loss=True,
        arguments={"random_state", "rtol", "weight_decay"},
    ),
    **NORM_MEASURES,
    **SHARPNESS_MEASURES,
}
# the changes of the weights under which each measure is invariant
SAME: dict[str, tuple[str, ...]] = {
    **LAYER_MEASURES,
    **{name: measure.same for name, measure in NETWORK_WIDE.items()},
}
# arguments of the measures of layers, which measures of the whole network accept without effect
_OF_LAYERS = {"atol", "max_passes", "method", "n_probes", "rtol", "verbose"}
# an argument that every measure accepts, also where it has no effect
_SEED = {"random_state"}
# measures that are zero where the loss has no curvature
CURVATURES = {*LAYER_MEASURES, "network_flatness"} - {GRADIENT_NORM}
# measures that are taken at equal loss always, and the share of the best constant's loss
SHARES = dict.fromkeys(AT_EQUAL_LOSS, 0.1)


def name_of(measure: Measure) -> str:
    """Return the name of a measure, or of a function of the user's, whichever kind it is."""
    if isinstance(measure, str):
        return measure
    return str(getattr(measure, "__name__", type(measure).__name__))


def of_network(measure: Measure) -> NetworkMeasure | None:
    """Return a measure of the network as a whole, which has no layer; None for one of a layer."""
    if isinstance(measure, str):
        return NETWORK_WIDE.get(measure)
    compute = partial(measure_by_function, measure, name_of(measure))
    return NetworkMeasure(compute, arguments=arguments_of(measure))


def takes_loss(measure: Measure) -> bool:
    """Return whether a measure can be taken at equal loss."""
    whole = of_network(measure)
    return whole is None or whole.of_loss


def counts_decay(measure: Measure) -> bool:
    """Return whether the optimiser's weight decay can be counted into a measure."""
    whole = of_network(measure)
    if whole is not None:
        return "weight_decay" in whole.arguments
    name = name_of(measure)
    return name not in TRACE_LIKE or TRACE_LIKE[name].identity is not None


def get_measure_names() -> list[str]:
    """List the names that `measure` and `flatness_report` take.

    Returns
    -------
    list of str
        The names in alphabetical order.

    See Also
    --------
    measure : Measure a model by one of these names.
    flatness_report : Several of them at all layers.

    Examples
    --------
    >>> "relative_flatness" in get_measure_names()
    True
    """
    return sorted(SAME)


# -- checks of what the user asks for -----------------------------------------------------------


def find_measure(measure: Measure) -> Measure:
    """Check a measure, which is a name of this library or a function of the user's."""
    if isinstance(measure, str) and measure in SAME:
        return measure
    if not callable(measure):
        names = sorted(SAME)
        question = did_you_mean(measure, names) if isinstance(measure, str) else ""
        raise ValueError(
            f"there is no measure {measure!r}.{question} Choose from {names}, or pass a "
            "function of model, X and y."
        )
    if isinstance(measure, BaseEstimator):  # its values have the other sign
        raise TypeError(
            f"{measure!r} is greater for flatter models, and a measure is smaller. Pass the name "
            "of its measure; only searches and rank_models take scorers, for their arguments."
        )
    arguments_of(measure)
    name = name_of(measure)
    if name in SAME or is_reserved(name):
        raise ValueError(f"{name!r} is a measure or a column of relflat_sk: rename {measure!r}.")
    return measure


def find_measures(measures: Any) -> dict[str, Measure]:
    """Check the measures of a table, and return them by the names of their columns."""
    alone = isinstance(measures, str) or callable(measures)
    listed = [measures] if alone else list(measures) if isinstance(measures, Iterable) else []
    if not listed:
        raise TypeError(f"measures must be a name, function or list of these, got {measures!r}.")
    columns: dict[str, Measure] = {}
    for measure in listed:
        checked = find_measure(measure)
        name = column_of(measure)  # refuses a function without a name
        if columns.setdefault(name, checked) != checked:
            raise ValueError(
                f"two measures have the name {name!r} of a column: {columns[name]!r} and "
                f"{checked!r}. Give one of the functions another name."
            )
    return columns


# what a measure must be to have an option
_NEEDS: dict[str, tuple[Callable[[Measure], bool], str]] = {
    "at_loss": (takes_loss, "depends on the loss"),
    "weight_decay": (counts_decay, "is a curvature in units of the weights"),
    "per_sample": (
        lambda measure: name_of(measure) in TRACE_LIKE,
        f"is a mean over samples: one of {list(TRACE_LIKE)}",
    ),
}


def check_options(measures: Sequence[Measure], **options: Any) -> None:
    """Refuse bad values of the options of `_NEEDS`, and those that a measure cannot have."""
    check_number("weight_decay", options.get("weight_decay", 0.0), positive=False)
    share = options.get("at_loss")
    if share is not None and not (is_number(share) and 0 < share < 1):
        raise ValueError(
            "at_loss must be a share of the best constant prediction's loss, between 0 and 1, or "
            f"None, got {share!r}."
        )
    for option, value in options.items():
        has, kind = _NEEDS[option]
        without = [name_of(measure) for measure in measures if value and not has(measure)]
        if without:
            raise ValueError(
                f"{option}={value!r} has no effect on {', '.join(without)}: it needs a measure "
                f"that {kind}. Leave one of them out."
            )


def check_layers(measures: Sequence[Measure], layers: Any) -> None:
    """Refuse a choice of layers if all measures are of the whole network."""
    is_default = isinstance(layers, str | Integral) and layers in (-1, "all")
    if not is_default and None not in map(of_network, measures):
        raise ValueError(
            f"{', '.join(map(name_of, measures))} measures the network as a whole, which has no "
            f"layers to choose; got {layers!r}. Leave the layer out."
        )


def check_arguments(measures: Sequence[Measure], params: Mapping[str, Any]) -> None:
    """Refuse arguments that none of the measures takes."""
    wholes = [whole for whole in map(of_network, measures) if whole is not None]
    known = _SEED.union(*(whole.arguments for whole in wholes)) - {"weight_decay"}
    if not all(map(callable, measures)):
        known |= _OF_LAYERS | {"at_loss"}
    for key in params:
        if key not in known:
            raise TypeError(
                f"{key!r} is no argument of {', '.join(map(name_of, measures))}. Expected some of "
                f"{sorted(known)}."
            )


# -- measuring ----------------------------------------------------------------------------------


@torch.inference_mode(False)  # measures write to tensors of their own, and differentiate
def measure_network(
    network: Network,
    measures: Sequence[Measure],
    layers: Any,
    *,
    weight_decay: float = 0.0,
    tolerates: Tolerates = lambda name, error: isinstance(error, NotApplicableError),
    per_sample: bool = False,
    at_loss: float | None = None,
    **params: Any,
) -> Results:
    """Measure a network in several ways, with as few passes over the data as possible."""
    # A measure has no value, and a reason, where the loss of `at_loss` is reached at no
    # temperature, or where a measure of the whole network raises an error that is tolerated.
    # All traces, the gradient norm, the mean loss, the number of samples and the shape of the
    # outputs come from one pass, with which the largest eigenvalues begin. Measures at equal loss
    # have passes of their own.
    check_arguments(measures, params)
    options = {"weight_decay": weight_decay, "per_sample": per_sample}
    check_options(measures, at_loss=at_loss, **options)
    params |= options
    layers = name_layers(None if network.source is None else network.source.model, layers)
    results: Results = {}
    names = map(name_of, measures)
    shares = [SHARES.get(name) if at_loss is None else at_loss for name in names]
    with alone():
        for share in dict.fromkeys(shares):
            alike = [measure for measure, at in zip(measures, shares, strict=True) if at == share]
            results |= _measure_at_loss(network, alike, layers, share, tolerates, params)
    for (layer, name), measured in results.items():
        warn_of_saddle(layer, name, measured)
    return results


# arguments of the measures that say how the data are read
OF_DATA = {"batch_size", "criterion", "device", "output", "sample_weight"}


def measure_opened(
    network: Network, measure: Measure, *, layer: Layer = -1, **params: Any
) -> Measured:
    """Measure a model that was opened, as `measure` does."""
    check_layers([measure], layer)
    (measured,) = measure_network(network, [measure], [layer], **params).values()
    return measured


def _measure_at_loss(
    network: Network,
    measures: Sequence[Measure],
    layers: Sequence[Layer] | str,
    share: float | None,
    tolerates: Tolerates,
    params: Mapping[str, Any],
) -> Results:
    """Measure a network, or the network at the temperature of a share of the loss."""
    kinds = {name_of(measure): of_network(measure) for measure in measures}
    wholes = {name: whole for name, whole in kinds.items() if whole is not None}
    of_layers = [name for name in kinds if name not in wholes]
    equal = None
    if share is not None:
        checked, where = bool(of_layers), layers if of_layers else [-1]
        equal = at_equal_loss(network, where, share, checked=checked)
        if equal.reason is not None:
            reason = f"no temperature gives the loss of at_loss={share:g}: {equal.reason}"
            passes = Passes(equal.own, at_loss=share)
            nothing = Measured.without_value(equal.reason and reason, passes)
            keys = [*product(equal.own.layer_weights, of_layers), *product([""], wholes)]
            return dict.fromkeys(keys, nothing)
        network = equal.network
    results: Results = {}
    if of_layers:
        taken = _OF_LAYERS | _SEED | {"per_sample", "weight_decay"}
        of_them = {key: value for key, value in params.items() if key in taken}
        results |= measure_layers(network, of_layers, layers, **of_them)
    if wholes:
        if results:
            summary = next(iter(results.values())).passes.own
        else:
            with borrowed(network.module):
                summary = scan(network, [-1] if weight_layers(network.module) else [])
        diverged = not math.isfinite(summary.loss) and find_non_finite(network.module)
        for name, whole in wholes.items():
            measured = Measured.without_value()
            if not diverged:
                measured = _measure_whole(network, name, whole, tolerates, params)
            results["", name] = replace(measured, passes=Passes(summary))
    if equal is None:
        return results
    divides = network.loss.divides_logits
    return {
        key: replace(
            measured, passes=Passes(equal.own, measured.passes.own if divides else None, share)
        )
        for key, measured in results.items()
    }


def _measure_whole(
    network: Network,
    name: str,
    measure: NetworkMeasure,
    tolerates: Tolerates,
    params: Mapping[str, Any],
) -> Measured:
    """Measure the network as a whole; without a value where the measure may fail, and does."""
    try:
        own = {key: params[key] for key in params.keys() & measure.arguments}
        return measure.compute(network, **own)
    except Exception as error:
        if not tolerates(name, error):
            raise
        kind = "" if isinstance(error, NotApplicableError) else f"{type(error).__name__}: "
        return Measured.without_value(f"{kind}{error}".removesuffix("."))


def warn_of_non_finite(network: Network, results: Results) -> None:
    """Say why measures are nan or infinite, unless the measures have said so themselves."""
    # by name, not by layer: a network that diverged has diverged at all of them
    names = dict.fromkeys(
        name
        for (_, name), measured in results.items()
        if not math.isfinite(measured.value) and not measured.reason
    )
    if names:
        passes = next(iter(results.values())).passes
        has_curvature = bool(names.keys() & CURVATURES.union([GRADIENT_NORM]))
        summary = passes.fitted or passes.own
        loss = summary.loss if summary.has_labels else None
        explain_non_finite(list(names), network, loss, has_curvature=has_curvature)


def explain_non_finite(
    names: Sequence[str], network: Network, loss: float | None, *, has_curvature: bool = True
) -> None:
    """Warn that values are nan or infinite, with the cause."""
    parameter = find_non_finite(network.module)
    advice = "If training has diverged, train again, with a lower learning rate for example."
    if parameter is not None:
        cause = f"{parameter!r} of the network contains nan or infinite numbers"
    elif not has_curvature:
        return
    elif loss is None:
        cause = "features or outputs of the network are nan or too large at some sample"
    elif not math.isfinite(loss):
        cause = (
            f"the mean loss is {loss}: the network's outputs are too large, or not what the "
            "criterion takes, such as logits in place of probabilities"
        )
    else:
        cause = (
            "a function behind the layer has no finite derivative at some sample. It is probably a "
            "norm or a square root at 0, as in torch.nn.functional.normalize of features of 0"
        )
        advice = "Measure without such samples, or at a layer behind the function."
    first, *others = names
    and_others = f" and {len(others)} more" if others else ""
    warn(f"the value of {first}{and_others} is nan or infinite, because {cause}. {advice}")

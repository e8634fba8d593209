"""All measures of a network, with as few passes over the data as they take together."""

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from sklearn.base import BaseEstimator

from relflat_sk._checks import check_number, did_you_mean
from relflat_sk._losses.loss import name_criterion
from relflat_sk._models.network_of import name_layer
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer, find_non_finite, weight_layers
from relflat_sk._network.network import Network
from relflat_sk._random import RandomState, alone
from relflat_sk._warnings import warn
from relflat_sk.measures._criterion_curvature import criterion_has_curvature
from relflat_sk.measures._equal_loss import at_equal_loss, check_share
from relflat_sk.measures._layer_measures import (
    GRADIENT_NORM,
    LAYER_MEASURES,
    TRACE_LIKE,
    measure_layers,
)
from relflat_sk.measures._norms import NORM_MEASURES
from relflat_sk.measures._results import (
    Estimate,
    Measure,
    Measured,
    NetworkMeasure,
    NotApplicableError,
    Passes,
    Results,
    Summary,
    name_of,
)
from relflat_sk.measures._scan import scan, scan_losses
from relflat_sk.measures._sharpness import SHARPNESS_MEASURES
from relflat_sk.measures._user_function import arguments_of, measure_by_function
from relflat_sk.minima._minimum import is_reserved
from relflat_sk.minima._ranking import AT_EQUAL_LOSS

# -- measuring ----------------------------------------------------------------------------------


def _network_flatness(
    network: Network,
    *,
    rtol: float = 0.01,
    random_state: RandomState = None,
    weight_decay: float = 0.0,
) -> Estimate:
    """Return the largest eigenvalue flatness of all layers."""
    of_layers = measure_layers(
        network,
        ["eigenvalue_flatness"],
        "all",
        rtol=rtol,
        random_state=random_state,
        weight_decay=weight_decay,
    )
    most = max(of_layers.values(), key=lambda layer: (math.isnan(layer.value), layer.value))
    return Estimate(most.value, most.stderr, most.method)


# measures of the network as a whole, each with arguments of its own
NETWORK_WIDE: dict[str, NetworkMeasure] = {
    "network_flatness": NetworkMeasure(_network_flatness, ("layer",), of_loss=True),
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
_ALWAYS = _OF_LAYERS | _SEED | {"weight_decay"}
# measures that are zero where the loss has no curvature
CURVATURES = {*LAYER_MEASURES, "network_flatness"} - {GRADIENT_NORM}
# measures that are taken at equal loss always, and the share of the best constant's loss
_SHARES = dict.fromkeys(AT_EQUAL_LOSS, 0.1)
# how many standard errors below zero a curvature must be to be called negative
_SURE = 4


@torch.inference_mode(False)  # measures write to tensors of their own, and differentiate
def measure_network(
    network: Network,
    measures: Sequence[Measure],
    layers: Sequence[Layer] | str,
    *,
    weight_decay: float = 0.0,
    tolerated: tuple[type[Exception], ...] = (),
    required: Collection[str] = (),
    per_sample: bool = False,
    at_loss: float | None = None,
    **params: Any,
) -> Results:
    """Measure a network in several ways, with as few passes over the data as possible.

    A measure has no value, and a reason, where the loss of `at_loss` is reached at no temperature,
    or where a measure of the whole network, none of `required`, raises a `tolerated` error.

    All traces, the gradient norm, the mean loss, the number of samples and the shape of the
    outputs come from one pass; the largest eigenvalues begin with it. Measures at equal loss have
    passes of their own.
    """
    check_number("weight_decay", weight_decay, positive=False)
    check_at_loss(measures, at_loss)
    check_arguments(measures, params)
    _check_together(measures, weight_decay, per_sample)
    params |= {"weight_decay": weight_decay, "per_sample": per_sample}
    results: Results = {}
    shares = [loss_share(measure, at_loss) for measure in measures]
    for share in dict.fromkeys(shares):
        alike = [measure for measure, at in zip(measures, shares, strict=True) if at == share]
        may_fail = (tolerated, required)
        results |= _measure_at_loss(network, alike, layers, share, may_fail, params)
    for (layer, name), measured in results.items():
        warn_of_saddle(layer, name, measured)
    _warn_of_no_curvature(network, results)
    return results


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
    _refuse_scorer(measure)
    arguments_of(measure)
    name = name_of(measure)
    if name in SAME or is_reserved(name):
        raise ValueError(
            f"{name!r} is a measure or a column of relflat_sk: give {measure!r} another name."
        )
    return measure


def _refuse_scorer(function: Any) -> None:
    """Refuse a scorer as a measure: its values have the other sign."""
    if isinstance(function, BaseEstimator):
        raise TypeError(
            f"{function!r} is greater for flatter models, and a measure is smaller. Pass the name "
            "of its measure; only searches and rank_models take scorers, for their arguments."
        )


# arguments of the measures that say how the data are read
OF_DATA = {"batch_size", "criterion", "device", "output", "sample_weight"}


def measure_opened(
    network: Network, measure: Measure, *, layer: Layer = -1, **params: Any
) -> Measured:
    """Measure a model that was opened, as `measure` does."""
    if "layers" in params:
        raise TypeError(
            f"layers={params['layers']!r}: a measure takes one layer=..., flatness_report several."
        )
    check_layers([measure], layer)
    assert network.source is not None
    at = name_layer(network.source.model, layer)
    with alone():
        (measured,) = measure_network(network, [measure], [at], **params).values()
    return measured


def loss_share(measure: Measure, at_loss: float | None) -> float | None:
    """Return the share of the best constant's loss at which a measure is taken, if at any."""
    return _SHARES.get(name_of(measure)) if at_loss is None else at_loss


def takes_loss(measure: Measure) -> bool:
    """Return whether a measure can be taken at equal loss."""
    name = name_of(measure)
    return name in LAYER_MEASURES or (name in NETWORK_WIDE and NETWORK_WIDE[name].of_loss)


def check_at_loss(measures: Sequence[Measure], at_loss: float | None) -> None:
    """Refuse a bad share of the loss, and measures that do not depend on the loss."""
    if at_loss is None:
        return
    check_share(at_loss)
    without = [name_of(measure) for measure in measures if not takes_loss(measure)]
    if without:
        raise ValueError(
            f"at_loss={at_loss!r} has no effect on {', '.join(without)}, which does not depend on "
            "the loss: leave it out, or measure a flatness."
        )


# errors that leave a measure without a value, and the names of measures that must have one
MayFail = tuple[tuple[type[Exception], ...], Collection[str]]


def _measure_at_loss(
    network: Network,
    measures: Sequence[Measure],
    layers: Sequence[Layer] | str,
    share: float | None,
    may_fail: MayFail,
    params: Mapping[str, Any],
) -> Results:
    """Measure a network, or the network at the temperature of a share of the loss."""
    whole = [measure for measure in measures if is_of_network(measure)]
    of_layers = [name_of(measure) for measure in measures if not is_of_network(measure)]
    equal = None
    if share is not None:
        checked, where = bool(of_layers), layers if of_layers else [-1]
        refuse = ValueError not in may_fail[0]
        equal = at_equal_loss(network, where, share, checked=checked, refuse=refuse)
        if equal.reason:
            reason = f"no temperature gives the loss of at_loss={share:g}: {equal.reason}"
            nothing = Measured.without_value(Passes(equal.own, at_loss=share), reason)
            keys = [(layer, name) for layer in equal.own.layer_weights for name in of_layers]
            return dict.fromkeys([*keys, *(("", name_of(measure)) for measure in whole)], nothing)
        network = equal.network
    results: Results = {}
    if of_layers:
        of_them = {key: value for key, value in params.items() if key in _ALWAYS | {"per_sample"}}
        recorded = network if equal is None else equal.recorded
        results |= measure_layers(recorded, of_layers, layers, **of_them)
    if whole:
        summary = next(iter(results.values())).passes.own if results else _scan(network)
        results |= _measure_whole(network, whole, may_fail, params, summary)
    if equal is None:
        return results
    divides = equal.network.loss.divides_logits
    return {
        key: replace(measured, passes=Passes(equal.own, measured.passes.own, share, divides))
        for key, measured in results.items()
    }


def is_of_network(measure: Measure) -> bool:
    """Return whether a measure belongs to the network as a whole, so that it has no layer."""
    return not isinstance(measure, str) or measure in NETWORK_WIDE


def counts_decay(measure: Measure) -> bool:
    """Return whether the optimiser's weight decay can be counted into a measure."""
    if is_of_network(measure):
        return "weight_decay" in _arguments(measure)
    name = name_of(measure)
    return not (name in TRACE_LIKE and TRACE_LIKE[name].normalized)


def _check_together(measures: Sequence[Measure], weight_decay: float, per_sample: bool) -> None:
    """Refuse what these measures cannot do: decay, and terms of samples."""
    undecayed = [name_of(measure) for measure in measures if not counts_decay(measure)]
    if weight_decay and undecayed:
        raise ValueError(
            f"weight_decay cannot be counted into {undecayed[0]}, which is no curvature in units "
            "of the weights; leave one of them out."
        )
    names = map(name_of, measures)
    without = [name for name in names if name not in TRACE_LIKE]
    if per_sample and without:
        raise ValueError(
            f"per_sample=True needs a measure that is a mean over samples, got {without[0]!r}; "
            f"choose from {list(TRACE_LIKE)}."
        )


def check_layers(measures: Sequence[Measure], layers: Any) -> None:
    """Refuse a choice of layers if all measures are of the whole network."""
    is_default = isinstance(layers, str | Integral) and layers in (-1, "all")
    if not is_default and all(map(is_of_network, measures)):
        raise ValueError(
            f"{', '.join(map(name_of, measures))} measures the network as a whole, which has no "
            f"layers to choose; got {layers!r}. Leave the layer out, or choose a measure of a "
            "layer, such as relative_flatness."
        )


def check_arguments(measures: Sequence[Measure], params: Mapping[str, Any]) -> None:
    """Refuse arguments that none of the measures takes."""
    of_library = set() if all(map(callable, measures)) else _OF_LAYERS | {"at_loss"}
    known = _SEED.union(of_library, *map(_arguments, measures)) - {"weight_decay"}
    for key in params:
        if key not in known:
            raise TypeError(
                f"{key!r} is no argument of {', '.join(map(name_of, measures))}. Expected some of "
                f"{sorted(known)}."
            )


def _arguments(measure: Measure) -> Set[str]:
    """List the arguments of a measure of the whole network."""
    if not isinstance(measure, str):
        return arguments_of(measure)
    return NETWORK_WIDE[measure].arguments if measure in NETWORK_WIDE else set()


def _scan(network: Network) -> Summary:
    """Make the pass that measures of the whole network do not make themselves."""
    with borrowed(network.module):
        return scan(network) if weight_layers(network.module) else scan_losses(network)


def _measure_whole(
    network: Network,
    measures: Sequence[Measure],
    may_fail: MayFail,
    params: Mapping[str, Any],
    summary: Summary,
) -> Results:
    """Measure the network as a whole; without a value where a measure may fail, and does."""
    tolerated, required = may_fail
    passes, results = Passes(summary), Results()
    diverged = not math.isfinite(summary.loss) and find_non_finite(network.module)
    for measure in measures:
        name = name_of(measure)
        arguments = {key: value for key, value in params.items() if key in _arguments(measure)}
        if diverged:
            results["", name] = Measured.without_value(passes)
            continue
        try:
            if isinstance(measure, str):
                estimate = NETWORK_WIDE[measure](network, **arguments)
            else:
                estimate = measure_by_function(measure, network, **arguments)
        except tolerated as error:
            if name in required:
                raise
            kind = "" if isinstance(error, NotApplicableError) else f"{type(error).__name__}: "
            results["", name] = Measured.without_value(passes, f"{kind}{error}")
        else:
            results["", name] = Measured(
                estimate.value, passes, stderr=estimate.stderr, method=estimate.method
            )
    return results


def warn_of_saddle(layer: str, name: str, measured: Measured) -> None:
    """Warn if a curvature is negative beyond doubt."""
    rounding = 1e-9 * abs(measured.passes.risk)
    if name in TRACE_LIKE and measured.value < -max(_SURE * measured.stderr, rounding):
        warn(
            f"{name} at layer {layer!r} is negative ({measured.value:.3g}): the loss curves down "
            "there, so this point is no minimum, and flatness says nothing about it. Train "
            "further, or check gradient_norm."
        )


def _warn_of_no_curvature(network: Network, results: Results) -> None:
    """Warn if curvatures are zero because the criterion has none, whatever the network does."""
    zero = [
        name
        for (_, name), measured in results.items()
        if name in CURVATURES and measured.value == 0
    ]
    if zero and not criterion_has_curvature(network):
        warn(
            f"{', '.join(dict.fromkeys(zero))} is 0 because "
            f"{name_criterion(network.loss.criterion)} has no curvature at the network's outputs: "
            "it is piecewise linear or constant in them, or gives no gradient. So 0 does not mean "
            "that the minimum is flat. Measure with a loss that is twice differentiable, for "
            "example criterion=torch.nn.CrossEntropyLoss() or torch.nn.MSELoss()."
        )


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
        summary = passes.tempered or passes.own
        explain_non_finite(list(names), network, summary, has_curvature=has_curvature)


def explain_non_finite(
    names: Sequence[str], network: Network, summary: Summary, *, has_curvature: bool
) -> None:
    """Warn that values are nan or infinite, with the cause."""
    parameter = find_non_finite(network.module)
    advice = "If training has diverged, train again, with a lower learning rate for example."
    if parameter is not None:
        cause = f"{parameter!r} of the network contains nan or infinite numbers"
    elif not has_curvature:
        return
    elif not summary.has_labels:
        cause = "features or outputs of the network are nan or too large at some sample"
    elif not math.isfinite(summary.loss):
        cause = (
            f"the mean loss is {summary.loss}: the network's outputs are too large, or not of the "
            "kind that the criterion takes, such as logits in place of probabilities"
        )
    else:
        cause = (
            "a function behind the layer has no finite derivative at some sample, though weights "
            "and loss are finite. It is probably a norm or a square root at 0, as in "
            "torch.nn.functional.normalize of a sample whose features are all 0"
        )
        advice = "Measure without such samples, or at a layer behind the function."
    first, *others = names
    and_others = f" and {len(others)} more" if others else ""
    warn(f"the value of {first}{and_others} is nan or infinite, because {cause}. {advice}")

"""All measures of a network, with as few passes over the data as they take together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from relflat_sk._checks import warn
from relflat_sk._models.network_of import name_layers
from relflat_sk._network.borrowing import borrowed
from relflat_sk._network.layers import Layer, find_non_finite, weight_layers
from relflat_sk._network.network import Network
from relflat_sk._random import alone
from relflat_sk.measures._equal_loss import at_equal_loss
from relflat_sk.measures._layer_measures import (
    GRADIENT_NORM,
    measure_layers,
    warn_of_saddle,
)
from relflat_sk.measures._names import (
    ALWAYS,
    CURVATURES,
    NETWORK_WIDE,
    SHARES,
    check_arguments,
    check_layers,
    check_options,
    is_of_network,
    measure_by_function,
    own_arguments,
)
from relflat_sk.measures._results import (
    Measure,
    Measured,
    NotApplicableError,
    Passes,
    Results,
    Summary,
    name_of,
)
from relflat_sk.measures._scan import scan

# whether a measure of some name has no value, rather than that its error is raised
Tolerates = Callable[[str, Exception], bool]

# -- measuring ----------------------------------------------------------------------------------


@torch.inference_mode(False)  # measures write to tensors of their own, and differentiate
def measure_network(
    network: Network,
    measures: Sequence[Measure],
    layers: Sequence[Layer] | str,
    *,
    weight_decay: float = 0.0,
    tolerates: Tolerates = lambda name, error: isinstance(error, NotApplicableError),
    per_sample: bool = False,
    at_loss: float | None = None,
    **params: Any,
) -> Results:
    """Measure a network in several ways, with as few passes over the data as possible.

    A measure has no value, and a reason, where the loss of `at_loss` is reached at no temperature,
    or where a measure of the whole network raises an error that is tolerated.

    All traces, the gradient norm, the mean loss, the number of samples and the shape of the
    outputs come from one pass; the largest eigenvalues begin with it. Measures at equal loss have
    passes of their own.
    """
    check_arguments(measures, params)
    options = {"weight_decay": weight_decay, "per_sample": per_sample}
    check_options(measures, at_loss=at_loss, **options)
    params |= options
    results: Results = {}
    shares = [SHARES.get(name_of(one)) if at_loss is None else at_loss for one in measures]
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
    (measured,) = measure_at(network, measure, [layer], **params).values()
    return measured


def measure_at(network: Network, measure: Measure, layers: Any, **params: Any) -> Results:
    """Measure a model that was opened at a layer, a list of layers or "all"."""
    assert network.source is not None
    at = name_layers(network.source.model, layers)
    with alone():
        return measure_network(network, [measure], at, **params)


def _measure_at_loss(
    network: Network,
    measures: Sequence[Measure],
    layers: Sequence[Layer] | str,
    share: float | None,
    tolerates: Tolerates,
    params: Mapping[str, Any],
) -> Results:
    """Measure a network, or the network at the temperature of a share of the loss."""
    whole = [measure for measure in measures if is_of_network(measure)]
    of_layers = [name_of(measure) for measure in measures if not is_of_network(measure)]
    equal = None
    if share is not None:
        checked, where = bool(of_layers), layers if of_layers else [-1]
        equal = at_equal_loss(network, where, share, checked=checked)
        if equal.reason:
            reason = f"no temperature gives the loss of at_loss={share:g}: {equal.reason}"
            nothing = Measured.without_value(reason, Passes(equal.own, at_loss=share))
            keys = [(layer, name) for layer in equal.own.layer_weights for name in of_layers]
            return dict.fromkeys([*keys, *(("", name_of(measure)) for measure in whole)], nothing)
        network = equal.network
    results: Results = {}
    if of_layers:
        of_them = {key: value for key, value in params.items() if key in ALWAYS | {"per_sample"}}
        results |= measure_layers(network, of_layers, layers, **of_them)
    if whole:
        if results:
            summary = next(iter(results.values())).passes.own
        else:
            with borrowed(network.module):
                summary = scan(network, [-1] if weight_layers(network.module) else [])
        results |= _measure_whole(network, whole, tolerates, params, summary)
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
    measures: Sequence[Measure],
    tolerates: Tolerates,
    params: Mapping[str, Any],
    summary: Summary,
) -> Results:
    """Measure the network as a whole; without a value where a measure may fail, and does."""
    results = Results()
    diverged = not math.isfinite(summary.loss) and find_non_finite(network.module)
    for measure in measures:
        name = name_of(measure)
        arguments = {key: value for key, value in params.items() if key in own_arguments(measure)}
        try:
            if diverged:
                measured = Measured.without_value()
            elif isinstance(measure, str):
                measured = NETWORK_WIDE[measure](network, **arguments)
            else:
                measured = measure_by_function(measure, network, **arguments)
        except Exception as error:
            if not tolerates(name, error):
                raise
            kind = "" if isinstance(error, NotApplicableError) else f"{type(error).__name__}: "
            measured = Measured.without_value(f"{kind}{error}".removesuffix("."))
        results["", name] = replace(measured, passes=Passes(summary))
    return results


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

"""All measures of a network, with as few passes over the data as they take together."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from numbers import Integral
from typing import Any

from relflat_sk._checks import check_number
from relflat_sk._losses import name_criterion
from relflat_sk._network import Layer, Network, borrowed, find_non_finite
from relflat_sk._random import draw_seed, seed_from
from relflat_sk._warnings import warn
from relflat_sk.measures._criterion_curvature import criterion_has_curvature
from relflat_sk.measures._estimate import Estimate
from relflat_sk.measures._flatness import (
    LAYER_MEASURES,
    TRACE_LIKE,
    Flatness,
    Summary,
    measure_layers,
    summarize,
)
from relflat_sk.measures._norms import NORM_MEASURES
from relflat_sk.measures._own import OwnMeasure
from relflat_sk.measures._sharpness import SHARPNESS_MEASURES

__all__ = [
    "CURVATURES",
    "NETWORK_WIDE",
    "check_arguments",
    "check_layers",
    "counts_decay",
    "is_of_network",
    "measure_network",
    "warn_of",
]

# measures of the network as a whole, each with arguments of its own
NETWORK_WIDE: dict[str, Callable[..., Estimate]] = {**NORM_MEASURES, **SHARPNESS_MEASURES}
# arguments of the measures of layers, which measures of the whole network accept without effect
_OF_LAYERS = {"method", "n_probes", "rtol"}
# an argument that every measure accepts, also where it has no effect
_SEED = {"random_state"}
# measures that are zero where the loss has no curvature
CURVATURES = {*LAYER_MEASURES, "network_flatness"} - {"gradient_norm"}
_NONE = Estimate(math.nan, math.nan, "none")
# how many standard errors below zero a curvature must be to be called negative
_SURE = 4

Found = dict[tuple[str, str], Flatness]  # by layer and name of the measure


def measure_network(
    network: Network,
    names: Sequence[str],
    layers: Sequence[Layer] | str,
    *,
    weight_decay: float = 0.0,
    refuse: bool = True,
    per_sample: bool = False,
    **params: Any,
) -> Found:
    """Measure a network in several ways, with as few passes over the data as possible.

    All traces, the gradient norm, the mean loss, the number of samples and the shape of the
    outputs come from one pass; the largest eigenvalues begin with it.
    """
    check_number("weight_decay", weight_decay, positive=False)
    check_arguments(names, params)
    _check_decay(names, weight_decay)
    if network.processes.are_several:
        _check_shared(names, per_sample)
        # of the weights' noise and of Lanczos' first vector; probes have seeds of their own
        seed = seed_from(params.get("random_state"))
        params["random_state"] = network.processes.share(draw_seed(None) if seed is None else seed)
    some = {key: value for key, value in params.items() if key in _OF_LAYERS | _SEED}
    some["weight_decay"] = weight_decay
    if per_sample:
        _check_per_sample(names)
    found: Found = {}
    of_layers = [name for name in names if name in LAYER_MEASURES]
    if of_layers:
        found |= measure_layers(network, of_layers, layers, per_sample=per_sample, **some)
    if "network_flatness" in names:
        every = layers == "all" and "eigenvalue_flatness" in names
        found["", "network_flatness"] = _least_flat(network, found if every else None, some)
    summary = next((one.summary for one in found.values()), None)
    found |= _measure_whole(network, names, refuse, params, summary)
    warn_of(network, found)
    return found


def warn_of(network: Network, found: Found) -> None:
    """Warn of a negative curvature, and of a criterion without any."""
    for (layer, name), one in found.items():
        _warn_of_saddle(layer, name, one)
    _warn_of_no_curvature(network, found)


def counts_decay(name: str) -> bool:
    """Return whether the optimiser's weight decay can be counted into a measure."""
    return not _is_whole(name) and not (name in TRACE_LIKE and TRACE_LIKE[name].normalized)


def is_of_network(name: str) -> bool:
    """Return whether a measure belongs to the network as a whole, so that it has no layer."""
    return name == "network_flatness" or _is_whole(name)


def _is_whole(name: str) -> bool:
    """Return whether a measure is a function of the whole network, with arguments of its own."""
    return name in NETWORK_WIDE or isinstance(name, OwnMeasure)


def _check_shared(names: Sequence[str], per_sample: bool) -> None:
    """Refuse what cannot be summed over processes."""
    own = [str(name) for name in names if isinstance(name, OwnMeasure)]
    if own:
        raise ValueError(
            f"the measure {own[0]!r} is a function of yours, which gets the data of one process "
            "only. Measure it without process_group, or gather the data in one process."
        )
    if per_sample:
        raise ValueError(
            "per_sample=True gives the terms of the samples of one process, and with process_group "
            "all of them count. Leave one of the two out."
        )


def _check_per_sample(names: Sequence[str]) -> None:
    """Refuse to return the samples' terms of a measure that is no mean over samples."""
    for name in names:
        if name not in TRACE_LIKE:
            raise ValueError(
                f"per_sample=True needs a measure that is a mean over samples, got {name!r}; "
                f"choose from {list(TRACE_LIKE)}."
            )


def check_layers(names: Sequence[str], layers: Any) -> None:
    """Refuse a choice of layers if all measures are of the whole network."""
    is_default = isinstance(layers, str | Integral) and layers in (-1, "all")
    if not is_default and all(map(is_of_network, names)):
        raise ValueError(
            f"{', '.join(names)} measures the network as a whole, which has no layers to choose; "
            f"got {layers!r}. Leave the layer out, or choose a measure of a layer, such as "
            "relative_flatness."
        )


def _check_decay(names: Sequence[str], weight_decay: float) -> None:
    """Refuse weight decay where it cannot be counted into a measure."""
    undecayed = [name for name in names if not counts_decay(name)]
    if weight_decay and undecayed:
        raise ValueError(
            f"weight_decay cannot be counted into {undecayed[0]}, which is no curvature in units "
            "of the weights; leave one of them out."
        )


def check_arguments(names: Sequence[str], params: Mapping[str, Any]) -> None:
    """Refuse arguments that none of the measures takes."""
    known = _SEED.union(*map(_arguments, names))
    if not all(isinstance(name, OwnMeasure) for name in names):
        known |= _OF_LAYERS
    for key in params:
        if key not in known:
            raise TypeError(
                f"{key!r} is no argument of {', '.join(names)}. Expected some of {sorted(known)}."
            )


def _arguments(name: str) -> Set[str]:
    """List the arguments of a measure of the whole network."""
    if isinstance(name, OwnMeasure):
        return name.arguments
    if name not in NETWORK_WIDE:
        return set()
    return {
        key
        for key, one in inspect.signature(NETWORK_WIDE[name]).parameters.items()
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _least_flat(network: Network, found: Found | None, some: Mapping[str, Any]) -> Flatness:
    """Return the largest eigenvalue flatness of all layers, given or to be measured."""
    name = "eigenvalue_flatness"
    each = measure_layers(network, [name], "all", **some) if found is None else found
    return max(
        (one for (_, what), one in each.items() if what == name),
        key=lambda one: (math.isnan(one.value), one.value),
    )


def _measure_whole(
    network: Network,
    names: Sequence[str],
    refuse: bool,
    params: Mapping[str, Any],
    summary: Summary | None,
) -> Found:
    """Measure the network as a whole; nan, with a warning, for what does not apply to it."""
    names = [name for name in names if _is_whole(name)]
    if not names:
        return {}
    if summary is None:
        with borrowed(network.module):
            summary = summarize(network)
    diverged = not math.isfinite(summary.loss) and find_non_finite(network.module)
    found = {}
    for name in names:
        network.processes.begin(str(name))
        own = {key: value for key, value in params.items() if key in _arguments(name)}
        compute = name.measure if isinstance(name, OwnMeasure) else NETWORK_WIDE[name]
        try:
            one = _NONE if diverged else compute(network, **own)
        except (TypeError, ValueError) as error:
            if refuse:
                raise
            warn(f"{name} does not apply to this network: {error}")
            one = _NONE
        found["", str(name)] = Flatness(one.value, one.stderr, one.method, network, summary)
    return found


def _warn_of_saddle(layer: str, name: str, found: Flatness) -> None:
    """Warn if a curvature is negative beyond doubt."""
    if name in TRACE_LIKE and found.value < -max(_SURE * found.stderr, 1e-9 * abs(found.risk)):
        warn(
            f"{name} at layer {layer!r} is negative ({found.value:.3g}): the loss curves down "
            "there, so this point is no minimum, and flatness says nothing about it. Train "
            "further, or check gradient_norm."
        )


def _warn_of_no_curvature(network: Network, found: Found) -> None:
    """Warn if curvatures are zero because the criterion has none, whatever the network does."""
    zero = [name for (_, name), one in found.items() if name in CURVATURES and one.value == 0]
    if zero and not criterion_has_curvature(network):
        warn(
            f"{', '.join(dict.fromkeys(zero))} is 0 because "
            f"{name_criterion(network.loss.criterion)} has no curvature at the network's outputs: "
            "it is piecewise linear or constant in them, or gives no gradient. So 0 does not mean "
            "that the minimum is flat. Measure with a loss that is twice differentiable, for "
            "example criterion=torch.nn.CrossEntropyLoss() or torch.nn.MSELoss()."
        )

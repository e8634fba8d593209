"""All measures of a network, with as few passes over the data as they take together."""

import math
from collections.abc import Mapping, Sequence, Set
from numbers import Integral
from typing import Any

import torch
from torch import nn

from relflat_sk._checks import check_number
from relflat_sk._losses import name_criterion, product_curvature, pull_back
from relflat_sk._network import Batch, Layer, Network, borrowed, find_non_finite, outcome_of
from relflat_sk._random import draw_seed, make_generator, rademacher, seed_from
from relflat_sk._warnings import warn
from relflat_sk.measures._layer_measures import LAYER_MEASURES, TRACE_LIKE, measure_layers
from relflat_sk.measures._norms import NORM_MEASURES
from relflat_sk.measures._own import OwnMeasure
from relflat_sk.measures._results import Estimate, Flatness, Found, NetworkMeasure, Summary
from relflat_sk.measures._scan import summarize
from relflat_sk.measures._sharpness import SHARPNESS_MEASURES

# -- whether a criterion has any curvature at the outputs of a network --------------------------

_NOT_LOGARITHMS = 1e-2  # of the logarithm of the summed probabilities


def criterion_has_curvature(network: Network) -> bool:
    """Return whether the criterion is curved in the network's outputs, on some batch of the data.

    Where it is not, every flatness is zero behind a network that is linear or piecewise linear.
    The 0-1 loss, a detached loss and the mean absolute error are such criteria.
    """
    with borrowed(network.module):
        # by its formula, also where outputs are too large to show it in float32
        curved = network.loss.is_curved and not _takes_logits_as_logarithms(network)
        curved = curved or any(_is_curved(network, batch) for batch in network.batches())
    return any(network.processes.gather(curved))


def _takes_logits_as_logarithms(network: Network) -> bool:
    """Return whether `NLLLoss`, which is linear, receives outputs that are no log-probabilities."""
    if type(network.loss.criterion) is not nn.NLLLoss:
        return False
    with torch.no_grad():
        output = network(next(iter(network.batches())).x)
    return bool(output.logsumexp(dim=1).abs().max() > _NOT_LOGARITHMS)


def _is_curved(network: Network, batch: Batch) -> bool:
    """Return whether a product with the Hessian in the outputs of a batch is not zero."""
    if batch.y is None:
        return True
    with torch.no_grad():
        output = network(batch.x)
    with torch.enable_grad():
        output = output.detach().requires_grad_()
        loss, _ = outcome_of(network, batch, output).total()
        if not loss.requires_grad:
            return False
        (gradient,) = pull_back([loss], [output], create_graph=False)
        if gradient is None:
            return False
        if not bool(gradient.any()):
            return True
        # random signs do not cancel, as ones would in a softmax
        signs = rademacher(output.shape, output, make_generator(0, output.device))
        product = product_curvature(loss, output).product(signs)
    return bool(product.any())


# -- measuring ----------------------------------------------------------------------------------

# measures of the network as a whole, each with arguments of its own
NETWORK_WIDE: dict[str, NetworkMeasure] = {**NORM_MEASURES, **SHARPNESS_MEASURES}
# arguments of the measures of layers, which measures of the whole network accept without effect
_OF_LAYERS = {"method", "n_probes", "rtol"}
# an argument that every measure accepts, also where it has no effect
_SEED = {"random_state"}
# measures that are zero where the loss has no curvature
CURVATURES = {*LAYER_MEASURES, "network_flatness"} - {"gradient_norm"}
_NONE = Estimate(math.nan, math.nan, "none")
# how many standard errors below zero a curvature must be to be called negative
_SURE = 4


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
    for (layer, name), one in found.items():
        _warn_of_saddle(layer, name, one)
    _warn_of_no_curvature(network, found)
    return found


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
    return NETWORK_WIDE[name].arguments if name in NETWORK_WIDE else set()


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


def warn_of_non_finite(found: Mapping[tuple[str, str], Flatness]) -> None:
    """Say why measures are nan or infinite, unless the measures have said so themselves."""
    # by name, not by layer: a network that diverged has diverged at all of them
    names = dict.fromkeys(name for (_, name), one in found.items() if not math.isfinite(one.value))
    if not names:
        return
    one = next(iter(found.values()))
    parameter, cause = find_non_finite(one.network.module), None
    if parameter is not None:
        cause = f"{parameter!r} of the network contains nan or infinite numbers"
    elif names.keys() & {*TRACE_LIKE, "gradient_norm"} and not math.isfinite(one.risk):
        cause = (
            f"the mean loss is {one.risk}: the network's outputs are too large, or not of the kind "
            "that the criterion takes, such as logits in place of probabilities"
        )
    if cause is not None:
        first, *others = names
        and_others = f" and {len(others)} more" if others else ""
        warn(
            f"the value of {first}{and_others} is nan or infinite, because {cause}. If training "
            "has diverged, train again, with a lower learning rate for example."
        )

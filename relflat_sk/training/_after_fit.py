"""What a net records of its training data at the end of `fit`, and warnings if it ended badly."""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from torch import nn
from torch.nn.parameter import is_lazy

from relflat_sk._checks import warn
from relflat_sk._losses.loss import warn_of_no_curvature
from relflat_sk._models.network_of import defaults_of, describe
from relflat_sk._network.layers import weight_layers
from relflat_sk._network.network import REFUSALS
from relflat_sk._random import fork_rng
from relflat_sk.measures._layer_measures import measure_layers, warn_of_saddle
from relflat_sk.measures._minimum import (
    ConstantComparison,
    compare_with_constant,
    criterion_has_curvature,
    epoch_losses,
)
from relflat_sk.measures._scan import Results
from relflat_sk.training._callbacks import required_goals
from relflat_sk.training._data import training_network

# A net has collapsed if its best epoch had learned something, as a share of a constant's loss, and
# if it lost this share of that gain. In 450 trainings with learning rates from 0.01 to 0.1 on five
# data sets, noise cost at most 0.27 of it.
_GAIN, _LOST = 0.25, 0.5
# A net has hardly learned if its loss is below the best constant's by no more than this share.
_HARDLY = 0.05
# The weight of the penalty does not matter if its limit took this share of it, and the net has
# learned. In the first steps of any training the limit takes all: there is nothing yet to spend.
_NEARLY_ALL, _FIRST_STEPS = 0.98, 200

# what is left to do for nets that are fitted inside of `measured_later`
_LATER: ContextVar[list[Callable[[], None]] | None] = ContextVar("_LATER", default=None)


@contextmanager
def measured_later() -> Iterator[list[Callable[[], None]]]:
    """Let the caller measure nets that are fitted inside the context, by the yielded functions."""
    later: list[Callable[[], None]] = []
    token = _LATER.set(later)
    try:
        yield later
    finally:
        _LATER.reset(token)


@dataclass(frozen=True)
class Record:
    """What was measured on the training data, how, and checksums of weights: those at which.

    `initialized` is the checksum of a network that was made after the training.
    """

    value: float
    at_last: float | None  # the value at the last layer, if it is among several
    comparison: ConstantComparison
    layer: Any
    normalize: bool
    weights: int
    initialized: int | None = None


def checksum(module: nn.Module) -> int:
    """Compute a number of parameters and buffers that tells whether they have changed."""
    found = 0
    for tensor in (*module.parameters(), *module.buffers()):
        if is_lazy(tensor):
            continue
        numbers = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        found = zlib.crc32(numbers.data, found)
    return found


def record_outcome(net: Any, dataset: Any, *, since: int | None) -> None:
    """Measure a trained net, and check how its epochs `since` one ended, now or when asked to.

    Without `since`, the net is measured only.
    """
    with fork_rng(None):  # the draw must not change what users draw next
        seed = int(torch.randint(2**31 - 1, ()))
    later = _LATER.get()
    if later is not None:  # who measures later judges the depth as well
        later.append(partial(_finish, net, dataset, seed, since))
        return
    _finish(net, dataset, seed, since)
    if since is None or getattr(net, "converged_", True):  # nets without a goal have none to miss
        return
    goals, most = required_goals(net), net.max_epochs
    if goals and 0 < most <= len(net.history) - since:
        # of the class only: one warning for many nets at a line that differ in parameters
        text = f"the {type(net).__name__} has not reached {goals} with max_epochs={most}."
        warn(f"{text} Train longer, or to a goal within reach.", ConvergenceWarning)


def _finish(net: Any, dataset: Any, seed: int, since: int | None) -> None:
    """Measure a net, record that, and warn if its training ended badly.

    The loss and the score from the same pass are recorded as well, for `FlatnessScorer`.
    """
    name = "normalized_relative_flatness" if net.flatness_normalize else "relative_flatness"
    network, results = None, Results()
    value, at_last, comparison = np.nan, None, ConstantComparison(np.nan, np.nan)
    try:
        network = training_network(net, dataset)
        results = measure_layers(network, [name], net._layers(), random_state=seed)
    except (TypeError, ValueError) as error:
        warn(f"relative_flatness_ could not be measured: {error}")
    for (layer, _), measured in results.items():
        warn_of_saddle(layer, name, measured)
    if network is not None and results:
        values = [measured.value for measured in results.values()]  # in the order of the layers
        value = sum(values)
        # "all" leaves out layers at which there is no flatness, perhaps the last
        is_whole = len(values) == len(weight_layers(network.module))
        layers = net._layers()
        if is_whole if layers == "all" else -1 in layers:
            at_last = values[-1]
        with _saying("constant_comparison_ could not be computed"):
            comparison = compare_with_constant(network, next(iter(results.values())).passes)
    way = net.flatness_layer, net.flatness_normalize
    net._record = Record(value, at_last, comparison, *way, checksum(net.module_))
    is_flat = network is not None and net.flatness_weight != 0 and value == 0
    has_died = is_flat and not comparison.beats_constant
    if is_flat:
        _warn_of_flat(net, network, has_died=has_died)
    if since is not None:
        for problem in _bad_endings(net, since, has_died=has_died):
            warn(problem)


@contextmanager
def _saying(what: str) -> Iterator[None]:
    """Turn errors of a criterion or of data into a warning, because they are no reason to fail."""
    try:
        yield
    except REFUSALS as error:
        warn(f"{what}: {error}")


# -- how the training ended ----------------------------------------------------------------


def _warn_of_flat(net: Any, network: Any, *, has_died: bool) -> None:
    """Warn of a net that is perfectly flat if its criterion has no curvature, or if it has died."""
    has_curvature = True
    with _saying("it could not be checked that the criterion has a curvature"):
        has_curvature = criterion_has_curvature(network)
    if not has_curvature:
        # of the class only: one warning for many nets at a line
        penalty = f"the penalty of the {type(net).__name__}"
        warn_of_no_curvature(network.loss, penalty, "with flatness_weight=0")
    elif has_died:
        warn(
            f"the network of {describe(net)} is perfectly flat: it has probably died (its "
            f"outputs are constant). {_advice(net)}"
        )


def _bad_endings(net: Any, since: int, *, has_died: bool) -> Iterator[str]:
    """Yield how a training ended badly, but for a death that is told in other words."""
    epochs, losses, ended = net.history[since:], epoch_losses(net)[since:], net._record.comparison
    if epochs and all(epoch.get("train_batch_count") == 0 for epoch in epochs):
        yield (
            f"the {type(net).__name__} is not trained: its data gave no batch. Take a smaller "
            f"batch_size than {net.batch_size!r}, or leave out iterator_train__drop_last."
        )
    if losses and net.flatness_weight and not net._penalty_weight():
        yield (
            f"the {type(net).__name__} was trained for {len(net.history)} epochs, before its "
            f"penalty began with flatness_start={net.flatness_start!r}. Choose an earlier start."
        )
    if not all(map(math.isfinite, [*losses[-1:], *([ended.loss] if ended.is_known else [])])):
        yield f"the training of {describe(net)} has diverged: its loss is not finite."
        return
    if not losses or has_died:
        return
    outweighs = any(e.get("flatness_penalty", 0.0) > e.get("train_loss", np.inf) for e in epochs)
    if _has_collapsed(losses, ended):
        best = int(np.nanargmin(losses))
        yield (
            f"{describe(net)} ended much worse than it was: its training loss was "
            f"{losses[best]:.3g} in epoch {since + best + 1} and {losses[-1]:.3g} in the last "
            f"one, where the best constant prediction has {ended.constant_loss:.3g}. "
            f"{_advice(net)} skorch's callback Checkpoint(load_best=True) keeps the best epoch."
        )
    elif ended.is_known and ended.is_lower_by(_HARDLY):
        # with callbacks="disable", a net records batches only
        share = _share_of_limit([b for epoch in epochs for b in epoch.get("batches", ())])
        if share >= _NEARLY_ALL and any(  # somebody chose a weight that could have mattered
            getattr(net, name) != defaults_of(type(net))[name]
            for name in ("flatness_weight", "flatness_clip")
        ):
            # of the class only: one warning for many nets at a line
            yield (
                f"the penalty of the {type(net).__name__} was at its limit, which took "
                f"{100 * share:.1f}% of it, and flatness_weight={net.flatness_weight!r} did not "
                f"matter. Use a smaller one, or a larger flatness_clip than {net.flatness_clip!r}."
            )
    elif ended.is_known and net.flatness_weight and net.flatness_clip is None and outweighs:
        yield (
            f"{describe(net)} has hardly learned, because its penalty was larger than its "
            f"loss: its training loss is {ended.loss:.4g}, where the best constant prediction "
            f"has {ended.constant_loss:.4g}. {_advice(net)}"
        )


def _share_of_limit(batches: Sequence[Mapping[str, float]]) -> float:
    """Return the mean share of the penalty that its limit took, 0 in the first steps."""
    clipped = [
        batch["flatness_clipped"]
        for batch in batches
        if batch.get("flatness_clipped") or batch.get("flatness_penalty")  # others have no penalty
    ]
    return float(np.mean(clipped)) if len(clipped) >= _FIRST_STEPS else 0.0


def _has_collapsed(losses: Sequence[float], ended: ConstantComparison) -> bool:
    """Return whether a net lost much of what its best epoch had gained over the best constant.

    The last epoch and the final weights must show it, because a callback may have restored the
    weights of the best epoch.
    """
    last, best = min(losses[-1], ended.loss), np.nanmin(losses)
    gain = ended.constant_loss - best
    return bool(gain > _GAIN * abs(ended.constant_loss) and last - best > _LOST * gain)


def _advice(net: Any) -> str:
    """Say what helps against a training that ends badly."""
    if not net.flatness_weight:
        return "Use a lower learning rate."
    limit = f"a smaller flatness_clip than {net.flatness_clip!r}"
    if net.flatness_clip is None:
        limit = "a limit of the penalty (flatness_clip=1.0)"
    return (
        f"Use {limit}, a lower learning rate, or a flatness_weight below {net.flatness_weight!r}."
    )

"""Fit one candidate: seeded, one at a time in this process, open to a pruner and to Ctrl-C."""

import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.callbacks import Callback
from threadpoolctl import threadpool_limits
from torch.nn.parameter import is_lazy

from relflat_sk._engine.epoch import EPOCH_TRAINER
from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._network.layers import find_layer
from relflat_sk._random import IN_TURN, seeded
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.fleet._fleet import seconds_used
from relflat_sk.measures._scorer import flatness_columns
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._data import TrainingData
from relflat_sk.search._failures import KEPT, CallError

OnEpoch = Callable[[int, float], bool]  # of epoch and training loss; returns whether to stop


class StoppedError(Exception):
    """A pruner stopped the training."""


def fit(
    estimator: Any,
    data: TrainingData,
    seed: int | None,
    minimum: Minimum,
    layers: Sequence[Any] = (),
    on_epoch: OnEpoch | None = None,
) -> None:
    """Fit an estimator, and note how long it took and how its losses went."""
    started = seconds_used()
    try:
        with _interruptible(), seeded(seed), _watched(estimator, layers, on_epoch):
            estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    except KeyError as error:
        missing = re.search(r"\bvalid\w*", str(error))
        if missing is None:
            raise
        raise ValueError(
            f"{missing[0]!r} is missing: a callback reads it, but a search trains on all data. Let "
            "it monitor the training loss, such as EarlyStopping('train_loss')."
        ) from error
    finally:
        minimum.seconds = seconds_used() - started
    minimum.curves = _curves(estimator)


def nets_of(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets among an estimator and its parameters."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the search: skorch would end only the training of one net."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    pressed = []

    def remember(number: int, frame: Any) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


# -- one network at a time, with a number of threads that is always the same ---------------------

# Torch has one random state for all threads of a process, and the number of threads that compute
# changes the order of floating-point sums. A network would therefore depend on what else is trained
# at the same time, and on where.

_LOCK = threading.RLock()


def in_fleet() -> bool:
    """Return whether the nets of this thread are trained together with others."""
    return EPOCH_TRAINER.get() is not None


@contextmanager
def isolated(n_threads: int | None) -> Iterator[None]:
    """Compute alone in this process, with a number of threads; None leaves it as it is.

    A fleet computes alone as a whole: the trainings in it take turns. A search inside of a fit, as
    by a callback, does not wait for a candidate in another thread, which may wait for that fit.
    """
    if in_fleet():
        yield
        return
    with nullcontext() if IN_TURN.get() else _LOCK, ExitStack() as stack:
        if n_threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(n_threads)  # also of MKL inside torch, which has its own limit
            stack.enter_context(threadpool_limits(limits=n_threads))
        yield


# -- watching the training of nets ---------------------------------------------------------------

LAST = -1  # the position of the last layer, which each network has that can be measured at one


class _Watcher(Callback):
    """Refuse a net without the layers to measure, and let a pruner stop it.

    It stays itself in copies of its net, because what it calls belongs to the caller.
    """

    def __init__(self, layers: Sequence[Any], on_epoch: OnEpoch | None) -> None:
        self.layers = layers
        self.on_epoch = on_epoch

    def __deepcopy__(self, memo: Any) -> "_Watcher":
        return self

    def __sklearn_clone__(self) -> "_Watcher":
        return self

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Look for the layers, which are there as soon as the net is initialised."""
        module = unwrapped(net.module_)
        if any(map(is_lazy, module.parameters())):
            return  # the layers of a lazy module get their types from the first batch
        for layer in self.layers:
            try:
                find_layer(module, layer)
            except (LayerNotFoundError, TypeError) as error:
                raise missing_layer(layer, error) from error

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        """Report the training loss of the epoch."""
        loss = net.history[-1, "train_loss"]
        if self.on_epoch is not None and self.on_epoch(len(net.history), loss):
            raise StoppedError


def missing_layer(layer: Any, error: Exception) -> CallError:
    """Return the error for a layer that a candidate does not have."""
    return CallError(
        f"layer={layer!r} cannot be measured: {error} Give a layer that each candidate has.{KEPT}"
    )


@contextmanager
def _watched(estimator: Any, layers: Sequence[Any], on_epoch: OnEpoch | None) -> Iterator[None]:
    """Let nets be checked before their first epoch, and stopped after each."""
    watcher = _Watcher(layers, on_epoch)
    nets = [net for net in nets_of(estimator) if net.callbacks != "disable"]
    if not layers and on_epoch is None:
        nets = []
    for net in nets:
        net.set_params(callbacks=[*(net.callbacks or []), watcher])
    yield
    # a TransformedTargetRegressor fits a copy of its net
    for net in [*nets, final_estimator(estimator)] if nets else []:
        net.callbacks = [x for x in net.callbacks or [] if x is not watcher] or None
        if hasattr(net, "callbacks_"):
            net.callbacks_ = [pair for pair in net.callbacks_ if pair[1] is not watcher]


# -- how loss and flatness went ------------------------------------------------------------------

MOST_EPOCHS = 200  # of longer trainings, epochs at equal distances, the first and the last
LOSSES = ("train_loss", "valid_loss")


def _curves(estimator: Any) -> dict[str, list[Any]] | None:
    """Return the losses of the epochs, and their flatness if a `FlatnessScorer` recorded it."""
    final = final_estimator(estimator)
    signs = dict.fromkeys(LOSSES, 1.0)
    if isinstance(final, NeuralNet):
        history = list(final.history)
        signs |= flatness_columns(final)  # small is flat
    else:
        history = [{"train_loss": loss} for loss in getattr(final, "loss_curve_", [])]
    recorded = signs.keys() & {name for epoch in history for name in epoch}
    if not recorded:
        return None
    kept = np.unique(np.linspace(0, len(history) - 1, MOST_EPOCHS).round().astype(int)).tolist()
    return {"epoch": [row + 1 for row in kept]} | {
        name: [_short(sign * history[row].get(name, np.nan)) for row in kept]
        for name, sign in signs.items()
        if name in recorded
    }


def _short(value: float) -> float | None:
    """Return a value as JSON stores it: with six digits, None if it is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None

"""Fit one candidate: on all the data, seeded, open to the pruner and to Ctrl-C."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from sklearn.base import clone
from skorch import NeuralNet

from relflat_sk._random import seeded
from relflat_sk.fleet import seconds_used
from relflat_sk.search._trial.curves import record_curves
from relflat_sk.search._trial.goal import add_goal
from relflat_sk.search._trial.held_out import (
    check_early_stopping,
    drop_default_splits,
    explain_missing_validation,
    split_recorded,
)
from relflat_sk.search._trial.training_data import TrainingData
from relflat_sk.search._trial.watching import watched

__all__ = ["fit", "prepare"]


def prepare(
    estimator: Any, params: Mapping[str, Any], seed: int | None, goal: Any, device: Any = None
) -> Any:
    """Clone an estimator and set it up for one candidate."""
    estimator = clone(estimator)
    estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
    drop_default_splits(_nets(estimator))
    check_early_stopping(estimator.get_params().items())
    if device is not None and not any(name.split("__")[-1] == "device" for name in params):
        for net in _nets(estimator):
            net.set_params(device=str(device))
    add_goal(estimator, goal)
    if seed is not None:
        unset = [
            name
            for name, value in estimator.get_params().items()
            if name.split("__")[-1] == "random_state" and value is None
        ]
        estimator.set_params(**dict.fromkeys(unset, seed))
    return estimator


def fit(
    estimator: Any,
    data: TrainingData,
    seed: int | None,
    record: dict[str, Any],
    layer: Any = -1,
    trial: Any = None,
) -> Any:
    """Fit an estimator and record how long it took."""
    if _nets(estimator):
        _import_compiler()
    started = seconds_used()
    try:
        with (
            _interruptible(),
            seeded(seed),
            watched(_nets(estimator), estimator, layer, trial),
            split_recorded(estimator, data.X_fit),
        ):
            estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    except KeyError as error:
        explained = explain_missing_validation(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        record["seconds"] = seconds_used() - started
    record_curves(record, estimator)
    return estimator


@cache
def _import_compiler() -> None:
    """Import what the first optimizer of a process imports, so that no candidate's time has it."""
    torch.optim.SGD([torch.zeros(1)])


def _nets(estimator: Any) -> list[NeuralNet]:
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

"""Fit one candidate: on all the data, seeded, watched by the pruner, ended by Ctrl-C."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optuna
import torch
from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback

from relflat_sk._models import final_estimator

__all__ = ["fit", "prepare", "seeded"]


def prepare(estimator: Any, params: Mapping[str, Any], seed: int | None) -> Any:
    """Copy an estimator and set it up for one candidate.

    Parameters
    ----------
    estimator : estimator
    params : dict
        Values by parameter name.
    seed : int or None
        For every `random_state` of the estimator that is None.

    Returns
    -------
    estimator
        Unfitted; the user's own stays as it is.
    """
    estimator = clone(estimator)
    estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
    _hold_nothing_out(estimator, params)
    if seed is not None:
        unset = [
            name
            for name, value in estimator.get_params().items()
            if name.split("__")[-1] == "random_state" and value is None
        ]
        estimator.set_params(**dict.fromkeys(unset, seed))
    return estimator


def fit(estimator: Any, X: Any, y: Any, seed: int | None, trial: Any = None) -> Any:
    """Fit an estimator.

    Parameters
    ----------
    estimator : estimator
    X, y : array-like
    seed : int or None
        For torch's random state.
    trial : optuna.Trial, optional
        Is told the time, and each epoch for its study's pruner.

    Returns
    -------
    estimator
        The same.
    """
    started = time.perf_counter()
    try:
        with _interruptible(), seeded(seed), _pruned(estimator, trial):
            estimator.fit(X, y)
    finally:
        if trial is not None:
            trial.set_user_attr("seconds", time.perf_counter() - started)
    return estimator


def _hold_nothing_out(estimator: Any, params: Mapping[str, Any]) -> None:
    """Switch validation splits off: those of skorch, and scikit-learn's early stopping."""
    for net in _nets(estimator):
        net.set_params(train_split=None)
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True and name not in params:
            estimator.set_params(**{name: False})


def _nets(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets in an estimator, itself included."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


class _ReportToPruner(Callback):
    """Tell the study's pruner the training loss after each epoch."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def __deepcopy__(self, memo: Any) -> "_ReportToPruner":
        return self  # a copy of the trial would report to a copy of the study

    def __sklearn_clone__(self) -> "_ReportToPruner":
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        self.trial.report(net.history[-1, "train_loss"], len(net.history))
        if self.trial.should_prune():
            raise optuna.TrialPruned


@contextmanager
def _pruned(estimator: Any, trial: Any) -> Iterator[None]:
    """Let the study's pruner, if there is one, watch the nets of an estimator as they train."""
    study = getattr(trial, "study", None)
    if (
        study is None
        or len(study.directions) > 1
        or isinstance(study.pruner, optuna.pruners.NopPruner)
    ):
        yield
        return
    watched = [net for net in _nets(estimator) if net.callbacks != "disable"]
    for net in watched:
        net.set_params(callbacks=[*(net.callbacks or []), _ReportToPruner(trial)])
    yield
    if watched:  # what was fitted may be a copy, as in a TransformedTargetRegressor
        for net in [*watched, final_estimator(estimator)]:
            _forget_pruner(net)


def _forget_pruner(net: Any) -> None:
    """Drop the callback that holds on to the study."""
    others = [one for one in net.callbacks or [] if not isinstance(one, _ReportToPruner)]
    net.callbacks = others or None
    if hasattr(net, "callbacks_"):
        net.callbacks_ = [
            (name, one) for name, one in net.callbacks_ if not isinstance(one, _ReportToPruner)
        ]


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed torch's random state, from which plain skorch nets draw, and give it back."""
    if seed is None:
        yield
        return
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=cuda):
        torch.manual_seed(seed)
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the sweep: skorch takes it for the end of one net's training."""
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

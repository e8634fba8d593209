"""Fit one candidate: on all the data, seeded, open to the pruner and to Ctrl-C."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import optuna
from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback

from relflat_sk._models import final_estimator
from relflat_sk._random import seeded
from relflat_sk.ensemble import seconds_used
from relflat_sk.search._trial.curves import record_curves
from relflat_sk.search._trial.goal import add_goal
from relflat_sk.search._trial.held_out import (
    drop_default_splits,
    explain_missing_validation,
    split_recorded,
)
from relflat_sk.search._trial.training_data import TrainingData

__all__ = ["fit", "prepare"]


def prepare(
    estimator: Any, params: Mapping[str, Any], seed: int | None, goal: Any, device: Any = None
) -> Any:
    """Clone an estimator and set it up for one candidate.

    Parameters
    ----------
    estimator : estimator
        The user's estimator, which stays as it is.
    params : dict
        Values by parameter name; they are copied.
    seed : int or None
        The value of every `random_state` of the estimator that is None.
    goal : "auto", float or None
        What nets train to that have no goal of their own.
    device : str or torch.device, optional
        Where nets are trained, unless `params` say it; on their own device if None.

    Returns
    -------
    estimator
        An unfitted estimator. Its nets hold no data out that nobody asked for.
    """
    estimator = clone(estimator)
    estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
    _train_on_all_data(estimator, params)
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


def fit(estimator: Any, data: TrainingData, seed: int | None, trial: Any = None) -> Any:
    """Fit an estimator and record in a trial how long it took.

    Parameters
    ----------
    estimator : estimator
        The estimator, which is fitted in place.
    data : TrainingData
        What to train on.
    seed : int or None
        Seed of torch's random state.
    trial : optuna.Trial, optional
        Gets the seconds that training took, the curves of loss and flatness, and the training
        loss of each epoch for the study's pruner. If several estimators train together, each has
        its share of their seconds.

    Returns
    -------
    estimator
        The same estimator.
    """
    started = seconds_used()
    try:
        with (
            _interruptible(),
            seeded(seed),
            _pruned(estimator, trial),
            split_recorded(estimator, data.X_fit),
        ):
            estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    except KeyError as error:
        explained = explain_missing_validation(error)
        if explained is error:
            raise
        raise explained from error
    finally:
        if trial is not None:
            trial.set_user_attr("seconds", seconds_used() - started)
    if trial is not None:
        record_curves(trial, estimator)
    return estimator


def _train_on_all_data(estimator: Any, params: Mapping[str, Any]) -> None:
    """Switch off the splits of skorch that nobody asked for, and scikit-learn's early stopping."""
    drop_default_splits(_nets(estimator))
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True and name not in params:
            estimator.set_params(**{name: False})


def _nets(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets among an estimator and its parameters."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


class _ReportToPruner(Callback):
    """Report the training loss of each epoch to the study's pruner."""

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
    """Let the study's pruner, if there is one, stop the nets of an estimator early."""
    study = getattr(trial, "study", None)
    if (
        study is None
        or len(study.directions) > 1
        or isinstance(study.pruner, optuna.pruners.NopPruner)
    ):
        yield
        return
    nets = [net for net in _nets(estimator) if net.callbacks != "disable"]
    for net in nets:
        net.set_params(callbacks=[*(net.callbacks or []), _ReportToPruner(trial)])
    yield
    if nets:  # a TransformedTargetRegressor fits a copy of its net
        for net in [*nets, final_estimator(estimator)]:
            _remove_reporter(net)


def _remove_reporter(net: Any) -> None:
    """Remove the callback, which would keep the whole study in memory and in pickles."""
    others = [one for one in net.callbacks or [] if not isinstance(one, _ReportToPruner)]
    net.callbacks = others or None
    if hasattr(net, "callbacks_"):
        net.callbacks_ = [
            (name, one) for name, one in net.callbacks_ if not isinstance(one, _ReportToPruner)
        ]


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

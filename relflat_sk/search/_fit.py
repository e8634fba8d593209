"""Fit one candidate: on all the data, seeded, one at a time, open to the pruner and to Ctrl-C."""

import inspect
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import optuna
import torch
from numpy.typing import NDArray
from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import get_len
from threadpoolctl import threadpool_limits
from torch.nn.parameter import is_lazy
from torch.utils.data import IterableDataset, Subset

from relflat_sk._checks import is_number
from relflat_sk._engine.epoch import EPOCH_TRAINER
from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._network.layers import find_layer
from relflat_sk._random import IN_TURN, seeded
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.fleet._turns import seconds_used
from relflat_sk.measures._scorer import flatness_columns
from relflat_sk.minima._table import CURVES
from relflat_sk.search._data import LR_SCALING, TrainingData
from relflat_sk.search._failures import KEPT, CallError, blame_storage
from relflat_sk.search._goal import add_goal, callbacks_of
from relflat_sk.search._weights import last_step


def prepare(estimator: Any, params: Mapping[str, Any], seed: int, goal: Any) -> Any:
    """Clone an estimator and set it up for one candidate."""
    estimator = clone(estimator)
    estimator.set_params(**{name: clone(value, safe=False) for name, value in params.items()})
    drop_default_splits(nets_of(estimator))
    check_early_stopping(estimator.get_params().items())
    add_goal(estimator, goal)
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
    layers: Sequence[Any] = (),
    trial: Any = None,
) -> Any:
    """Fit an estimator and record how long it took."""
    started = seconds_used()
    try:
        with (
            _interruptible(),
            seeded(seed),
            watched(nets_of(estimator), estimator, layers, trial),
            split_recorded(estimator, data.X_fit),
        ):
            estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    except KeyError as error:
        missing = re.search(r"\bvalid\w*", str(error))
        if missing is None:
            raise
        raise ValueError(
            f"{missing[0]!r} is missing: a callback reads it, but the net holds no data out. A "
            "search drops skorch's default train_split unless a callback has an attribute "
            "`monitor`. Pass a train_split of your own, such as skorch.dataset.ValidSplit(0.2)."
        ) from error
    finally:
        record["seconds"] = seconds_used() - started
    record_curves(record, estimator)
    return estimator


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

Method = TypeVar("Method", bound=Callable[..., Any])

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


def in_isolation(method: Method) -> Method:
    """Decorate a method to run in isolation, with the number of threads of its object."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with isolated(self.n_threads):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


# -- watching the training of nets ---------------------------------------------------------------

LAST = -1  # the position of the last layer, which each network has that can be measured at one


class _Watcher(Callback):
    """Refuse a net without the layers to measure, and report to the study's pruner.

    It stays itself in copies of its net: a copy of a trial would report to a copy of the study.
    """

    def __init__(self, layers: Sequence[Any], trial: optuna.Trial | None) -> None:
        self.layers = layers
        self.trial = trial

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
        if self.trial is None:
            return
        with blame_storage():
            self.trial.report(net.history[-1, "train_loss"], len(net.history))
            pruned = self.trial.should_prune()
        if pruned:
            raise optuna.TrialPruned


def missing_layer(layer: Any, error: Exception) -> CallError:
    """Return the error for a layer that a candidate does not have."""
    return CallError(
        f"layer={layer!r} cannot be measured: {error} Give a layer that each candidate has.{KEPT}"
    )


@contextmanager
def watched(
    nets: Sequence[NeuralNet], estimator: Any, layers: Sequence[Any], trial: Any
) -> Iterator[None]:
    """Let nets be checked before their first epoch, and let the study's pruner stop them."""
    watcher = _Watcher(layers, trial if _has_pruner(trial) else None)
    nets = [net for net in nets if net.callbacks != "disable"]
    if not layers and watcher.trial is None:
        nets = []
    for net in nets:
        net.set_params(callbacks=[*(net.callbacks or []), watcher])
    yield
    # a TransformedTargetRegressor fits a copy of its net
    for net in [*nets, final_estimator(estimator)] if nets else []:
        net.callbacks = [one for one in net.callbacks or [] if one is not watcher] or None
        if hasattr(net, "callbacks_"):
            net.callbacks_ = [pair for pair in net.callbacks_ if pair[1] is not watcher]


def _has_pruner(trial: Any) -> bool:
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return False
    return not isinstance(study.pruner, optuna.pruners.NopPruner)


# -- what nets hold out for validation: their `train_split` --------------------------------------

# A search trains on all data. A `train_split` that the user chose stays, and so does skorch's own
# default if a callback monitors validation, such as `EarlyStopping`. Other nets train on all data,
# because skorch's classes hold a fifth out that nobody asked for. Candidates with a split are
# measured on the samples that they are trained on. The `early_stopping` of scikit-learn's
# estimators holds out samples that nobody can name afterwards, so that it is an error.


def drop_default_splits(nets: Iterable[NeuralNet]) -> None:
    """Let nets train on all data, unless their user or one of their callbacks needs a split."""
    for net in nets:
        if _is_default(net) and not any(map(_monitors_validation, callbacks_of(net))):
            net.set_params(train_split=None)


def check_early_stopping(params: Iterable[tuple[str, Any]]) -> None:
    """Refuse parameters by which an estimator of scikit-learn holds data out."""
    for name, value in params:
        if name.split("__")[-1] == "early_stopping" and isinstance(value, bool) and value:
            raise ValueError(
                f"{name}=True holds out a part of the data in each candidate, and does not tell "
                "which, so that nothing can be measured on the samples that it is trained on. Set "
                f"{name}=False: candidates stop at the search's goal, or by their tolerance. Or "
                "search over a skorch net with train_split and EarlyStopping, which are kept."
            )


def _is_default(net: NeuralNet) -> bool:
    """Return whether the split of a net is what skorch's own class sets without being asked."""
    split = net.train_split
    for kind in type(net).__mro__:
        default = inspect.signature(kind).parameters.get("train_split")
        if kind.__module__.startswith("skorch.") and default is not None:
            other = default.default
            return type(split) is type(other) and vars(split) == vars(other)
    return False


def _monitors_validation(callback: Any) -> bool:
    """Return whether a callback, or a class of callbacks, monitors more than the training loss."""
    if isinstance(callback, type):
        argument = inspect.signature(callback).parameters.get("monitor")
        monitor = None if argument is None else argument.default
    else:
        monitor = getattr(callback, "monitor", None)
    if isinstance(monitor, str):
        return not monitor.startswith("train_loss")
    return callable(monitor) and monitor is not inspect.Parameter.empty


class _RecordedSplit:
    """The `train_split` of a net, which remembers the rows that it leaves for training."""

    rows: NDArray[np.intp] | None = None
    n_samples = 0

    def __init__(self, split: Any) -> None:
        self.split = split

    def __call__(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        trained, valid = self.split(dataset, *args, **kwargs)
        if isinstance(trained, Subset) and trained.dataset is dataset:
            self.rows = np.sort(np.asarray(trained.indices, dtype=np.intp))
            self.n_samples = get_len(dataset)
        return trained, valid

    def __deepcopy__(self, memo: Any) -> "_RecordedSplit":
        return self  # an estimator around the net fits a clone of it


@contextmanager
def split_recorded(estimator: Any, X: Any) -> Iterator[None]:
    """Note in the net of an estimator which rows it is trained on, if it holds out others."""
    net = last_step(estimator)
    split = getattr(net, "train_split", None)
    if not isinstance(net, NeuralNet) or split is None or isinstance(X, IterableDataset):
        yield
        return
    net.train_split = recorded = _RecordedSplit(split)
    try:
        yield
    finally:
        net.train_split = split
    fitted = final_estimator(estimator)  # a TransformedTargetRegressor fits a copy of its net
    fitted.train_split = split
    if recorded.rows is not None and recorded.n_samples == get_len(X):
        fitted.trained_rows_ = recorded.rows


def trained_rows(estimator: Any) -> NDArray[np.intp] | None:
    """Return which rows of the data the network of an estimator was trained on.

    Shapes: returns (n_trained,).
    """
    rows: NDArray[np.intp] | None = getattr(final_estimator(estimator), "trained_rows_", None)
    return rows


# -- learning rates in proportion to batch sizes -------------------------------------------------

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
RATES = ("lr", "learning_rate_init")  # in skorch nets, in scikit-learn's MLPs


def check_lr_scaling(rules: Iterable[Any]) -> None:
    """Refuse rules of scaling that there are not."""
    for rule in rules:
        if rule is not None and rule not in RULES:
            raise ValueError(f"lr_scaling must be None or one of {list(RULES)}, got {rule!r}.")


def scale_lr(estimator: Any, params: Mapping[str, Any]) -> dict[str, float]:
    """Scale learning rates with the batch size, relative to the estimator's own batch size."""
    lr_scaling = params.get(LR_SCALING)
    check_lr_scaling([lr_scaling])
    if lr_scaling is None:
        return {}
    own = estimator.get_params()
    found = {}
    for name, size in params.items():
        prefix, _, last = name.rpartition("batch_size")
        if last or not (prefix == "" or prefix.endswith("__")) or "batch_size" not in name:
            continue
        rate = next((prefix + one for one in RATES if prefix + one in own), None)
        before = own.get(name)
        if rate is None or not _is_size(size) or not _is_size(before):
            raise ValueError(
                f"lr_scaling={lr_scaling!r} needs numbers for {name!r} and a learning rate beside "
                f"it ({' or '.join(RATES)}), got {name}={size!r} in the candidate and {before!r} "
                "in the estimator. Give both as numbers, or leave lr_scaling out."
            )
        found[rate] = float(params.get(rate, own[rate]) * RULES[lr_scaling](size / before))
    return found


def _is_size(value: Any) -> bool:
    return is_number(value) and value > 0  # -1 stands for all samples


# -- how loss and flatness went ------------------------------------------------------------------

MOST_EPOCHS = 200  # of longer trainings, epochs at equal distances, the first and the last
LOSSES = ("train_loss", "valid_loss")


def record_curves(record: dict[str, Any], estimator: Any) -> None:
    """Record the losses of the epochs, and their flatness if a `FlatnessScorer` recorded it."""
    final = final_estimator(estimator)
    signs = dict.fromkeys(LOSSES, 1.0)
    if isinstance(final, NeuralNet):
        history = list(final.history)
        signs |= flatness_columns(final)  # small is flat
    else:
        history = [{"train_loss": loss} for loss in getattr(final, "loss_curve_", [])]
    recorded = signs.keys() & {name for epoch in history for name in epoch}
    if not recorded:
        return
    kept = np.unique(np.linspace(0, len(history) - 1, MOST_EPOCHS).round().astype(int)).tolist()
    record[CURVES] = {"epoch": [row + 1 for row in kept]} | {
        name: [_short(sign * history[row].get(name, np.nan)) for row in kept]
        for name, sign in signs.items()
        if name in recorded
    }


def _short(value: float) -> float | None:
    """Return a value as JSON stores it: with six digits, None if it is not finite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None

"""Train and measure one candidate. Nothing here knows of Optuna, of a study or of its storage."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import config_context, get_config
from sklearn.base import clone, is_classifier
from sklearn.model_selection import train_test_split
from skorch import NeuralNet
from skorch.callbacks import Callback
from skorch.dataset import ValidSplit
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from relflat_sk._checks import check_integer, is_integer, is_number, naming_parameters
from relflat_sk._engine.epoch import EPOCH_TRAINER
from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.batches import take_rows
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._network.layers import find_layer
from relflat_sk._random import IN_TURN, as_random_state, seeded
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.fleet._fleet import Fleet
from relflat_sk.measures._scan import Measured
from relflat_sk.measures._scorer import flatness_columns
from relflat_sk.minima._table import Minimum
from relflat_sk.search._measure import Measuring, TrainingData, add_goal, assess, missing_layer
from relflat_sk.search._storage import CallError, on_ctrl_c
from relflat_sk.training._after_fit import measured_later

STOPPED = "stopped by the pruner"
# the splits that skorch's own classes set without being asked
_DEFAULT_SPLITS = [vars(ValidSplit(5, stratified=stratified)) for stratified in (False, True)]

PREFIX = "data__"
LR_SCALING = "lr_scaling"  # the rule by which learning rates follow batch sizes
DATA_NAMES = tuple(
    PREFIX + name for name in ("train_size", "random_labels", "confusion_size", "random_state")
)

OnEpoch = Callable[[int, float], bool]  # of epoch and training loss; returns whether to stop


class StoppedError(Exception):
    """A pruner stopped the training."""


@dataclass(frozen=True)
class Task:
    """What all candidates of a study share, and all that a worker process gets."""

    estimator: Any
    X: Any
    y: Any
    X_test: Any
    y_test: Any
    measuring: Measuring
    goal: Any
    n_threads: int | None
    fit_params: Mapping[str, Any] | None
    sample_weight: Any = None  # (n,), among them
    # of scikit-learn, which has one for each thread
    config: Mapping[str, Any] = field(default_factory=get_config)

    def data(self, params: Mapping[str, Any]) -> TrainingData:
        """Choose the data that a candidate is trained and measured on."""
        X, y, held_out = self.X, self.y, (self.X_test, self.y_test)
        data = TrainingData(X, y, X, y, self.fit_params or {}, self.sample_weight, held_out)
        stratify = is_classifier(self.estimator)
        return vary_data(data, stratify=stratify, **split_params(params)[1])

    def prepare(self, params: Mapping[str, Any], seed: int) -> Any:
        """Make the estimator of a candidate."""
        of_estimator = split_params(params)[0] | scale_lr(self.estimator, params)
        estimator = clone(self.estimator)
        with naming_parameters(estimator, of_estimator):
            estimator.set_params(**{n: clone(x, safe=False) for n, x in of_estimator.items()})
        _train_on_all_data(estimator)
        add_goal(estimator, self.goal)
        params = estimator.get_params()
        unset = [n for n in params if n.split("__")[-1] == "random_state" and params[n] is None]
        estimator.set_params(**dict.fromkeys(unset, seed))
        return estimator

    def measure(
        self, names: Sequence[str], estimator: Any, data: TrainingData, seed: int
    ) -> dict[str, Measured]:
        """Measure a trained candidate, all measures in as few passes over the data as possible."""
        with isolated(self.n_threads), seeded(seed):
            return self.measuring(self.measuring.networks(estimator, data), names, seed)


def nets_of(estimator: Any) -> list[NeuralNet]:
    """List the skorch nets among an estimator and its parameters."""
    parts = [estimator, *estimator.get_params().values()]
    return [part for part in parts if isinstance(part, NeuralNet)]


def _train_on_all_data(estimator: Any) -> None:
    """Drop skorch's default split, and refuse estimators that hold out a part of their data."""
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True:
            raise ValueError(
                f"{name}=True holds out data, and a search trains on all: set {name}=False."
            )
    for net in nets_of(estimator):
        split = net.train_split
        is_default = type(split) is ValidSplit and vars(split) in _DEFAULT_SPLITS
        if split is not None and not is_default:
            raise ValueError(f"a search trains on all data: set train_split=None, got {split!r}.")
        net.set_params(train_split=None)


# -- fewer samples, random labels, a confusion set ------------------------------------------------

# Neyshabur et al., "Exploring Generalization in Deep Learning", NeurIPS 2017, section 3. Shuffling
# keeps the frequencies of the labels, so it works for any kind of target. Candidates are measured
# without the confusion set, so that every one that fits the other samples is a minimum there,
# however badly it generalizes.


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate parameters of the estimator from parameters of the data, without other names."""
    of_data = {name: value for name, value in params.items() if name.startswith(PREFIX)}
    if not of_data.keys() <= set(DATA_NAMES):
        raise ValueError(
            f"space names {list(of_data)}, but the names that vary the data are {list(DATA_NAMES)}."
        )
    of_net = {n: value for n, value in params.items() if n not in of_data and n != LR_SCALING}
    return of_net, {name.removeprefix(PREFIX): value for name, value in of_data.items()}


def vary_data(
    data: TrainingData,
    *,
    train_size: Any = None,
    random_labels: float = 0.0,
    confusion_size: int = 0,
    random_state: int = 0,
    stratify: bool = False,
) -> TrainingData:
    """Choose samples and shuffle labels; the data stay themselves if nothing varies.

    Arguments of `fit` with one value for each sample are chosen with the samples. `stratify` says
    whether the classes have the same shares among the chosen samples as among all.
    """
    if not is_number(random_labels) or not 0 <= random_labels <= 1:
        raise ValueError(f"data__random_labels must be a share from 0 to 1, got {random_labels!r}.")
    check_integer(
        "data__confusion_size", confusion_size, minimum=0, reason="it is a number of samples"
    )
    if train_size is None and not random_labels and not confusion_size:
        return data
    X, y = data.X, data.y
    if y is None or not hasattr(X, "__len__"):
        raise ValueError(
            f"names with data__ need X and y as arrays, got {type(X).__name__}, {type(y).__name__}."
        )
    rng = as_random_state(random_state)
    rows, rest = _choose(y, train_size, stratify, rng)
    if confusion_size > len(rest):
        raise ValueError(
            f"data__confusion_size={confusion_size}, but of {len(y)} samples {len(rest)} are left."
        )
    labels = rows.copy()
    shuffled = rng.permutation(len(rows))[: round(random_labels * len(rows))]
    labels[shuffled] = rows[rng.permutation(shuffled)]
    confusion = rng.permutation(rest)[: int(confusion_size)]
    rows_fit = np.concatenate([rows, confusion])
    return replace(
        data,
        X_fit=take_rows(X, rows_fit),
        y_fit=take_rows(y, np.concatenate([labels, rng.permutation(confusion)])),
        X=take_rows(X, rows),
        y=take_rows(y, labels),
        fit_params={
            name: take_rows(value, rows_fit) if _is_per_sample(value, len(y)) else value
            for name, value in data.fit_params.items()
        },
        sample_weight=take_rows(data.sample_weight, rows),
    )


def _is_per_sample(value: Any, n: int) -> bool:
    """Return whether an argument of `fit` has a value for each sample."""
    return not isinstance(value, str | Mapping) and hasattr(value, "__len__") and len(value) == n


def _choose(
    y: Any, train_size: Any, stratify: bool, rng: np.random.RandomState
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows of the chosen samples and of the others, both sorted."""
    every = np.arange(len(y))
    share_of_all = not is_integer(train_size) and train_size == 1
    if train_size is None or train_size == len(y) or share_of_all:
        return every, every[:0]
    chosen, rest = train_test_split(
        every, train_size=train_size, random_state=rng, stratify=y if stratify else None
    )
    return np.sort(chosen), np.sort(rest)


# -- learning rates in proportion to batch sizes -------------------------------------------------

RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt}
RATES = ("lr", "learning_rate_init")  # in skorch nets, in scikit-learn's MLPs


def scale_lr(estimator: Any, params: Mapping[str, Any]) -> dict[str, float]:
    """Scale learning rates with the batch size, relative to the estimator's own batch size."""
    lr_scaling = params.get(LR_SCALING)
    if lr_scaling is None:
        return {}
    if lr_scaling not in RULES:
        raise ValueError(f"lr_scaling must be None or one of {list(RULES)}, got {lr_scaling!r}.")
    before = estimator.get_params()
    scaled = {}
    for name in [name for name in params if name.split("__")[-1] == "batch_size"]:
        size, own_size = params[name], before.get(name)
        rates_beside = [name.removesuffix("batch_size") + end for end in RATES]
        rate = next((rate for rate in rates_beside if rate in before), None)
        # -1 stands for all samples
        are_sizes = all(is_number(value) and value > 0 for value in (size, own_size))
        if rate is None or not are_sizes:
            raise ValueError(
                f"lr_scaling={lr_scaling!r} needs numbers for {name!r}, and {' or '.join(RATES)} "
                f"beside it, got {size!r} in the candidate and {own_size!r} before."
            )
        scaled[rate] = float(params.get(rate, before[rate]) * RULES[lr_scaling](size / own_size))
    return scaled


# -- one network at a time, with a number of threads that is always the same ---------------------

# Torch has one random state for all threads of a process, and the number of threads that compute
# changes the order of floating-point sums. A network would therefore depend on what else is trained
# at the same time, and on where.

_LOCK = threading.RLock()


@contextmanager
def isolated(n_threads: int | None) -> Iterator[None]:
    """Compute alone in this process, with a number of threads; None leaves it as it is.

    A fleet computes alone as a whole: the trainings in it take turns. A search inside of a fit, as
    by a callback, does not wait for a candidate in another thread, which may wait for that fit.
    """
    if EPOCH_TRAINER.get() is not None:
        yield
        return
    with nullcontext() if IN_TURN.get() else _LOCK, ExitStack() as stack:
        if n_threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(n_threads)  # also of MKL inside torch, which has its own limit
            stack.enter_context(threadpool_limits(limits=n_threads))
        yield


# -- training ------------------------------------------------------------------------------------


def train(
    task: Task, params: Mapping[str, Any], seed: int, on_epoch: OnEpoch | None = None
) -> "tuple[Minimum, Trained | None]":
    """Train and measure one candidate; what it raises is recorded, unless it is the call's."""
    minimum, trained = Minimum(seed=seed, in_fleet=EPOCH_TRAINER.get() is not None), None
    with isolated(task.n_threads), config_context(**task.config):
        try:
            trained = _train(minimum, task, params, seed, on_epoch)
        except CallError:
            raise
        except StoppedError:
            minimum.reason = STOPPED
        except Exception as error:
            minimum.fail(error)
            torch.cuda.empty_cache()  # the next candidate may fit, if this one needed too much
    return minimum, trained


def _train(
    minimum: Minimum, task: Task, params: Mapping[str, Any], seed: int, on_epoch: OnEpoch | None
) -> "Trained | None":
    """Train and measure one candidate, and record what is found."""
    rates = scale_lr(task.estimator, params)
    minimum.params = {f"scaled_{name}": rate for name, rate in rates.items()}
    with measured_later() as later:
        estimator, data = task.prepare(params, seed), task.data(params)
        fit(estimator, data, seed, minimum, task.measuring.layers, on_epoch)
    with seeded(seed):  # data loaders draw from torch's random state
        network = assess(minimum, estimator, data, task.measuring, seed, task.goal)
    for check in later:
        check()
    if np.isnan(minimum.values).any():
        minimum.failed = True
        return None
    n_iter = getattr(final_estimator(estimator), "n_iter_", None)  # of a solver
    minimum.n_iter = None if n_iter is None else np.ravel(n_iter).tolist()
    return Trained.of(estimator, network.module)


def train_again(task: Task, params: Mapping[str, Any], seed: int, *, together: bool) -> Any:
    """Train a candidate with the same seed, in a fleet if it was in one, without measuring it."""
    estimator = task.prepare(params, seed)
    left = iter([estimator])

    def train_next() -> bool:
        if next(left, None) is None:
            return False
        fit(estimator, task.data(params), seed, Minimum(), task.measuring.layers)
        return True

    # the table of minima says already whether the goal was reached
    with isolated(task.n_threads), measured_later() as later:
        if together:
            Fleet(1).run(train_next)
        else:
            train_next()
        for check in later:
            check()
    return estimator


def fit(
    estimator: Any,
    data: TrainingData,
    seed: int | None,
    minimum: Minimum,
    layers: Sequence[Any] = (),
    on_epoch: OnEpoch | None = None,
) -> None:
    """Fit an estimator, and note how long it took and how its losses went."""
    fleet = EPOCH_TRAINER.get()
    clock = time.perf_counter if fleet is None else fleet.seconds_used
    started = clock()
    try:
        with _interruptible(), seeded(seed), _watched(estimator, layers, on_epoch):
            estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    except KeyError as error:
        missing = re.search(r"\bvalid\w*", str(error))
        if missing is None:
            raise
        raise ValueError(
            f"{missing[0]!r} is missing: a search trains on all data. Let the callback monitor the "
            "training loss, such as EarlyStopping('train_loss')."
        ) from error
    finally:
        minimum.seconds = clock() - started
    minimum.curves = _curves(estimator)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the search: skorch would end only the training of one net."""
    pressed: list[bool] = []

    def remember() -> None:
        pressed.append(True)
        raise KeyboardInterrupt

    with on_ctrl_c(remember):
        yield
    if pressed:
        raise KeyboardInterrupt


@dataclass(eq=False)
class _Watcher(Callback):
    """Refuse a net without the layers to measure, and let a pruner stop it.

    It stays itself in copies of its net, because what it calls belongs to the caller.
    """

    layers: Sequence[Any]
    on_epoch: OnEpoch | None

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


@contextmanager
def _watched(estimator: Any, layers: Sequence[Any], on_epoch: OnEpoch | None) -> Iterator[None]:
    """Let nets be checked before their first epoch, and stopped after each."""
    watcher = _Watcher(layers, on_epoch)
    nets = [net for net in nets_of(estimator) if net.callbacks != "disable"]
    for net in nets:
        net.set_params(callbacks=[*(net.callbacks or []), watcher])
    yield
    # a TransformedTargetRegressor fits a copy of its net
    for net in [*nets, final_estimator(estimator)] if nets else []:
        net.callbacks = [x for x in net.callbacks or [] if x is not watcher] or None
        if hasattr(net, "callbacks_"):
            net.callbacks_ = [pair for pair in net.callbacks_ if pair[1] is not watcher]


MOST_EPOCHS = 200  # of longer trainings, epochs at equal distances, the first and the last


def _curves(estimator: Any) -> dict[str, list[Any]] | None:
    """Return the losses of the epochs, and their flatness if a `FlatnessScorer` recorded it."""
    final = final_estimator(estimator)
    signs = {"train_loss": 1.0, "valid_loss": 1.0}
    if isinstance(final, NeuralNet):
        history = list(final.history)
        signs |= flatness_columns(final)  # small is flat
    else:
        history = [{"train_loss": loss} for loss in getattr(final, "loss_curve_", [])]
    recorded = [name for name in signs if any(name in epoch for epoch in history)]
    if not recorded:
        return None
    kept = np.unique(np.linspace(0, len(history) - 1, MOST_EPOCHS).round().astype(int)).tolist()
    curves: dict[str, list[Any]] = {"epoch": [row + 1 for row in kept]}
    for name in recorded:
        values = [signs[name] * history[row].get(name, np.nan) for row in kept]
        # as JSON stores them: with six digits, None if one is not finite
        curves[name] = [float(f"{x:.6g}") if np.isfinite(x) else None for x in values]
    return curves


# -- trained networks ----------------------------------------------------------------------------

# what a net or solver knows of its training, beside its weights
_OF_TRAINING = (
    *("history_", "converged_", "_record"),
    *("n_iter_", "loss_curve_", "loss_", "best_loss_", "t_"),
)


@dataclass
class Trained:
    """A trained network, as an estimator or as what it takes to make it again."""

    estimator: Any | None
    weights: Mapping[str, Tensor]
    of_training: Mapping[str, Any]

    @classmethod
    def of(cls, estimator: Any, module: nn.Module) -> "Trained":
        """Hold an estimator, without what its net needs to train only."""
        final = final_estimator(estimator)
        if isinstance(final, NeuralNet):  # together several times its weights
            final.module_.zero_grad()
            for epoch in final.history_:
                epoch["batches"] = []
            if hasattr(final, "optimizer_"):
                final.optimizer_.state.clear()
        of_training = {name: vars(final)[name] for name in _OF_TRAINING if name in vars(final)}
        return cls(estimator, module.state_dict(), of_training)

    def to_send(self) -> "Trained":
        """Leave out the estimator of a net: its module may be of a class that cannot be sent."""
        if not isinstance(final_estimator(self.estimator), NeuralNet):
            return self
        return replace(self, estimator=None, weights={n: x.cpu() for n, x in self.weights.items()})

"""Train and measure one candidate. Nothing here knows of Optuna, of a study or of its storage."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.base import clone, is_classifier
from skorch import NeuralNet
from torch import Tensor, nn

from relflat_sk._models.network_of import final_estimator
from relflat_sk._random import seeded
from relflat_sk.fleet._fleet import Fleet
from relflat_sk.measures._results import Measured
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._data import TrainingData, scale_lr, split_params, vary_data
from relflat_sk.search._failures import CallError
from relflat_sk.search._fit import OnEpoch, StoppedError, fit, in_fleet, isolated, nets_of
from relflat_sk.search._goal import add_goal, record_verdict
from relflat_sk.search._measure import Measuring, record_held_out, record_measures
from relflat_sk.training._after_fit import measured_later

STOPPED = "stopped by the pruner"
# what a net or solver knows of its training, beside its weights
_OF_TRAINING = (
    *("history_", "converged_", "_record"),
    *("n_iter_", "loss_curve_", "loss_", "best_loss_", "t_"),
)


@dataclass(frozen=True)
class Task:
    """What all candidates of a study share, and all that a worker process gets."""

    estimator: Any
    X: Any
    y: Any
    X_test: Any
    y_test: Any
    fit_params: Mapping[str, Any]
    sample_weight: Any  # (n,), among them
    measuring: Measuring
    ranking: Sequence[str]  # the measures that are objectives of the study
    goal: Any
    n_threads: int | None

    def data(self, params: Mapping[str, Any]) -> TrainingData:
        """Choose the data that a candidate is trained and measured on."""
        return vary_data(
            self.X,
            self.y,
            **split_params(params)[1],
            stratify=is_classifier(self.estimator),
            fit_params=self.fit_params,
            sample_weight=self.sample_weight,
        )

    def prepare(self, params: Mapping[str, Any], seed: int) -> Any:
        """Make the estimator of a candidate."""
        of_estimator = split_params(params)[0] | scale_lr(self.estimator, params)
        estimator = clone(self.estimator)
        estimator.set_params(**{n: clone(value, safe=False) for n, value in of_estimator.items()})
        _train_on_all_data(estimator)
        add_goal(estimator, self.goal)
        unset = [
            name
            for name, value in estimator.get_params().items()
            if name.split("__")[-1] == "random_state" and value is None
        ]
        estimator.set_params(**dict.fromkeys(unset, seed))
        return estimator

    def measure(
        self, names: Sequence[str], estimator: Any, data: TrainingData, seed: int
    ) -> dict[str, Measured]:
        """Measure a trained candidate, all measures in as few passes over the data as possible."""
        with isolated(self.n_threads), seeded(seed):
            return self.measuring(self.measuring.networks(estimator, data), names, seed)


def _train_on_all_data(estimator: Any) -> None:
    """Drop skorch's default split, and refuse estimators that hold out a part of their data."""
    for name, value in estimator.get_params().items():
        if name.split("__")[-1] == "early_stopping" and value is True:
            raise ValueError(
                f"{name}=True holds out data, and a search trains on all of them: set "
                f"{name}=False; candidates stop at the search's goal, or by their tolerance."
            )
    for net in nets_of(estimator):
        if net.train_split is not None and not _is_default(net):
            raise ValueError(
                f"a search trains on all data: set train_split=None, got {net.train_split!r}."
            )
        net.set_params(train_split=None)


def _is_default(net: NeuralNet) -> bool:
    """Return whether the split of a net is what skorch's own class sets without being asked."""
    for kind in type(net).__mro__:
        parameter = inspect.signature(kind).parameters.get("train_split")
        if kind.__module__.startswith("skorch.") and parameter is not None:
            split = parameter.default
            return type(net.train_split) is type(split) and vars(net.train_split) == vars(split)
    return False


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


def train(
    task: Task, params: Mapping[str, Any], seed: int, on_epoch: OnEpoch | None = None
) -> tuple[Minimum, Trained | None]:
    """Train and measure one candidate; what it raises is recorded, unless it is the call's."""
    minimum, trained = Minimum(seed=seed, in_fleet=in_fleet()), None
    with isolated(task.n_threads):
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
) -> Trained | None:
    """Train and measure one candidate, and record what is found."""
    rates = scale_lr(task.estimator, params)
    minimum.params = {f"scaled_{name}": rate for name, rate in rates.items()}
    with measured_later() as later:
        estimator, data = task.prepare(params, seed), task.data(params)
        fit(estimator, data, seed, minimum, task.measuring.layers, on_epoch)
    with seeded(seed):  # data loaders draw from torch's random state
        networks = task.measuring.networks(estimator, data)
        measured = record_measures(minimum, networks, seed, task.measuring, task.ranking)
        minimum.values = [np.nan] * len(task.ranking)
        if measured:
            record_held_out(minimum, estimator, data, task.X_test, task.y_test)
    if measured:
        minimum.values = record_verdict(minimum, estimator, task.goal, measured, task.ranking)
    for check in later:
        check()
    if np.isnan(minimum.values).any():
        minimum.failed = True
        return None
    minimum.n_iter = _iterations(estimator)
    return Trained.of(estimator, next(iter(networks.values())).module)


def _iterations(estimator: Any) -> list[int] | None:
    """Return the iterations of a solver."""
    n_iter: Any = getattr(final_estimator(estimator), "n_iter_", None)
    return None if n_iter is None else np.ravel(n_iter).tolist()


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

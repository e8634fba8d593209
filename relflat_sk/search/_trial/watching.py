"""Watch the training of a candidate's nets by callbacks of the search."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch.nn.parameter import is_lazy

from relflat_sk._models import final_estimator
from relflat_sk._network import find_layer
from relflat_sk.exceptions import LayerNotFoundError
from relflat_sk.search._trial.failures import CallError, blame_storage

__all__ = ["LAST", "missing_layer", "watched"]

LAST = -1  # the position of the last layer, which each network has that can be measured at one


class _Watcher(Callback):
    """A callback of the search, which stays itself in copies of its net."""

    def __deepcopy__(self, memo: Any) -> "_Watcher":
        return self  # a copy of a trial would report to a copy of the study

    def __sklearn_clone__(self) -> "_Watcher":
        return self

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        return {}


class _ReportToPruner(_Watcher):
    """Report the training loss of each epoch to the study's pruner."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_epoch_end(self, net: NeuralNet, **kwargs: Any) -> None:
        with blame_storage():
            self.trial.report(net.history[-1, "train_loss"], len(net.history))
            pruned = self.trial.should_prune()
        if pruned:
            raise optuna.TrialPruned


class _FindLayer(_Watcher):
    """Refuse a net without the layer that is going to be measured, before its first epoch."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        """Look for the layer, which is there as soon as the net is initialised."""
        module = getattr(net.module_, "_orig_mod", net.module_)
        if any(map(is_lazy, module.parameters())):
            return  # its layers get their types from the first batch
        try:
            find_layer(module, self.layer)
        except (LayerNotFoundError, TypeError) as error:
            raise missing_layer(self.layer, error) from error


def missing_layer(layer: Any, error: Exception) -> CallError:
    """Return the error for a layer that a candidate does not have."""
    return CallError(
        f"layer={layer!r} cannot be measured: {error} Give the search a layer that each candidate "
        "has. The candidate is not recorded, and those that were finished before are kept."
    )


@contextmanager
def watched(nets: Sequence[NeuralNet], estimator: Any, layer: Any, trial: Any) -> Iterator[None]:
    """Let nets be checked before their first epoch, and let the study's pruner stop them."""
    watchers: list[_Watcher] = []
    if layer != LAST:
        watchers.append(_FindLayer(layer))
    if _has_pruner(trial):
        watchers.append(_ReportToPruner(trial))
    nets = [net for net in nets if watchers and net.callbacks != "disable"]
    for net in nets:
        net.set_params(callbacks=[*(net.callbacks or []), *watchers])
    yield
    if nets:  # a TransformedTargetRegressor fits a copy of its net
        for net in [*nets, final_estimator(estimator)]:
            _remove_watchers(net)


def _has_pruner(trial: Any) -> bool:
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return False
    return not isinstance(study.pruner, optuna.pruners.NopPruner)


def _remove_watchers(net: Any) -> None:
    others = [one for one in net.callbacks or [] if not isinstance(one, _Watcher)]
    net.callbacks = others or None
    if hasattr(net, "callbacks_"):
        net.callbacks_ = [
            (name, one) for name, one in net.callbacks_ if not isinstance(one, _Watcher)
        ]

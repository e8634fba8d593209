"""How a trial becomes a minimum, and its estimator again: parameters, seed, weights."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._models.network_of import DataOptions, to_network
from relflat_sk._warnings import warn
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._failures import blame_storage
from relflat_sk.search._fit import OnEpoch, isolated
from relflat_sk.search._space import Space, labels_of
from relflat_sk.search._task import Task, Trained, train_again
from relflat_sk.search._weights import (
    DamagedWeightsError,
    from_file,
    replace_weights,
    restore,
    save_weights,
)

# by which share the training loss may differ after training again
ROUNDING = 1e-5  # on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size


@dataclass
class Recipe:
    """What the trials of a study and their minima have in common."""

    space: Space
    task: Task
    store: Any  # of artifacts
    seed: int | None
    drawn: int  # from torch's random state, if there is no seed

    def parameters(self, trial: FrozenTrial) -> dict[str, Any]:
        """Return the values that a trial drew."""
        return self.space.values(trial)

    def seed_of(self, trial: Any) -> int:
        """Return the seed of a trial.

        With a `random_state`, the seed derives from it and from the drawn parameters, so that a
        candidate has the same seed in each search.
        """
        recorded = Minimum.from_trial(trial).seed
        if recorded is not None:
            return recorded
        if self.seed is None:
            return zlib.crc32(b"%d" % trial.number, self.drawn) >> 1
        return zlib.crc32(repr(sorted(labels_of(trial).items())).encode(), self.seed) >> 1

    def record(
        self, trial: Any, params: Mapping[str, Any], minimum: Minimum, trained: Trained | None
    ) -> None:
        """Save the weights of a candidate, and write what it has become."""
        minimum.params |= self.space.computed(trial, params)
        if self.store is not None and trained is not None:
            save_weights(self.store, trial, trained.weights, minimum)
        minimum.write(trial)

    # -- the estimator of a finished trial -------------------------------------------------------

    def has_weights(self, trial: FrozenTrial) -> bool:
        """Return whether the weights of a trial were saved, and are within reach."""
        return self.store is not None and Minimum.from_trial(trial).artifact_id is not None

    def restore(self, trial: FrozenTrial, trained: Trained) -> Any:
        """Make the estimator of a trial of its weights."""
        if trained.estimator is not None:
            return trained.estimator
        params, seed = self.parameters(trial), self.seed_of(trial)
        with isolated(self.task.n_threads):
            estimator = self.task.prepare(params, seed)
            return restore(estimator, trained, self.task.data(params), seed)

    def provide(self, trial: FrozenTrial, *, retrain: bool = True) -> tuple[Any, str]:
        """Restore the estimator of a trial, or train it again, and say why it is not as it was.

        Damaged weights are replaced by those of the network that is trained again.
        """
        if self.has_weights(trial):
            try:
                return self.restore(trial, from_file(self.store, trial)), ""
            except DamagedWeightsError as error:
                if not retrain:
                    return None, str(error)
                warn(f"{error} The candidate is trained again.")
        task, params, seed = self.task, self.parameters(trial), self.seed_of(trial)
        minimum = Minimum.from_trial(trial)
        estimator = train_again(task, params, seed, together=bool(minimum.in_fleet))
        data, name = task.data(params), task.measuring.names[0]
        loss, before = (
            task.measure([name], estimator, data, seed)[name].passes.risk,
            minimum.train_loss,
        )
        assert before is not None
        if np.isclose(loss, before, rtol=OF_FLEETS if minimum.in_fleet else ROUNDING, atol=0):
            module = to_network(estimator, data.X, data.y, DataOptions()).module
            replace_weights(self.store, minimum, module.state_dict())
            return estimator, ""
        return estimator, (
            f"the minimum of trial {trial.number} cannot be had again: its training loss was "
            f"{before:.8g}, and is {loss:.8g} after training again with the same seed. Another "
            "machine or version of a library computes other bits, and a part of the estimator may "
            "draw from a random state of its own. An artifact_store keeps the weights: give the "
            "search one before it trains."
        )


def find_trial(study: optuna.Study, number: Any) -> FrozenTrial:
    """Find a finished trial by its number."""
    trials = study.get_trials(deepcopy=False)
    trial = next((trial for trial in trials if trial.number == number), None)
    check_complete(trial, number)
    assert trial is not None
    return trial


def check_complete(trial: FrozenTrial | None, number: Any) -> None:
    """Refuse a trial that was not trained to its end."""
    if trial is None or trial.state != TrialState.COMPLETE:
        state = "there is no such trial" if trial is None else Minimum.from_trial(trial).reason
        raise ValueError(
            f"trial {number!r} has no estimator ({state or 'it is not finished'}). Take a number "
            "from the column 'trial' of minima_, of a row whose state is 'complete'."
        )


def pruning(trial: Any) -> OnEpoch | None:
    """Return what reports the epochs of a trial to the pruner of its study, if it has one."""
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return None
    if isinstance(study.pruner, optuna.pruners.NopPruner):
        return None

    def on_epoch(epoch: int, loss: float) -> bool:
        with blame_storage(study):
            trial.report(loss, epoch)
            return bool(trial.should_prune())

    return on_epoch

"""Provide the estimator of a trial: from its saved weights, or trained again."""

from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._warnings import warn
from relflat_sk.fleet import Fleet
from relflat_sk.search._trial import (
    ARTIFACT,
    IN_FLEET,
    DamagedWeightsError,
    MinimaObjective,
    isolated,
)
from relflat_sk.training import measured_later

__all__ = ["check_same", "find_trial", "has_weights", "provide", "provide_same", "train_again"]

ROUNDING = 1e-5  # of the training loss, on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size


def find_trial(study: optuna.Study, number: Any) -> FrozenTrial:
    """Find a finished trial by its number."""
    trials = study.get_trials(deepcopy=False)
    found = next((trial for trial in trials if trial.number == number), None)
    if found is None or found.state != TrialState.COMPLETE:
        state = "there is no such trial" if found is None else found.user_attrs.get("reason", "")
        raise ValueError(
            f"trial {number!r} has no estimator ({state or 'it is not finished'}). Take a number "
            "from the column 'trial' of minima_, of a row whose state is 'complete'."
        )
    return found


def has_weights(objective: MinimaObjective, trial: FrozenTrial) -> bool:
    """Return whether the weights of a trial were saved, and are within reach."""
    return objective.artifact_store is not None and ARTIFACT in trial.user_attrs


def provide(objective: MinimaObjective, trial: FrozenTrial) -> Any:
    """Provide the estimator of a trial."""
    if has_weights(objective, trial):
        try:
            return objective.restore(objective.space.values(trial), trial)
        except DamagedWeightsError as error:
            warn(f"{error} The candidate is trained again.")
    return train_again(objective, trial)


def train_again(objective: MinimaObjective, trial: FrozenTrial) -> Any:
    """Train the candidate of a trial again, with the same seed and in the same way."""
    # the table of minima says already whether the goal was reached
    with measured_later() as later:
        estimator = _train_as_before(objective, trial)
    for check in later:
        check()
    return estimator


def _train_as_before(objective: MinimaObjective, trial: FrozenTrial) -> Any:
    """Train the candidate of a trial, in a fleet if it was trained in one."""
    params, seed = objective.space.values(trial), objective.seeds.of(trial)
    if not trial.user_attrs.get(IN_FLEET):
        return objective.train(params, seed)
    trained: list[Any] = []

    def train_once() -> bool:
        if not trained:
            trained.append(objective.train(params, seed))
            return True
        return False

    with isolated(objective.n_threads):
        Fleet(1).run(train_once)
    return trained[0]


def provide_same(objective: MinimaObjective, trial: FrozenTrial) -> Any:
    """Provide the estimator of a trial, and check that it is the one that was measured."""
    estimator = provide(objective, trial)
    check_same(objective, trial, estimator)
    return estimator


def check_same(objective: MinimaObjective, trial: FrozenTrial, estimator: Any) -> None:
    """Check that an estimator is the one that was measured in a trial."""
    data = objective.data(objective.space.values(trial))
    name = objective.measures[0]
    found = objective.measure([name], estimator, data, trial)[name].risk
    before = trial.user_attrs["train_loss"]
    rounding = OF_FLEETS if trial.user_attrs.get(IN_FLEET) else ROUNDING
    if not np.isclose(found, before, rtol=rounding, atol=0):
        raise ValueError(
            f"the minimum of trial {trial.number} cannot be had again: its training loss was "
            f"{before:.8g}, and is {found:.8g} after training again with the same seed. Another "
            "machine or version of a library computes other bits, and a part of the estimator may "
            "draw from a random state of its own. An artifact_store keeps the weights: give the "
            "search one before it trains."
        )

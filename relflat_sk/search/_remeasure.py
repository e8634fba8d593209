"""Measure the minima of a study again, from their saved weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._models import DataOptions, to_network
from relflat_sk._warnings import warn
from relflat_sk.fleet import Fleet
from relflat_sk.measures import find_measures
from relflat_sk.minima import remeasured_key
from relflat_sk.search._fit import isolated
from relflat_sk.search._measure import measure_held_out
from relflat_sk.search._objective import IN_FLEET, MinimaObjective
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._weights import ARTIFACT, DamagedWeightsError, replace_weights
from relflat_sk.training import measured_later

# Provide the estimator of a trial: from its saved weights, or trained again.

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
    """Train the candidate of a trial again, with the same seed, in a fleet if it was in one."""
    params, seed = objective.space.values(trial), objective.seeds.of(trial)
    trained: list[Any] = []

    def train_once() -> bool:
        if trained:
            return False
        trained.append(objective.train(params, seed))
        return True

    # the table of minima says already whether the goal was reached
    with measured_later() as later:
        if trial.user_attrs.get(IN_FLEET):
            with isolated(objective.n_threads):
                Fleet(1).run(train_once)
        else:
            train_once()
    for check in later:
        check()
    return trained[0]


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


_TEST_LOSS = "test_loss"


def remeasure(
    study: optuna.Study, objective: MinimaObjective, measures: Sequence[Any], *, retrain: bool
) -> None:
    """Measure the finished trials of a study again, and store the measures in the study."""
    if isinstance(measures, str) or callable(measures) or not measures:
        raise ValueError(f"measures must be a sequence of names, got {measures!r}.")
    names = find_measures(measures)
    check_made_with(study, objective, names=names)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not retrain and not any(has_weights(objective, trial) for trial in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains, or set retrain=True."
        )
    _complete(study, objective, names, held_out=False, retrain=retrain)


def measure_what_is_new(study: optuna.Study, objective: MinimaObjective) -> None:
    """Measure the minima of earlier sessions as those of this one are going to be measured.

    A session may have measures or held-out data that the sessions before did not have. Minima
    without saved weights get nan.
    """
    lacking = _complete(study, objective, objective.measures, held_out=True)
    if lacking:
        columns = sorted({name for names in lacking.values() for name in names})
        warn(
            f"{', '.join(columns)} of trials {sorted(lacking)} stay nan: an earlier session "
            "trained them without these measures or held-out data, and their weights were not "
            "saved. With an artifact_store, such as a folder, they would be measured now."
        )


def _complete(
    study: optuna.Study,
    objective: MinimaObjective,
    names: Sequence[str],
    *,
    held_out: bool,
    retrain: bool = False,
) -> dict[int, list[str]]:
    """Measure what finished trials lack; return what is lacking where there are no weights."""
    lacking, damaged = {}, []
    attributes = study.user_attrs
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
        found = trial.user_attrs | before
        missing = [name for name in names if name not in found]
        new_data = held_out and objective.X_test is not None and _TEST_LOSS not in found
        if not missing and not new_data:
            continue
        if not retrain and not has_weights(objective, trial):
            lacking[trial.number] = [*missing, *[_TEST_LOSS] * new_data]
            continue
        try:
            estimator = _bring_back(objective, trial, retrain)
        except DamagedWeightsError as error:
            damaged.append(str(error))
            continue
        data = objective.data(objective.space.values(trial))
        measured = objective.measure(missing, estimator, data, trial) if missing else {}
        values = {name: float(one.value) for name, one in measured.items()}
        if new_data:
            held_out_data = objective.X_test, objective.y_test
            values |= measure_held_out(estimator, found["train_loss"], data, *held_out_data)
        study.set_user_attr(remeasured_key(trial), before | values)
    if damaged:
        warn(
            "\n".join(damaged)
            + "\nThe other minima are measured."
            + " To train the candidates of damaged files again: remeasure(..., retrain=True)."
            * (not retrain)
        )
    return lacking


def _bring_back(objective: MinimaObjective, trial: FrozenTrial, retrain: bool) -> Any:
    """Restore a minimum from its weights, or train it again and mend its file."""
    params = objective.space.values(trial)
    try:
        if has_weights(objective, trial):
            return objective.restore(params, trial)
    except DamagedWeightsError:
        if not retrain:
            raise
    estimator = train_again(objective, trial)
    data = objective.data(params)
    module = to_network(estimator, data.X, data.y, DataOptions()).module
    replace_weights(objective.artifact_store, trial, module)
    try:
        check_same(objective, trial, estimator)
    except ValueError as error:
        raise DamagedWeightsError(str(error)) from error
    return estimator

"""Provide the estimators of finished trials, and measure them again."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._models.network_of import DataOptions, to_network
from relflat_sk._warnings import warn
from relflat_sk.fleet._fleet import Fleet
from relflat_sk.minima._table import attributes_of, remeasured_key
from relflat_sk.search._fit import isolated, trained_rows
from relflat_sk.search._measure import Measuring, check_listed, measure_held_out
from relflat_sk.search._objective import IN_FLEET, MinimaObjective
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._weights import ARTIFACT, DamagedWeightsError, replace_weights
from relflat_sk.training._after_fit import measured_later

ROUNDING = 1e-5  # of the training loss, on another machine
OF_FLEETS = 1e-4  # of nets that were trained in a fleet of another size


def find_trial(study: optuna.Study, number: Any) -> FrozenTrial:
    """Find a finished trial by its number."""
    trials = study.get_trials(deepcopy=False)
    found = next((trial for trial in trials if trial.number == number), None)
    if found is None or found.state != TrialState.COMPLETE:
        state = (
            "there is no such trial" if found is None else attributes_of(found).get("reason", "")
        )
        raise ValueError(
            f"trial {number!r} has no estimator ({state or 'it is not finished'}). Take a number "
            "from the column 'trial' of minima_, of a row whose state is 'complete'."
        )
    return found


def has_weights(objective: MinimaObjective, trial: FrozenTrial) -> bool:
    """Return whether the weights of a trial were saved, and are within reach."""
    return objective.artifact_store is not None and ARTIFACT in trial.user_attrs


def provide(
    objective: MinimaObjective, trial: FrozenTrial, *, retrain: bool = True
) -> tuple[Any, str]:
    """Restore the estimator of a trial, or train it again, and say why it is not as it was.

    Damaged weights are replaced by those of the network that is trained again.
    """
    params = objective.space.values(trial)
    if has_weights(objective, trial):
        try:
            return objective._restore(params, trial), ""
        except DamagedWeightsError as error:
            if not retrain:
                return None, str(error)
            warn(f"{error} The candidate is trained again.")
    estimator = _train_again(objective, trial)
    data, name = objective._data(params), objective.measures[0]
    measured = objective._measure(objective.measuring, [name], estimator, data, trial)
    loss = measured[name].risk
    before = trial.user_attrs["train_loss"]
    rounding = OF_FLEETS if attributes_of(trial).get(IN_FLEET) else ROUNDING
    if np.isclose(loss, before, rtol=rounding, atol=0):
        module = to_network(estimator, data.X, data.y, DataOptions()).module
        replace_weights(objective.artifact_store, trial, module)
        return estimator, ""
    return estimator, (
        f"the minimum of trial {trial.number} cannot be had again: its training loss was "
        f"{before:.8g}, and is {loss:.8g} after training again with the same seed. Another "
        "machine or version of a library computes other bits, and a part of the estimator may "
        "draw from a random state of its own. An artifact_store keeps the weights: give the "
        "search one before it trains."
    )


def _train_again(objective: MinimaObjective, trial: FrozenTrial) -> Any:
    """Train the candidate of a trial again, with the same seed, in a fleet if it was in one."""
    params, seed = objective.space.values(trial), objective._seed_of(trial)
    trained: list[Any] = []

    def train_once() -> bool:
        if not trained:
            trained.append(objective._train(params, seed))
            return True
        return False

    # the table of minima says already whether the goal was reached
    with measured_later() as later:
        if attributes_of(trial).get(IN_FLEET):
            with isolated(objective.n_threads):
                Fleet(1).run(train_once)
        else:
            train_once()
    for check in later:
        check()
    return trained[0]


_TEST_LOSS = "test_loss"


def remeasure(
    study: optuna.Study, objective: MinimaObjective, measures: Sequence[Any], *, retrain: bool
) -> list[str]:
    """Measure the finished trials of a study again, and store the measures in the study."""
    check_listed(measures)
    measuring = Measuring(measures)
    check_made_with(study, objective, measuring=measuring)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not retrain and not any(has_weights(objective, trial) for trial in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains, or set retrain=True."
        )
    _complete(study, objective, measuring, held_out=False, retrain=retrain)
    return measuring.names


def measure_what_is_new(study: optuna.Study, objective: MinimaObjective) -> None:
    """Measure the minima of earlier sessions as those of this one are going to be measured.

    A session may have measures or held-out data that the sessions before did not have. Minima
    without saved weights get nan.
    """
    held_out = objective.X_test is not None
    lacking = _complete(study, objective, objective.measuring, held_out=held_out)
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
    measuring: Measuring,
    *,
    held_out: bool,
    retrain: bool = False,
) -> dict[int, list[str]]:
    """Measure what finished trials lack; return what is lacking where there are no weights."""
    lacking, problems = {}, []
    attributes = study.user_attrs
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
        found = trial.user_attrs | before
        wanted = (*measuring.names, *[_TEST_LOSS] * held_out)
        missing = [name for name in wanted if name not in found]
        if not missing:
            continue
        if not retrain and not has_weights(objective, trial):
            lacking[trial.number] = missing
            continue
        estimator, problem = provide(objective, trial, retrain=retrain)
        if problem:
            problems.append(problem)
            continue
        data = objective._data(objective.space.values(trial))
        names = [name for name in missing if name != _TEST_LOSS]
        measured = objective._measure(measuring, names, estimator, data, trial) if names else {}
        failed = {name: one.error for name, one in measured.items() if one.error is not None}
        problems += [f"{name} of trial {trial.number}: {why}" for name, why in failed.items()]
        values = {name: float(one.value) for name, one in measured.items() if name not in failed}
        if _TEST_LOSS in missing:
            values |= measure_held_out(
                estimator, found["train_loss"], data.only(trained_rows(estimator)),
                objective.X_test, objective.y_test,
            )  # fmt: skip
        study.set_user_attr(remeasured_key(trial), before | values)
    if problems:
        warn(
            "\n".join(problems)
            + "\nThe other minima are measured."
            + " To train the candidates of damaged files again: remeasure(..., retrain=True)."
            * (not retrain)
        )
    return lacking

"""Measure the minima of a study again, from their saved weights."""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._models import DataOptions, to_network
from relflat_sk._warnings import warn
from relflat_sk.measures import find_measures
from relflat_sk.minima import remeasured_key
from relflat_sk.search._provide import check_same, train_again
from relflat_sk.search._trial import (
    ARTIFACT,
    DamagedWeightsError,
    MinimaObjective,
    check_made_with,
    measure_held_out,
    replace_weights,
)

__all__ = ["measure_what_is_new", "remeasure"]

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
    saved = objective.artifact_store is not None and any(ARTIFACT in t.user_attrs for t in trials)
    if not saved and not retrain:
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
        has_weights = objective.artifact_store is not None and ARTIFACT in trial.user_attrs
        if not has_weights and not retrain:
            lacking[trial.number] = [*missing, *[_TEST_LOSS] * new_data]
            continue
        try:
            estimator = _bring_back(objective, trial, retrain, has_weights)
        except DamagedWeightsError as error:
            damaged.append(str(error))
            continue
        values = _measure(objective, estimator, trial, missing)
        if new_data:
            data = objective.data(objective.space.values(trial))
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


def _bring_back(
    objective: MinimaObjective, trial: FrozenTrial, retrain: bool, has_weights: bool
) -> Any:
    """Restore a minimum from its weights, or train it again and mend its file."""
    params = objective.space.values(trial)
    try:
        if has_weights:
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


def _measure(
    objective: MinimaObjective, estimator: Any, trial: FrozenTrial, names: Sequence[str]
) -> dict[str, float]:
    """Compute measures of a minimum; none if there are no names."""
    if not names:
        return {}
    data = objective.data(objective.space.values(trial))
    measured = objective.measure(names, estimator, data, trial)
    return {name: float(one.value) for name, one in measured.items()}

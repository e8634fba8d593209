"""Measure finished trials again, from their saved weights or after training them again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import optuna
from optuna.trial import TrialState

from relflat_sk._warnings import warn
from relflat_sk.minima._minimum import Minimum
from relflat_sk.minima._table import remeasured_key
from relflat_sk.search._failures import blame_storage
from relflat_sk.search._measure import Measuring, check_listed, record_held_out
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._recipe import Recipe


def remeasure(
    study: optuna.Study, recipe: Recipe, measures: Sequence[Any], *, retrain: bool
) -> list[str]:
    """Measure the finished trials of a study again, and store the measures in the study."""
    check_listed(measures)
    measuring = Measuring(measures)
    check_made_with(study, recipe, recipe.task.ranking, also=measuring)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not retrain and not any(recipe.has_weights(trial) for trial in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains, or set retrain=True."
        )
    _complete(study, recipe, measuring, held_out=False, retrain=retrain)
    return measuring.names


def measure_what_is_new(study: optuna.Study, recipe: Recipe) -> None:
    """Measure the minima of earlier sessions as those of this one are going to be measured.

    A session may have measures or held-out data that the sessions before did not have. Minima
    without saved weights get nan.
    """
    task = recipe.task
    lacking = _complete(study, recipe, task.measuring, held_out=task.X_test is not None)
    if lacking:
        columns = sorted({name for names in lacking.values() for name in names})
        warn(
            f"{', '.join(columns)} of trials {sorted(lacking)} stay nan: an earlier session "
            "trained them without these measures or held-out data, and their weights were not "
            "saved. With an artifact_store, such as a folder, they would be measured now."
        )


def _complete(
    study: optuna.Study,
    recipe: Recipe,
    measuring: Measuring,
    *,
    held_out: bool,
    retrain: bool = False,
) -> dict[int, list[str]]:
    """Measure what finished trials lack; return what is lacking where there are no weights."""
    lacking: dict[int, list[str]] = {}
    problems = []
    task, attributes = replace(recipe.task, measuring=measuring), study.user_attrs
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        minimum = Minimum.from_trial(trial)
        before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
        row = minimum.row() | before
        names = [name for name in measuring.names if name not in row]
        lacks_loss = held_out and "test_loss" not in row
        if not names and not lacks_loss:
            continue
        if not retrain and not recipe.has_weights(trial):
            lacking[trial.number] = [*names, *["test_loss"] * lacks_loss]
            continue
        estimator, problem = recipe.provide(trial, retrain=retrain)
        if problem:
            problems.append(problem)
            continue
        data = task.data(recipe.parameters(trial))
        again = Minimum(train_loss=minimum.train_loss)
        if names:
            for name, one in task.measure(names, estimator, data, recipe.seed_of(trial)).items():
                if one.reason:
                    problems.append(f"{name} of trial {trial.number}: {one.reason}")
                else:
                    again.measures[name] = float(one.value)
        if lacks_loss:
            record_held_out(again, estimator, data, task.X_test, task.y_test)
        with blame_storage(study):
            study.set_user_attr(remeasured_key(trial), before | again.row())
    if problems:
        warn(
            "\n".join(problems)
            + "\nThe other minima are measured."
            + " To train the candidates of damaged files again: remeasure(..., retrain=True)."
            * (not retrain)
        )
    return lacking

"""Measure the minima of a study again, from their saved weights."""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from relflat_sk._minima_table import remeasured_key
from relflat_sk._warnings import warn
from relflat_sk.measures import check_name
from relflat_sk.search._trial import (
    ARTIFACT,
    MinimaObjective,
    check_made_with,
    measure_held_out,
)

__all__ = ["measure_what_is_new", "remeasure"]

_TEST_LOSS = "test_loss"


def remeasure(study: optuna.Study, objective: MinimaObjective, names: Sequence[str]) -> None:
    """Measure the finished trials of a study again, and store the measures in the study.

    Parameters
    ----------
    study : optuna.Study
        The study. Optuna lets nobody change finished trials, so the study gets the measures as
        user attributes.
    objective : MinimaObjective
        Holds the estimator, the data and the store of weights.
    names : sequence of str
        Names of measures, see `get_measure_names`. A trial that has a measure already is not
        measured again; the other measures of a trial share one pass over the data.

    Raises
    ------
    ValueError
        If a name is not a measure, the study was made with other data, or no weights were saved.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"measures must be a sequence of names, got {names!r}.")
    for name in names:
        check_name(name)
    check_made_with(study, objective)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if objective.artifact_store is None or not any(ARTIFACT in t.user_attrs for t in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains."
        )
    _complete(study, objective, names, held_out=False)


def measure_what_is_new(study: optuna.Study, objective: MinimaObjective) -> None:
    """Measure the minima of earlier sessions as those of this one are going to be measured.

    A session may have measures or held-out data that the sessions before did not have. Minima
    without saved weights get nan.

    Parameters
    ----------
    study : optuna.Study
        The study.
    objective : MinimaObjective
        Measures and held-out data of this session.

    Warns
    -----
    FlatnessWarning
        If minima have no saved weights.
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
    study: optuna.Study, objective: MinimaObjective, names: Sequence[str], *, held_out: bool
) -> dict[int, list[str]]:
    """Measure what finished trials lack; return what is lacking where there are no weights."""
    lacking = {}
    attributes = study.user_attrs
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        before: dict[str, Any] = attributes.get(remeasured_key(trial), {})
        found = trial.user_attrs | before
        missing = [name for name in names if name not in found]
        new_data = held_out and objective.X_test is not None and _TEST_LOSS not in found
        if not missing and not new_data:
            continue
        if objective.artifact_store is None or ARTIFACT not in trial.user_attrs:
            lacking[trial.number] = [*missing, *[_TEST_LOSS] * new_data]
            continue
        params = objective.space.values(trial)
        estimator = objective.restore(params, trial)
        data = objective.data(params)
        values: dict[str, float] = {}
        if missing:
            measured = objective.measure(missing, estimator, data, trial.params)
            values |= {name: float(one.value) for name, one in measured.items()}
        if new_data:
            values |= measure_held_out(
                estimator, found["train_loss"], data, objective.X_test, objective.y_test
            )
        study.set_user_attr(remeasured_key(trial), before | values)
    return lacking

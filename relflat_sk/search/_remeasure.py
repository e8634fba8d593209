"""Measure the minima of a study again, from their saved weights."""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from relflat_sk._minima_table import remeasured_key
from relflat_sk.measures import check_name
from relflat_sk.search._sharing import check_data
from relflat_sk.search._trial import ARTIFACT, MinimaObjective

__all__ = ["remeasure"]


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
    check_data(study, objective)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if objective.artifact_store is None or not any(ARTIFACT in t.user_attrs for t in trials):
        raise ValueError(
            "no weights of these minima were saved, so they cannot be measured again. Give the "
            "search an artifact_store, such as a folder, before it trains."
        )
    for trial in trials:
        before: dict[str, Any] = study.user_attrs.get(remeasured_key(trial), {})
        missing = [name for name in names if name not in trial.user_attrs | before]
        if not missing or ARTIFACT not in trial.user_attrs:
            continue
        params = objective.space.values(trial)
        estimator = objective.restore(params, trial)
        measured = objective.measure(missing, estimator, objective.data(params), trial.params)
        values = {name: float(found.value) for name, found in measured.items()}
        study.set_user_attr(remeasured_key(trial), before | values)

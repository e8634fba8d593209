"""New measures of old minima, by the weights that were kept of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from relflat_sk._minima_table import remeasured_key
from relflat_sk.measures import check_name
from relflat_sk.search._sharing import check_data
from relflat_sk.search._trial import ARTIFACT, MinimaObjective

__all__ = ["remeasure"]


def remeasure(study: optuna.Study, objective: MinimaObjective, names: Sequence[str]) -> None:
    """Measure the finished trials of a study once more, and write it to the study.

    Parameters
    ----------
    study : optuna.Study
    objective : MinimaObjective
        Knows the data, the estimator and the store of weights.
    names : sequence of str
        What to measure. What a trial has already is left as it is.

    Raises
    ------
    ValueError
        If a name is not one of a measure, the data are other ones or no weights were kept.
    """
    if isinstance(names, str) or not names:
        raise ValueError(f"measures must be a sequence of names, got {names!r}.")
    for name in names:
        check_name(name)
    check_data(study, objective)
    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if objective.artifact_store is None or not any(ARTIFACT in t.user_attrs for t in trials):
        raise ValueError(
            "no weights of these minima were kept, so that they cannot be measured again. Give "
            "the search an artifact_store, a folder for instance, before it trains."
        )
    for trial in trials:
        found: dict[str, Any] = study.user_attrs.get(remeasured_key(trial), {})
        missing = [name for name in names if name not in trial.user_attrs | found]
        if not missing or ARTIFACT not in trial.user_attrs:
            continue
        params = objective.space.values(trial)
        estimator = objective.restore(params, trial)
        measured = objective.measure(missing, estimator, objective.data(params), trial.params)
        values = {name: float(np.float64(one.value)) for name, one in measured.items()}
        study.set_user_attr(remeasured_key(trial), found | values)

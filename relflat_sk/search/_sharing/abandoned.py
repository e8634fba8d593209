"""Give up running trials, above all those of processes that are gone."""

import warnings
from collections.abc import Callable
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.search._optuna_internals import fail_trial, trial_id_of
from relflat_sk.search._optuna_reading import read_trials
from relflat_sk.search._sharing.processes import is_gone

__all__ = ["give_up", "give_up_abandoned"]


def give_up(
    study: optuna.Study,
    which: Callable[[FrozenTrial], bool],
    attributes: Callable[[FrozenTrial], dict[str, Any]] = lambda trial: {},
) -> list[FrozenTrial]:
    """Mark running trials as failed, so that their candidates are free again."""
    trials = read_trials(study)
    given_up = [one for one in trials if one.state == TrialState.RUNNING and which(one)]
    for trial in given_up:
        fail_trial(study, trial_id_of(trial), attributes(trial))
    return read_trials(study) if given_up else trials


def give_up_abandoned(study: optuna.Study, except_of: str = "") -> list[FrozenTrial]:
    """Give up the running trials of processes that are gone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.storages.fail_stale_trials(study)  # in storages with a heartbeat
    return give_up(
        study,
        lambda trial: trial.user_attrs.get("sweep") != except_of and _is_abandoned(trial),
        lambda trial: {"killed": True},
    )


def _is_abandoned(trial: FrozenTrial) -> bool:
    return "process" in trial.user_attrs and is_gone(trial.user_attrs["process"])

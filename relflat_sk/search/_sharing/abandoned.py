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
    """Mark running trials as failed, so that their candidates are free again.

    Parameters
    ----------
    study : optuna.Study
        The study.
    which : callable
        From a running trial to whether it is given up.
    attributes : callable, optional
        From a trial that is given up to the user attributes that it gets.

    Returns
    -------
    list of optuna.trial.FrozenTrial
        All trials of the study, as they are afterwards.
    """
    trials = read_trials(study)
    given_up = [one for one in trials if one.state == TrialState.RUNNING and which(one)]
    for trial in given_up:
        fail_trial(study, trial_id_of(trial), attributes(trial))
    return read_trials(study) if given_up else trials


def give_up_abandoned(study: optuna.Study, except_of: str = "") -> list[FrozenTrial]:
    """Give up the running trials of processes that are gone.

    Parameters
    ----------
    study : optuna.Study
        The study.
    except_of : str, optional
        Name of a sweep whose trials are left as they are. Worker processes pass their own: when
        one of them dies, joblib ends the others, too, and the sweep gives up all their trials. A
        trial that a worker claimed meanwhile would be blamed for the crash.

    Returns
    -------
    list of optuna.trial.FrozenTrial
        All trials of the study, as they are afterwards.
    """
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

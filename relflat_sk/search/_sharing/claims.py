"""Claim candidates, so that processes that share a study never train the same one.

There is no queue. A process claims a candidate by creating a trial for it, in state RUNNING from
the first moment, and then reads the study. If an earlier trial holds the same candidate, the
process withdraws its own trial before it trains anything. This works in every storage of Optuna,
because each numbers trials in the order in which they become visible: SQLite under its write
lock, other databases under a lock on the study's row, a journal by the order of its lines. A
process that sees its own trial therefore sees every earlier one. (A queue of waiting trials
would fail in SQLite, which cannot lock rows: two processes can take the same trial from it.)

If the process of a running trial is gone, the trial is given up and its candidate is free again.
The operating system tells about processes on the same machine (except on Windows). For other
machines Optuna's heartbeat does, if the storage has one:
``RDBStorage(url, heartbeat_interval=60)``.

User attributes of a trial that this package reads again:

===========  ==========================================================================
attribute    meaning
===========  ==========================================================================
``process``  which process and thread train the trial, see `processes.this_process`
``sweep``    name of the sweep (one call of `FlatMinimaSearch.fit`) that the trial is of
``failed``   training or measuring failed; the candidate is not tried again
``killed``   the process that trained the trial died
===========  ==========================================================================
"""

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from relflat_sk.search._optuna_internals import FIXED_VALUES, add_trial, fail_trial
from relflat_sk.search._optuna_reading import trials_between
from relflat_sk.search._optuna_views import OneTrialStudy
from relflat_sk.search._sharing.abandoned import give_up_abandoned
from relflat_sk.search._sharing.processes import this_process

__all__ = [
    "NUMBER",
    "Plan",
    "claim",
    "counted",
    "failed_trials",
    "is_cut_short",
    "is_superseded",
    "is_suspect",
]

# system attribute: the number of a draw, which a trial shares with the trial it replaces
NUMBER = "candidate"

_RANDOM = random.SystemRandom()  # workers that are forked must not draw the same numbers


class Plan(ABC):
    """The candidates that a search is to train."""

    choices: Mapping[str, BaseDistribution]
    released: frozenset[int] = frozenset()

    def counted(self, trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """List the trials that hold a candidate of this plan."""
        return [trial for trial in counted(trials) if trial.number not in self.released]

    @abstractmethod
    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the candidates that no trial holds."""

    @abstractmethod
    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose a candidate that no trial holds."""

    def values(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], candidate: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values that the trial of a candidate has from the beginning."""
        return dict(candidate.get(FIXED_VALUES, {}))


def claim(study: optuna.Study, plan: Plan, sweep: str) -> OneTrialStudy | None:
    """Claim a candidate for the calling process.

    A candidate that a process died of is claimed only while its sweep trains nothing else, so
    that another death can only be its own.
    """
    for lost in itertools.count():
        trials = give_up_abandoned(study, except_of=sweep)
        # processes that begin at once would otherwise all try the same candidate, then the next
        candidate = plan.next_candidate(study, trials, skip=_RANDOM.randrange(2 ** min(lost, 10)))
        if candidate is None:
            return None
        point = plan.values(study, trials, candidate)
        values = {name: value for name, value in point.items() if name in plan.choices}
        template = create_trial(
            state=TrialState.RUNNING,
            params=values,
            distributions={name: plan.choices[name] for name in values},
            user_attrs={"process": this_process(), "sweep": sweep},
            system_attrs=candidate,
        )
        alone = is_suspect(template, trials)
        if alone and _sweep_is_busy(template, trials):
            return None
        others = trials_between(study, trials, trial_id := add_trial(study, template))
        taken = any(_same_candidate(template, other) for other in plan.counted(others))
        if not taken and not (alone and _sweep_is_busy(template, others)):
            return OneTrialStudy(study, trial_id)
        fail_trial(study, trial_id)
    return None


def counted(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """List the trials that hold a candidate: finished, failed or running ones."""
    return [one for one in trials if one.state != TrialState.WAITING and not is_cut_short(one)]


def is_cut_short(trial: FrozenTrial) -> bool:
    """Whether a trial was interrupted, killed or withdrawn, so that its candidate is free."""
    return trial.state == TrialState.FAIL and not _has_failed(trial)


def _has_failed(trial: FrozenTrial) -> bool:
    return "failed" in trial.user_attrs


def failed_trials(trials: Iterable[FrozenTrial]) -> frozenset[int]:
    """Return the numbers of the trials whose training or measuring failed."""
    return frozenset(
        trial.number for trial in trials if trial.state == TrialState.FAIL and _has_failed(trial)
    )


def is_superseded(trial: FrozenTrial, trials: Sequence[FrozenTrial]) -> bool:
    """Return whether a failed trial has a successor, which was told to train it again."""
    if trial.state != TrialState.FAIL:
        return False
    later = (other for other in counted(trials[trial.number + 1 :]) if other.state.is_finished())
    return any(_same_candidate(other, trial) for other in later)


def is_suspect(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Return whether a process died while it trained the candidate of a trial."""
    return any(
        "killed" in trial.user_attrs and _same_candidate(template, trial) for trial in trials
    )


def _same_candidate(one: FrozenTrial, other: FrozenTrial) -> bool:
    """Return whether two trials hold the same draw, or the same combination of choices."""
    number, point = one.system_attrs.get(NUMBER), one.system_attrs.get(FIXED_VALUES)
    return (number is not None and number == other.system_attrs.get(NUMBER)) or (
        point is not None and point in (other.params, other.system_attrs.get(FIXED_VALUES))
    )


def _sweep_is_busy(template: FrozenTrial, trials: Iterable[FrozenTrial]) -> bool:
    """Return whether the sweep of a trial trains another candidate at the moment."""
    sweep = template.user_attrs["sweep"]
    return any(
        trial.state == TrialState.RUNNING and trial.user_attrs.get("sweep") == sweep
        for trial in trials
    )

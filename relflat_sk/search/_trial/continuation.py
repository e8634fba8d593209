"""Continue a study with a space: the same parameters, in ranges that are at least as wide."""

from collections.abc import Container, Iterable
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.minima import PARAM_PREFIX
from relflat_sk.search._trial.entries import Computed, as_stored, is_choice
from relflat_sk.search._trial.space import Space

__all__ = ["check_space", "new_choices"]

_OTHER_NAME = "give this search a study_name of its own."
_SCALED = f"{PARAM_PREFIX}scaled_"  # learning rates that the search computes itself


def check_space(space: Space, study: optuna.Study) -> None:
    """Refuse to continue a study of another space, and take over the order of its choices.

    Optuna knows choices by their position, so that further ones go to the end.
    """
    _follow(space, study)
    drawn = space.distributions()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        for name, distribution in drawn.items():
            before = trial.distributions.get(name, distribution)
            problem = _why_not_wider(before, distribution)
            if problem:
                raise ValueError(
                    f"study {study.study_name!r} was made with {before} for {name!r}, this space "
                    f"has {distribution}: {problem}, or {_OTHER_NAME}"
                )
        _check_names(space, study.study_name, trial)
        _check_functions(space, study.study_name, trial)


def new_choices(space: Space, study: optuna.Study) -> dict[str, CategoricalDistribution]:
    """Return the lists of choices that are longer than those of a study."""
    drawn = [trial.distributions for trial in study.get_trials(deepcopy=False)]
    return {
        name: entry.distribution
        for name, entry in space.entries.items()
        if is_choice(entry)
        and any(name in one and one[name] != entry.distribution for one in drawn)
    }


def _follow(space: Space, study: optuna.Study) -> None:
    """Bring the choices of a space into the order in which a study has them."""
    drawn = [trial.distributions for trial in study.get_trials(deepcopy=False)]
    for name, entry in space.entries.items():
        lists = [one[name] for one in drawn if name in one]
        before = [one.choices for one in lists if isinstance(one, CategoricalDistribution)]
        if is_choice(entry) and before:
            space.entries[name] = entry.in_order_of(max(before, key=len))


def _check_names(space: Space, study_name: str, trial: FrozenTrial) -> None:
    """Refuse a space that draws or computes other parameters than a finished trial has."""
    recorded = {
        name.removeprefix(PARAM_PREFIX)
        for name in trial.user_attrs
        if name.startswith(PARAM_PREFIX) and not name.startswith(_SCALED)
    }
    values, again = space.draw_again(trial)
    drawn = again | space.distributions().keys()
    then = _mark_computed(trial.params.keys() | recorded, trial.params)
    now = _mark_computed(values.keys() | drawn, drawn)
    if then != now:
        raise ValueError(
            f"study {study_name!r} was made over {then}, this space is over {now}; {_OTHER_NAME}"
        )


def _mark_computed(names: Iterable[str], drawn: Container[str]) -> list[str]:
    """List names in order, and mark those that are not drawn."""
    return [name if name in drawn else f"{name} (computed)" for name in sorted(names)]


def _check_functions(space: Space, study_name: str, trial: FrozenTrial) -> None:
    """Refuse functions that give a finished trial another value than it had."""
    values: dict[str, Any] = space.values(trial)
    for name, entry in space.entries.items():
        recorded = f"{PARAM_PREFIX}{name}"
        if isinstance(entry, Computed) and name in values and recorded in trial.user_attrs:
            had, now = trial.user_attrs[recorded], as_stored(values[name])
            if now != had:
                raise ValueError(
                    f"study {study_name!r} was made with another function for {name!r}: it "
                    f"gave trial {trial.number} the value {had!r}, and this one gives {now!r}. "
                    f"Restore the function, or {_OTHER_NAME}"
                )


def _why_not_wider(before: Any, now: Any) -> str:
    """Say what to do if a distribution cannot continue another one; empty if it can."""
    logs = [getattr(one, "log", None) for one in (before, now)]
    if not isinstance(now, type(before)) or logs[0] != logs[1]:
        return "Optuna cannot change that within a study. Draw this parameter as the study did"
    if isinstance(before, CategoricalDistribution):
        dropped = [choice for choice in before.choices if choice not in now.choices]
        return f"choices can be added, but not removed. Put {dropped} back" if dropped else ""
    if now.low > before.low or now.high < before.high:
        return "ranges can be wider, but not narrower. Give this one at least the old ends"
    return ""

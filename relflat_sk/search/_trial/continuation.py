"""Continue a study with a space: the same parameters, in ranges that are at least as wide."""

from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from relflat_sk.search._trial.entries import Computed, as_stored, is_choice
from relflat_sk.search._trial.space import Space

__all__ = ["check_space", "new_choices"]

_OTHER_NAME = "give this search a study_name of its own."


def check_space(space: Space, study: optuna.Study) -> None:
    """Refuse to continue a study of another space, and take over the order of its choices.

    Optuna knows choices by their position, so that further ones go to the end.

    Parameters
    ----------
    space : Space
        The space.
    study : optuna.Study
        The study to continue.

    Raises
    ------
    ValueError
        If the study's trials have other parameters, or drew them in another way. Ranges may be
        wider, and lists of choices longer.
    """
    _follow(space, study)
    drawn = space.distributions()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        extra = set(trial.params) - set(drawn) if len(drawn) == len(space.entries) else set()
        if extra or set(drawn) - set(trial.params):
            raise ValueError(
                f"study {study.study_name!r} was made over {sorted(trial.params)}, this space "
                f"is over {sorted(space.entries)}; {_OTHER_NAME}"
            )
        for name, distribution in drawn.items():
            problem = _why_not_wider(trial.distributions[name], distribution)
            if problem:
                raise ValueError(
                    f"study {study.study_name!r} was made with {trial.distributions[name]} "
                    f"for {name!r}, this space has {distribution}: {problem}, or {_OTHER_NAME}"
                )
        _check_functions(space, study.study_name, trial)


def new_choices(space: Space, study: optuna.Study) -> dict[str, CategoricalDistribution]:
    """Return the lists of choices that are longer than those of a study.

    Parameters
    ----------
    space : Space
        The space.
    study : optuna.Study
        A study that `check_space` has accepted.

    Returns
    -------
    dict of str to optuna.distributions.CategoricalDistribution
        By parameter name.
    """
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


def _check_functions(space: Space, study_name: str, trial: FrozenTrial) -> None:
    """Refuse functions that give a finished trial another value than it had."""
    values: dict[str, Any] = space.values(trial)
    for name, entry in space.entries.items():
        had = trial.user_attrs.get(f"param_{name}")
        if isinstance(entry, Computed) and name in values and had is not None:
            now = as_stored(values[name])
            if now != had:
                raise ValueError(
                    f"study {study_name!r} was made with another function for {name!r}: it "
                    f"gave trial {trial.number} the value {had!r}, and this one gives {now!r}. "
                    f"Restore the function, or {_OTHER_NAME}"
                )


def _why_not_wider(before: BaseDistribution, now: BaseDistribution) -> str:
    """Say what to do if a distribution cannot continue another one; empty if it can."""
    logs = [getattr(one, "log", None) for one in (before, now)]
    if not isinstance(now, type(before)) or logs[0] != logs[1]:
        return "Optuna cannot change that within a study. Draw this parameter as the study did"
    if isinstance(now, CategoricalDistribution) and isinstance(before, CategoricalDistribution):
        dropped = [choice for choice in before.choices if choice not in now.choices]
        if dropped:
            return f"choices can be added, but not removed. Put {dropped} back"
    return ""

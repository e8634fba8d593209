"""What a search trains: all combinations of its choices, or so many draws from its space."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from relflat_sk.search._sharing.claims import NUMBER, POINT, Claimed, live, was_killed
from relflat_sk.search._trial import Space

__all__ = ["CandidateSampler", "Draws", "Grid"]


class Grid:
    """All combinations of choices."""

    def __init__(self, points: list[dict[str, Any]]) -> None:
        self.points = points

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the points that no trial has."""
        return len(self._missing(trials))

    def free(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """Choose the first one, those that a process died of last."""
        candidates = [{POINT: point} for point in self._missing(trials)]
        return _unsuspected_first(candidates, trials)

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
        taken = _points(trials)
        return [point for point in self.points if point not in taken]


class Draws:
    """So many draws, numbered from 0, of a sampler.

    Parameters
    ----------
    n_trials : int
        How many, those of an earlier session included.
    """

    def __init__(self, n_trials: int) -> None:
        self.n_trials = n_trials

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the draws that no trial has."""
        return len(self._missing(trials))

    def free(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> dict[str, Any] | None:
        """Choose the first one, those that a process died of last, and draw if it is of choices."""
        candidates = [{NUMBER: number} for number in self._missing(trials)]
        found = _unsuspected_first(candidates, trials)
        if found is not None and isinstance(study.sampler, CandidateSampler):
            found |= study.sampler.point(study, found[NUMBER], _points(trials))
        return found

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[int]:
        numbers = [trial.system_attrs.get(NUMBER) for trial in live(trials)]
        n_trials = self.n_trials - numbers.count(None)  # of a grid, or not of a search
        return [number for number in range(n_trials) if number not in numbers]


def _points(trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
    """List the values that trials have, or will have."""
    return [values for trial in live(trials) for values in (trial.params, _fixed(trial)) if values]


def _fixed(trial: FrozenTrial) -> dict[str, Any]:
    fixed: dict[str, Any] = trial.system_attrs.get(POINT, {})
    return fixed


def _unsuspected_first(
    candidates: list[dict[str, Any]], trials: Sequence[FrozenTrial]
) -> dict[str, Any] | None:
    killed = [trial for trial in trials if "killed" in trial.user_attrs]
    if not killed:
        return next(iter(candidates), None)

    def is_suspected(candidate: dict[str, Any]) -> bool:
        template = create_trial(state=TrialState.WAITING, system_attrs=candidate)
        return was_killed(template, killed)

    return min(candidates, key=is_suspected, default=None)


class CandidateSampler(TPESampler):
    """TPE that draws a candidate by its number, and no combination of choices twice.

    A draw depends on the seed, on its number and on the results before it, so that a sweep
    that was interrupted goes on as it would have, and a draw whose process died is drawn
    again. Of choices alone, the first draws are a random order of all combinations, whatever
    process asks for them.

    Parameters
    ----------
    seed : int or None
    space : Space
    """

    n_random = 10

    def __init__(self, seed: int | None, space: Space) -> None:
        super().__init__(seed=seed, n_startup_trials=self.n_random)
        self.seed = seed
        self.points = space.grid()
        order = np.random.RandomState(seed).permutation(len(self.points or []))
        self.order = [int(index) for index in order]
        self.choices = space.distributions()

    def reseed_rng(self) -> None:
        """Keep the seed: no two draws share a number."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start from the seed and the number of the draw."""
        number = trial.system_attrs.get(NUMBER, trial.number)
        self._start(number)
        super().before_trial(study, trial)

    def _start(self, number: int) -> None:
        if self.seed is not None:
            seed = zlib.crc32(b"%d" % number, self.seed)
            TPESampler.__init__(self, seed=seed, n_startup_trials=self.n_random)

    def point(self, study: optuna.Study, number: int, taken: list[Any]) -> dict[str, Any]:
        """Draw a combination of choices that no trial has.

        Parameters
        ----------
        study : optuna.Study
        number : int
            Of the draw.
        taken : list of dict
            What other trials have.

        Returns
        -------
        dict
            As a system attribute; empty if the space has more than choices.
        """
        if self.points is None:
            return {}
        start = min(number, self.n_random)
        in_order = [self.points[i] for i in (*self.order[start:], *self.order[:start])]
        if number >= self.n_random:
            reserved = in_order[len(in_order) - start :]
            drawn = self._draw(study, number, [*taken, *reserved])
            if drawn is not None:
                return {POINT: drawn}
        return {POINT: next(one for one in in_order if one not in taken)}

    def _draw(
        self, study: optuna.Study, number: int, taken: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        self._start(number)
        fresh = Claimed(study, -1)  # Optuna keeps what it reads until a study runs a trial
        trial = create_trial(state=TrialState.WAITING)
        choices: dict[str, BaseDistribution] = self.choices
        for _ in range(100):
            point = {
                name: self.sample_independent(fresh, trial, name, choices[name]) for name in choices
            }
            if point not in taken:
                return point
        return None

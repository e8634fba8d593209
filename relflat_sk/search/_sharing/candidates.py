"""Plan what a search trains: all combinations of its choices, or a number of draws."""

import threading
import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from relflat_sk.search._optuna_internals import FIXED_VALUES
from relflat_sk.search._optuna_views import with_trials
from relflat_sk.search._sharing.claims import NUMBER, Plan, is_suspect
from relflat_sk.search._trial import Space

__all__ = ["CandidateSampler", "Draws", "Grid"]

_SPACE_LOCK = threading.Lock()  # of no sampler, as samplers are pickled


class Grid(Plan):
    """The plan to train all combinations of choices."""

    def __init__(
        self, points: list[dict[str, Any]], choices: Mapping[str, BaseDistribution] | None = None
    ) -> None:
        self.points = points
        self.choices = choices or {}

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the combinations that no trial holds."""
        return len(self._missing(trials))

    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose the first combination left; those that a process died of come last."""
        candidates = [{FIXED_VALUES: point} for point in self._missing(trials)]
        return _suspects_last(candidates, trials, skip)

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
        taken = _keys(_points(self.counted(trials)))
        return [point for point in self.points if _key(point) not in taken]


class Draws(Plan):
    """The plan to train a number of draws, which are numbered from 0."""

    def __init__(
        self, n_trials: int, choices: Mapping[str, BaseDistribution] | None = None
    ) -> None:
        self.n_trials = n_trials
        self.choices = choices or {}

    def n_left(self, trials: Iterable[FrozenTrial]) -> int:
        """Count the draws that no trial holds."""
        return len(self._missing(trials))

    def next_candidate(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], skip: int = 0
    ) -> dict[str, Any] | None:
        """Choose the first draw left; those that a process died of come last.

        A `CandidateSampler` over choices draws the values now.
        """
        candidates = [{NUMBER: number} for number in self._missing(trials)]
        found = _suspects_last(candidates, trials, skip)
        sampler = study.sampler
        if found is None or not isinstance(sampler, CandidateSampler) or sampler.points is None:
            return found
        taken = _points(self.counted(trials))
        return found | sampler.point(with_trials(study, trials), found[NUMBER], taken)

    def values(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], candidate: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values that the trial of a candidate has; a `CandidateSampler` draws them."""
        if FIXED_VALUES in candidate or not isinstance(study.sampler, CandidateSampler):
            return super().values(study, trials, candidate)
        return study.sampler.draw(with_trials(study, trials), candidate[NUMBER])

    def _missing(self, trials: Iterable[FrozenTrial]) -> list[int]:
        numbers = [trial.system_attrs.get(NUMBER) for trial in self.counted(trials)]
        # trials without a number are of a grid, or were made by something other than a search
        n_trials, taken = self.n_trials - numbers.count(None), set(numbers)
        return [number for number in range(n_trials) if number not in taken]


def _points(trials: Iterable[FrozenTrial]) -> list[dict[str, Any]]:
    """List the values that trials have drawn, or are going to draw."""
    return [
        values
        for trial in trials
        for values in (trial.params, trial.system_attrs.get(FIXED_VALUES, {}))
        if values
    ]


def _key(point: Mapping[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the values in a form of which thousands are compared at once."""
    return frozenset(point.items())


def _keys(points: Iterable[Mapping[str, Any]]) -> set[frozenset[tuple[str, Any]]]:
    return set(map(_key, points))


def _suspects_last(
    candidates: list[dict[str, Any]], trials: Sequence[FrozenTrial], skip: int
) -> dict[str, Any] | None:
    """Return the first candidate that no process died of, or else the first one."""
    if candidates:
        skip %= len(candidates)
        candidates = [*candidates[skip:], *candidates[:skip]]
    killed = [trial for trial in trials if "killed" in trial.user_attrs]
    if not killed:
        return next(iter(candidates), None)

    def died_of(candidate: dict[str, Any]) -> bool:
        template = create_trial(state=TrialState.WAITING, system_attrs=candidate)
        return is_suspect(template, killed)

    return min(candidates, key=died_of, default=None)


class CandidateSampler(TPESampler):
    """TPE that repeats no combination of choices and can repeat any draw by its number.

    A draw depends on the seed, its number and the results before it. A search that was
    interrupted therefore goes on as it would have, and if the process of a draw dies, the same
    values are drawn again. If the space has choices only, the first draws follow a random order
    of all combinations, whichever process asks for them.
    """

    n_random = 10

    def __init__(self, seed: int | None, space: Space) -> None:
        super().__init__(seed=seed, n_startup_trials=self.n_random)
        self.seed = seed
        # never draws: looks at each trial once to learn which parameters all trials have
        self.space_of_trials = self._tpe(0)
        self.points = space.grid()
        order = np.random.RandomState(seed).permutation(len(self.points or []))
        self.order = [int(index) for index in order]
        self.choices = space.distributions()
        self.draws_all = len(self.choices) == len(space.entries)  # and no function of the trial

    def reseed_rng(self) -> None:
        """Do nothing: every draw has a seed of its own, in every process."""

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Start from the seed and the number of the draw."""
        if self.seed is not None:
            number = trial.system_attrs.get(NUMBER, trial.number)
            TPESampler.__init__(self, seed=self._seed_of(number), n_startup_trials=self.n_random)
        super().before_trial(study, trial)

    def _seed_of(self, number: int) -> int | None:
        return None if self.seed is None else zlib.crc32(b"%d" % number, self.seed)

    def _tpe(self, number: int) -> TPESampler:
        """Return a sampler for one draw, which threads can make at the same time."""
        return TPESampler(seed=self._seed_of(number), n_startup_trials=self.n_random)

    def point(
        self, study: optuna.Study, number: int, taken: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Draw a combination of choices that no trial holds, from a space of choices only."""
        start, keys = min(number, self.n_random), _keys(taken)
        points = self.points or []
        in_order = [points[i] for i in (*self.order[start:], *self.order[:start])]
        if number >= self.n_random:
            reserved = in_order[len(in_order) - start :]  # for the draws before this one
            drawn = self._draw(study, number, keys | _keys(reserved))
            if drawn is not None:
                return {FIXED_VALUES: drawn}
        return {FIXED_VALUES: next(point for point in in_order if _key(point) not in keys)}

    def draw(self, study: optuna.Study, number: int) -> dict[str, Any]:
        """Draw the values of a trial as it would draw them itself, but without its storage."""
        if not self.draws_all:
            return {}
        tpe, trial = self._tpe(number), create_trial(state=TrialState.WAITING)
        varied = {name: one for name, one in self.choices.items() if not one.single()}
        with _SPACE_LOCK:
            known = self.space_of_trials.infer_relative_search_space(study, trial)
        same = {name: one for name, one in known.items() if varied.get(name) == one}
        together = tpe.sample_relative(study, trial, same)
        alone = [name for name in varied if name not in together]
        drawn = together | {
            name: tpe.sample_independent(study, trial, name, varied[name]) for name in alone
        }
        return {name: drawn[name] for name in varied}

    def _draw(
        self, study: optuna.Study, number: int, taken: Container[frozenset[tuple[str, Any]]]
    ) -> dict[str, Any] | None:
        """Draw by TPE until a combination is not taken; None after 100 attempts."""
        tpe, trial = self._tpe(number), create_trial(state=TrialState.WAITING)
        choices: dict[str, BaseDistribution] = self.choices
        for _ in range(100):
            point = {
                name: tpe.sample_independent(study, trial, name, choices[name]) for name in choices
            }
            if _key(point) not in taken:
                return point
        return None

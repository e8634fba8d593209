"""Run one trial of a search."""

from collections.abc import Sequence
from typing import Any

import optuna

from relflat_sk.search._trial import CallError, MinimaObjective

__all__ = ["Run"]


class Run:
    """The objective of `Study.optimize` for one trial, which holds the trained estimator."""

    def __init__(self, objective: MinimaObjective) -> None:
        self.objective = objective
        self.estimator: Any = None
        self.call_error: CallError | None = None

    def __call__(self, trial: optuna.Trial) -> Sequence[float]:
        """Train and measure a candidate."""
        try:
            found, self.estimator = self.objective.run(trial)
        except CallError as error:
            self.call_error = error
            raise
        values = found if isinstance(found, tuple) else (found,)
        # with one direction, the first measure alone, so that any sampler and pruner works
        return values[: len(trial.study.directions)]

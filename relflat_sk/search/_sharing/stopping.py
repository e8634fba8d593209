"""End a search early: after a time, or when one of the user's callbacks asks for it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from relflat_sk._checks import check_number
from relflat_sk.search._optuna_views import StoppableStudy

__all__ = ["Stopping"]

# user attribute of a study: the sweeps that a callback has ended, which all their processes read
STOPPED = "stopped_sweeps"


class Stopping:
    """When a sweep is to end, although there are candidates left."""

    def __init__(
        self,
        timeout: float | None = None,
        callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], Any]] | None = None,
    ) -> None:
        check_number("timeout", timeout, optional=True)
        self.callbacks = [] if callbacks is None else callbacks
        if not isinstance(self.callbacks, list | tuple) or not all(map(callable, self.callbacks)):
            raise TypeError(
                "callbacks must be a list of functions of a study and a trial, as in "
                f"Study.optimize, got {callbacks!r}."
            )
        # the clock that all processes of a machine share
        self.deadline = None if timeout is None else time.time() + timeout

    def __getstate__(self) -> dict[str, Any]:
        # worker processes call none, but look whether one has ended the sweep
        return self.__dict__ | {"callbacks": [None] * bool(self.callbacks)}

    def is_due(self, study: optuna.Study, sweep: str) -> bool:
        """Return whether no candidate is to begin."""
        if self.deadline is not None and time.time() >= self.deadline:
            return True
        return bool(self.callbacks) and sweep in study.user_attrs.get(STOPPED, [])

    def call(self, study: optuna.Study, trial: FrozenTrial, sweep: str) -> None:
        """Call the callbacks."""
        view = StoppableStudy(study)
        for callback in self.callbacks:
            callback(view, trial)
        if view.stopped:
            before = study.user_attrs.get(STOPPED, [])
            study.set_user_attr(STOPPED, [*before, sweep])

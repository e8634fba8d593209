"""Adapter to the private attributes of Optuna's studies: further objects for the same study."""

from collections.abc import Sequence
from typing import Any

import optuna
from optuna.trial import FrozenTrial

__all__ = ["OneTrialStudy", "StoppableStudy", "with_trials"]


class _View(optuna.Study):
    """A second object for a study, made without a read of its storage."""

    def __init__(self, study: optuna.Study) -> None:
        self.__setstate__(study.__getstate__())  # as a copy by pickle, but for the storage


class OneTrialStudy(_View):
    """A view of a study whose ``optimize(..., n_trials=1)`` runs a trial that exists already."""

    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        super().__init__(study)
        self.trial_id = trial_id
        self.stopped = False

    def _pop_waiting_trial_id(self) -> int:
        return self.trial_id

    def stop(self) -> None:
        """Stop as `optuna.Study.stop` does, and remember it."""
        super().stop()
        self.stopped = True


class StoppableStudy(_View):
    """A view of a study for callbacks, whose `stop` says that a search is to end."""

    def __init__(self, study: optuna.Study) -> None:
        super().__init__(study)
        self.stopped = False

    def stop(self) -> None:
        """End the search after the candidates that are in training."""
        self.stopped = True


class _NoStorage:
    """Drops what a sampler notes for the samplers of other processes."""

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        pass


class _KnownTrialsStudy(_View):
    """A view of a study that reads and writes nothing."""

    def __init__(self, study: optuna.Study, trials: Sequence[FrozenTrial]) -> None:
        super().__init__(study)
        self._storage: Any = _NoStorage()
        self._thread_local.cached_all_trials = list(trials)

    def _get_trials(
        self, deepcopy: bool = True, states: Any = None, use_cache: bool = True
    ) -> list[FrozenTrial]:
        return super()._get_trials(deepcopy, states, use_cache=True)


def with_trials(study: optuna.Study, trials: Sequence[FrozenTrial]) -> optuna.Study:
    """Return a view of a study by which its sampler draws from given trials.

    Optuna's samplers would read all trials that run from a database, and write what they draw.
    """
    return _KnownTrialsStudy(study, trials)

"""Adapter to the private attributes of Optuna's databases: hold the trials of this process."""

import copy
from typing import Any

from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.trial import FrozenTrial, TrialState

__all__ = ["Database", "holding_own_trials"]


class Database(_CachedStorage):
    """A database that reads no trial which this process runs itself.

    Optuna reads a trial when it begins, for each constraint, and when it ends, by six statements
    each time. Only the process that runs a trial changes it, and its `optuna.Trial` notes the
    changes in the trial that it was given here. If another process gives the trial up meanwhile,
    the write of its end fails, as it does without this class.
    """

    def __init__(self, backend: RDBStorage) -> None:
        super().__init__(backend)
        self._own: dict[int, FrozenTrial] = {}  # running trials that this process created, by id

    def __getstate__(self) -> dict[Any, Any]:
        return super().__getstate__() | {"_own": {}}  # another process runs none of them

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Create a trial, and hold it if it runs."""
        trial_id = super().create_new_trial(study_id, template_trial)
        number = self._trial_id_to_study_id_and_number[trial_id][1]
        created = self._studies[study_id].trials[number]
        if created.state == TrialState.RUNNING:
            own = copy.copy(created)  # others may read the trial that was created
            own.params, own.distributions = {**own.params}, {**own.distributions}
            own.user_attrs, own.system_attrs = {**own.user_attrs}, {**own.system_attrs}
            own.intermediate_values = {**own.intermediate_values}
            self._own[trial_id] = own
        return trial_id

    def get_trial(self, trial_id: int) -> FrozenTrial:
        """Return a trial."""
        own = self._own.get(trial_id)
        if own is not None:
            return own
        trial = super().get_trial(trial_id)
        place = self._trial_id_to_study_id_and_number.get(trial_id)
        if place is not None and trial.state.is_finished():
            with self._lock:
                known = self._studies[place[0]]
                known.trials[place[1]] = trial
                known.unfinished_trial_ids.discard(trial_id)
        return trial

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        """Write a system attribute, as samplers do without an `optuna.Trial`."""
        super().set_trial_system_attr(trial_id, key, value)
        if trial_id in self._own:
            self._own[trial_id].system_attrs[key] = value

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Any = None) -> bool:
        """Write the state of a trial."""
        self._own.pop(trial_id, None)  # it has ended, here or in another process
        return super().set_trial_state_values(trial_id, state, values)


def holding_own_trials(storage: BaseStorage) -> BaseStorage:
    """Return a storage that does not read the trials of this process, if it is a database."""
    return Database(storage._backend) if type(storage) is _CachedStorage else storage

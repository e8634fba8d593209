"""Adapter to the private attributes of Optuna, as the other modules `_optuna_...` are.

Optuna has no public way to create a running trial, to learn its id and to run exactly that
trial. Processes that share a study need all three (see `relflat_sk.search._claims`). The
tests of this module (``tests/search/test_optuna_internals.py``) pass with the oldest and the
newest version of Optuna that ``pyproject.toml`` allows; run them with a new version first.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, distribution_to_json
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

__all__ = [
    "FIXED_VALUES",
    "TELL_ERRORS",
    "add_trial",
    "fail_trial",
    "file_of",
    "is_journal",
    "is_shared_by_threads",
    "last_known",
    "other_studies",
    "read_trial",
    "trial_id_of",
    "widen_choices",
]

# the system attribute in which Optuna looks for values that its sampler is not to draw
FIXED_VALUES = "fixed_params"

# what `Study.optimize` raises if another process has finished the trial meanwhile
TELL_ERRORS = (ValueError, AssertionError)


def add_trial(study: optuna.Study, template: FrozenTrial) -> int:
    """Create a trial in a study."""
    storage: Any = study._storage
    trial_id: int = storage.create_new_trial(study._study_id, template)
    # without a first heartbeat, Optuna would never miss a process that dies at once
    interval: Callable[[], int | None] = getattr(storage, "get_heartbeat_interval", lambda: None)
    if interval() is not None:
        storage.record_heartbeat(trial_id)
    return trial_id


def read_trial(study: optuna.Study, trial_id: int) -> FrozenTrial:
    """Read a trial as it is in the storage now."""
    return study._storage.get_trial(trial_id)


def fail_trial(
    study: optuna.Study, trial_id: int, attributes: Mapping[str, Any] | None = None
) -> bool:
    """Mark a running trial as failed, unless another process has finished it."""
    try:
        for name, value in (attributes or {}).items():
            study._storage.set_trial_user_attr(trial_id, name, value)
        return study._storage.set_trial_state_values(trial_id, TrialState.FAIL)
    except UpdateFinishedTrialError:
        return False


def trial_id_of(trial: FrozenTrial) -> int:
    """Return a trial's id in the storage."""
    return trial._trial_id


def is_shared_by_threads(study: optuna.Study) -> bool:
    """Return whether all threads of this process see the same study."""
    storage: Any = study._storage
    url = getattr(getattr(storage, "_backend", storage), "url", "")
    in_memory = url.startswith("sqlite") and (":memory:" in url or url.rstrip("/").endswith(":"))
    return not in_memory


def other_studies(study: optuna.Study) -> dict[str, dict[str, Any]]:
    """Return the user attributes of the other studies in a study's storage."""
    found = sorted(study._storage.get_all_studies(), key=lambda one: one._study_id)
    return {one.study_name: one.user_attrs for one in found if one._study_id != study._study_id}


def is_journal(study: optuna.Study) -> bool:
    """Return whether a study is stored in a journal."""
    return isinstance(study._storage, JournalStorage)


def file_of(study: optuna.Study) -> Path | None:
    """Return the file that a study is stored in."""
    storage: Any = study._storage
    backend = getattr(storage, "_backend", None)
    if isinstance(backend, JournalFileBackend):
        return Path(backend._file_path)
    if isinstance(backend, RDBStorage) and backend.engine.dialect.name == "sqlite":
        return Path(backend.engine.url.database or "")
    return None


def last_known(study: optuna.Study) -> tuple[list[FrozenTrial], dict[str, Any]]:
    """Return what this process has read of a study, without its storage."""
    storage: Any = study._storage
    replayed = getattr(storage, "_replay_result", None)
    if replayed is not None:
        trials = replayed.get_all_trials(study._study_id, None)
        attributes = dict(replayed.get_study(study._study_id).user_attrs)
    else:
        known: Any = getattr(storage, "_studies", {}).get(study._study_id)
        trials = [] if known is None else [known.trials[key] for key in sorted(known.trials)]
        attributes = {}
    return [trial for trial in trials if trial.state.is_finished()], attributes


def widen_choices(study: optuna.Study, wider: Mapping[str, CategoricalDistribution]) -> None:
    """Let a study accept further choices, which Optuna would refuse.

    A database compares a new trial with an earlier one of the study, and so do the storages that
    hold studies in memory. A journal accepts a trial that has its parameters from the beginning.
    """
    storage: Any = study._storage
    known: Any = getattr(storage, "_studies", {}).get(study._study_id)
    if hasattr(known, "param_distribution"):
        known.param_distribution.update(wider)
    if isinstance(getattr(storage, "_backend", None), RDBStorage):
        _rewrite_choices(storage._backend, study._study_id, wider)


def _rewrite_choices(
    storage: Any, study_id: int, wider: Mapping[str, CategoricalDistribution]
) -> None:
    """Write longer lists of choices to the trials of a database, in one transaction."""
    # imported here: sqlalchemy takes a tenth of the time that `import relflat_sk` takes
    from optuna.storages._rdb.models import TrialModel, TrialParamModel  # noqa: PLC0415

    with storage.scoped_session() as session, session.begin():
        for name, distribution in wider.items():
            trials = session.query(TrialModel.trial_id).filter(TrialModel.study_id == study_id)
            session.query(TrialParamModel).filter(
                TrialParamModel.param_name == name,
                TrialParamModel.trial_id.in_(trials.subquery().select()),
            ).update(
                {"distribution_json": distribution_to_json(distribution)},
                synchronize_session=False,
            )

"""Adapter to the private attributes of Optuna's storages: read what is new in a study."""

from collections.abc import Callable, Sequence
from itertools import count, takewhile
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

__all__ = ["read_trials", "trials_between"]


def read_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Read all trials of a study, without copies.

    From a database, `optuna.Study.get_trials` would read anew all trials that run, which are many
    if many processes share it. Here their states are read, and those that have changed. Other
    attributes of running trials are as this process read them first.

    Optuna parses the choices of each trial from a text. In a study of as many seeds as trials,
    these lists would take more memory than all else. Here trials with equal choices share them.
    """
    if isinstance(getattr(study._storage, "_backend", None), RDBStorage):
        trials = _read_changed(study._storage, study._study_id)
    else:
        trials = study.get_trials(deepcopy=False)
    shared: dict[str, BaseDistribution] = {}
    for trial in trials:
        for name, own in trial.distributions.items():
            earlier = shared.setdefault(name, own)
            if own is not earlier:
                shared[name] = trial.distributions[name] = earlier if own == earlier else own
    return trials


def _read_changed(storage: Any, study_id: int) -> list[FrozenTrial]:
    """Read the trials of a database that are new, or in another state, and return all."""
    storage.get_study_directions(study_id)  # Optuna begins to hold trials of this study
    known, backend = storage._studies[study_id], storage._backend
    with storage._lock:
        before = _without_gaps(known.trials)
    newest = before[-1]._trial_id if before else -1
    running = {t._trial_id: t.state for t in before if not t.state.is_finished()}
    unfinished = (TrialState.RUNNING, TrialState.WAITING)
    session = backend.scoped_session()  # of this thread: both reads are in one transaction
    try:
        states = _read_states(
            session, study_id, lambda trial: trial.state.in_(unfinished) | (trial.trial_id > newest)
        )
        changed = {one for one, state in running.items() if states.get(one) != state}
        added = max(states, default=newest) > newest
        read = backend._get_trials(study_id, None, changed, newest) if changed or added else []
    finally:
        session.close()
    with storage._lock:
        storage._add_trials_to_cache(study_id, read)
        trials = _without_gaps(known.trials)
        # Optuna's own reads are of the first, and of all trials after the second
        known.unfinished_trial_ids = {
            trial._trial_id for trial in known.trials.values() if not trial.state.is_finished()
        }
        known.last_finished_trial_id = trials[-1]._trial_id if trials else -1
    return trials


def _without_gaps(trials: dict[int, FrozenTrial]) -> list[FrozenTrial]:
    """List trials by number, up to the first that is not held.

    Trials that this process adds are held before those that others added meanwhile.
    """
    return [trials[number] for number in takewhile(trials.__contains__, count())]


def _read_states(session: Any, study_id: int, which: Callable[[Any], Any]) -> dict[int, TrialState]:
    """Read the states of some trials by id, in one statement."""
    # imported here: sqlalchemy takes a tenth of the time that `import relflat_sk` takes
    from optuna.storages._rdb.models import TrialModel  # noqa: PLC0415

    states = session.query(TrialModel.trial_id, TrialModel.state)
    return dict(states.filter(TrialModel.study_id == study_id, which(TrialModel)).all())


def trials_between(
    study: optuna.Study, known: Sequence[FrozenTrial], trial_id: int
) -> list[FrozenTrial]:
    """Read the trials that were added to a study after some and before another one.

    `optuna.Study.get_trials` would read from a database all trials that run, too, which are many
    if many processes share it.
    """
    storage: Any = study._storage
    backend = getattr(storage, "_backend", None)
    if isinstance(backend, RDBStorage):
        newest, study_id = known[-1]._trial_id if known else -1, study._study_id
        session = backend.scoped_session()
        try:
            states = _read_states(
                session, study_id, lambda trial: trial.trial_id.between(newest + 1, trial_id - 1)
            )
            added = backend._get_trials(study_id, None, set(), newest) if states else []
        finally:
            session.close()
    else:
        added = study.get_trials(deepcopy=False)[len(known) :]
    # ids are in the order of numbers
    return [trial for trial in added if trial._trial_id < trial_id]

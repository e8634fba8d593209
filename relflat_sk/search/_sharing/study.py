"""Open a study and its storage, check that a search may resume it, copy it into memory."""

import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState

from relflat_sk._minima_table import remeasured_key
from relflat_sk.search._trial import MinimaObjective

__all__ = ["check_data", "check_resumable", "in_memory", "log_level", "open_storage"]

PATIENCE = (0.1, 0.3, 1.0)  # seconds between attempts
_SQLITE_TIMEOUT = 60  # seconds to wait for a lock; SQLite's own 5 are few for a slow disk


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage that several processes may open for the first time at once.

    If two processes find a database empty, both create its tables, and one of them fails. A
    moment later the tables exist, and opening the database works.

    Parameters
    ----------
    storage : str, optuna storage or None
        The URL of a database, or a storage, which is returned; in memory if None.

    Returns
    -------
    optuna.storages.BaseStorage
        The open storage.

    Examples
    --------
    >>> open_storage("sqlite:///:memory:").get_all_studies()
    []
    """
    # imported here: a tenth of the time that `import relflat_sk` would take
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    for seconds in PATIENCE:
        try:
            return _open(storage)
        except SQLAlchemyError:
            time.sleep(seconds)
    return _open(storage)


def _open(storage: Any) -> BaseStorage:
    if isinstance(storage, str) and storage.startswith("sqlite"):
        arguments = {"connect_args": {"timeout": _SQLITE_TIMEOUT}}
        storage = RDBStorage(storage, engine_kwargs=arguments)
    return optuna.storages.get_storage(storage)


def check_resumable(study: optuna.Study, objective: MinimaObjective, n_objectives: int = 1) -> None:
    """Refuse to resume a study whose minima cannot be compared with those of this search.

    Parameters
    ----------
    study : optuna.Study
        The study, new or with the trials of earlier sessions.
    objective : MinimaObjective
        Space, measures and data of this search.
    n_objectives : int, default=1
        Number of objectives of this search.

    Raises
    ------
    ValueError
        If the study has other directions, another space, other data, or a trial that lacks
        one of the measures.
    """
    name = study.study_name
    if study.directions != [StudyDirection.MINIMIZE] * n_objectives:
        raise ValueError(
            f"study {name!r} was not made by this search: its directions are "
            f"{[direction.name.lower() for direction in study.directions]}, this search needs "
            f"{['minimize'] * n_objectives}. Give this search a study_name of its own."
        )
    objective.space.check_study(study)
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        found = trial.user_attrs | study.user_attrs.get(remeasured_key(trial), {})
        lacking = [measure for measure in objective.measures if measure not in found]
        if lacking:
            raise ValueError(
                f"trial {trial.number} of study {name!r} has no {lacking}. Give this search a "
                "study_name of its own. If weights were saved (artifact_store), you can instead "
                f"call remeasure({lacking}) on a search with the measures of that study."
            )
    check_data(study, objective)


def check_data(study: optuna.Study, objective: MinimaObjective) -> None:
    """Refuse data other than those that a study was made with, and note them in a new study.

    Parameters
    ----------
    study : optuna.Study
        The study.
    objective : MinimaObjective
        Holds the data.

    Raises
    ------
    ValueError
        If the data differ in shape or content.
    """
    name = study.study_name
    digest = [_digest(objective.X), _digest(objective.y)]
    if study.user_attrs.get("data", digest) != digest:
        raise ValueError(
            f"study {name!r} was made with other data; give this search a study_name of its own. "
            "In cross-validation leave study_name out: every fold is a search of its own."
        )
    study.set_user_attr("data", digest)


def _digest(data: Any) -> str | None:
    """Return a short text that changes with the data; None if the data are not an array."""
    array = np.asarray(data) if hasattr(data, "__array__") or isinstance(data, list) else None
    if array is None or not array.ndim:
        return None
    if array.dtype == object:
        array = array.astype(str)
    return f"{array.shape} {zlib.crc32(np.ascontiguousarray(array).tobytes())}"


def in_memory(study: optuna.Study) -> optuna.Study:
    """Copy a study from its storage into memory.

    Parameters
    ----------
    study : optuna.Study
        The study to copy.

    Returns
    -------
    optuna.Study
        A study with the same trials, attributes, sampler and pruner.
    """
    copied = optuna.create_study(
        directions=study.directions,
        study_name=study.study_name,
        sampler=study.sampler,
        pruner=study.pruner,
    )
    copied.add_trials(study.get_trials())
    for name, value in study.user_attrs.items():
        copied.set_user_attr(name, value)
    return copied


@contextmanager
def log_level(quiet: bool) -> Iterator[None]:
    """Silence Optuna's log for a while.

    Parameters
    ----------
    quiet : bool
        Whether to show errors only. If False, the log level stays as it is.

    Yields
    ------
    None
        On exit, the log level is what it was on entry.
    """
    before = optuna.logging.get_verbosity()
    try:
        if quiet:
            optuna.logging.set_verbosity(optuna.logging.ERROR)
        yield
    finally:
        optuna.logging.set_verbosity(before)

"""Open a study and its storage, check that a search may resume it, copy it into memory."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._checks import check_number
from relflat_sk._warnings import warn
from relflat_sk.minima import MADE_WITH, remeasured_key
from relflat_sk.search._claims import give_up_abandoned
from relflat_sk.search._failures import explain, has_storage_failed
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._optuna_database import holding_own_trials
from relflat_sk.search._optuna_internals import (
    file_of,
    is_journal,
    last_known,
    other_studies,
    widen_choices,
)
from relflat_sk.search._optuna_journal import protect_journal
from relflat_sk.search._optuna_views import StoppableStudy
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._space import check_space, new_choices
from relflat_sk.search._weights import check_saved

# Each attempt that fails has lost one step of making the tables to another process, and there are
# fewer steps than attempts.
ATTEMPTS = 30
LONGEST_WAIT = 0.5  # seconds between two attempts
LOCK_TIMEOUT = 60  # seconds to wait for a lock: SQLite's own 5 are few, PostgreSQL waits forever
# words of databases: "table studies already exists", "UNIQUE constraint failed", "duplicate key
# value violates unique constraint", "Duplicate entry"
_LOST_A_RACE = ("already exists", "unique constraint", "duplicate")
# how names of files end
_OF_DATABASES = {".db", ".sqlite", ".sqlite3"}
_OF_JOURNALS = {".log", ".journal"}
_UNNAMED = "no-name-"  # how Optuna's names begin for studies that were given none
# the log levels that quiet searches of this process have found
_LEVELS: list[int] = []
_LEVEL_LOCK = threading.Lock()
# drivers of PostgreSQL that take its command-line options
_POSTGRESQL = {"postgresql", "postgresql+psycopg2", "postgresql+psycopg"}


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage that several processes may open for the first time at once.

    If two processes find a database empty, both create its tables, and one of them fails at the
    first table that the other has made. It tries again, and goes on from there.
    """
    # imported here: a tenth of the time that `import relflat_sk` would take
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    deadline = time.monotonic() + LOCK_TIMEOUT
    for _ in range(ATTEMPTS - 1):
        try:
            return _open(storage)
        except DBAPIError as error:
            text = str(error).lower()
            locked = "lock" in text and time.monotonic() < deadline
            if not (locked or any(word in text for word in _LOST_A_RACE)):
                raise
            # processes that failed together do not try again together; the user's stream of
            # random numbers is left alone
            time.sleep(SystemRandom().uniform(0.0, LONGEST_WAIT))
    return _open(storage)


def _open(storage: Any) -> BaseStorage:
    if storage is not None and not isinstance(storage, str | Path | BaseStorage):
        raise TypeError(
            "storage must be the URL of a database, a file such as 'minima.db', an optuna storage "
            f"or None, got {storage!r}."
        )
    if is_file(storage):
        file = str(storage)
        folder = Path(file).expanduser().parent
        if not folder.is_dir():
            raise ValueError(
                f"there is no folder {str(folder)!r} for the storage {file!r}: make it first, or "
                "give a file in another folder."
            )
        is_journal_file = Path(file).suffix in _OF_JOURNALS
        storage = (
            JournalStorage(JournalFileBackend(file)) if is_journal_file else f"sqlite:///{file}"
        )
    if isinstance(storage, str):
        storage = RDBStorage(storage, engine_kwargs=_engine_arguments(storage))
    opened = optuna.storages.get_storage(storage)
    protect_journal(opened)
    return holding_own_trials(opened)


def is_file(storage: Any) -> bool:
    """Return whether a storage is given as a file."""
    if isinstance(storage, str):
        return "://" not in storage and Path(storage).suffix in _OF_DATABASES | _OF_JOURNALS
    return isinstance(storage, Path)


def _engine_arguments(url: str) -> dict[str, Any]:
    """Return how to connect to a database: wait for locks, and mend lost connections."""
    kind = url.partition(":")[0]
    if kind == "sqlite":
        return {"connect_args": {"timeout": LOCK_TIMEOUT}}
    found: dict[str, Any] = {"pool_pre_ping": True}  # a server may restart while a net trains
    if kind in _POSTGRESQL and "options=" not in url:
        found["connect_args"] = {"options": f"-c lock_timeout={LOCK_TIMEOUT}s"}
    return found


def check_resumable(
    study: optuna.Study,
    objective: MinimaObjective,
    n_objectives: int = 1,
    *,
    own_sampler: bool = False,
) -> None:
    """Refuse to resume a study whose minima cannot be compared with those of this search."""
    name = study.study_name
    if study.directions != [StudyDirection.MINIMIZE] * n_objectives:
        raise ValueError(
            f"study {name!r} was not made by this search: its directions are "
            f"{[direction.name.lower() for direction in study.directions]}, this search needs "
            f"{['minimize'] * n_objectives}. Give this search a study_name of its own."
        )
    give_up_abandoned(study)
    check_space(objective.space, study)
    check_made_with(study, objective)
    wider = new_choices(objective.space, study)
    drawn = own_sampler or objective.space.grid() is None
    if wider and drawn and is_journal(study):
        raise ValueError(
            f"study {name!r} has fewer choices for {sorted(wider)} than this space, and is in a "
            "journal, to which choices can be added only if the space has nothing but choices and "
            "no sampler is given. Give this search a study_name of its own."
        )
    widen_choices(study, wider)
    attributes = study.user_attrs
    needed = {one for one in objective.names[:n_objectives] if one in objective.measures}
    finished = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    check_saved(objective.artifact_store, finished)
    for trial in finished:
        found = trial.user_attrs | attributes.get(remeasured_key(trial), {})
        lacking = sorted(needed - found.keys())
        if lacking:
            raise ValueError(
                f"trial {trial.number} of study {name!r} has no {lacking}. Give this search a "
                "study_name of its own. If weights were saved (artifact_store), you can instead "
                f"call remeasure({lacking}) on a search with the measures of that study."
            )
    if study.study_name.startswith(_UNNAMED):
        _warn_of_same(study)


def _warn_of_same(study: optuna.Study) -> None:
    """Warn if a new study trains again what another one in its storage holds already."""
    if study.get_trials(deepcopy=False):
        return
    made = study.user_attrs[MADE_WITH]
    others = other_studies(study).items()
    same = [name for name, attributes in others if attributes.get(MADE_WITH) == made]
    if same:
        warn(
            f"the storage holds study {same[-1]!r} of the same estimator, data and settings. "
            "Without a study_name, this search does not resume it, but trains all candidates in a "
            f"new study, {study.study_name!r}. To resume it, pass study_name={same[-1]!r}."
        )


def in_memory(study: optuna.Study) -> optuna.Study:
    """Copy a study from its storage into memory."""
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
    """Silence Optuna's log for a while."""
    if not quiet:
        yield
        return
    with _LEVEL_LOCK:
        _LEVELS.append(optuna.logging.get_verbosity())
        optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        with _LEVEL_LOCK:
            before = _LEVELS.pop()
            if not _LEVELS:
                optuna.logging.set_verbosity(before)


# Explain failures of a storage, and hold what was finished before.


class StorageGuard:
    """A context in which a search uses its storage."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.study: optuna.Study | None = None
        self._attributes: dict[str, Any] = {}

    def remember_attributes(self) -> None:
        """Read the attributes of the study, such as how its minima are made, before training."""
        if self.study is not None:
            self._attributes = self.study.user_attrs

    def __enter__(self) -> "StorageGuard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not has_storage_failed(error):
            return
        if self.study is None:
            storage = self.search.storage
            raise ValueError(
                f"storage={without_password(storage, unread=str(storage))!r} cannot be used: "
                f"{explain(error)} Expected the URL of a database, a file whose name ends in .db, "
                ".sqlite or .log (a journal), a Path, or an optuna storage. Nothing was trained."
            ) from error
        self.search.study_ = _rescue(self.study, self._attributes)
        file = file_of(self.study)
        reason = explain(error)
        if file is not None and not file.exists():
            reason = f"{file} was deleted or moved. Put it back, or give another storage."
        raise RuntimeError(
            f"the storage of study {self.study.study_name!r} failed: {reason} Then call fit again "
            "with the same storage and study_name: candidates that the storage holds are not "
            "trained again. Those that this process knows are in `study_` of the search, in "
            "memory, for `rank_minima` or `optuna.copy_study`."
        ) from error


def without_password(storage: Any, *, unread: str) -> str:
    """Return the URL of a storage with its password hidden, or the storage's class."""
    if is_file(storage):
        return str(storage)
    if not isinstance(storage, str):
        return type(storage).__name__
    # imported here: a tenth of the time that `import relflat_sk` would take
    from sqlalchemy import make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return unread


def _rescue(study: optuna.Study, known: dict[str, Any]) -> optuna.Study:
    """Copy a study into memory, or what this process has read of it."""
    try:
        return in_memory(study)
    except Exception:  # whatever a broken storage raises
        trials, attributes = last_known(study)
    copied = optuna.create_study(directions=study.directions, study_name=study.study_name)
    copied.add_trials(trials)
    for name, value in (known | attributes).items():
        copied.set_user_attr(name, value)
    return copied


# End a search early: after a time, or when one of the user's callbacks asks for it.

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

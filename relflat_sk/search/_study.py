"""Open a study and its storage, check that a search may resume it, copy it into memory."""

import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import SystemRandom
from typing import Any

import optuna
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._warnings import warn
from relflat_sk.minima._table import MADE_WITH, remeasured_key
from relflat_sk.search._claims import give_up_abandoned
from relflat_sk.search._failures import StorageFailedError, explain, has_storage_failed
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._provenance import check_made_with
from relflat_sk.search._space import check_space, new_choices
from relflat_sk.search._weights import check_saved

LOCK_TIMEOUT = 60  # seconds to wait for a lock: SQLite's own 5 are few, PostgreSQL waits forever
LONGEST_WAIT = 0.5  # seconds between two attempts to make the tables of a database
# words of databases in which another process has just made a table, or holds a lock: "table studies
# already exists", "UNIQUE constraint failed", "duplicate key value violates unique constraint",
# "Duplicate entry", "database is locked"
_LOST_A_RACE = ("already exists", "unique constraint", "duplicate", "lock")
# how names of files end
_OF_DATABASES = {".db", ".sqlite", ".sqlite3"}
_OF_JOURNALS = {".log", ".journal"}
_STOPPED = "stopped_sweeps"  # user attribute of a study: the sweeps that a callback has ended
_UNNAMED = "no-name-"  # how Optuna's names begin for studies that were given none
# the log levels that quiet searches of this process have found
_LEVELS: list[int] = []
_LEVEL_LOCK = threading.Lock()
# drivers of PostgreSQL that take its command-line options
_POSTGRESQL = {"postgresql", "postgresql+psycopg2", "postgresql+psycopg"}


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage, which several processes may open for the first time at once."""
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    if not isinstance(storage, str | Path):
        raise TypeError(
            "storage must be the URL of a database, a file such as 'minima.db', an optuna storage "
            f"or None, got {storage!r}."
        )
    file = file_of(storage)
    if file is not None:
        _check_file(file)
    if file is None or not is_file(storage):
        return _open_database(str(storage))
    if file.suffix in _OF_JOURNALS:
        return JournalStorage(JournalFileBackend(str(file), WholeLinesLock(str(file))))
    return _open_database(f"sqlite:///{file}")


def _check_file(file: Path) -> None:
    """Refuse a file that this process cannot make, or not write to."""
    folder = file.parent
    if not folder.is_dir():
        raise ValueError(
            f"there is no folder {str(folder)!r} for the storage {str(file)!r}: make it first, or "
            "give a file in another folder."
        )
    if file.is_dir():
        raise ValueError(
            f"the storage {str(file)!r} is a folder: give a file, such as "
            f"{str(file / 'minima.log')!r}."
        )
    # databases and journals make files beside theirs, to lock it
    for place, kind in ((folder, "folder"), (file, "file")):
        if place.exists() and not os.access(place, os.W_OK):
            raise ValueError(
                f"this process may not write to the {kind} {str(place)!r} of the storage "
                f"{str(file)!r}, because it is read-only or belongs to another user. Give a file "
                "in another folder, or change the permissions."
            )


def _open_database(url: str) -> RDBStorage:
    """Open a database, again while other processes make its tables.

    If two processes find a database empty, both create its tables, and one of them fails at the
    first table that the other has made. It tries again, and goes on from there.
    """
    # imported here: a tenth of the time that `import relflat_sk` would take
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return RDBStorage(url, engine_kwargs=_engine_arguments(url))
        except DBAPIError as error:
            lost_a_race = any(word in str(error).lower() for word in _LOST_A_RACE)
            if not lost_a_race or time.monotonic() > deadline:
                raise
            # processes that failed together do not try again together; the user's stream of
            # random numbers is left alone
            time.sleep(SystemRandom().uniform(0.0, LONGEST_WAIT))


def file_of(storage: Any) -> Path | None:
    """Return the file that a search's argument `storage` names."""
    if is_file(storage):
        return Path(storage).expanduser()
    name = storage.removeprefix("sqlite:///") if isinstance(storage, str) else ""
    # SQLite's own URLs, `file:...?uri=true`, also name databases in memory
    if name in ("", storage, ":memory:") or name.startswith("file:"):
        return None
    return Path(name.partition("?")[0])


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


class WholeLinesLock(JournalFileSymlinkLock):
    """The lock of a journal file; who acquires it finds whole lines.

    Optuna writes to the end of the file, whatever is there. If the disk is full or a process is
    killed, half a line stays behind, and with the next line appended to it nobody could read the
    file any more. If the file was deleted, Optuna would create one that begins in the middle.
    """

    def __init__(self, path: str, grace_period: int | None = 30) -> None:
        super().__init__(path, grace_period)
        self.path = path

    def acquire(self) -> bool:
        """Wait for the lock, and remove half a line at the end of the file."""
        acquired = super().acquire()
        try:
            with open(self.path, "r+b") as file:
                file.truncate(_end_of_lines(file))
        except BaseException:
            self.release()
            raise
        return acquired


def _end_of_lines(file: Any) -> int:
    """Return where the last whole line of a file ends."""
    if not file.seek(0, os.SEEK_END):
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n") + 1


class SearchStudy(optuna.Study):
    """A second object for a study, whose `stop` says that a search is to end.

    Callbacks and samplers call it outside of `Study.optimize`, where Optuna's own raises. If
    several processes take part in a sweep, its name in the study tells all of them.
    """

    def __init__(self, study: optuna.Study, sweep: str = "") -> None:
        self.__setstate__(study.__getstate__())  # as a copy by pickle, but for the storage
        self.sweep = sweep
        self.stopped = False

    def stop(self) -> None:
        """End the search after the candidates that are in training."""
        if self.sweep and not self.is_stopped():
            self.set_user_attr(_STOPPED, [*self.user_attrs.get(_STOPPED, []), self.sweep])
        self.stopped = True

    def is_stopped(self) -> bool:
        """Return whether the search is to end."""
        return self.stopped or self.sweep in self.user_attrs.get(_STOPPED, [])


def check_resumable(
    study: optuna.Study,
    storage: BaseStorage,
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
    if wider and (drawn or not isinstance(storage, JournalStorage)):
        raise ValueError(
            f"study {name!r} has fewer choices for {sorted(wider)} than this space. Optuna takes "
            "further choices in a journal only, if the space has nothing but choices and no "
            "sampler is given. Give this search a study_name of its own. To keep the minima of "
            f"{name!r}, copy its trials into a study with all choices first: docs/searching.md "
            "shows how."
        )
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
        _warn_of_same(study, storage)


def _warn_of_same(study: optuna.Study, storage: BaseStorage) -> None:
    """Warn if a new study trains again what another one in its storage holds already."""
    if study.get_trials(deepcopy=False):
        return
    made = study.user_attrs[MADE_WITH]
    others = optuna.get_all_study_summaries(storage, include_best_trial=False)
    same = [
        (other.datetime_start, other.study_name)
        for other in others
        if other.study_name != study.study_name
        and other.user_attrs.get(MADE_WITH) == made
        and other.datetime_start is not None
    ]
    if same:
        _, newest = max(same)
        warn(
            f"the storage holds study {newest!r} of the same estimator, data and settings. "
            "Without a study_name, this search does not resume it, but trains all candidates in a "
            f"new study, {study.study_name!r}. To resume it, pass study_name={newest!r}."
        )


def in_memory(
    study: optuna.Study,
    trials: Iterable[FrozenTrial] | None = None,
    attributes: dict[str, Any] | None = None,
) -> optuna.Study:
    """Copy a study from its storage into memory, or what is known of it without the storage."""
    copied = optuna.create_study(
        directions=study.directions,
        study_name=study.study_name,
        sampler=study.sampler,
        pruner=study.pruner,
    )
    copied.add_trials(study.get_trials() if trials is None else trials)
    for name, value in (study.user_attrs if attributes is None else attributes).items():
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


class StorageGuard(AbstractContextManager["StorageGuard"]):
    """A context in which a search uses its storage: explains failures, and holds what it knows."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.study: optuna.Study | None = None
        self.known: dict[int, FrozenTrial] = {}  # finished trials, by number
        self.attributes: dict[str, Any] = {}
        self.of_user: Exception | None = None

    def let_pass(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls code of the user, whose errors are not the storage's."""

        def call(*args: Any) -> None:
            try:
                function(*args)
            except StorageFailedError:
                raise
            except Exception as error:
                self.of_user = error
                raise

        return call

    def remember(self, study: optuna.Study) -> None:
        """Read what a study holds before training."""
        self.attributes = study.user_attrs
        self.known = {one.number: one for one in study.get_trials() if one.state.is_finished()}

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or error is self.of_user or not has_storage_failed(error):
            return
        storage, reason = self.search.storage, explain(error)
        if self.study is None:
            raise ValueError(
                f"storage={without_password(storage)!r} cannot be used: {reason} Expected the URL "
                "of a database, a file whose name ends in .db, .sqlite or .log (a journal), a "
                "Path, or an optuna storage. Nothing was trained."
            ) from error
        try:
            self.search.study_ = in_memory(self.study)
        except Exception:  # whatever a broken storage raises
            known = [self.known[number] for number in sorted(self.known)]
            self.search.study_ = in_memory(self.study, known, self.attributes)
        file = file_of(storage)
        if file is not None and not file.exists():
            reason = f"{file} was deleted or moved. Put it back, or give another storage."
        raise RuntimeError(
            f"the storage of study {self.study.study_name!r} failed: {reason} Then call fit again "
            "with the same storage and study_name: candidates that the storage holds are not "
            "trained again. Those that this process knows are in `study_` of the search, in "
            "memory, for `rank_minima` or `optuna.copy_study`."
        ) from error


def without_password(storage: Any) -> str:
    """Return the file or URL of a storage, with its password hidden, or the storage's class."""
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(storage))

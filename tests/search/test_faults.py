"""Faults of storages: nothing finished is lost, nothing is found twice, errors say what to do."""

import os
import resource
import sqlite3
import subprocess
import threading
from contextlib import ExitStack, contextmanager
from functools import cache, partial

import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression

from relflat_sk import rank_minima
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.search import _study as study_module
from relflat_sk.search._study import open_storage
from tests.search.examples import X, Y, logistic
from tests.search.storages import FILES

CHOICES = [round(0.3 + 0.1 * i, 1) for i in range(5)]
KINDS = [*FILES, "postgresql"]

FAULT = {"at": 0, "what": None}  # a function that is called after so many trainings
TRAINED = []


@pytest.fixture(autouse=True)
def _no_fault():
    """No fault is left from another test, or for one."""
    TRAINED.clear()
    FAULT.update(at=0, what=None)
    yield
    FAULT.update(at=0, what=None)


class Trains(LogisticRegression):
    """Counts its trainings, after one of which the fault happens."""

    def fit(self, X, y):
        fitted = super().fit(X, y)
        TRAINED.append(self.C)
        if len(TRAINED) == FAULT["at"]:
            FAULT["what"]()
        return fitted


def make_search(storage, study_name="sweep", estimator=None, **parameters):
    stored = {"storage": storage, "study_name": study_name, "refit": False}
    estimator = estimator or Trains(max_iter=1000)
    return logistic({"C": CHOICES}, estimator, **{**stored, **parameters})


def params_of_minima(study):
    return [trial.params["C"] for trial in study.trials if trial.state == TrialState.COMPLETE]


def assert_goes_on(storage, n_kept):
    """The next call trains what is left, once; the table is that of a search without a fault."""
    FAULT.update(at=0)
    TRAINED.clear()
    search = make_search(storage).fit(X, Y)
    assert len(TRAINED) == len(set(TRAINED)) == len(CHOICES) - n_kept
    assert_complete(search)


@cache
def table_without_faults():
    search = make_search(None, None, LogisticRegression(max_iter=1000)).fit(X, Y)
    return search.minima_[["param_C", "relative_flatness", "train_loss", "state"]]


def assert_complete(search):
    """Each candidate was found once, and the table is that of a search without a fault."""
    expected = table_without_faults()
    assert search.minima_[list(expected)].equals(expected)
    assert sorted(params_of_minima(search.study_)) == CHOICES


def assert_at_hand(search, n_finished):
    """What was finished before the fault can be ranked."""
    table = rank_minima(search.study_, depth_band=None)
    assert (table["state"] == "complete").sum() == n_finished


# -- places, and faults: each a context that yields a function to begin it and one to mend it -----


class Place:
    """A file in a folder, or a database of a server."""

    def __init__(self, request, kind, folder):
        self.kind, self.folder = kind, folder
        self.database = request.getfixturevalue("postgresql") if kind == "postgresql" else None
        self.file = folder / FILES[kind] if kind in FILES else None
        self.storage = self.file or self.database.url


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    return Place(request, request.param, tmp_path)


@contextmanager
def mounted(folder, options):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def full_disk(place):
    def fill():
        with open(place.folder / "fill", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(512))
            except OSError:
                return

    with mounted(place.folder, "size=1m"):
        yield fill, (place.folder / "fill").unlink


@contextmanager
def file_that_cannot_grow(place):
    """Writing past a size fails as on a full disk; needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin():
        # a database writes to its own journal first; of a line of the other journal, half fits
        size = 2000 if place.kind == "sqlite" else place.file.stat().st_size + 40
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    def end():
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    try:
        yield begin, end
    finally:
        end()


@contextmanager
def read_only(place):
    """Nobody may write to the database, or to the disk."""

    def set_to(value):
        if place.database is not None:
            with place.database.server.session() as execute:
                execute("SET default_transaction_read_only = off")
                name = place.database.name
                execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}")
            end_connections(place)
        elif os.getuid():
            place.folder.chmod(0o555 if value == "on" else 0o755)
        else:  # root may write to any folder, but not to a disk that is mounted for reading
            mode = "ro" if value == "on" else "rw"
            subprocess.run(["mount", "-o", f"remount,{mode}", str(place.folder)], check=True)

    with ExitStack() as stack:
        if place.file is not None and not os.getuid():
            stack.enter_context(mounted(place.folder, "size=4m"))
        try:
            yield lambda: set_to("on"), lambda: set_to("off")
        finally:
            set_to("off")


def end_connections(place):
    """End connections as an administrator, a firewall or a proxy does while a net trains."""
    with place.database.server.session() as execute:
        execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            f"WHERE datname = '{place.database.name}'"
        )


@contextmanager
def locked(place):
    """Another program holds a lock."""
    with ExitStack() as held:

        def begin():
            if place.database is None:
                other = sqlite3.connect(place.file, check_same_thread=False)
                other.execute("BEGIN EXCLUSIVE")
                held.callback(other.close)
            else:
                execute = held.enter_context(place.database.session())
                execute("BEGIN")
                execute("LOCK TABLE trials IN ACCESS EXCLUSIVE MODE")

        yield begin, held.close


@contextmanager
def deleted_file(place):
    kept = place.folder / "kept"

    def end():
        assert not place.file.exists()  # no file that begins in the middle
        kept.rename(place.file)

    yield lambda: place.file.rename(kept), end


@contextmanager
def server_away(place):
    server = place.database.server
    try:
        yield server.kill, server.start
    finally:
        server.start()


def interrupt():
    raise KeyboardInterrupt


# -- faults that end a search ------------------------------------------------------------------

FREE, WRITABLE = "Free space on its disk", "Give a place that this process may write to"
FAULTS = {  # storages, and what the error says
    full_disk: (list(FILES), FREE),
    file_that_cannot_grow: (list(FILES), FREE),
    read_only: (["postgresql"], WRITABLE),  # files that are open stay writable
    locked: (["sqlite", "postgresql"], "Another program holds the lock"),
    deleted_file: (list(FILES), r"was deleted or moved\. Put it back, or give another"),
    server_away: (["postgresql"], "Check that the server runs, and that"),
}


@pytest.mark.parametrize(
    ("fault", "kind"), [(fault, kind) for fault, row in FAULTS.items() for kind in row[0]]
)
def test_a_fault_in_the_middle(request, fault, kind, tmp_path, monkeypatch):
    """The error says what to do; what was finished is at hand; the next call goes on."""
    match = FAULTS[fault][1]
    monkeypatch.setattr(study_module, "LOCK_TIMEOUT", 1)  # instead of 60 s
    place = Place(request, kind, tmp_path)
    with fault(place) as (begin, end):
        FAULT.update(at=3, what=begin)
        search = make_search(place.storage)
        with pytest.raises(RuntimeError, match=rf"storage of study 'sweep' failed: .*{match}"):
            search.fit(X, Y)
        n_kept = len(params_of_minima(search.study_))
        assert 2 <= n_kept < len(CHOICES)  # lines of a journal may fit in its last block
        assert_at_hand(search, n_kept)
        if fault in (locked, server_away):
            TRAINED.clear()
            with pytest.raises((RuntimeError, ValueError), match=match):
                make_search(place.storage).fit(X, Y)
            assert not TRAINED
        end()
        assert_goes_on(place.storage, n_kept)


def test_a_place_that_is_read_only(place):
    match = f"cannot be used: .*{WRITABLE}"
    with read_only(place) as (begin, end):
        if place.file is not None:
            match = f"this process may not write to the folder '{place.folder}' of the storage"
            begin()
            with pytest.raises(ValueError, match=match):
                make_search(place.storage).fit(X, Y)
            with pytest.raises(ValueError, match=f"artifact_store=.*{WRITABLE}"):
                make_search(None, None, artifact_store=place.folder).fit(X, Y)
            end()
        storage = open_storage(place.storage)
        make_search(storage, n_trials=2).fit(X, Y)
        if place.kind == "sqlite":  # a disk with files that are open for writing stays writable
            storage.engine.dispose()
        TRAINED.clear()
        begin()
        with pytest.raises(ValueError, match=match):
            make_search(place.storage).fit(X, Y)
        assert not TRAINED
        end()
        assert_goes_on(place.storage, n_kept=2)


def test_what_was_finished_can_be_stored_again(place):
    """Though its file, tables or database are gone for good."""

    def delete():
        if place.file is not None:
            place.file.unlink()
        else:
            with place.database.session() as execute:
                execute("DROP TABLE trials CASCADE")

    FAULT.update(at=4, what=delete)
    search = make_search(place.storage)
    with pytest.raises(RuntimeError, match="deleted, moved or replaced: put it|was deleted or"):
        search.fit(X, Y)
    assert_at_hand(search, 3)
    new = place.folder / "new.log"
    study = optuna.create_study(storage=open_storage(new), study_name="sweep")
    study.add_trials(search.study_.trials)
    for name, value in search.study_.user_attrs.items():
        study.set_user_attr(name, value)
    assert_goes_on(new, n_kept=3)


def test_ctrl_c(place):
    FAULT.update(at=3, what=interrupt)
    with pytest.warns(FlatnessWarning, match="interrupted: the search ends with the 2 candidates"):
        search = make_search(place.storage).fit(X, Y)
    assert_at_hand(search, 2)
    assert all(trial.state.is_finished() for trial in search.study_.trials)
    assert_goes_on(place.storage, n_kept=2)


# -- faults that are not noticed ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_lock_is_waited_for(request, kind, tmp_path):
    """The lock is held while a candidate is recorded, and released after a moment."""
    place = Place(request, kind, tmp_path)
    with locked(place) as (begin, end):
        FAULT.update(at=3, what=lambda: (begin(), threading.Timer(1.0, end).start()))
        assert_complete(make_search(place.storage).fit(X, Y))


def test_a_server_that_restarts(request, tmp_path):
    place = Place(request, "postgresql", tmp_path)
    faults = [partial(end_connections, place)]
    with server_away(place) as (kill, start):
        faults.append(lambda: (kill(), start()))
        FAULT.update(at=2, what=lambda: (faults.pop()(), FAULT.update(at=4)))
        assert_complete(make_search(place.storage).fit(X, Y))
    assert not faults
    assert len(TRAINED) == len(CHOICES)


@pytest.mark.filterwarnings("ignore:The existing lock file has not been released:UserWarning")
def test_what_a_process_leaves_that_is_killed_while_it_writes_to_a_journal(tmp_path, monkeypatch):
    """Half a line, however long, is removed, and a lock is released after a while."""
    path = tmp_path / "minima.log"
    make_search(path, n_trials=2).fit(X, Y)
    for half in (b'{"op_code":4,"wor', b"x" * 200_000):
        before = path.read_bytes()
        path.write_bytes(before + half)
        make_search(path, n_trials=3).fit(X, Y)
        assert path.read_bytes().startswith(before + b"{")
    lock = study_module.WholeLinesLock
    monkeypatch.setattr(study_module, "WholeLinesLock", partial(lock, grace_period=3))
    (tmp_path / "minima.log.lock").symlink_to(path)
    assert_goes_on(path, n_kept=3)


# -- storages that a user opens -------------------------------------------------------------------


def test_storages_that_a_user_opened_are_used_as_they_are(request, tmp_path):
    impatient = {"connect_args": {"timeout": 0.05}}
    database = RDBStorage(f"sqlite:///{tmp_path / 'minima.db'}", engine_kwargs=impatient)
    make_search(database, n_trials=2).fit(X, Y)
    with locked(Place(request, "sqlite", tmp_path)) as (begin, _):
        begin()
        with pytest.raises(ValueError, match=r"cannot be used: .*locked\. Another program holds"):
            make_search(database).fit(X, Y)
    assert_goes_on(database, n_kept=2)
    journal = JournalStorage(JournalFileBackend(str(tmp_path / "minima.log")))
    TRAINED.clear()
    make_search(journal, n_trials=2).fit(X, Y)
    assert_goes_on(journal, n_kept=2)


def test_options_of_a_user_stay(postgresql):
    storage = open_storage(f"{postgresql.url}&options=-c lock_timeout=7s")
    with storage.engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW lock_timeout").scalar() == "7s"

"""A search whose storage fails in the middle, and the faults of storages of each kind."""

import os
import resource
import shutil
import sqlite3
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch, rank_minima
from tests.search.storages import FILES

X, Y = load_iris(return_X_y=True)
CHOICES = [round(0.3 + 0.1 * i, 1) for i in range(6)]

FAULT = {"at": 0, "what": None}  # a function that is called after so many trainings
TRAINED = []


class Trains(LogisticRegression):
    """Counts its trainings, after one of which the fault happens."""

    def fit(self, X, y):
        fitted = super().fit(X, y)
        TRAINED.append(self.C)
        if len(TRAINED) == FAULT["at"]:
            FAULT["what"]()
        return fitted


def make_search(storage, study_name="sweep", **parameters):
    return FlatMinimaSearch(
        Trains(max_iter=1000),
        {"C": CHOICES},
        storage=storage,
        study_name=study_name,
        **{"random_state": 0, "depth_band": None, "refit": False, **parameters},
    )


def n_complete(study):
    return sum(trial.state == TrialState.COMPLETE for trial in study.trials)


def assert_goes_on(storage, n_kept):
    """The next call trains what is left, once; the table is that of a search without a fault."""
    FAULT.update(at=0)
    TRAINED.clear()
    search = make_search(storage).fit(X, Y)
    assert len(TRAINED) == len(set(TRAINED)) == len(CHOICES) - n_kept
    assert_complete(search)


def assert_complete(search):
    """Each candidate was found once, and the table is that of a search without a fault."""
    expected = make_search(None, None).fit(X, Y).minima_
    columns = ["param_C", "relative_flatness", "train_loss", "state"]
    assert search.minima_[columns].equals(expected[columns])
    complete = [t for t in search.study_.trials if t.state == TrialState.COMPLETE]
    assert sorted(trial.params["C"] for trial in complete) == CHOICES


def assert_at_hand(search, n_finished):
    """What was finished before the fault can be ranked."""
    table = rank_minima(search.study_, depth_band=None)
    assert (table["state"] == "complete").sum() == n_finished


# -- places of storages --------------------------------------------------------------------------


class Place:
    """A file in a folder, or a database of a server."""

    def __init__(self, kind, folder, database=None):
        self.kind = kind
        self.folder = folder
        self.database = database
        self.file = folder / FILES[kind] if kind in FILES else None
        self.storage = self.file if database is None else database.url


@contextmanager
def mounted(folder, options):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def database_on_small_disk(server):
    """A database on a disk of its own, as a place with the folder where the disk is mounted."""
    folder = Path(tempfile.mkdtemp(prefix="tablespace"))
    owner = server.user or {"user": os.getuid(), "group": os.getgid()}
    try:
        with mounted(folder, f"size=16m,mode=0700,uid={owner['user']},gid={owner['group']}"):
            space = folder / "data"
            space.mkdir()
            os.chown(space, owner["user"], owner["group"])
            with server.session() as execute:
                execute(f"CREATE TABLESPACE small LOCATION '{space}'")
            try:
                with server.database("TABLESPACE small") as database:
                    yield Place("postgresql", folder, database)
            finally:
                with server.session() as execute:
                    execute("DROP TABLESPACE small")
    finally:
        shutil.rmtree(folder)


# -- faults: each is a context that yields a function to begin it and one to mend it --------------


def fill(folder):
    with open(folder / "fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return


@contextmanager
def full_disk(place):
    yield lambda: fill(place.folder), (place.folder / "fill").unlink


def write_much(study, trial):
    """Write more than the tables' pages have room for: a callback for searches on a full disk."""
    note = np.random.default_rng(0).bytes(30_000).hex()
    study.set_user_attr(f"note {trial.number}", note)


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
                execute(
                    f"ALTER DATABASE {place.database.name} "
                    f"SET default_transaction_read_only = {value}"
                )
            end_connections(place)
        elif os.getuid():
            place.folder.chmod(0o555 if value == "on" else 0o755)
        else:  # root may write to any folder, but not to a disk that is mounted for reading
            mode = "ro" if value == "on" else "rw"
            subprocess.run(["mount", "-o", f"remount,{mode}", str(place.folder)], check=True)

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
    held, release = threading.Event(), threading.Event()

    def lock():
        if place.database is None:
            other = sqlite3.connect(place.file)
            other.execute("BEGIN EXCLUSIVE")
            held.set()
            release.wait(60)
            other.rollback()
            other.close()
            return
        with place.database.session() as execute:
            execute("BEGIN")
            execute("LOCK TABLE trials IN ACCESS EXCLUSIVE MODE")
            held.set()
            release.wait(60)
            execute("ROLLBACK")

    thread = threading.Thread(target=lock)

    def begin():
        thread.start()
        held.wait(60)

    def end():
        release.set()
        if thread.ident is not None:
            thread.join()

    try:
        yield begin, end
    finally:
        end()


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

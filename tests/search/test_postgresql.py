"""Faults of a PostgreSQL server: nothing finished is lost or found twice, errors say what to do.

The tests on all storages, in `test_faults.py` and others, run on PostgreSQL, too.
"""

import os
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState

from relflat_sk.search import _study as study_module
from tests.search.faulty import (
    CHOICES,
    FAULT,
    TRAINED,
    X,
    Y,
    assert_at_hand,
    assert_complete,
    assert_goes_on,
    fill,
    make_search,
    mounted,
)

pytestmark = pytest.mark.usefixtures("no_fault")


def when_trained(n, fault):
    FAULT.update(at=n, what=fault)


# -- disk full, read-only ----------------------------------------------------------------------


@pytest.fixture
def small_disk(postgresql_server):
    """A database on a small disk, with its folder."""
    folder = Path(tempfile.mkdtemp(prefix="tablespace"))
    owner = postgresql_server.user or {"user": os.getuid(), "group": os.getgid()}
    try:
        with mounted(folder, f"size=16m,mode=0700,uid={owner['user']},gid={owner['group']}"):
            space = folder / "data"
            space.mkdir()
            os.chown(space, owner["user"], owner["group"])
            with postgresql_server.session() as execute:
                execute(f"CREATE TABLESPACE small LOCATION '{space}'")
            try:
                with postgresql_server.database("TABLESPACE small") as database:
                    yield database, folder
            finally:
                with postgresql_server.session() as execute:
                    execute("DROP TABLESPACE small")
    finally:
        shutil.rmtree(folder)


def test_a_full_disk(small_disk):
    database, folder = small_disk
    note = np.random.default_rng(0).bytes(30_000).hex()  # more than the tables' pages have room for

    def write(study, trial):
        study.set_user_attr(f"note {trial.number}", note)

    when_trained(3, lambda: fill(folder))
    search = make_search(database.url, callbacks=[write])
    with pytest.raises(RuntimeError, match=r"storage of study 'sweep' failed: .*Free space on its"):
        search.fit(X, Y)
    finished = [t for t in search.study_.trials if t.state == TrialState.COMPLETE]
    assert 2 <= len(finished) < len(CHOICES)
    (folder / "fill").unlink()
    assert_goes_on(database.url, n_kept=len(finished))


@contextmanager
def read_only(database):
    """Nobody may write to the database, nor those who are connected to it already."""
    set_read_only(database, "on")
    try:
        yield
    finally:
        set_read_only(database, "off")


def set_read_only(database, value):
    with database.server.session() as execute:
        execute("SET default_transaction_read_only = off")
        execute(f"ALTER DATABASE {database.name} SET default_transaction_read_only = {value}")
    end_connections(database)


def end_connections(database):
    with database.server.session() as execute:
        execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            f"WHERE datname = '{database.name}'"
        )


def test_a_database_that_becomes_read_only(postgresql):
    storage = postgresql.url
    make_search(storage, n_trials=1).fit(X, Y)
    TRAINED.clear()
    match = "cannot be used: .*read-only transaction. Give a place that this process may write to"
    with read_only(postgresql), pytest.raises(ValueError, match=match):
        make_search(storage).fit(X, Y)
    assert not TRAINED
    when_trained(3, lambda: set_read_only(postgresql, "on"))
    search = make_search(storage)
    with pytest.raises(RuntimeError, match=r"storage of study 'sweep' failed: .*Give a place that"):
        search.fit(X, Y)
    assert_at_hand(search, 3)
    set_read_only(postgresql, "off")
    assert_goes_on(storage, n_kept=3)


# -- locked ------------------------------------------------------------------------------------


def lock(database, held, release):
    with database.session() as execute:
        execute("BEGIN")
        execute("LOCK TABLE trials IN ACCESS EXCLUSIVE MODE")
        held.set()
        release.wait(60)
        execute("ROLLBACK")


@pytest.fixture
def locking(postgresql):
    """Functions that lock the database and release it."""
    held, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=lock, args=(postgresql, held, release))

    def begin():
        thread.start()
        held.wait(60)

    def end():
        release.set()
        thread.join()

    yield begin, end
    if thread.ident is not None:
        end()


def test_a_lock_is_waited_for(postgresql, locking):
    begin, end = locking

    def hold():
        begin()
        threading.Timer(1.0, end).start()

    when_trained(3, hold)
    assert_complete(make_search(postgresql.url).fit(X, Y))


def test_a_lock_that_stays_is_explained(postgresql, locking, monkeypatch):
    monkeypatch.setattr(study_module, "LOCK_TIMEOUT", 1)  # instead of 60 s
    begin, end = locking
    when_trained(3, begin)
    search = make_search(postgresql.url)
    with pytest.raises(RuntimeError, match=r"failed: .*lock timeout\. Another program holds the"):
        search.fit(X, Y)
    TRAINED.clear()
    with pytest.raises(RuntimeError, match=r"failed: .*lock timeout\. Another program holds the"):
        make_search(postgresql.url).fit(X, Y)
    assert not TRAINED
    end()
    assert_at_hand(search, 2)
    assert_goes_on(postgresql.url, n_kept=2)


# -- deleted -----------------------------------------------------------------------------------

DELETED = {
    "tables": (lambda database: "DROP TABLE trials CASCADE", 'relation "trials" does not exist'),
    "database": (lambda database: f"DROP DATABASE {database.name} WITH (FORCE)", "does not exist"),
}


@pytest.mark.parametrize("kind", DELETED)
def test_what_is_deleted_can_be_stored_again(postgresql, kind):
    statement, why = DELETED[kind]
    server = postgresql.server

    def delete():
        with server.session("postgres" if kind == "database" else postgresql.name) as execute:
            execute(statement(postgresql))

    when_trained(4, delete)
    search = make_search(postgresql.url)
    with pytest.raises(RuntimeError, match=rf"{why}.* deleted, moved or replaced: put it back, or"):
        search.fit(X, Y)
    assert_at_hand(search, 3)
    memory = search.study_._storage
    with server.database() as other:
        optuna.copy_study(from_study_name="sweep", from_storage=memory, to_storage=other.url)
        assert_goes_on(other.url, n_kept=3)


# -- killed ------------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_restarts_is_not_noticed(postgresql):
    def restart():
        postgresql.server.kill()
        postgresql.server.start()

    when_trained(3, restart)
    assert_complete(make_search(postgresql.url).fit(X, Y))
    assert len(TRAINED) == 2 * len(CHOICES)  # once each, and once each for the comparison


def test_a_server_that_stays_away(postgresql):
    when_trained(3, postgresql.server.kill)
    search = make_search(postgresql.url)
    try:
        with pytest.raises(
            RuntimeError, match=r"'sweep' failed: .*Check that the server runs, and"
        ):
            search.fit(X, Y)
        TRAINED.clear()
        with pytest.raises(ValueError, match=r"cannot be used: .*Check that the server runs, and"):
            make_search(postgresql.url).fit(X, Y)
        assert not TRAINED
    finally:
        postgresql.server.start()
    assert_at_hand(search, 2)
    assert_goes_on(postgresql.url, n_kept=2)


def test_connections_that_end_are_not_noticed(postgresql):
    """As an administrator, a firewall or a proxy ends them while a net trains for hours."""
    when_trained(3, lambda: end_connections(postgresql))
    assert_complete(make_search(postgresql.url).fit(X, Y))


# -- settings of a user ------------------------------------------------------------------------


def test_options_of_a_user_stay(postgresql):
    url = f"{postgresql.url}&options=-c lock_timeout=7s"
    storage = study_module.open_storage(url)
    with storage._backend.engine.connect() as connection:
        found = connection.exec_driver_sql("SHOW lock_timeout").scalar()
    assert found == "7s"

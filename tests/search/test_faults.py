"""Faults of storages: nothing finished is lost, nothing is found twice, errors say what to do.

Faults of a PostgreSQL server are in `test_postgresql.py`.
"""

import datetime
import os
import resource
import sqlite3
import subprocess
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch
from relflat_sk.minima import MADE_WITH
from relflat_sk.search import _study as study_module
from tests.processes import forkserver
from tests.search.faulty import (
    CHOICES,
    FAULT,
    TRAINED,
    X,
    Y,
    assert_at_hand,
    assert_goes_on,
    fill,
    make_search,
    mounted,
)
from tests.search.storages import FILES, journal, sqlite

pytestmark = pytest.mark.usefixtures("no_fault")

# -- disk full ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
def test_a_full_disk(tmp_path, kind):
    make, _ = FILES[kind]
    with mounted(tmp_path, "size=1m"):
        FAULT.update(at=3, what=lambda: fill(tmp_path))
        search = make_search(make(tmp_path))
        with pytest.raises(RuntimeError, match=r"storage of study 'sweep' failed: .*Free space on"):
            search.fit(X, Y)
        finished = [t for t in search.study_.trials if t.state == TrialState.COMPLETE]
        assert 2 <= len(finished) < len(CHOICES)  # lines of a journal may fit in its last block
        (tmp_path / "fill").unlink()
        assert_goes_on(make(tmp_path), n_kept=len(finished))


@contextmanager
def files_limited(size):
    """Writing past a size fails as on a full disk; needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size(), before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_cannot_grow(tmp_path, kind):
    make, name = FILES[kind]
    path = tmp_path / name
    # a database writes to its own journal first; of a line of the other journal, half fits
    with files_limited(lambda: 2000 if kind == "sqlite" else path.stat().st_size + 40) as limit:
        FAULT.update(at=3, what=limit)
        search = make_search(make(tmp_path))
        with pytest.raises(RuntimeError, match=r"storage of study 'sweep' failed: .*Free space on"):
            search.fit(X, Y)
    assert_at_hand(search, 2)
    assert_goes_on(make(tmp_path), n_kept=2)


def test_half_a_line_in_a_journal_is_removed(tmp_path):
    """A process that is killed while it writes leaves half a line behind."""
    search = make_search(journal(tmp_path), n_trials=2).fit(X, Y)
    path = tmp_path / "minima.log"
    before = path.read_bytes()
    path.write_bytes(before + b'{"op_code":4,"wor')
    TRAINED.clear()
    go_on = make_search(journal(tmp_path)).fit(X, Y)
    assert path.read_bytes().startswith(before + b"{")
    assert sorted(go_on.minima_["param_C"]) == CHOICES
    assert len(TRAINED) == len(CHOICES) - 2
    assert len(search.minima_) == 2


def test_a_long_line_without_an_end_is_removed(tmp_path):
    make_search(journal(tmp_path), n_trials=1).fit(X, Y)
    path = tmp_path / "minima.log"
    with path.open("ab") as file:
        file.write(b"x" * 200_000)
    make_search(journal(tmp_path)).fit(X, Y)
    assert b"xx" not in path.read_bytes()


# -- read-only ---------------------------------------------------------------------------------


@contextmanager
def read_only(folder):
    if os.getuid():
        folder.chmod(0o555)
        try:
            yield
        finally:
            folder.chmod(0o755)
        return
    # root may write to any folder, but not to a disk that is mounted for reading
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)


@contextmanager
def a_disk(folder):
    """A folder that can be made read-only."""
    if os.getuid():
        yield
        return
    with mounted(folder, "size=4m"):
        yield


def test_a_read_only_folder_is_refused_before_training(tmp_path):
    with a_disk(tmp_path), read_only(tmp_path):
        with pytest.raises(ValueError, match=r"storage='sqlite.*cannot be used: .*another storage"):
            make_search(sqlite(tmp_path)).fit(X, Y)
        with pytest.raises(ValueError, match=r"artifact_store=.*Give a place that this process"):
            make_search(None, None, artifact_store=tmp_path).fit(X, Y)
    assert not TRAINED


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_that_becomes_read_only(tmp_path, kind):
    make, _ = FILES[kind]
    with a_disk(tmp_path):
        first = make_search(make(tmp_path), n_trials=2).fit(X, Y)
        if kind == "sqlite":  # a disk with files that are open for writing stays writable
            first.study_._storage._backend.engine.dispose()
        storage = make(tmp_path)
        TRAINED.clear()
        match = "cannot be used: .* Give a place that this process may write to"
        with read_only(tmp_path), pytest.raises(ValueError, match=match):
            make_search(storage).fit(X, Y)
        assert not TRAINED
        assert_goes_on(make(tmp_path), n_kept=2)


# -- locked ------------------------------------------------------------------------------------


@contextmanager
def database_locked(path):
    other = sqlite3.connect(path)
    other.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        other.rollback()
        other.close()


def test_a_lock_is_waited_for(tmp_path):
    """The lock is held while a candidate is recorded, and released after a moment."""
    make_search(sqlite(tmp_path), n_trials=1).fit(X, Y)
    held, release = threading.Event(), threading.Event()

    def hold():
        with database_locked(tmp_path / "minima.db"):
            held.set()
            release.wait(30)

    thread = threading.Thread(target=hold)

    def lock():
        thread.start()
        held.wait(30)
        threading.Timer(1.0, release.set).start()

    FAULT.update(at=2, what=lock)
    search = make_search(sqlite(tmp_path)).fit(X, Y)
    thread.join()
    assert search.minima_["state"].tolist() == ["complete"] * len(CHOICES)


def test_a_lock_that_stays_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(study_module, "LOCK_TIMEOUT", 0.05)  # instead of 60 s
    other = sqlite3.connect(tmp_path / "minima.db", isolation_level=None)
    FAULT.update(at=3, what=lambda: other.execute("BEGIN EXCLUSIVE"))
    search = make_search(sqlite(tmp_path))
    with pytest.raises(RuntimeError, match=r"failed: .*locked\. Another program holds the lock"):
        search.fit(X, Y)
    TRAINED.clear()
    with pytest.raises(ValueError, match=r"cannot be used: .*locked\. Another program holds"):
        make_search(sqlite(tmp_path)).fit(X, Y)
    assert not TRAINED
    other.execute("ROLLBACK")
    other.close()
    assert_at_hand(search, 2)
    assert_goes_on(sqlite(tmp_path), n_kept=2)


def test_a_storage_with_a_short_timeout_of_its_own(tmp_path):
    arguments = {"connect_args": {"timeout": 0.05}}
    storage = RDBStorage(sqlite(tmp_path), engine_kwargs=arguments)
    make_search(storage, n_trials=2).fit(X, Y)
    with (
        database_locked(tmp_path / "minima.db"),
        pytest.raises(ValueError, match=r"cannot be used: .*locked\. Another program holds"),
    ):
        make_search(storage).fit(X, Y)
    assert_goes_on(storage, n_kept=2)


@pytest.mark.filterwarnings("ignore:The existing lock file has not been released:UserWarning")
def test_a_lock_that_a_killed_process_left_behind(tmp_path):
    make_search(journal(tmp_path), n_trials=2).fit(X, Y)
    (tmp_path / "minima.log.lock").symlink_to(tmp_path / "minima.log")
    assert_goes_on(journal(tmp_path), n_kept=2)


# -- deleted -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_deleted(tmp_path, kind):
    make, name = FILES[kind]
    path = tmp_path / name
    kept = tmp_path / "kept"
    FAULT.update(at=4, what=lambda: path.rename(kept))
    search = make_search(make(tmp_path))
    with pytest.raises(RuntimeError, match=rf"{name} was deleted or moved\. Put it back, or give"):
        search.fit(X, Y)
    assert not path.exists()  # no file that begins in the middle
    assert_at_hand(search, 3)
    # it is put back
    kept.rename(path)
    assert_goes_on(make(tmp_path), n_kept=3)


def test_what_was_finished_can_be_stored_again(tmp_path):
    path = tmp_path / "minima.db"
    FAULT.update(at=4, what=path.unlink)
    search = make_search(sqlite(tmp_path))
    with pytest.raises(RuntimeError, match="was deleted or moved"):
        search.fit(X, Y)
    memory = search.study_._storage
    optuna.copy_study(from_study_name="sweep", from_storage=memory, to_storage=sqlite(tmp_path))
    assert_goes_on(sqlite(tmp_path), n_kept=3)


# -- clock -------------------------------------------------------------------------------------


class GoesBack(datetime.datetime):
    """A clock that is set back by a day at each look."""

    looks = 0

    @classmethod
    def now(cls, tz=None):
        cls.looks += 1
        return datetime.datetime(2020, 1, 1, tzinfo=tz) - datetime.timedelta(days=cls.looks)


def test_a_clock_that_is_set_back(make_storage, monkeypatch):
    make_search(make_storage(), n_trials=2).fit(X, Y)
    for module in (
        optuna.storages._rdb.storage,
        optuna.storages._rdb.models,
        optuna.storages.journal._storage,
        optuna.trial._frozen,
        optuna.study.study,
    ):
        known = getattr(module, "datetime", None)
        if known is datetime.datetime:
            monkeypatch.setattr(module, "datetime", GoesBack)
        elif known is datetime:  # in Optuna 4
            monkeypatch.setattr(
                module, "datetime", SimpleNamespace(**{**vars(datetime), "datetime": GoesBack})
            )
    before = GoesBack.looks
    search = make_search(make_storage()).fit(X, Y)
    assert GoesBack.looks > before
    assert len(TRAINED) == len(CHOICES)
    complete = [t for t in search.study_.trials if t.state == TrialState.COMPLETE]
    assert sorted(trial.params["C"] for trial in complete) == CHOICES
    assert make_search(make_storage()).fit(X, Y).minima_.equals(search.minima_)
    assert len(TRAINED) == len(CHOICES)


# -- versions ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:study .* does not say how they were made")
@pytest.mark.parametrize("record", [None, {"later": {"part": "unknown"}}], ids=["older", "newer"])
def test_two_versions_on_one_study(make_storage, record):
    """An older version records nothing; a newer one may record more."""
    first = make_search(make_storage(), n_trials=2).fit(X, Y).study_
    first.set_user_attr(MADE_WITH, (first.user_attrs[MADE_WITH] | record) if record else None)
    search = make_search(make_storage()).fit(X, Y)
    assert len(TRAINED) == len(set(TRAINED)) == len(CHOICES)
    assert search.minima_["state"].tolist() == ["complete"] * len(CHOICES)


# -- many at once ------------------------------------------------------------------------------

N_PROCESSES = 16


def work(make_storage, barrier):
    barrier.wait(600)
    search = FlatMinimaSearch(
        LogisticRegression(max_iter=1000),
        {"C": np.linspace(0.1, 2.0, N_PROCESSES).tolist()},
        storage=make_storage(),
        study_name="sweep",
        refit=False,
        random_state=0,
        depth_band=None,
    )
    search.fit(X, Y)


@pytest.mark.slow
def test_many_processes_at_once(make_storage):
    """All begin at the same moment, with no study and no file before."""
    context = forkserver()
    barrier = context.Barrier(N_PROCESSES)
    workers = [
        context.Process(target=work, args=(make_storage, barrier)) for _ in range(N_PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * N_PROCESSES
    study = optuna.load_study(study_name="sweep", storage=make_storage())
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(complete) == len({trial.params["C"] for trial in complete}) == N_PROCESSES
    assert not [trial for trial in study.trials if "failed" in trial.user_attrs]

"""Faults of storages: nothing finished is lost, nothing is found twice, errors say what to do."""

import os
import threading
from contextlib import ExitStack
from functools import partial

import numpy as np
import optuna
import pytest
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.minima import MADE_WITH
from relflat_sk.search import _study as study_module
from relflat_sk.search._study import open_storage
from tests.search import faulty
from tests.search.faulty import (
    CHOICES,
    FAULT,
    TRAINED,
    Place,
    X,
    Y,
    assert_at_hand,
    assert_complete,
    assert_goes_on,
    make_search,
    n_complete,
)
from tests.search.storages import FILES
from tests.search.test_claims import run_at_once

pytestmark = pytest.mark.usefixtures("no_fault")

KINDS = [*FILES, "postgresql"]


@pytest.fixture(params=KINDS)
def place(request, tmp_path):
    return make_place(request, request.param, tmp_path)


def make_place(request, kind, folder):
    database = request.getfixturevalue("postgresql") if kind == "postgresql" else None
    return Place(kind, folder, database)


# -- faults that end a search ------------------------------------------------------------------

FREE, WRITABLE = "Free space on its disk", "Give a place that this process may write to"
FAULTS = {  # storages, what the error says; whether the disk is one of its own
    "full_disk": (KINDS, FREE, True),
    "file_that_cannot_grow": (list(FILES), FREE, False),
    "read_only": (["postgresql"], WRITABLE, False),  # files that are open stay writable
    "locked": (["sqlite", "postgresql"], "Another program holds the lock", False),
    "deleted_file": (list(FILES), r"was deleted or moved\. Put it back, or give another", False),
    "server_away": (["postgresql"], "Check that the server runs, and that", False),
}


@pytest.mark.parametrize(
    ("fault", "kind"), [(fault, kind) for fault, row in FAULTS.items() for kind in row[0]]
)
def test_a_fault_in_the_middle(request, fault, kind, tmp_path, monkeypatch):
    """The error says what to do; what was finished is at hand; the next call goes on."""
    _, match, own_disk = FAULTS[fault]
    monkeypatch.setattr(study_module, "LOCK_TIMEOUT", 1)  # instead of 60 s
    with ExitStack() as stack:
        if own_disk and kind == "postgresql":
            server = request.getfixturevalue("postgresql_server")
            place = stack.enter_context(faulty.database_on_small_disk(server))
        else:
            if own_disk:
                stack.enter_context(faulty.mounted(tmp_path, "size=1m"))
            place = make_place(request, kind, tmp_path)
        begin, end = stack.enter_context(getattr(faulty, fault)(place))
        FAULT.update(at=3, what=begin)
        writes = [faulty.write_much] if fault == "full_disk" and kind == "postgresql" else None
        search = make_search(place.storage, callbacks=writes)
        with pytest.raises(RuntimeError, match=rf"storage of study 'sweep' failed: .*{match}"):
            search.fit(X, Y)
        n_kept = n_complete(search.study_)
        assert 2 <= n_kept < len(CHOICES)  # lines of a journal may fit in its last block
        assert_at_hand(search, n_kept)
        if fault in ("locked", "server_away"):
            TRAINED.clear()
            with pytest.raises((RuntimeError, ValueError), match=match):
                make_search(place.storage).fit(X, Y)
            assert not TRAINED
        end()
        assert_goes_on(place.storage, n_kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_read_only(request, kind, tmp_path):
    with ExitStack() as stack:
        if kind in FILES and not os.getuid():
            stack.enter_context(faulty.mounted(tmp_path, "size=4m"))
        place = make_place(request, kind, tmp_path)
        begin, end = stack.enter_context(faulty.read_only(place))
        if kind in FILES:
            begin()
            match = f"storage=.*cannot be used: .*(another storage|{WRITABLE})"
            with pytest.raises(ValueError, match=match):
                make_search(place.storage).fit(X, Y)
            with pytest.raises(ValueError, match=f"artifact_store=.*{WRITABLE}"):
                make_search(None, None, artifact_store=tmp_path).fit(X, Y)
            end()
        storage = open_storage(place.storage)
        make_search(storage, n_trials=2).fit(X, Y)
        if kind == "sqlite":  # a disk with files that are open for writing stays writable
            storage.engine.dispose()
        TRAINED.clear()
        begin()
        with pytest.raises(ValueError, match=f"cannot be used: .*{WRITABLE}"):
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
    memory = optuna.create_study(study_name="sweep")
    memory.add_trials(search.study_.trials)
    new = place.folder / "new.log"
    study = optuna.create_study(storage=open_storage(new), study_name="sweep")
    study.add_trials(search.study_.trials)
    for name, value in search.study_.user_attrs.items():
        study.set_user_attr(name, value)
    assert_goes_on(new, n_kept=3)


def interrupt():
    raise KeyboardInterrupt


def test_ctrl_c(place):
    FAULT.update(at=3, what=interrupt)
    with pytest.warns(FlatnessWarning, match="interrupted: the search ends with the 2 candidates"):
        search = make_search(place.storage).fit(X, Y)
    assert_at_hand(search, 2)
    assert all(trial.state.is_finished() for trial in search.study_.trials)
    assert_goes_on(place.storage, n_kept=2)


# -- faults that are not noticed ---------------------------------------------------------------


def test_a_lock_is_waited_for(place):
    """The lock is held while a candidate is recorded, and released after a moment."""
    if place.kind == "journal":
        pytest.skip("a journal's lock is held for a line")
    with faulty.locked(place) as (begin, end):

        def hold():
            begin()
            threading.Timer(1.0, end).start()

        FAULT.update(at=3, what=hold)
        assert_complete(make_search(place.storage).fit(X, Y))


def test_a_server_that_restarts(request, tmp_path):
    place = make_place(request, "postgresql", tmp_path)
    faults = [partial(faulty.end_connections, place)]
    with faulty.server_away(place) as (kill, start):
        faults.append(lambda: (kill(), start()))
        FAULT.update(at=2, what=lambda: (faults.pop()(), FAULT.update(at=4)))
        assert_complete(make_search(place.storage).fit(X, Y))
    assert not faults
    assert len(TRAINED) == 2 * len(CHOICES)  # once each, and once each for the comparison


def test_half_a_line_in_a_journal_is_removed(tmp_path):
    """A process that is killed while it writes leaves half a line behind, however long."""
    path = tmp_path / "minima.log"
    make_search(path, n_trials=2).fit(X, Y)
    for half in (b'{"op_code":4,"wor', b"x" * 200_000):
        before = path.read_bytes()
        path.write_bytes(before + half)
        make_search(path, n_trials=3).fit(X, Y)
        assert path.read_bytes().startswith(before + b"{")
    assert_goes_on(path, n_kept=3)


@pytest.mark.filterwarnings("ignore:The existing lock file has not been released:UserWarning")
def test_a_lock_that_a_killed_process_left_behind(tmp_path, monkeypatch):
    path = tmp_path / "minima.log"
    make_search(path, n_trials=2).fit(X, Y)
    lock = study_module.JournalFileSymlinkLock
    monkeypatch.setattr(study_module, "JournalFileSymlinkLock", partial(lock, grace_period=3))
    (tmp_path / "minima.log.lock").symlink_to(path)
    assert_goes_on(path, n_kept=2)


# -- storages that a user opens ----------------------------------------------------------------


def test_storages_that_a_user_opened_are_used_as_they_are(tmp_path):
    database = RDBStorage(
        f"sqlite:///{tmp_path / 'minima.db'}",
        engine_kwargs={"connect_args": {"timeout": 0.05}},
    )
    make_search(database, n_trials=2).fit(X, Y)
    with faulty.locked(Place("sqlite", tmp_path)) as (begin, _):
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


# -- versions, many at once --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:study .* does not say how they were made")
@pytest.mark.parametrize("record", [None, {"later": {"part": "unknown"}}], ids=["older", "newer"])
def test_two_versions_on_one_study(tmp_path, record):
    """An older version records nothing; a newer one may record more."""
    path = tmp_path / "minima.log"
    study = make_search(path, n_trials=2).fit(X, Y).study_
    study.set_user_attr(MADE_WITH, (study.user_attrs[MADE_WITH] | record) if record else None)
    search = make_search(path).fit(X, Y)
    assert len(TRAINED) == len(set(TRAINED)) == len(CHOICES)
    assert search.minima_["state"].tolist() == ["complete"] * len(CHOICES)


N_PROCESSES = 8


def work(make_storage, barrier):
    barrier.wait(600)
    FlatMinimaSearch(
        LogisticRegression(max_iter=1000),
        {"C": np.linspace(0.1, 2.0, 2 * N_PROCESSES).tolist()},
        storage=make_storage(),
        study_name="sweep",
        refit=False,
        random_state=0,
        depth_band=None,
    ).fit(X, Y)


@pytest.mark.slow
def test_many_processes_at_once(make_storage):
    """All begin at the same moment, with no study and no file before."""
    run_at_once(N_PROCESSES, work, make_storage)
    study = optuna.load_study(study_name="sweep", storage=open_storage(make_storage()))
    complete = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(complete) == len({trial.params["C"] for trial in complete}) == 2 * N_PROCESSES
    assert not [trial for trial in study.trials if "failed" in trial.user_attrs]

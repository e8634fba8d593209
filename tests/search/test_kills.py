"""Real kills, Ctrl-C and full disks: nothing finished is lost, nothing trained twice.

Storages: SQLite, a journal, memory; trained in this process, in two of loky, on two of dask.
"""

import os
import resource
import signal
import sqlite3
import threading
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import product

import optuna
import pytest
from joblib import parallel_config
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch, FlatnessWarning, MinimaObjective
from relflat_sk.search._storage import open_storage
from tests.processes import fork_workers_of_joblib, forkserver
from tests.search.examples import FILES, X, Y

pytestmark = pytest.mark.filterwarnings("default")  # of the engines
CHOICES = [0.3, 0.4, 0.5, 0.6, 0.7]
WAYS = ["alone", "loky", "dask"]


class Logged(LogisticRegression):
    """Writes a line when its training begins, and does what the file `<C>` says."""

    def __init__(self, folder=None, C=1.0, max_iter=1000):
        super().__init__(C=C, max_iter=max_iter)
        self.folder = folder

    def fit(self, X, y):
        with open(self.folder / "trained", "a", encoding="utf-8") as file:
            file.write(f"{self.C}\n")
        order = self.folder / str(self.C)
        what = order.read_text(encoding="utf-8") if order.exists() else ""
        if what == "die once":
            order.unlink()
        if what.startswith("die"):
            time.sleep(0.3)  # others begin
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "crash":
            raise RuntimeError("out of luck")
        while what == "wait" and order.exists():
            time.sleep(0.05)
        return super().fit(X, y)


def order(folder, C, what):
    (folder / str(C)).write_text(what, encoding="utf-8")


def trained(folder):
    """How often each candidate began to train."""
    lines = (folder / "trained").read_text(encoding="utf-8").split()
    return Counter(map(float, lines))


def make_search(folder, kind, way="alone", **parameters):
    stored = {}
    if kind != "memory":
        stored = {"storage": folder / FILES[kind], "study_name": "sweep"}
    arguments = {"n_jobs": 1 if way == "alone" else 2, "random_state": 0, **stored, **parameters}
    return FlatMinimaSearch(Logged(folder), {"C": CHOICES}, **arguments)


def of_study(folder, storage):
    return optuna.load_study(study_name="sweep", storage=open_storage(folder / FILES[storage]))


def assert_complete(search, folder, again=()):
    """Each candidate is in the table once, and was trained once, but those that were killed."""
    assert sorted(search.minima_["param_C"]) == CHOICES
    complete = search.study_.get_trials(states=(TrialState.COMPLETE,))
    assert sorted(trial.params["C"] for trial in complete) == CHOICES
    assert not search.study_.get_trials(states=(TrialState.RUNNING, TrialState.WAITING))
    for C, n in trained(folder).items():
        assert n == 1 or C in again


@pytest.fixture
def engine(request):
    """A function that returns joblib's context for a way to train."""

    def context(way):
        if way != "dask":
            return nullcontext()
        client = request.getfixturevalue("dask_client")
        client.wait_for_workers(2, timeout=300)
        return parallel_config(backend="dask", client=client)

    return context


IN_WORKERS = [("sqlite", "loky"), ("journal", "loky"), ("memory", "loky"), ("journal", "dask")]


@pytest.mark.parametrize(("storage", "way"), IN_WORKERS)
def test_of_killed_workers_only_the_culprit_is_lost(storage, way, tmp_path, engine):
    order(tmp_path, CHOICES[0], "die")
    search = make_search(tmp_path, storage, way)
    with engine(way), pytest.warns(FlatnessWarning, match="1 of 5 candidates are no minima"):
        search.fit(X, Y)
    table = search.minima_.set_index("param_C")
    assert table["state"][CHOICES[0]] == "failed"
    assert "killed twice" in table["reason"][CHOICES[0]]
    assert table["state"][CHOICES[1:]].eq("complete").all()
    counts = trained(tmp_path)
    assert counts.pop(CHOICES[0]) >= 2  # dask itself tries again, too
    # its companion of each time, and a result that was on its way
    assert sum(counts.values()) <= len(counts) + 3


@pytest.mark.parametrize(("storage", "way"), IN_WORKERS)
def test_a_worker_that_is_killed_once_costs_nothing(storage, way, tmp_path, engine):
    order(tmp_path, CHOICES[2], "die once")
    with engine(way):
        search = make_search(tmp_path, storage, way).fit(X, Y)
    counts = trained(tmp_path)
    assert_complete(search, tmp_path, again=counts)
    assert counts[CHOICES[2]] == 2
    # also its companion, and a result that was on its way
    assert sum(counts.values()) <= len(CHOICES) + 3


def test_all_that_die_are_named(tmp_path):
    for C in CHOICES:
        order(tmp_path, C, "die")
    with pytest.raises(ValueError, match="2 x the process that trained was killed twice"):
        make_search(tmp_path, "memory", "loky").fit(X, Y)


def fit_in_process(folder, storage, way):
    fork_workers_of_joblib()
    if way != "dask":
        make_search(folder, storage, way).fit(X, Y)
        return
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    with cluster, distributed.Client(cluster), parallel_config(backend="dask"):
        make_search(folder, storage, way).fit(X, Y)


def wait_until(condition):
    """Wait until something is true, for five minutes on a machine however slow."""
    for _ in range(1500):
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError(condition)


def start(folder, storage, way, waiting):
    """Begin a search in another process, and wait until all others than `waiting` are finished."""
    for C in waiting:
        order(folder, C, "wait")
    process = forkserver().Process(target=fit_in_process, args=(folder, storage, way))
    process.start()

    def is_waiting():
        assert process.exitcode is None
        if not (folder / "trained").exists() or not trained(folder)[waiting[0]]:
            return False
        trials = of_study(folder, storage).get_trials(deepcopy=False)
        return sum(trial.state == TrialState.COMPLETE for trial in trials) >= 2

    wait_until(is_waiting)
    return process


@pytest.mark.parametrize(
    ("storage", "way"),
    [
        ("sqlite", "alone"),
        ("journal", "alone"),
        ("journal", "loky"),
        pytest.param("sqlite", "dask", marks=pytest.mark.slow),
    ],
)
def test_a_killed_parent_loses_nothing(storage, way, tmp_path):
    process = start(tmp_path, storage, way, CHOICES[2:3])
    process.kill()
    process.join()
    study = of_study(tmp_path, storage)
    finished = [t.params["C"] for t in study.trials if t.state == TrialState.COMPLETE]
    assert len(finished) >= 2
    assert study.get_trials(states=(TrialState.RUNNING,))
    (tmp_path / str(CHOICES[2])).unlink()
    search = make_search(tmp_path, storage, refit=False).fit(X, Y)
    in_training = set(CHOICES) - set(finished)
    assert_complete(search, tmp_path, again=in_training)


def test_a_study_whose_owner_is_alive_is_refused_and_its_process_named(tmp_path):
    process = start(tmp_path, "journal", "alone", CHOICES[2:3])
    with pytest.raises(ValueError, match=f"'sweep' belongs to process {process.pid} on"):
        make_search(tmp_path, "journal").fit(X, Y)
    (tmp_path / str(CHOICES[2])).unlink()
    process.join()
    assert process.exitcode == 0
    assert_complete(make_search(tmp_path, "journal", refit=False).fit(X, Y), tmp_path)


def test_a_trial_of_an_objective_that_is_alive_is_refused_as_well(tmp_path):
    study = optuna.create_study(study_name="sweep", storage=open_storage(tmp_path / "minima.log"))
    refused = []

    class Trains(Logged):
        def fit(self, X, y):
            if not refused:
                refused.append(None)
                search = threading.Thread(target=other_thread)
                search.start()
                search.join()
            return super().fit(X, y)

    def other_thread():
        try:
            make_search(tmp_path, "journal").fit(X, Y)
        except ValueError as error:
            refused.append(str(error))

    study.optimize(MinimaObjective(Trains(tmp_path), X, Y, {"C": CHOICES[:1]}), n_trials=1)
    assert f"belongs to process {os.getpid()}" in refused[1]


@pytest.mark.parametrize("storage", FILES)
def test_a_running_trial_without_an_owner_is_free(storage, tmp_path):
    path = tmp_path / FILES[storage]
    study = optuna.create_study(study_name="sweep", storage=open_storage(path))
    study.ask()
    assert_complete(make_search(tmp_path, storage).fit(X, Y), tmp_path)


def test_of_two_that_begin_at_the_same_moment_one_ends(tmp_path):
    def take(study, trial):
        study.set_user_attr("owner", ["elsewhere", 7, "1", 1])

    with pytest.raises(RuntimeError, match="process 7 on elsewhere"):
        make_search(tmp_path, "sqlite").fit(X, Y, callbacks=[take])
    study = of_study(tmp_path, "sqlite")
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE]
    with pytest.raises(ValueError, match="process 7 on elsewhere"):
        make_search(tmp_path, "sqlite").fit(X, Y)
    study.set_user_attr("owner", None)  # as the error says
    assert_complete(make_search(tmp_path, "sqlite", refit=False).fit(X, Y), tmp_path)


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def press_in_training(folder):
    wait_until(lambda: (folder / "trained").exists() and trained(folder)[CHOICES[1]])
    press_ctrl_c()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("storage", "way"),
    [("sqlite", "alone"), ("journal", "loky"), ("memory", "loky"), ("sqlite", "dask")],
)
def test_ctrl_c(storage, way, tmp_path, engine):
    order(tmp_path, CHOICES[1], "wait")
    timers = [threading.Timer(0.5, press_ctrl_c)]

    def press(study, trial):  # once, while the search waits for its workers
        if timers:
            timers.pop().start()

    if way == "alone":
        timers.clear()
        threading.Thread(target=press_in_training, args=(tmp_path,)).start()
    search = make_search(tmp_path, storage, way)
    match = "interrupted: the search ends with the . candidates"
    with engine(way), pytest.warns(FlatnessWarning, match=match):
        search.fit(X, Y, callbacks=[press])
    finished = search.minima_["param_C"].tolist()
    assert CHOICES[0] in finished
    assert CHOICES[1] not in finished
    assert not search.study_.get_trials(states=(TrialState.RUNNING,))
    (tmp_path / str(CHOICES[1])).unlink()
    if storage != "memory":
        again = make_search(tmp_path, storage, refit=False).fit(X, Y)
        assert_complete(again, tmp_path, again=set(CHOICES) - set(finished))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("storage", FILES)
def test_ctrl_c_waits_until_a_result_is_stored(storage, tmp_path, monkeypatch):
    handler, tell = signal.getsignal(signal.SIGINT), optuna.Study.tell

    def interrupted(study, trial, *result, **options):
        told = tell(study, trial, *result, **options)
        if told.state == TrialState.COMPLETE:
            signal.raise_signal(signal.SIGINT)
        return told

    monkeypatch.setattr(optuna.Study, "tell", interrupted)
    search = make_search(tmp_path, storage)
    with pytest.warns(FlatnessWarning, match="interrupted: the search ends with the 1 candidates"):
        search.fit(X, Y)
    assert signal.getsignal(signal.SIGINT) is handler
    assert [trial.state for trial in search.study_.trials] == [TrialState.COMPLETE]
    assert search.best_estimator_.score(X, Y) > 0
    # interrupted again, the network of the earlier session is not trained
    no_best = "has no best_estimator_: an earlier session trained"
    with pytest.warns(match="interrupted"), pytest.warns(FlatnessWarning, match=no_best):
        search.fit(X, Y)
    assert not hasattr(search, "best_estimator_")
    monkeypatch.undo()
    assert_complete(make_search(tmp_path, storage, refit=False).fit(X, Y), tmp_path)


@pytest.mark.parametrize(("way", "n_trials"), [*product(WAYS, [None]), ("alone", 5)], ids=str)
def test_a_crashed_candidate_is_named_and_tried_again_if_asked(way, n_trials, tmp_path, engine):
    order(tmp_path, CHOICES[0], "crash")
    search = make_search(tmp_path, "sqlite", way, refit=False, n_trials=n_trials)
    for retry_failed, n_trained in ((False, 1), (False, 1), (True, 2)):
        with engine(way), pytest.warns(FlatnessWarning, match="RuntimeError: out of luck"):
            search.fit(X, Y, retry_failed=retry_failed)
        assert trained(tmp_path) == Counter(CHOICES + CHOICES[:1] * (n_trained - 1))
        assert search.minima_.iloc[-1]["param_C"] == CHOICES[0]
    (tmp_path / str(CHOICES[0])).unlink()
    with engine(way):
        for _ in range(2):
            search.fit(X, Y, retry_failed=True)
    assert_complete(search, tmp_path, again=CHOICES[:1])
    assert trained(tmp_path)[CHOICES[0]] == 3


def full_disk(file):
    """Return functions from and until which writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def begin():
        # a database writes to its own journal first; of a line of the other journal, half fits
        size = 2000 if file.suffix == ".db" else file.stat().st_size + 40
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    return begin, partial(resource.setrlimit, resource.RLIMIT_FSIZE, before)


def lock(file):
    """Another program holds a lock."""
    other = sqlite3.connect(file, check_same_thread=False)
    return partial(other.execute, "BEGIN EXCLUSIVE"), other.close


FULL = "full|[Nn]o space|too large|I/O"
FAULTS = [(full_disk, "sqlite", FULL), (full_disk, "journal", FULL), (lock, "sqlite", "locked")]


@pytest.mark.parametrize(("fault", "storage", "why"), FAULTS)
@pytest.mark.parametrize("way", ["alone", "loky"])
def test_a_failing_storage_is_named_and_the_next_call_goes_on(fault, storage, why, way, tmp_path):
    n_told, (begin, end) = [], fault(tmp_path / FILES[storage])

    def begin_late(study, trial):
        n_told.append(trial.params["C"])
        if len(n_told) == 2:
            begin()

    search = make_search(tmp_path, storage, way, refit=False)
    try:
        with pytest.raises(RuntimeError, match=f"storage of study 'sweep' failed: .*({why})"):
            search.fit(X, Y, callbacks=[begin_late])
    finally:
        end()
    finished = of_study(tmp_path, storage).get_trials(states=(TrialState.COMPLETE,))
    kept = {trial.params["C"] for trial in finished}
    assert kept >= set(n_told[:2])
    search = make_search(tmp_path, storage, refit=False).fit(X, Y)
    assert_complete(search, tmp_path, again=set(CHOICES) - kept)


def test_half_a_line_of_a_journal_is_removed(tmp_path):
    make_search(tmp_path, "journal", n_trials=2, refit=False).fit(X, Y)
    path = tmp_path / FILES["journal"]
    for half in (b'{"op_code":4,"wor', b"x" * 200_000):
        path.write_bytes(path.read_bytes() + half)
        make_search(tmp_path, "journal", n_trials=3, refit=False).fit(X, Y)
    assert_complete(make_search(tmp_path, "journal", refit=False).fit(X, Y), tmp_path)

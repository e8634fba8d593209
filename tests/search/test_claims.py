"""Tests of claims and candidates: none is trained twice, none is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
from unittest import mock

import numpy as np
import optuna
import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError, OperationalError

from relflat_sk import FlatMinimaSearch, MinimaObjective
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.search import _claims as claims_module
from relflat_sk.search import _claims as processes_module
from relflat_sk.search import _study as study_module
from relflat_sk.search import _workers as workers_module
from relflat_sk.search._claims import CandidateSampler, Draws, Grid, claim, give_up, is_cut_short
from relflat_sk.search._space import Space
from relflat_sk.search._workers import train_in_processes
from tests.processes import forkserver

X, Y = load_iris(return_X_y=True)
C = [0.01, 0.1, 1.0]
POINTS = [{"C": c} for c in C]

STORAGES = {
    "memory": lambda folder: InMemoryStorage(),
    "sqlite": lambda folder: f"sqlite:///{folder / 'minima.db'}",
    "journal": lambda folder: JournalStorage(JournalFileBackend(str(folder / "minima.log"))),
}


@pytest.fixture(params=[*STORAGES, "postgresql"])
def storage(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").url
    return STORAGES[request.param](tmp_path)


@pytest.fixture
def study(storage):
    return optuna.create_study(storage=storage, study_name="sweep")


def states(study):
    return [trial.state.name for trial in study.trials]


def logistic(space=None, **parameters):
    """A search that takes milliseconds."""
    space = {"C": C} if space is None else space
    parameters = {"depth_band": None, "random_state": 0, **parameters}  # C determines the depth
    return FlatMinimaSearch(LogisticRegression(max_iter=1000), space, **parameters)


# -- claims ------------------------------------------------------------------------------------


def finish(claimed):
    claimed.optimize(lambda trial: trial.suggest_categorical("C", C), n_trials=1)


def test_every_point_of_a_grid_is_claimed_once(study):
    grid = Grid(POINTS)
    while claimed := claim(study, grid, "a"):
        finish(claimed)
    assert [trial.params for trial in study.trials] == POINTS
    assert grid.n_left(study.trials) == 0


def test_draws_are_numbered(study):
    study.sampler = CandidateSampler(0, Space({"C": C}))
    while claimed := claim(study, Draws(2), "a"):
        finish(claimed)
    assert [trial.system_attrs["candidate"] for trial in study.trials] == [0, 1]
    assert study.trials[0].params != study.trials[1].params
    # of a study that is to have fewer or more, what is finished counts
    assert claim(study, Draws(1), "b") is None
    assert Draws(5).n_left(study.trials) == 3


@pytest.mark.parametrize("plan", [Grid(POINTS), Draws(len(POINTS))], ids=["grid", "draws"])
def test_candidates_are_left_to_processes_that_began_at_the_same_moment(plan):
    study = optuna.create_study()
    found = [plan.next_candidate(study, [], skip) for skip in range(len(POINTS))]
    assert all(one not in found[:index] for index, one in enumerate(found))
    assert plan.next_candidate(study, [], len(POINTS)) == found[0]


def test_the_last_of_two_at_the_same_moment_withdraws(study, monkeypatch):
    """Both find the first point free, and both create a trial for it."""
    grid, first, raced = Grid(POINTS), [], []

    def at_the_same_moment(study, trials, skip):
        found = Grid.next_candidate(grid, study, trials)
        if not raced:
            raced.append(True)
            first.append(claim_elsewhere(study, grid, "a"))
        return found

    other = Grid(POINTS)
    monkeypatch.setattr(other, "next_candidate", at_the_same_moment)
    second = claim(study, other, "b")
    finish(first[0])
    finish(second)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]
    assert is_cut_short(study.trials[1])
    assert [study.trials[n].params for n in (0, 2)] == POINTS[:2]


def test_a_minimum_takes_few_transactions(tmp_path):
    """Each takes a round trip to a server, or a wait for a disk."""
    storage = study_module.open_storage(tmp_path / "minima.db")
    commits, counts = [], []
    event.listen(storage._backend.engine, "commit", commits.append)
    logistic(storage=storage, callbacks=[lambda *_: counts.append(len(commits))]).fit(X, Y)
    assert len(counts) == len(C)
    assert max(np.diff(counts)) <= 9


def claim_elsewhere(*arguments):
    """Claim on another machine, so that this thread does not give the trial up as its own."""
    with mock.patch.object(claims_module, "this_process", return_value=["elsewhere", 1, "1", 1]):
        return claim(*arguments)


def test_running_trials_of_others_are_left_alone(study):
    """Trials of another thread, another process and another machine are not given up."""
    here, start = socket.gethostname(), processes_module._start_time(os.getppid())
    parent = [here, os.getppid(), start, 1]
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    thread = [here, os.getpid(), processes_module._start_time(os.getpid()), other.ident]
    for point, process in zip(POINTS, [["elsewhere", 1, "1", 1], parent, thread], strict=True):
        add_running(study, point, process=process)
    assert claim(study, Grid(POINTS), "b") is None
    assert states(study) == ["RUNNING"] * 3


def add_running(study, point, **attributes):
    template = optuna.trial.create_trial(
        state=TrialState.RUNNING, user_attrs=attributes, system_attrs={"fixed_params": point}
    )
    study.add_trial(template)


def test_abandoned_trials_are_taken_over(study):
    """Trials of a process that is gone, of one whose id was reused, and of this thread."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    mine = processes_module.this_process()
    for point, process in zip(
        POINTS,
        [[here, gone.pid, "1", 1], [here, os.getppid(), "not then", 1], mine],
        strict=True,
    ):
        add_running(study, point, process=process)
    while claimed := claim(study, Grid(POINTS), "b"):
        finish(claimed)
    assert states(study) == ["FAIL"] * 3 + ["COMPLETE"] * 3
    assert [trial.params for trial in study.trials[3:]] == POINTS


def test_a_worker_leaves_the_trials_of_its_own_sweep_to_the_sweep(study):
    """joblib may end this process at any moment: its next trial would be blamed for the crash."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    sweep = workers_module.Sweep(None, Grid(POINTS[:2]), quiet=True)
    dead = {"process": [socket.gethostname(), gone.pid, "1", 1], "sweep": sweep.name}
    add_running(study, POINTS[0], killed=True, **dead)
    give_up(study, lambda trial: True)
    add_running(study, POINTS[0], **dead)
    fresh = claim(study, sweep.plan, sweep.name)
    finish(fresh)
    assert study.trials[-1].params == POINTS[1]
    assert claim(study, sweep.plan, sweep.name) is None
    assert states(study) == ["FAIL", "RUNNING", "COMPLETE"]
    assert (sweep.n_killed(study), sweep.n_left(study), sweep.n_killed(study)) == (1, 1, 2)
    finish(claim(study, sweep.plan, sweep.name))
    assert states(study) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_zombie_is_gone(study):
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    start = processes_module._start_time(child.pid)
    child.stdout.read()  # it has ended, and nobody has waited for it
    add_running(study, POINTS[0], process=[socket.gethostname(), child.pid, start, 1])
    assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert claim(study, Grid(POINTS[:1]), "b") is not None
    child.stdout.close()
    child.wait()


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # not in all versions
def test_a_heartbeat_tells_of_other_machines(tmp_path):
    url = f"sqlite:///{tmp_path / 'minima.db'}"
    storage = RDBStorage(url, heartbeat_interval=1, grace_period=1)
    study = optuna.create_study(storage=storage, study_name="sweep")
    add_running(study, POINTS[0], process=["elsewhere", 1, "1", 1])
    trial_id = study.trials[0]._trial_id
    storage.record_heartbeat(trial_id)
    assert claim(study, Grid(POINTS[:1]), "b") is None
    claim_elsewhere(study, Grid(POINTS[1:2]), "elsewhere")  # and killed at once
    while len(storage._get_stale_trial_ids(study._study_id)) < 2:
        threading.Event().wait(0.1)
    while claimed := claim(study, Grid(POINTS[:2]), "b"):
        finish(claimed)
    assert states(study) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE"]


def test_a_draw_whose_process_died_is_drawn_again(study):
    """The number of the draw is free again; the draws after it stay the same."""
    space = Space({"C": FloatDistribution(0.01, 1.0)})

    def draw(trial):
        return trial.suggest_float("C", 0.01, 1.0)

    study.sampler = CandidateSampler(0, space)
    claim(study, Draws(3), "a")
    second = claim(study, Draws(3), "b")  # which gives up the first: this thread has moved on
    second.optimize(draw, n_trials=1)
    while claimed := claim(study, Draws(3), "b"):
        claimed.optimize(draw, n_trials=1)
    expected = optuna.create_study()
    expected.sampler = CandidateSampler(0, space)
    while claimed := claim(expected, Draws(3), "a"):
        claimed.optimize(draw, n_trials=1)
    found = sorted(trial.params["C"] for trial in study.trials if trial.params)
    assert found == sorted(trial.params["C"] for trial in expected.trials)


def test_candidates_that_a_process_died_of_come_last_and_one_at_a_time(study):
    sweep = {"process": ["elsewhere", 1, "1", 1], "sweep": "a"}
    for point in POINTS[:2]:
        add_running(study, point, **sweep)
    give_up(study, lambda trial: True, lambda trial: {"killed": True})
    grid = Grid(POINTS)
    fresh = claim_elsewhere(study, grid, "a")
    assert study.trials[-1].system_attrs["fixed_params"] == POINTS[2]
    assert claim(study, grid, "a") is None  # would be in company
    finish(fresh)
    suspect = claim_elsewhere(study, grid, "a")
    assert study.trials[-1].system_attrs["fixed_params"] == POINTS[0]
    assert claim(study, grid, "a") is None
    finish(suspect)
    assert claim(study, grid, "a") is not None


def test_a_trial_that_was_given_up_meanwhile_is_dropped(storage, monkeypatch):
    """Another machine may give it up while this one sleeps."""
    study = optuna.create_study(storage=storage)
    run, slept = MinimaObjective.run, []

    def sleeps_once(self, trial):
        found = run(self, trial)
        if not slept:
            slept.append(trial.number)
            give_up(trial.study, lambda one: one.number == trial.number)
        return found

    monkeypatch.setattr(MinimaObjective, "run", sleeps_once)
    objective = MinimaObjective(LogisticRegression(max_iter=1000), X, Y, {"C": C})
    sweep = workers_module.Sweep(objective, Grid(POINTS), quiet=True)
    kept = []
    with study_module.log_level(quiet=True):
        while sweep.train_one(study, lambda trial, _: kept.append(trial.params)):
            pass
    assert sorted(states(study)) == ["COMPLETE"] * 3 + ["FAIL"]
    assert sorted(params["C"] for params in kept) == C


# -- processes ---------------------------------------------------------------------------------


def claim_all(make_storage, n_points, start):
    study = optuna.load_study(study_name="sweep", storage=make_storage())
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    start.wait()
    while claimed := claim(study, Grid([{"x": x} for x in range(n_points)]), "a"):
        claimed.optimize(lambda trial: trial.suggest_int("x", 0, n_points), n_trials=1)


@pytest.mark.slow
def test_processes_at_once_claim_nothing_twice(make_storage):
    """Points that take no time to train, so that processes often claim at the same moment."""
    study = optuna.create_study(storage=make_storage(), study_name="sweep")
    context, n_points = forkserver(), 20
    start = context.Barrier(3)
    workers = [
        context.Process(target=claim_all, args=(make_storage, n_points, start)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 3
    done = [trial.params["x"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert sorted(done) == list(range(n_points))
    assert all(is_cut_short(t) for t in study.trials if t.state != TrialState.COMPLETE)


class Dies(LogisticRegression):
    """Kills its process, as the kernel does when memory runs out."""

    def fit(self, X, y):
        if self.C == 1.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(X, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs:UserWarning")
def test_of_a_killed_process_only_the_culprit_is_lost():
    space = {"C": [1.0, 0.01, 0.1, 0.2, 0.5]}
    search = FlatMinimaSearch(Dies(max_iter=1000), space, n_jobs=2, depth_band=None, random_state=0)
    with pytest.warns(FlatnessWarning, match="1 of 5 candidates are no minima"):
        search.fit(X, Y)
    reasons = search.minima_.set_index("param_C")["reason"]
    assert len(reasons) == 5
    assert "the process that trained was killed twice" in reasons[1.0]
    assert (reasons.drop(1.0) == "").all()


class Kills(Grid):
    """Kills the process that asks for a candidate."""

    def next_candidate(self, study, trials, skip=0):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs:UserWarning")
def test_processes_that_die_by_themselves_are_an_error(tmp_path):
    study = optuna.create_study(storage=STORAGES["sqlite"](tmp_path))
    objective = MinimaObjective(LogisticRegression(), X, Y, {"C": C})
    sweep = workers_module.Sweep(objective, Kills(POINTS), quiet=True)
    with pytest.raises(TerminatedWorkerError, match="unexpectedly terminated"):
        train_in_processes(study, sweep, 2, on_finished=print)
    assert not study.trials


def search_and_die(storage):
    fit = LogisticRegression.fit

    def fit_or_die(self, X, y):
        if self.C == 0.1:
            os.kill(os.getpid(), signal.SIGKILL)
        return fit(self, X, y)

    LogisticRegression.fit = fit_or_die  # of the same class as in the search that goes on
    logistic(storage=storage, study_name="sweep").fit(X, Y)


def test_a_killed_trial_is_trained_again(tmp_path):
    storage = STORAGES["sqlite"](tmp_path)
    process = forkserver().Process(target=search_and_die, args=(storage,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert states(optuna.load_study(study_name="sweep", storage=storage)) == ["COMPLETE", "RUNNING"]
    search = logistic(storage=storage, study_name="sweep").fit(X, Y)
    assert sorted(search.minima_["param_C"]) == C
    assert (search.minima_["state"] == "complete").all()
    expected = logistic().fit(X, Y).minima_
    columns = ["param_C", "relative_flatness"]
    assert search.minima_[columns].equals(expected[columns])


def test_a_trial_that_was_killed_after_its_last_word_is_trained_again(storage):
    """The process died after the last attribute, before the trial was complete."""
    study = optuna.create_study(storage=storage, study_name="sweep")
    objective = MinimaObjective(LogisticRegression(max_iter=1000), X, Y, {"C": C})
    trial = optuna.Trial(study, claim(study, Grid(POINTS), "a").trial_id)
    objective.run(trial)
    assert trial.user_attrs["reason"] == ""
    search = logistic(storage=storage, study_name="sweep").fit(X, Y)
    assert search.minima_["state"].tolist() == ["complete"] * 3


def test_trials_that_run_elsewhere_are_not_waited_for(storage):
    study = optuna.create_study(storage=storage, study_name="sweep")
    add_running(study, POINTS[1], process=["elsewhere", 1, "1", 1])
    search = logistic(storage=storage, study_name="sweep").fit(X, Y)
    assert sorted(search.minima_["param_C"]) == [0.01, 1.0]
    assert [trial.state.name for trial in search.study_.trials].count("RUNNING") == 1


def test_progress_counts_what_is_left_for_this_process(storage, capfd):
    """The bar leaves out candidates that other processes train."""
    study = optuna.create_study(storage=storage, study_name="sweep")

    class Shared(LogisticRegression):
        def fit(self, X, y):
            if self.C == 0.01:
                add_running(study, POINTS[1], process=["elsewhere", 1, "1", 1])
            return super().fit(X, y)

    space = {"C": C}
    search = FlatMinimaSearch(
        Shared(max_iter=1000), space, depth_band=None, random_state=0, verbose=1
    )
    search.set_params(storage=storage, study_name="sweep").fit(X, Y)
    shown = capfd.readouterr().err
    assert "0/3" in shown
    assert "2/2" in shown
    assert "2/3" not in shown


def test_a_database_that_several_processes_make_at_once(monkeypatch):
    """A process fails at each table that another has just made, and tries again."""
    real, failures = study_module._open, []

    def fails_at_first(storage):
        if failures:
            raise failures.pop()
        return real(storage)

    monkeypatch.setattr(study_module, "_open", fails_at_first)
    monkeypatch.setattr(study_module, "LONGEST_WAIT", 0.0)
    failures += [
        OperationalError("CREATE", None, Exception("table studies already exists")),
        IntegrityError("INSERT", None, Exception("UNIQUE constraint failed: alembic_version")),
        OperationalError("INSERT", None, Exception("database is locked")),
    ] * 6
    assert study_module.open_storage("sqlite:///:memory:").get_all_studies() == []
    failures += [OperationalError("SELECT", None, Exception("no such host"))]
    with pytest.raises(OperationalError, match="no such host"):
        study_module.open_storage("sqlite:///:memory:")
    failures += [OperationalError("CREATE", None, Exception("already exists"))] * 30
    with pytest.raises(OperationalError, match="already exists"):
        study_module.open_storage("sqlite:///:memory:")


@pytest.mark.slow
def test_searches_that_begin_at_once_on_a_new_database(tmp_path):
    context = forkserver()
    start = context.Barrier(2)
    storage = STORAGES["sqlite"](tmp_path)
    workers = [context.Process(target=search_at_once, args=(storage, start)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    study = optuna.load_study(study_name="sweep", storage=storage)
    done = [trial.params["C"] for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert sorted(done) == sorted(MANY["C"])


MANY = {"C": [0.01 * k for k in range(1, 13)]}


def search_at_once(storage, start):
    search = logistic(MANY, storage=storage, study_name="sweep")
    start.wait()
    search.fit(X, Y)

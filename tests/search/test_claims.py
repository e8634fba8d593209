"""Tests of claims and candidates: none is trained twice, none is lost, though processes die."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import GridSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import TrialState, create_trial
from sklearn.linear_model import LogisticRegression
from sqlalchemy.exc import IntegrityError, OperationalError

from relflat_sk import FlatnessWarning, MinimaObjective
from relflat_sk.minima._table import attributes_of, is_reserved
from relflat_sk.search import _claims as claims_module
from relflat_sk.search import _study as study_module
from relflat_sk.search._claims import (
    Draws,
    Plan,
    claim,
    give_up,
    is_cut_short,
    number_of,
    this_process,
)
from relflat_sk.search._space import Space
from relflat_sk.search._study import SearchStudy, log_level, open_storage
from relflat_sk.search._workers import Sweep, train_in_processes
from tests.processes import forkserver
from tests.search.examples import X, Y, logistic
from tests.search.storages import FILES

C = [0.3, 0.5, 1.0]
POINTS = [{"C": c} for c in C]
CHOICES = {"C": CategoricalDistribution(C)}
ELSEWHERE = ["elsewhere", 1, "1", 1]


def grid(points=POINTS):
    return Plan(CHOICES, points)


@pytest.fixture
def storage(request, tmp_path):
    """A journal, or the storage of the kind that the test names."""
    kind = getattr(request, "param", "journal")
    if kind == "postgresql":
        return open_storage(request.getfixturevalue("postgresql").url)
    return open_storage(tmp_path / FILES[kind] if kind in FILES else None)


KINDS = ["memory", *FILES]


@pytest.fixture
def study(storage):
    return SearchStudy(optuna.create_study(storage=storage, study_name="sweep"))


def states(study):
    return [trial.state.name for trial in study.trials]


def finish(study, trial):
    trial.suggest_categorical("C", C)
    study.tell(trial, 1.0)


def claim_elsewhere(*arguments, **options):
    """Claim on another machine, so that this thread does not give the trial up as its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims_module, "this_process", lambda: ELSEWHERE)
        return claim(*arguments, **options)


def add_running(study, point, **attributes):
    study.add_trial(
        create_trial(
            state=TrialState.RUNNING, user_attrs=attributes, params=point, distributions=CHOICES
        )
    )


# -- claims ------------------------------------------------------------------------------------


def test_draws_are_numbered(study):
    while trial := claim(study, Plan(CHOICES, n_trials=2, draws=Draws(0, CHOICES, POINTS)), "a"):
        finish(study, trial)
    assert [number_of(trial) for trial in study.trials] == [0, 1]
    assert study.trials[0].params != study.trials[1].params
    # of a study that is to have fewer or more, what is finished counts
    assert claim(study, Plan(CHOICES, n_trials=1), "b") is None
    assert len(Plan(CHOICES, n_trials=5).left(study.trials)) == 3
    # and so do trials that something other than a search has made
    study.add_trial(create_trial(value=1.0))
    assert [one.number for one in Plan(CHOICES, n_trials=5).left(study.trials)] == [2, 3]


def test_draws_end_when_every_combination_is_held(study):
    """Draws died, a search of all combinations trained theirs, and draws are asked for again."""
    for attributes, point in [({"candidate": "1"}, 0), ({}, 1), ({}, 2)]:
        study.add_trial(
            create_trial(
                value=1.0, params=POINTS[point], distributions=CHOICES, user_attrs=attributes
            )
        )
    plan = Plan(CHOICES, n_trials=3, draws=Draws(0, CHOICES, POINTS))
    assert plan.left(study.trials) == []
    assert claim(study, plan, "a") is None


@pytest.mark.parametrize(
    ("storage", "plan"),
    [
        ("memory", Plan(CHOICES, n_trials=3)),
        ("sqlite", Plan(CHOICES, n_trials=3)),
        ("journal", grid()),
        ("postgresql", grid()),
    ],
    indirect=["storage"],
)
def test_the_last_of_two_at_the_same_moment_withdraws(study, plan, monkeypatch):
    """Both find the same candidate free, and both add a trial for it."""
    free = plan.left(study.trials)
    first = claim_elsewhere(study, plan, "a")
    answers = [free]
    monkeypatch.setattr(
        plan, "left", lambda trials: answers.pop() if answers else type(plan).left(plan, trials)
    )
    second = claim(study, plan, "b")
    finish(study, first)
    finish(study, second)
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]
    assert is_cut_short(study.trials[1])
    assert study.trials[1].params == study.trials[0].params or plan.points is None
    assert number_of(study.trials[1]) == number_of(study.trials[0])


def test_running_trials_of_others_are_left_alone(study):
    """Trials of another thread, another process and another machine are not given up."""
    here, start = socket.gethostname(), claims_module._start_time(os.getppid())
    other = threading.Thread(target=threading.Event().wait, daemon=True)
    other.start()
    thread = [*this_process()[:3], other.ident]
    parent = [here, os.getppid(), start, 1]
    for point, process in zip(POINTS, [ELSEWHERE, parent, thread], strict=True):
        add_running(study, point, process=process)
    assert claim(study, grid(), "b") is None
    assert states(study) == ["RUNNING"] * 3


@pytest.mark.parametrize("storage", [*KINDS, "postgresql"], indirect=True)
def test_abandoned_trials_are_taken_over(study):
    """Of a process that is gone, a zombie, an id that was used again, and this thread."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    zombie = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    started = claims_module._start_time(zombie.pid)
    zombie.stdout.read()  # it has ended, and nobody has waited for it
    assert os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    here = socket.gethostname()
    dead = [[here, gone.pid, "1", 1], [here, os.getppid(), "not then", 1], this_process()]
    dead.append([here, zombie.pid, started, 1])
    for process in dead:
        add_running(study, POINTS[0], process=process)
    while trial := claim(study, grid(), "b"):
        finish(study, trial)
    zombie.stdout.close()
    zombie.wait()
    assert states(study) == ["FAIL"] * 4 + ["COMPLETE"] * 3
    assert all(trial.user_attrs["killed"] for trial in study.trials[:4])
    assert {
        name for one in study.trials for name in one.user_attrs if not is_reserved(name)
    } == set()
    assert sorted(trial.params["C"] for trial in study.trials[4:]) == C
    assert grid().left(study.trials) == []


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # not in all versions
def test_a_heartbeat_tells_of_other_machines(tmp_path, monkeypatch):
    url = f"sqlite:///{tmp_path / 'minima.db'}"
    # the storage counts whole seconds; the longer period is over on no machine, however busy
    patient = RDBStorage(url, heartbeat_interval=60, grace_period=600)
    storage = RDBStorage(url, heartbeat_interval=1, grace_period=1)
    study = optuna.create_study(storage=patient, study_name="sweep")
    add_running(study, POINTS[0], process=ELSEWHERE)
    beats, record = [], storage.record_heartbeat
    record(study.trials[0]._trial_id)
    assert claim(study, grid(POINTS[:1]), "b") is None
    monkeypatch.setattr(
        storage, "record_heartbeat", lambda trial_id: beats.append(trial_id) or record(trial_id)
    )
    threading.Event().wait(2.1)  # more than one whole second later, at whichever fraction of one
    search = logistic(storage=storage, study_name="sweep", refit=False).fit(X, Y)
    assert len(search.minima_) == 3
    assert states(study) == ["FAIL"] + ["COMPLETE"] * 3
    assert sorted(set(beats)) == [trial._trial_id for trial in study.trials[1:]]


def test_a_draw_whose_process_died_is_drawn_again(storage):
    """The number of the draw is free again; the draws after it stay the same."""
    choices = {"C": FloatDistribution(0.3, 1.0)}
    plan = Plan(choices, n_trials=3, draws=Draws(0, choices))

    def draw_all(study, first=None):
        if first is not None:
            first(study)
        while trial := claim(study, plan, "b"):
            trial.suggest_float("C", 0.3, 1.0)
            study.tell(trial, 1.0)
        return sorted(t.params["C"] for t in study.trials if t.state == TrialState.COMPLETE)

    expected = draw_all(optuna.create_study())
    # which this thread gives up: it has moved on
    died = partial(claim, plan=plan, sweep="a")
    assert draw_all(optuna.create_study(storage=storage), died) == expected


@pytest.mark.parametrize("sampler", [None, GridSampler({"C": C}), RandomSampler()])
@pytest.mark.parametrize("failed", [False, True], ids=["died", "failed"])
def test_a_candidate_is_trained_again(storage, sampler, failed):
    """Not another one in its place, whichever way it was drawn."""
    study = SearchStudy(optuna.create_study(storage=storage, sampler=sampler))
    plan = Plan({}, n_trials=3, draws=None if sampler else Draws(None, {}))
    while trial := claim(study, plan, sweep=f"{len(study.trials)}"):
        trial.suggest_float("C", 0.3, 1.0)
        if trial.number != 1:
            study.tell(trial, 1.0)
        elif failed:
            trial.set_user_attr("failed", True)
            study.tell(trial, state=TrialState.FAIL)
            plan.released = frozenset({1})
        # else this thread gives it up: it has moved on
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert study.trials[1].params in [trial.params for trial in study.trials[2:]]
    assert len({trial.params["C"] for trial in study.trials}) == 3


def test_candidates_that_a_process_died_of_come_last_and_not_beside_others(study):
    for point in POINTS[:2]:
        add_running(study, point, process=ELSEWHERE, sweep="a")
    assert len(give_up(study, lambda trial: True, killed=True)) == 2
    assert claim(study, grid(), "a", suspects=False).params == POINTS[2]
    assert claim(study, grid(), "a", suspects=False) is None
    assert claim_elsewhere(study, grid(), "a").params == POINTS[0]


def test_a_worker_leaves_the_trials_of_its_own_sweep_to_the_sweep(study):
    """joblib may end this process at any moment: its next trial would be blamed for the crash."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    add_running(study, POINTS[0], process=[socket.gethostname(), gone.pid, "1", 1], sweep="a")
    assert claim_elsewhere(study, grid(POINTS[:1]), "a") is None
    assert claim_elsewhere(study, grid(POINTS[:1]), "b").params == POINTS[0]


@pytest.mark.parametrize("storage", KINDS, indirect=True)
def test_a_trial_that_was_given_up_meanwhile_is_dropped(storage, study, monkeypatch):
    """Another machine may give it up while this one sleeps, before its record or after it."""
    train, run, slept = MinimaObjective._train, MinimaObjective._run, []

    def sleeps_once(method, self, *arguments):
        found = method(self, *arguments)
        if method not in slept:
            slept.append(method)
            give_up(study, lambda one: True)
        return found

    monkeypatch.setattr(MinimaObjective, "_train", lambda *given: sleeps_once(train, *given))
    monkeypatch.setattr(MinimaObjective, "_run", lambda *given: sleeps_once(run, *given))
    objective = MinimaObjective(LogisticRegression(max_iter=1000), X, Y, {"C": C})
    kept = []
    with log_level(quiet=True):
        Sweep(study, storage, objective, grid()).train_left(
            lambda trial, _: kept.append(trial.params)
        )
    assert sorted(states(study)) == ["COMPLETE"] * 3 + ["FAIL"] * 2
    assert sorted(params["C"] for params in kept) == C


# -- draws -------------------------------------------------------------------------------------

N = 200


class Counting(int):
    """A number that counts how often numbers are compared."""

    n_compared = 0

    def __eq__(self, other):
        Counting.n_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def test_the_work_does_not_grow_with_the_square_of_the_number_of_candidates():
    points = [{"C": Counting(n)} for n in range(N)]
    done = [create_trial(value=1.0, user_attrs={"candidate": str(n)}) for n in range(N - 1)]
    for trial, point in zip(done, points[:-1], strict=True):
        trial.params = point
    Counting.n_compared = 0
    assert [one.params for one in Plan({}, points).left(done)] == points[-1:]
    assert [one.number for one in Plan({}, n_trials=N).left(done)] == [N - 1]
    assert Counting.n_compared < 10 * N


SPACES = {
    "mixed": {
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "n": IntDistribution(2, 64, step=2),
        "decay": FloatDistribution(0.0, 1.0, step=0.25),
        "module": ["a", "b", "c"],
        "fixed": [0.5],
    },
    "function": {
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "twice": lambda trial: 2 * trial.suggest_int("half", 1, 9),
    },
}


def loss(params):
    return abs(params["lr"] - 0.1) + 0.01 * params.get("n", 0) + 0.1 * (params.get("module") == "a")


@pytest.mark.parametrize(("kind", "n_at_once"), [("mixed", 1), ("mixed", 3), ("function", 1)])
def test_candidates_are_drawn_as_optuna_draws(kind, n_at_once):
    """By TPE from the seed of the draw, several at a time as in searches."""
    space, found = Space(SPACES[kind]), []
    choices = space.distributions()
    plan = Plan(choices, n_trials=30, draws=Draws(0, choices))
    for searches in (True, False):
        study = optuna.create_study()
        for begin in range(0, 30, n_at_once):
            trials = []
            for number in range(begin, begin + n_at_once):
                if searches:
                    trials.append(claim_elsewhere(study, plan, "a"))
                else:
                    seed = zlib.crc32(b"%d" % number, 0)
                    study.sampler = TPESampler(seed=seed, n_startup_trials=10)
                    trials.append(study.ask())
                space.suggest(trials[-1])
            for trial in trials:
                study.tell(trial, loss(trial.params))
        found.append([trial.params for trial in study.trials])
    assert found[0] == found[1]


# -- processes ---------------------------------------------------------------------------------


class Kills(Plan):
    """Kills every process that asks for a candidate, but the one of this number."""

    def left(self, trials):
        if os.getpid() != self.n_trials:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().left(trials)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A worker stopped while some jobs:UserWarning")
def test_processes_that_die_by_themselves_are_an_error(tmp_path):
    storage = open_storage(tmp_path / "minima.db")
    study = optuna.create_study(storage=storage)
    objective = MinimaObjective(LogisticRegression(), X, Y, {"C": C})
    plan = Kills(CHOICES, POINTS, n_trials=os.getpid())
    with pytest.raises(BrokenProcessPool, match="unexpectedly terminated"):
        train_in_processes(Sweep(SearchStudy(study), storage, objective, plan), 2, print)
    assert not study.trials


def test_a_trial_that_was_killed_after_its_last_word_is_trained_again(storage, study):
    """The process died after the last attribute, before the trial was complete."""
    objective = MinimaObjective(LogisticRegression(max_iter=1000), X, Y, {"C": C})
    trial = claim(study, grid(), "a")
    objective._run(trial)
    assert attributes_of(trial)["reason"] == ""
    search = logistic(storage=storage, study_name="sweep").fit(X, Y)
    assert search.minima_["state"].tolist() == ["complete"] * 3
    expected = logistic().fit(X, Y).minima_
    columns = ["param_C", "relative_flatness"]
    assert search.minima_[columns].equals(expected[columns])


def test_trials_that_run_elsewhere_are_missing_with_a_warning(storage, study, capfd):
    class Shared(LogisticRegression):
        def fit(self, X, y):
            if self.C == 0.3:
                add_running(study, POINTS[1], process=ELSEWHERE)
            return super().fit(X, y)

    stored = {"storage": storage, "study_name": "sweep"}
    search = logistic(estimator=Shared(max_iter=1000), verbose=1, **stored)
    with pytest.warns(FlatnessWarning, match="other processes still train 1 of .* ranking of 2 la"):
        search.fit(X, Y)
    assert sorted(search.minima_["param_C"]) == [0.3, 1.0]
    assert states(search.study_).count("RUNNING") == 1
    shown = capfd.readouterr().err
    assert "0/3" in shown
    assert "2/2" in shown
    assert "2/3" not in shown
    other = optuna.create_study(storage=storage, study_name="none")
    add_running(other, POINTS[0], process=ELSEWHERE)
    search.set_params(study_name="none", n_trials=1)
    with pytest.raises(ValueError, match="no candidate is trained yet: other processes still tr"):
        search.fit(X, Y)


def test_a_database_that_several_processes_make_at_once(monkeypatch):
    """A process fails at each table that another has just made, and tries again."""
    failures = []

    def fails_at_first(*arguments, **options):
        if failures:
            raise failures.pop()
        return RDBStorage(*arguments, **options)

    monkeypatch.setattr(study_module, "RDBStorage", fails_at_first)
    monkeypatch.setattr(study_module, "LONGEST_WAIT", 0.0)
    failures += [
        OperationalError("CREATE", None, Exception("table studies already exists")),
        IntegrityError("INSERT", None, Exception("UNIQUE constraint failed: alembic_version")),
        OperationalError("INSERT", None, Exception("database is locked")),
    ] * 6
    assert open_storage("sqlite:///:memory:").get_all_studies() == []
    failures += [OperationalError("SELECT", None, Exception("no such host"))]
    with pytest.raises(OperationalError, match="no such host"):
        open_storage("sqlite:///:memory:")
    monkeypatch.setattr(study_module, "LOCK_TIMEOUT", 0)
    failures += [OperationalError("CREATE", None, Exception("already exists"))]
    with pytest.raises(OperationalError, match="already exists"):
        open_storage("sqlite:///:memory:")


# -- processes that are killed while they train ------------------------------------------------

N_PROCESSES, N_TRIALS = 3, 10
DUE = [2, 5]  # how many trials are finished when a process is killed; enough is left to do
SHARED = {
    "grid": {"C": np.geomspace(0.2, 1.0, N_TRIALS).tolist()},
    "draws": {"C": FloatDistribution(0.2, 1.0)},
}


PERMITS = []


class Permitted(LogisticRegression):
    """Trains when the test permits it, on a machine however busy."""

    def fit(self, X, y):
        for permits in PERMITS:
            permits.acquire()
        return super().fit(X, y)


def search_shared(storage, space):
    return logistic(
        SHARED[space],
        Permitted(max_iter=1000),
        n_trials=N_TRIALS,
        storage=storage,
        study_name="sweep",
        refit=False,
    ).fit(X, Y)


def work(permits, start, make_storage, space):
    PERMITS.append(permits)
    if start is not None:
        start.wait(600)
    # another process can hold what is left, and die of it: then this one comes again
    search_shared(make_storage(), space)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_storage", "space"),
    [("sqlite", "grid"), ("journal", "draws"), ("postgresql", "draws")],
    indirect=["make_storage"],
)
def test_three_processes_two_of_which_are_killed(make_storage, space):
    """All begin at the same moment, with no study and no file before."""
    context = forkserver()

    permits = context.Semaphore(0)

    def begin(start=None):
        worker = context.Process(target=work, args=(permits, start, make_storage, space))
        worker.start()
        return worker

    start = context.Barrier(N_PROCESSES + 1)
    workers = [begin(start) for _ in range(N_PROCESSES)]
    start.wait(600)
    storage = open_storage(make_storage())
    study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)

    def minima():
        return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    for turn, due in enumerate(DUE):
        for _ in range(len(minima()), due):
            permits.release()
        while len(minima()) < due:
            assert all(worker.exitcode is None for worker in workers)
            time.sleep(0.05)
        os.kill(workers[turn].pid, signal.SIGKILL)
        workers[turn].join()
        assert workers[turn].exitcode == -signal.SIGKILL
        workers[turn] = begin()
    for _ in range(2 * N_TRIALS):
        permits.release()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * N_PROCESSES
    found = [trial.params["C"] for trial in minima()]
    assert len(found) == len(set(found)) == N_TRIALS
    # and they are the candidates that one process would have had
    assert space == "draws" or sorted(found) == SHARED["grid"]["C"]
    # all else is what was killed, or withdrawn
    others = [trial for trial in study.trials if trial.state != TrialState.COMPLETE]
    assert all(map(is_cut_short, others))
    assert len(search_shared(make_storage(), space).minima_) == N_TRIALS

"""A study that two processes share loses nothing, though one of them is killed repeatedly."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch
from relflat_sk.search._sharing.claims import is_cut_short
from relflat_sk.search._sharing.processes import is_gone
from tests.processes import forkserver, run_module
from tests.search.storages import sqlite

N_TRIALS = 50
EVERY = 10  # finished trials between two kills
N_KILLS = N_TRIALS // EVERY - 2  # there is enough left to do after the last one
SPACES = {
    "grid": {"C": np.geomspace(0.01, 1.0, N_TRIALS).tolist()},
    "draws": {"C": FloatDistribution(0.01, 1.0)},
}


def make_search(storage, space):
    return FlatMinimaSearch(
        LogisticRegression(max_iter=1000),
        SPACES[space],
        n_trials=N_TRIALS,
        storage=storage,
        study_name="sweep",
        depth_band=None,  # C determines the depth
        refit=False,
        random_state=0,
    )


def work(make_storage, space):
    # the other process can hold what is left, and die of it: then this one comes again
    make_search(make_storage(), space).fit(*load_iris(return_X_y=True))


def begin(context, *arguments):
    worker = context.Process(target=work, args=arguments)
    worker.start()
    return worker


def count(study):
    return sum(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_storage", "space"),
    [("sqlite", "grid"), ("journal", "draws"), ("postgresql", "draws")],
    indirect=["make_storage"],
)
def test_two_processes_one_of_which_is_killed(make_storage, space):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    context = forkserver()
    study = optuna.create_study(storage=make_storage(), study_name="sweep")
    workers = [begin(context, make_storage, space) for _ in range(2)]
    n_killed = 0
    while any(worker.exitcode is None for worker in workers):
        turn = n_killed % 2
        if n_killed < N_KILLS and count(study) >= EVERY * (n_killed + 1):
            os.kill(workers[turn].pid, signal.SIGKILL)
            workers[turn].join()
            assert workers[turn].exitcode == -signal.SIGKILL
            workers[turn] = begin(context, make_storage, space)
            n_killed += 1
        time.sleep(0.05)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert n_killed == N_KILLS
    minima = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(minima) == N_TRIALS
    assert len({trial.params["C"] for trial in minima}) == N_TRIALS
    # all else is what was killed, or withdrawn
    assert all(is_cut_short(trial) for trial in study.trials if trial not in minima)
    # and they are the candidates that one process would have had
    if space == "grid":
        assert sorted(trial.params["C"] for trial in minima) == SPACES["grid"]["C"]
    table = make_search(make_storage(), space).fit(*load_iris(return_X_y=True)).minima_
    assert len(table) == N_TRIALS


class Waits(LogisticRegression):
    """Trains once a file exists, which an environment variable names."""

    def fit(self, X, y):
        while not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.1)
        return super().fit(X, y)


def search_waiting(folder, n_jobs):
    os.environ["WAIT_FOR"] = str(folder / "go")
    FlatMinimaSearch(
        Waits(max_iter=1000),
        {"C": [0.01, 0.1, 1.0, 10.0]},
        n_jobs=n_jobs,
        depth_band=None,  # C determines the depth
        refit=False,
        storage=sqlite(folder),
        study_name="sweep",
        random_state=0,
    ).fit(*load_iris(return_X_y=True))


def wait_until(condition):
    """Wait until something is true, for a minute on a machine however slow."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(condition)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers notice the end of their parent on posix")
def test_workers_end_with_the_main_process(tmp_path, monkeypatch):
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=sqlite(tmp_path), study_name="sweep")
    main = forkserver().Process(target=search_waiting, args=(tmp_path, 2))
    main.start()
    wait_until(lambda: len(study.get_trials(states=(TrialState.RUNNING,))) == 2)
    workers = [trial.user_attrs["process"] for trial in study.trials]
    assert main.pid not in [process_id for _, process_id, _, _ in workers]
    main.kill()
    main.join()
    wait_until(lambda: all(map(is_gone, workers)))
    (tmp_path / "go").touch()  # the candidates of the workers are free, and train at once
    monkeypatch.setenv("WAIT_FOR", "")  # set by the search, and given back
    search_waiting(tmp_path, 1)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert sorted(trial.params["C"] for trial in complete) == [0.01, 0.1, 1.0, 10.0]


@pytest.mark.slow
@pytest.mark.parametrize("url", [False, True])
def test_quick_run_of_the_benchmark(tmp_path, url):
    options = ["--url", sqlite(tmp_path), "--only", "overhead"] if url else []
    done = run_module("benchmarks.costs.search", "--quick", *options)
    assert done.returncode == 0, done.stderr
    *_, budgets = done.stdout.strip().split("\n\n")
    values = dict(line.split(": ", 1) for line in budgets.splitlines())
    assert len(values) == (1 if url else 7)
    for kind in [] if url else ["sqlite", "journal"]:
        assert values[f"{kind}, distinct minima"].startswith("6.00")
        assert values[f"{kind}, minima found twice"].startswith("0.00")
    assert (tmp_path / "minima.db").exists() == url

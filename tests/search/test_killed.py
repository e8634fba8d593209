"""A study that two processes share loses nothing, though one of them is killed repeatedly."""

import os
import signal
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from benchmarks.costs.engines import on_dask, on_ray
from relflat_sk import FlatMinimaSearch
from relflat_sk.search._claims import is_cut_short, is_gone
from relflat_sk.search._study import open_storage
from tests.processes import forkserver, run_module

N_TRIALS = 30
EVERY = 6  # finished trials between two kills
N_KILLS = N_TRIALS // EVERY - 2  # there is enough left to do after the last one
SPACES = {
    "grid": {"C": np.geomspace(0.2, 1.0, N_TRIALS).tolist()},
    "draws": {"C": FloatDistribution(0.2, 1.0)},
}


class Slow(LogisticRegression):
    """Takes at least a third of a second, so that two processes need half a minute for 180."""

    seconds = 1 / 3

    def fit(self, X, y):
        time.sleep(self.seconds)
        return super().fit(X, y)


class Brief(Slow):
    """Takes as long as the kills take to be noticed, on a machine however busy."""

    seconds = 0.05


def make_search(storage, space, model=LogisticRegression, n_trials=N_TRIALS):
    return FlatMinimaSearch(
        model(max_iter=1000),
        SPACES[space],
        n_trials=n_trials,
        storage=storage,
        study_name="sweep",
        refit=False,
        random_state=0,
    )


def work(make_storage, *arguments):
    # the other process can hold what is left, and die of it: then this one comes again
    make_search(make_storage(), *arguments).fit(*load_iris(return_X_y=True))


def begin(context, *arguments):
    worker = context.Process(target=work, args=arguments)
    worker.start()
    return worker


def count(study):
    return sum(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))


def search_and_kill(is_due, make_storage, *arguments):
    """Search in two processes, kill them in turns whenever a kill is due, and start them again.

    Returns the study and the number of kills.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    context = forkserver()
    study = optuna.create_study(storage=open_storage(make_storage()), study_name="sweep")
    workers = [begin(context, make_storage, *arguments) for _ in range(2)]
    n_killed = 0
    while any(worker.exitcode is None for worker in workers):
        turn = n_killed % 2
        if is_due(n_killed, count(study)):
            os.kill(workers[turn].pid, signal.SIGKILL)
            workers[turn].join()
            assert workers[turn].exitcode == -signal.SIGKILL
            workers[turn] = begin(context, make_storage, *arguments)
            n_killed += 1
        time.sleep(0.05)
    assert [worker.exitcode for worker in workers] == [0, 0]
    return study, n_killed


def assert_each_once(study, n_trials):
    minima = [trial for trial in study.trials if trial.state == TrialState.COMPLETE]
    assert len(minima) == n_trials
    assert len({trial.params["C"] for trial in minima}) == n_trials
    # all else is what was killed, or withdrawn
    assert all(is_cut_short(trial) for trial in study.trials if trial not in minima)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_storage", "space"),
    [("sqlite", "grid"), ("journal", "draws"), ("postgresql", "draws")],
    indirect=["make_storage"],
)
def test_two_processes_one_of_which_is_killed(make_storage, space):
    def is_due(n_killed, n_minima):
        return n_killed < N_KILLS and n_minima >= EVERY * (n_killed + 1)

    study, n_killed = search_and_kill(is_due, make_storage, space, Brief)
    assert n_killed == N_KILLS
    assert_each_once(study, N_TRIALS)
    # and they are the candidates that one process would have had
    if space == "grid":
        found = study.get_trials(states=(TrialState.COMPLETE,))
        assert sorted(trial.params["C"] for trial in found) == SPACES["grid"]["C"]
    table = make_search(make_storage(), space, Brief).fit(*load_iris(return_X_y=True)).minima_
    assert len(table) == N_TRIALS


@pytest.mark.scale
def test_200_minima_in_postgresql_with_a_kill_every_7_s(postgresql):
    begun = time.monotonic()

    def is_due(n_killed, n_minima):
        return n_minima < 180 and time.monotonic() - begun > 7 * (n_killed + 1)

    study, n_killed = search_and_kill(is_due, partial(str, postgresql.url), "draws", Slow, 200)
    assert n_killed >= 4
    assert_each_once(study, 200)


class Waits(LogisticRegression):
    """Trains once a file exists, which an environment variable names."""

    def fit(self, X, y):
        while not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.1)
        return super().fit(X, y)


def search_waiting(folder, n_jobs, context=nullcontext):
    os.environ["WAIT_FOR"] = str(folder / "go")
    search = FlatMinimaSearch(
        Waits(max_iter=1000),
        {"C": [0.3, 0.5, 1.0, 2.0]},
        n_jobs=n_jobs,
        refit=False,
        storage=folder / "minima.db",
        study_name="sweep",
        random_state=0,
    )
    with context():
        search.fit(*load_iris(return_X_y=True))


ENGINES = {
    "joblib": ("joblib", nullcontext),
    "dask": ("distributed", on_dask),
    "ray": ("ray", on_ray),
}


def wait_until(condition):
    """Wait until something is true, for two minutes on a machine however slow."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(condition)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers notice the end of their parent on posix")
@pytest.mark.parametrize(
    "engine", ["joblib", *(pytest.param(name, marks=pytest.mark.scale) for name in ("dask", "ray"))]
)
def test_workers_end_with_the_main_process(engine, tmp_path, monkeypatch):
    """Also those of a cluster of dask or ray that the main process has started."""
    module, context = ENGINES[engine]
    pytest.importorskip(module, reason=f"needs the extra {engine}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(storage=open_storage(tmp_path / "minima.db"), study_name="sweep")
    main = forkserver().Process(target=search_waiting, args=(tmp_path, 2, context))
    main.start()
    wait_until(lambda: len(study.get_trials(states=(TrialState.RUNNING,))) == 2)
    workers = [trial.user_attrs["process"] for trial in study.trials]
    assert main.pid not in [process_id for _, process_id, _, _ in workers]
    main.kill()
    main.join()
    begun = time.monotonic()
    wait_until(lambda: all(map(is_gone, workers)))
    assert time.monotonic() - begun < 10
    (tmp_path / "go").touch()  # the candidates of the workers are free, and train at once
    monkeypatch.setenv("WAIT_FOR", "")  # set by the search, and given back
    search_waiting(tmp_path, 1)
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    assert sorted(trial.params["C"] for trial in complete) == [0.3, 0.5, 1.0, 2.0]


@pytest.mark.slow
@pytest.mark.parametrize("url", [pytest.param(False, marks=pytest.mark.scale), True])
def test_quick_run_of_the_benchmark(tmp_path, url):
    options = ["--url", f"sqlite:///{tmp_path / 'minima.db'}", "--only", "overhead"] if url else []
    done = run_module("benchmarks.costs.search", "--quick", *options)
    assert done.returncode == 0, done.stderr
    *_, budgets = done.stdout.strip().split("\n\n")
    values = dict(line.split(": ", 1) for line in budgets.splitlines())
    assert len(values) == (1 if url else 7)
    for kind in [] if url else ["sqlite", "journal"]:
        assert values[f"{kind}, distinct minima"].startswith("6.00")
        assert values[f"{kind}, minima found twice"].startswith("0.00")
    assert (tmp_path / "minima.db").exists() == url

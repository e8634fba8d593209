"""A study that processes share loses nothing, though they are killed while they train."""

import os
import signal
import time
from contextlib import nullcontext
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
from tests.processes import forkserver

N_PROCESSES, N_TRIALS = 4, 20
DUE = [5, 10]  # how many trials are finished when a process is killed; enough is left to do
SPACES = {
    "grid": {"C": np.geomspace(0.2, 1.0, N_TRIALS).tolist()},
    "draws": {"C": FloatDistribution(0.2, 1.0)},
}


class Brief(LogisticRegression):
    """Takes longer than the kills take to be noticed, on a machine however busy."""

    def fit(self, X, y):
        time.sleep(0.2)
        return super().fit(X, y)


def search(storage, space):
    return FlatMinimaSearch(
        Brief(max_iter=1000),
        SPACES[space],
        n_trials=N_TRIALS,
        storage=storage,
        study_name="sweep",
        refit=False,
        random_state=0,
    ).fit(*load_iris(return_X_y=True))


def work(start, make_storage, space):
    if start is not None:
        start.wait(600)
    # another process can hold what is left, and die of it: then this one comes again
    search(make_storage(), space)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_storage", "space"),
    [("sqlite", "grid"), ("journal", "draws"), ("postgresql", "draws")],
    indirect=["make_storage"],
)
def test_four_processes_two_of_which_are_killed(make_storage, space):
    """All begin at the same moment, with no study and no file before."""
    context = forkserver()

    def begin(start=None):
        worker = context.Process(target=work, args=(start, make_storage, space))
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
        while len(minima()) < due:
            assert any(worker.exitcode is None for worker in workers)
            time.sleep(0.05)
        os.kill(workers[turn].pid, signal.SIGKILL)
        workers[turn].join()
        assert workers[turn].exitcode == -signal.SIGKILL
        workers[turn] = begin()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * N_PROCESSES
    found = [trial.params["C"] for trial in minima()]
    assert len(found) == len(set(found)) == N_TRIALS
    # and they are the candidates that one process would have had
    assert space == "draws" or sorted(found) == SPACES["grid"]["C"]
    # all else is what was killed, or withdrawn
    others = [trial for trial in study.trials if trial.state != TrialState.COMPLETE]
    assert all(map(is_cut_short, others))
    assert len(search(make_storage(), space).minima_) == N_TRIALS


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

"""Searches on the workers of dask and ray, on clusters of this machine; ray: `make test-scale`."""

import logging
import os
import signal
import time
from importlib import import_module
from multiprocessing.forkserver import ensure_running

import numpy as np
import pytest
from joblib import parallel_config
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    register_measure,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._names import _REGISTERED
from relflat_sk.search._claims import is_cut_short, this_process
from relflat_sk.search._workers import Sweep
from tests.data_kinds import KINDS
from tests.processes import forkserver
from tests.search.test_claims import Dies

pytestmark = pytest.mark.filterwarnings("default")  # of the engines

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
CHOICES = np.geomspace(0.01, 1.0, 10).tolist()


def load():
    """Import the library in a worker, so that both workers take part in short searches."""
    import_module("tests.search.test_clusters")


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    config = pytest.importorskip("dask.config")
    forkserver()
    ensure_running()  # dask would let it import less
    with (
        config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.run(load)
        yield {"backend": "dask", "client": client}


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray", reason="needs the extra ray")
    from ray.util.joblib import register_ray

    register_ray()
    ray.init(
        num_cpus=2,
        resources={"slot": 5},
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    ray.get([ray.remote(load).remote() for _ in range(2)])
    yield {"backend": "ray"}
    ray.shutdown()


@pytest.fixture(params=["dask", pytest.param("ray", marks=pytest.mark.scale)])
def engine(request):
    """The arguments of joblib's context."""
    found = request.getfixturevalue(request.param)
    if request.param == "dask":  # a worker that the test before has killed is replaced first
        found["client"].wait_for_workers(2, timeout=300)
    return found


class Slow(LogisticRegression):
    def fit(self, X, y):
        time.sleep(0.15)
        return super().fit(X, y)


def make_search(estimator=None, **arguments):
    given = {"n_jobs": 2, "depth_band": None, "random_state": 0} | arguments
    return FlatMinimaSearch(estimator or Slow(max_iter=1000), {"C": CHOICES}, **given)


def weight(model, X, y):
    return float(np.square(model.coef_).sum())


@pytest.fixture
def registered():
    register_measure("registered", lambda model, X, y: 2 * weight(model, X, y))
    yield "registered"
    del _REGISTERED["registered"]


def test_no_minimum_is_lost_and_none_is_double_if_a_worker_is_killed(engine, tmp_path):
    killed = []

    def kill(study, trial):
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        if len(study.get_trials(deepcopy=False)) > 4 and running and not killed:
            killed.append(running[-1].number)
            os.kill(running[-1].user_attrs["process"][1], signal.SIGKILL)

    with parallel_config(**engine):
        search = make_search(callbacks=[kill], storage=tmp_path / "minima.db").fit(X, Y)
    trials = search.study_.trials
    minima = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert len(killed) == 1
    # on a busy machine, a trial may have ended before the signal came
    assert trials[killed[0]] in minima or "killed" in trials[killed[0]].user_attrs
    assert sorted(trial.params["C"] for trial in minima) == CHOICES
    assert all(is_cut_short(trial) for trial in trials if trial not in minima)
    processes = [tuple(trial.user_attrs["process"][:3]) for trial in minima]
    assert len(set(processes)) >= 2
    assert tuple(this_process()[:3]) not in processes


def test_the_result_is_that_of_one_process_and_data_are_sent_once(engine, registered, monkeypatch):
    pickled, getstate = [], Sweep.__getstate__
    monkeypatch.setattr(Sweep, "__getstate__", lambda self: pickled.append(1) or getstate(self))
    trials = []
    arguments = {
        "measure": ["relative_flatness", weight, registered],
        "callbacks": [lambda *_: trials.append(1)],
    }
    fitted = []
    with parallel_config(**engine), monkeypatch.context() as patch:
        patch.setattr(LogisticRegression, "fit", lambda *_: fitted.append(1))  # in this process
        found = make_search(LogisticRegression(max_iter=1000), **arguments).fit(X, Y)
    assert not fitted  # the best one came back from its worker
    assert len(pickled) == 1
    assert len(trials) == len(CHOICES)
    alone = make_search(LogisticRegression(max_iter=1000), **arguments, n_jobs=None).fit(X, Y)
    for name in ("param_C", "relative_flatness", "weight", registered, "train_loss", "rank"):
        assert found.minima_[name].tolist() == alone.minima_[name].tolist()
    np.testing.assert_array_equal(found.predict(X), alone.predict(X))


def test_of_killed_workers_only_the_culprit_is_lost(engine):
    search = FlatMinimaSearch(
        Dies(max_iter=1000), {"C": [1.0, 0.01, 0.1]}, n_jobs=2, depth_band=None, random_state=0
    )
    with parallel_config(**engine), pytest.warns(FlatnessWarning, match="1 of 3 candidates are no"):
        search.fit(X, Y)
    reasons = search.minima_.set_index("param_C")["reason"]
    assert "the process that trained was killed twice" in reasons[1.0]
    assert (reasons.drop(1.0) == "").all()


def test_an_error_of_a_worker_is_that_of_the_search(engine, tmp_path):
    wrong = X.copy()
    wrong[0, 0] = np.nan
    given = {"storage": tmp_path / "minima.log", "study_name": "sweep"}
    search = make_search(LogisticRegression(max_iter=1000), **given)
    with (
        parallel_config(**engine),
        pytest.raises(RuntimeError, match="X_test and y_test cannot be evaluated: ValueError"),
    ):
        search.fit(X, Y, wrong, Y)
    with parallel_config(**engine):  # the cluster is as it was
        search.fit(X, Y)
    assert sorted(search.minima_["param_C"]) == CHOICES


@pytest.mark.parametrize("kind", ["memmap", "zarr", "stream"])
def test_data_that_are_not_in_memory_reach_the_workers(engine, kind, tmp_path):
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, max_epochs=50, verbose=0, iterator_train__shuffle=False,
        module__hidden_layer_sizes=(4,), module__n_features=4, module__n_outputs=3,
    )  # fmt: skip
    space = {"lr": [0.02, 0.05]}
    tables = []
    for data, n_jobs in ((KINDS[kind](tmp_path, X, Y), 2), ((X, Y), None)):
        search = FlatMinimaSearch(net, space, goal=0.9, n_jobs=n_jobs, random_state=0)
        with parallel_config(**engine):
            minima = search.fit(*data).minima_.set_index("param_lr")
        tables.append(minima.loc[space["lr"], ["relative_flatness", "train_loss"]])
    np.testing.assert_allclose(*tables, rtol=1e-5)


def test_grid_search_with_the_scorer(engine):
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, max_epochs=20, lr=0.05, verbose=0, random_state=0
    )
    grid = {"batch_size": [16, 75]}
    scorer = FlatnessScorer(at_minimum="warn", data="train")
    with parallel_config(**engine):
        found = GridSearchCV(net, grid, scoring=scorer, cv=2, refit=False, n_jobs=2)
        found.fit(X, Y)
    alone = GridSearchCV(net, grid, scoring=scorer, cv=2, refit=False).fit(X, Y)
    scores = alone.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all()
    assert len(set(scores)) == 2
    np.testing.assert_allclose(found.cv_results_["mean_test_score"], scores, rtol=1e-5)


def fit_in_a_task(backend):
    if backend == "ray":
        import_module("ray.util.joblib").register_ray()
    with parallel_config(backend=backend):  # of dask by the worker's own client
        search = make_search(LogisticRegression(max_iter=1000)).fit(X, Y)
    n_complete = sum(trial.state == TrialState.COMPLETE for trial in search.study_.trials)
    return n_complete, search.minima_[["param_C", "relative_flatness"]]


def run_two_tasks(function, backend, client=None):
    """Call a function on both workers at the same time, and return its results."""
    if client is not None:
        return client.gather(client.map(function, [backend] * 2, pure=False))
    ray = import_module("ray")
    return ray.get([ray.remote(function).remote(backend) for _ in range(2)])


def test_searches_in_tasks_train_in_tasks(engine):
    """Both workers have one thread, or CPU, in which a search waits for its candidates."""
    alone = make_search(LogisticRegression(max_iter=1000), n_jobs=None).fit(X, Y)
    for n_complete, minima in run_two_tasks(fit_in_a_task, **engine):
        assert n_complete == len(CHOICES)
        assert minima.equals(alone.minima_[minima.columns])


def test_cross_validation_of_a_search_on_dask(dask):
    """scikit-learn fits the searches in tasks, which pass their candidates on as tasks."""
    search = make_search(LogisticRegression(max_iter=1000))
    with parallel_config(**dask):
        found = cross_val_score(search, X, Y, cv=2, n_jobs=2)
    assert found.tolist() == cross_val_score(search.set_params(n_jobs=1), X, Y, cv=2).tolist()

"""Searches in worker processes: of joblib, dask and ray, with classes and data of any place.

The clusters are on this machine; ray: `make test-scale`. Kills are in `test_kills.py`.
"""

from functools import cache
from importlib import import_module

import numpy as np
import pytest
from joblib import parallel_config
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import shuffle
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss
from tests.data_kinds import KINDS
from tests.processes import run_script

pytestmark = pytest.mark.filterwarnings("default")  # of the engines

X, Y = shuffle(*load_iris(return_X_y=True), random_state=0)
X = X.astype(np.float32)
CHOICES = [0.2, 0.4, 0.6, 0.8, 1.0]


def load():
    """Import the library in a worker, so that both workers take part in short searches."""
    import_module("tests.search.test_processes")


@pytest.fixture(scope="module")
def dask(dask_client):
    dask_client.run(load)
    return {"backend": "dask", "client": dask_client}


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


CLUSTERS = ["dask", pytest.param("ray", marks=pytest.mark.scale)]


@pytest.fixture(params=["loky", "multiprocessing", *CLUSTERS])
def engine(request):
    """The arguments of joblib's context."""
    if request.param in {"loky", "multiprocessing"}:  # the latter in rounds
        return {"backend": request.param}
    found = request.getfixturevalue(request.param)
    if request.param == "dask":  # a worker that the test before has killed is replaced first
        found["client"].wait_for_workers(2, timeout=300)
    return found


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return request.getfixturevalue(request.param)


def make_search(estimator=None, choices=CHOICES, **arguments):
    given = {"n_jobs": 2, "random_state": 0} | arguments
    return FlatMinimaSearch(estimator or LogisticRegression(max_iter=1000), {"C": choices}, **given)


def make_net(module=None, **arguments):
    sizes = {f"module__{name}": n for name, n in (("n_features", 4), ("n_outputs", 3))}
    given = {"max_epochs": 10, "verbose": 0} | (sizes if module is None else {"module": module})
    return RelativeFlatnessRegularizedClassifier(flatness_weight=0, **given | arguments)


def weight(model, X, y):
    return float(np.square(model.coef_).sum())


def test_the_result_is_that_of_one_process(engine, monkeypatch):
    trials, trainings = [], []

    def size(model, X, y):  # which no worker can import
        return weight(model, X, y)

    # multiprocessing pickles functions by their name
    own_measure = weight if engine["backend"] == "multiprocessing" else size
    arguments = {"measure": ["relative_flatness", own_measure]}
    with parallel_config(**engine), monkeypatch.context() as patch:
        if engine["backend"] != "multiprocessing":  # whose workers are forks of this process
            patch.setattr(LogisticRegression, "fit", lambda *_: trainings.append(1))
        found = make_search(**arguments).fit(X, Y, callbacks=[lambda *_: trials.append(1)])
    assert not trainings  # all came back from their workers
    assert len(trials) == len(CHOICES)
    alone = make_search(**arguments, n_jobs=None).fit(X, Y)
    for name in ("param_C", "relative_flatness", own_measure.__name__, "train_loss", "rank"):
        assert found.minima_[name].tolist() == alone.minima_[name].tolist()
    np.testing.assert_array_equal(found.predict(X), alone.predict(X))


def test_nets_come_back_with_weights_history_and_flatness():
    net = make_net(lr=0.05, callbacks=[StopAtLoss(0.5)], max_epochs=60)
    alone, found = (
        FlatMinimaSearch(net, {"batch_size": [16, 32]}, n_jobs=n, random_state=0).fit(X, Y)
        for n in (None, 2)
    )
    np.testing.assert_array_equal(found.predict_proba(X), alone.predict_proba(X))
    best, other = found.best_estimator_, alone.best_estimator_
    assert best.history[:, "train_loss"] == other.history[:, "train_loss"]
    assert best.converged_
    assert best.relative_flatness_ == other.relative_flatness_


def test_an_error_of_a_worker_is_that_of_the_search(engine, tmp_path):
    wrong = X.copy()
    wrong[0, 0] = np.nan
    search = make_search(storage=tmp_path / "minima.log", study_name="sweep")
    with parallel_config(**engine):
        with pytest.raises(RuntimeError, match="X_test and y_test cannot be evaluated: ValueError"):
            search.fit(X, Y, wrong, Y)
        search.fit(X, Y)  # the cluster is as it was
    assert sorted(search.minima_["param_C"]) == CHOICES


def fit_in_a_task(backend):
    if backend == "ray":
        import_module("ray.util.joblib").register_ray()
    with parallel_config(backend=backend):  # of dask by the worker's own client
        search = make_search().fit(X, Y)
    n_complete = sum(trial.state == TrialState.COMPLETE for trial in search.study_.trials)
    return n_complete, search.minima_[["param_C", "relative_flatness"]]


def run_two_tasks(function, backend, client=None):
    """Call a function on both workers at the same time, and return its results."""
    if client is not None:
        return client.gather(client.map(function, [backend] * 2, pure=False))
    ray = import_module("ray")
    return ray.get([ray.remote(function).remote(backend) for _ in range(2)])


def test_searches_in_tasks_train_in_tasks(cluster):
    """Both workers have one thread, or CPU, in which a search waits for its candidates."""
    alone = make_search(n_jobs=None).fit(X, Y)
    for n_complete, minima in run_two_tasks(fit_in_a_task, **cluster):
        assert n_complete == len(CHOICES)
        assert minima.equals(alone.minima_[minima.columns])


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("loky", "memmap"),
        ("loky", "loader"),
        ("dask", "stream"),
        pytest.param("ray", "memmap", marks=pytest.mark.scale),
    ],
    indirect=["engine"],
)
# nets that were fitted on data sets know no classes, so that their probabilities have no mean
@pytest.mark.filterwarnings("ignore:the search predicts with the flattest minimum only")
def test_data_of_all_kinds_reach_the_workers(engine, kind, tmp_path):
    given = KINDS[kind](tmp_path, X, Y)
    batch_size = 13 if kind == "loader" else 20
    with parallel_config(**engine):
        found = table_of(given, batch_size, n_jobs=2)
    np.testing.assert_allclose(found, table_of_arrays(batch_size), rtol=1e-5)


def table_of(data, batch_size, n_jobs=None):
    net = make_net(
        batch_size=batch_size, module__hidden_layer_sizes=(4,), iterator_train__shuffle=False
    )
    space = {"lr": [0.05, 0.1]}
    search = FlatMinimaSearch(net, space, goal=0.9, n_jobs=n_jobs, random_state=0).fit(*data)
    minima = search.minima_.set_index("param_lr")
    return minima.loc[space["lr"], ["relative_flatness", "train_loss"]]


@cache
def table_of_arrays(batch_size):
    return table_of((X, Y), batch_size)


SCRIPT = """
from sklearn.datasets import load_iris
from torch import nn
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier

class Net(nn.Sequential):
    def __init__(self, n_features, n_outputs, activation=nn.ReLU):
        super().__init__(nn.Linear(n_features, 8), activation(), nn.Linear(8, n_outputs))

def search(n_jobs):
    net = RelativeFlatnessRegularizedClassifier(Net, max_epochs=10, verbose=0)
    space = {"module__activation": [nn.Tanh, lambda: nn.LeakyReLU(0.2)], "lr": lambda trial: 0.01}
    search = FlatMinimaSearch(net, space, n_jobs=n_jobs, random_state=0)
    return search.fit(*load_iris(return_X_y=True))

if __name__ == "__main__":
    one, two = search(1), search(2)
    assert one.minima_["relative_flatness"].tolist() == two.minima_["relative_flatness"].tolist()
    assert type(two.best_estimator_.module_) is Net
    print("done")
"""


@pytest.mark.slow
def test_workers_train_what_a_script_defines(tmp_path):
    """Fresh interpreters."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run_script(script)
    assert done.stdout.endswith("done\n"), done.stderr


def local_nets():
    """Nets of classes that no other process can import: ours, with an instance, of skorch."""
    width = 8

    class Net(nn.Sequential):
        def __init__(self, n_features=4, n_outputs=3):
            super().__init__(nn.Linear(n_features, width), nn.ReLU(), nn.Linear(width, n_outputs))

    class Loss(nn.CrossEntropyLoss):
        pass

    plain = NeuralNetClassifier(Net, criterion=Loss, max_epochs=60, lr=0.01, verbose=0)
    return [make_net(Net, lr=0.05), make_net(Net(), lr=0.05), plain]


def test_workers_train_what_a_function_defines():
    """A pipeline with a function, and nets as its choices."""
    nets = local_nets()
    pipeline = make_pipeline(FunctionTransformer(lambda x: 2 * x), nets[0])
    space, tables, predicted = {pipeline.steps[1][0]: nets}, [], []
    for n_jobs in (1, 2):
        search = FlatMinimaSearch(pipeline, space, n_jobs=n_jobs, goal=1.0, random_state=0)
        minima = search.fit(X, Y).minima_.sort_values("relative_flatness")
        tables.append(minima["relative_flatness"].tolist())
        predicted.append([search.get_estimator(one).predict_proba(X) for one in minima["trial"]])
    assert tables[0] == tables[1]
    assert len(tables[0]) == len(nets)
    np.testing.assert_array_equal(*predicted)

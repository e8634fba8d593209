"""Searches in workers of joblib, dask and ray, and in threads: results are those of one by one.

The clusters are on this machine; ray: `make test-scale`. Kills are in `test_kills.py`.
"""

import pickle
import threading
from functools import cache
from importlib import import_module

import numpy as np
import optuna
import pytest
import torch
from joblib import parallel_config
from optuna.pruners import NopPruner
from optuna.trial import TrialState
from sklearn.datasets import load_digits, load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import shuffle
from skorch import NeuralNetClassifier
from threadpoolctl import threadpool_info
from torch import nn

from relflat_sk import FlatMinimaSearch, MinimaObjective, RelativeFlatnessRegularizedClassifier
from relflat_sk._random import alone
from relflat_sk.search._task import isolated
from tests.data_kinds import KINDS
from tests.processes import run_script
from tests.search.examples import attributes_of

pytestmark = pytest.mark.filterwarnings("default")  # of the engines

X, Y = shuffle(*load_iris(return_X_y=True), random_state=0)
X = X.astype(np.float32)
DIGITS, OF_DIGITS = (values[:300] for values in load_digits(return_X_y=True))
DIGITS = (DIGITS / 16).astype(np.float32)
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
    import_module("ray.util.joblib").register_ray()
    quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
    ray.init(num_cpus=2, resources={"slot": 5}, **quiet)
    ray.get([ray.remote(load).remote() for _ in range(2)])
    yield {"backend": "ray"}
    ray.shutdown()


CLUSTERS = ["dask", pytest.param("ray", marks=pytest.mark.scale)]


@pytest.fixture(params=["loky", "multiprocessing", *CLUSTERS])
def engine(request):
    if request.param in {"loky", "multiprocessing"}:  # the latter in rounds
        return {"backend": request.param}
    found = request.getfixturevalue(request.param)
    if request.param == "dask":  # a worker that the test before has killed is replaced first
        found["client"].wait_for_workers(2, timeout=300)
    return found


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return request.getfixturevalue(request.param)


def make_search(estimator=None, space=None, **arguments):
    estimator = LogisticRegression(max_iter=1000) if estimator is None else estimator
    space = {"C": CHOICES} if space is None else space
    return FlatMinimaSearch(estimator, space, **{"n_jobs": 2, "random_state": 0} | arguments)


def make_net(module, **arguments):
    return RelativeFlatnessRegularizedClassifier(module, **{"verbose": 0} | arguments)


# -- in processes ---------------------------------------------------------------------------------


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
    single = make_search(**arguments, n_jobs=None).fit(X, Y)
    for name in ("param_C", "relative_flatness", own_measure.__name__, "train_loss", "rank"):
        assert found.minima_[name].tolist() == single.minima_[name].tolist()
    np.testing.assert_array_equal(found.predict(X), single.predict(X))


class Dropped(nn.Sequential):
    """A network whose weights, batches and dropout are random."""

    def __init__(self, n_features, n_outputs, width=32):
        layers = nn.Linear(n_features, width), nn.ReLU(), nn.Dropout(0.3)
        super().__init__(*layers, nn.Linear(width, n_outputs))


@pytest.mark.usefixtures("two_threads")
def test_processes_give_the_same_bits():
    """And draw the same two of three candidates; networks are wide enough for two threads."""
    net = make_net(Dropped, batch_size=150, module__width=2000, max_epochs=3)
    space, held_out = {"random_state": [0, 1, 2]}, (DIGITS[:50], OF_DIGITS[:50])
    single, shared = (
        make_search(net, space, n_trials=2, goal=0.7, n_jobs=n_jobs)
        .fit(DIGITS, OF_DIGITS, *held_out)
        for n_jobs in (1, 2)
    )  # fmt: skip
    expected, found = (
        search.minima_.drop(columns=["seconds", "trial"]).to_dict("records")
        for search in (single, shared)
    )
    assert found == expected
    assert len(found) == 2
    assert shared.best_params_ == single.best_params_
    np.testing.assert_array_equal(shared.predict_proba(DIGITS), single.predict_proba(DIGITS))
    best, other = shared.best_estimator_, single.best_estimator_
    assert best.history[:, "train_loss"] == other.history[:, "train_loss"]
    assert best.relative_flatness_ == other.relative_flatness_
    assert best.converged_
    # its study does not live in a file that is gone
    pickle.loads(pickle.dumps(shared)).study_.get_trials()


def test_an_error_of_a_worker_is_that_of_the_search(engine, tmp_path):
    wrong = np.where(np.arange(X.size).reshape(X.shape) == 0, np.nan, X)
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
    single = make_search(n_jobs=None).fit(X, Y)
    for n_complete, minima in run_two_tasks(fit_in_a_task, **cluster):
        assert n_complete == len(CHOICES)
        assert minima.equals(single.minima_[minima.columns])


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
    batch_size = 13 if kind == "loader" else 20
    with parallel_config(**engine):
        found = table_of(KINDS[kind](tmp_path, X, Y), batch_size, n_jobs=2)
    np.testing.assert_allclose(found, table_of_arrays(batch_size), rtol=1e-5)


def table_of(data, batch_size, n_jobs=None):
    net = RelativeFlatnessRegularizedClassifier(
        module__n_features=4, module__n_outputs=3, module__hidden_layer_sizes=(4,), max_epochs=10,
        flatness_weight=0, batch_size=batch_size, iterator_train__shuffle=False, verbose=0,
    )  # fmt: skip
    space = {"lr": [0.05, 0.1]}
    minima = make_search(net, space, goal=0.9, n_jobs=n_jobs).fit(*data).minima_
    return minima.set_index("param_lr").loc[space["lr"], ["relative_flatness", "train_loss"]]


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
    return [make_net(module, lr=0.05, max_epochs=10) for module in (Net, Net())] + [plain]


def test_workers_train_what_a_function_defines():
    """A pipeline with a function, and nets as its choices."""
    nets = local_nets()
    pipeline = make_pipeline(FunctionTransformer(lambda x: 2 * x), nets[0])
    tables, predicted = [], []
    for n_jobs in (1, 2):
        search = make_search(pipeline, {pipeline.steps[1][0]: nets}, n_jobs=n_jobs, goal=1.0)
        minima = search.fit(X, Y).minima_.sort_values("relative_flatness")
        tables.append(minima["relative_flatness"].tolist())
        predicted.append([search.get_estimator(one).predict_proba(X) for one in minima["trial"]])
    assert tables[0] == tables[1]
    assert len(tables[0]) == len(nets)
    np.testing.assert_array_equal(*predicted)


# -- in threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("random_state", [None, 0])
def test_jobs_of_a_study_give_the_same_table(random_state):
    tables, seeds = [], list(range(4))
    for n_jobs in (1, 4):
        net, space = make_net(Dropped, max_epochs=3), {"random_state": seeds}
        objective = MinimaObjective(net, DIGITS, OF_DIGITS, space, random_state=random_state)
        study = optuna.create_study(pruner=NopPruner())
        for seed in seeds:
            study.enqueue_trial({"random_state": seed})
        study.optimize(objective, n_trials=4, n_jobs=n_jobs)
        records = {trial.params["random_state"]: attributes_of(trial) for trial in study.trials}
        for name in ("seconds", "seed", "details", "owner"):  # which may differ
            for record in records.values():
                record.pop(name, None)
        tables.append(records)
    assert tables[0] == tables[1]


def n_threads():
    return {torch.get_num_threads(), *(one["num_threads"] for one in threadpool_info())}


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_is_a_candidates_own():
    seen = set()

    class Spy(Dropped):
        def forward(self, x):
            seen.update(n_threads())
            return super().forward(x)

    arguments = make_net(Spy, max_epochs=1), DIGITS, OF_DIGITS, {"lr": [0.01]}
    objective, study = MinimaObjective(*arguments), optuna.create_study()
    study.optimize(objective, 1)
    assert seen == {1}
    assert n_threads() == {2}
    seen.clear()
    objective.get_estimator(study.trials[0])  # trained again
    assert seen == {1}
    # in nested contexts, and after an error
    with pytest.raises(RuntimeError, match="in training"), isolated(1):  # noqa: PT012
        with isolated(2), isolated(None):
            assert torch.get_num_threads() == 2
        assert n_threads() == {1}
        raise RuntimeError("in training")
    assert n_threads() == {2}
    seen.clear()
    MinimaObjective(*arguments, n_threads=None)(optuna.trial.FixedTrial({"lr": 0.01}))
    assert seen == {2}


def test_a_search_inside_of_a_fit_and_a_candidate_do_not_wait_for_each_other():
    """Each holds what the other one needs."""
    fits, trains = threading.Barrier(2, timeout=60), []

    def fit():
        with alone():
            fits.wait()
            with isolated(None):
                trains.append("the search")

    def candidate():
        with isolated(None):
            fits.wait()
            with alone():
                trains.append("the candidate")

    threads = [threading.Thread(target=one, daemon=True) for one in (fit, candidate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert trains == ["the search", "the candidate"]

"""Searches in worker processes: of joblib, dask and ray, with classes and data of any place.

The clusters are on this machine; ray: `make test-scale`.
"""

import logging
import os
import pickle
import runpy
import signal
import threading
import time
from contextlib import nullcontext, suppress
from functools import cache
from importlib import import_module
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
from joblib import parallel_config
from optuna.trial import TrialState
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import shuffle
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from benchmarks.costs.engines import on_dask, on_ray
from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.search import _workers
from relflat_sk.search._claims import is_cut_short, is_gone, this_process
from relflat_sk.search._study import open_storage
from relflat_sk.search._workers import ByPath, Sweep
from tests.data_kinds import KINDS
from tests.processes import forkserver
from tests.search.examples import Slow

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the engines
    # the network of a worker that was killed is lost; the last filter counts
    pytest.mark.filterwarnings("ignore:the search predicts with the mean of 4 of 5 networks"),
]

X, Y = shuffle(*load_iris(return_X_y=True), random_state=0)
X = X.astype(np.float32)
CHOICES = [0.2, 0.4, 0.6, 0.8, 1.0]


def load():
    """Import the library in a worker, so that both workers take part in short searches."""
    import_module("tests.search.test_processes")


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


CLUSTERS = ["dask", pytest.param("ray", marks=pytest.mark.scale)]


@pytest.fixture(params=["loky", *CLUSTERS])
def engine(request):
    """The arguments of joblib's context."""
    if request.param == "loky":
        return {"backend": "loky"}
    found = request.getfixturevalue(request.param)
    if request.param == "dask":  # a worker that the test before has killed is replaced first
        found["client"].wait_for_workers(2, timeout=300)
    return found


@pytest.fixture(params=CLUSTERS)
def cluster(request):
    return request.getfixturevalue(request.param)


class Dies(LogisticRegression):
    """Kills its process, as the kernel does when memory runs out."""

    def fit(self, X, y):
        if self.C == 1.0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fit(X, y)


FITTED = set()


class DiesOnce(LogisticRegression):
    """Kills its process, the first that trains a second candidate, unless one was killed."""

    def __init__(self, file=None, *, C=1.0, max_iter=1000):
        super().__init__(C=C, max_iter=max_iter)
        self.file = file

    def fit(self, X, y):
        if self.file in FITTED:
            with suppress(FileExistsError):
                self.file.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        FITTED.add(self.file)
        return super().fit(X, y)


def make_search(estimator=None, choices=CHOICES, **arguments):
    given = {"n_jobs": 2, "random_state": 0} | arguments
    return FlatMinimaSearch(estimator or LogisticRegression(max_iter=1000), {"C": choices}, **given)


def make_net(module=None, **arguments):
    sizes = {f"module__{name}": n for name, n in (("n_features", 4), ("n_outputs", 3))}
    given = {"max_epochs": 10, "verbose": 0} | (sizes if module is None else {"module": module})
    return RelativeFlatnessRegularizedClassifier(flatness_weight=0, **given | arguments)


# -- what workers find -------------------------------------------------------------------------


def weight(model, X, y):
    return float(np.square(model.coef_).sum())


def test_the_result_is_that_of_one_process_and_data_are_sent_once(engine, monkeypatch):
    pickled, getstate = [], Sweep.__getstate__
    monkeypatch.setattr(Sweep, "__getstate__", lambda self: pickled.append(1) or getstate(self))
    trials, fitted = [], []

    def size(model, X, y):  # which no worker can import
        return weight(model, X, y)

    arguments = {"measure": ["relative_flatness", size]}
    count = {"callbacks": [lambda *_: trials.append(1)]}
    with parallel_config(**engine), monkeypatch.context() as patch:
        patch.setattr(LogisticRegression, "fit", lambda *_: fitted.append(1))  # in this process
        found = make_search(**arguments).fit(X, Y, **count)
    assert not fitted  # the best one came back from its worker
    assert len(pickled) == 1 or engine["backend"] == "loky"
    assert len(trials) == len(CHOICES)
    alone = make_search(**arguments, n_jobs=None).fit(X, Y)
    for name in ("param_C", "relative_flatness", "size", "train_loss", "rank"):
        assert found.minima_[name].tolist() == alone.minima_[name].tolist()
    np.testing.assert_array_equal(found.predict(X), alone.predict(X))


def test_no_minimum_is_lost_and_none_is_double_if_a_worker_is_killed(engine, tmp_path):
    search = make_search(DiesOnce(tmp_path / "killed"), storage=tmp_path / "minima.db")
    with parallel_config(**engine):
        search.fit(X, Y)
    trials = search.study_.trials
    minima = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    assert (tmp_path / "killed").exists()
    assert any("killed" in trial.user_attrs for trial in trials)
    assert sorted(trial.params["C"] for trial in minima) == CHOICES
    assert all(is_cut_short(trial) for trial in trials if trial not in minima)
    processes = [tuple(trial.user_attrs["process"][:3]) for trial in minima]
    assert len(set(processes)) >= 2  # that of the killed worker's first minimum, and others
    assert tuple(this_process()[:3]) not in processes


def test_a_worker_that_dies_between_two_candidates_is_replaced(monkeypatch, tmp_path):
    found = []

    def kill(study, trial):
        if not found:
            found.append(trial.user_attrs["process"][1])
            os.kill(found[0], signal.SIGKILL)

    # what it trained by then, if anything, is not told to the search
    give_up = _workers.give_up
    monkeypatch.setattr(
        _workers, "give_up", lambda *args, **kwargs: give_up(*args, **kwargs) and []
    )
    search = make_search(Slow(max_iter=1000), storage=tmp_path / "minima.log")
    assert sorted(search.fit(X, Y, callbacks=[kill]).minima_["param_C"]) == CHOICES
    assert found


def test_of_killed_workers_only_the_culprit_is_lost(engine):
    search = make_search(Dies(max_iter=1000), [1.0, 0.3, 0.5])
    with parallel_config(**engine), pytest.warns(FlatnessWarning, match="1 of 3 candidates are no"):
        search.fit(X, Y)
    reasons = search.minima_.set_index("param_C")["reason"]
    assert "the process that trained was killed twice" in reasons[1.0]
    assert (reasons.drop(1.0) == "").all()


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


def test_a_search_in_threads_finds_what_one_in_processes_finds():
    """Nested searches run so: scikit-learn's cross-validation fits them in processes."""
    alone = make_search(n_jobs=None).fit(X, Y).predict_proba(X)
    with parallel_config(backend="threading"):
        together = make_search().fit(X, Y).predict_proba(X)
    np.testing.assert_array_equal(together, alone)


def test_grid_search_with_the_scorer(cluster):
    net = make_net(max_epochs=20, lr=0.05, random_state=0)
    scorer = FlatnessScorer(non_minimum="warn", data="train")
    search = GridSearchCV(net, {"batch_size": [16, 75]}, scoring=scorer, cv=2, refit=False)
    scores = clone(search).fit(X, Y).cv_results_["mean_test_score"]
    with parallel_config(**cluster):
        found = search.set_params(n_jobs=2).fit(X, Y)
    assert np.isfinite(scores).all()
    assert len(set(scores)) == 2
    np.testing.assert_allclose(found.cv_results_["mean_test_score"], scores, rtol=1e-5)


def test_a_file_that_a_worker_does_not_reach_is_explained(monkeypatch, tmp_path):
    """As on another machine; here the file is moved before the first task."""
    train = _workers.train_in_processes

    def train_without_file(sweep, n_jobs, on_finished):
        sweep.file = tmp_path / "moved.db"
        train(sweep, n_jobs, on_finished)

    monkeypatch.setattr(_workers, "train_in_processes", train_without_file)
    match = r"the study's file .*moved.db is not on worker .*the URL of a database server"
    with pytest.raises(RuntimeError, match=match):
        make_search(storage=tmp_path / "minima.db").fit(X, Y)


def test_workers_that_died_are_replaced_before_others_train(monkeypatch):
    """joblib would train in this process while a cluster has a single worker."""
    counts = [1, 1, 2]
    pool = SimpleNamespace(effective_n_jobs=lambda n_jobs: counts.pop(0) if counts else 1)
    monkeypatch.setattr(_workers, "get_active_backend", lambda: (pool, 2))
    assert _workers._are_workers_back(2)
    assert not counts
    monkeypatch.setattr(_workers, "_REPLACED", 0)
    assert not _workers._are_workers_back(2)


# -- data that are not in memory ---------------------------------------------------------------


@pytest.fixture
def hdf5(tmp_path):
    """A file of h5py, open for reading."""
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("rows/x", data=X, chunks=(7, 3))
    with h5py.File(tmp_path / "rows.h5", "r") as file:
        yield file


@pytest.mark.parametrize(
    ("engine", "kind"),
    [*(("loky", kind) for kind in [*KINDS, "h5py"]), ("dask", "memmap"), ("dask", "stream"),
     pytest.param("ray", "memmap", marks=pytest.mark.scale)],
    indirect=["engine"],
)  # fmt: skip
def test_data_of_all_kinds_reach_the_workers(engine, kind, request, tmp_path):
    if kind == "h5py":
        given = request.getfixturevalue("hdf5")["rows/x"], Y
    else:
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


def sent(value):
    return pickle.loads(pickle.dumps(ByPath.wrap(value)))


def test_parts_of_a_mapped_file_are_sent_by_path(tmp_path):
    np.save(tmp_path / "rows.npy", np.arange(60, dtype=np.float32).reshape(12, 5))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for part in (np.s_[:], np.s_[3:7], np.s_[3], np.s_[::1, None]):
        assert len(pickle.dumps(ByPath.wrap(mapped[part]))) < 1000
        got = sent(mapped[part])
        assert isinstance(got, np.memmap)
        assert got.filename == mapped.filename
        np.testing.assert_array_equal(got, mapped[part])
    changed = np.load(mapped.filename, mmap_mode="c")
    changed[0, 0] = 7
    for value in (changed, mapped[:, 1], mapped[::2], X, [1, 2], None):
        assert ByPath.wrap(value) is value
    array = np.memmap(tmp_path / "rows", np.float64, "w+", offset=8, shape=(4, 3), order="F")
    array[:] = np.arange(12).reshape(4, 3)
    array.flush()
    got = sent(array)
    np.testing.assert_array_equal(got, array)
    assert got.mode == "r"
    assert got.flags.f_contiguous


def test_rows_of_h5py_are_opened_by_path(hdf5, tmp_path):
    got = sent(hdf5["rows/x"])
    assert (got.file.filename, got.file.mode, got.name) == (hdf5.filename, "r", "/rows/x")
    np.testing.assert_array_equal(got[:], X)
    h5py = import_module("h5py")
    for given in ({"mode": "w"}, {"mode": "w", "driver": "core", "backing_store": False}):
        with h5py.File(tmp_path / "new.h5", **given) as file:
            rows = file.create_dataset("x", data=X)
            with pytest.raises(ValueError, match=r"open for reading: h5py\.File\(path, 'r'\)"):
                make_search().fit(rows, Y)


# -- classes and functions of a script, a notebook, a function ---------------------------------

DEFINITIONS = """
import numpy as np
from sklearn.datasets import load_iris
from skorch.callbacks import Callback
from torch import nn
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier

class Net(nn.Module):
    def __init__(self, n_features, n_outputs, activation=nn.ReLU):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, 8), activation(), nn.Linear(8, n_outputs)
        )

    def forward(self, x):
        return self.layers(x)

class Counter(Callback):
    def on_epoch_end(self, net, **kwargs):
        self.count_ = getattr(self, "count_", 0) + 1
"""

SEARCH = """
def search(n_jobs):
    X, y = load_iris(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(Net, max_epochs=10, verbose=0, callbacks=[Counter])
    space = {
        "module__activation": [nn.Tanh, lambda: nn.LeakyReLU(0.2)],
        "lr": lambda trial: 0.01,  # not by number: processes take turns in any order
    }
    search = FlatMinimaSearch(net, space, n_jobs=n_jobs, random_state=0)
    return search.fit(X.astype(np.float32), y)

one, two = search(1), search(2)
assert one.minima_["relative_flatness"].tolist() == two.minima_["relative_flatness"].tolist()
assert type(two.best_estimator_.module_) is Net
assert dict(two.best_estimator_.callbacks_)["Counter"].count_ == 10
print("done")
"""

# in fresh processes, hashes have other seeds, and addresses differ
DESCRIBED = """
from joblib import Parallel, delayed
from tests.search.test_provenance import describe_many

assert Parallel(2)(delayed(describe_many)() for _ in range(2)) == [describe_many()] * 2
"""


class Waits(LogisticRegression):
    """Trains once a file exists, which an environment variable names."""

    def fit(self, X, y):
        while not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.1)
        return super().fit(X, y)


def search_waiting(folder, n_jobs, context=nullcontext, script=None):
    os.environ["WAIT_FOR"] = str(folder / "go")
    if script is not None:
        runpy.run_path(str(script), run_name="__main__")
    stored = {"storage": folder / "minima.db", "study_name": "sweep"}
    with context():
        make_search(Waits(max_iter=1000), n_jobs=n_jobs, refit=False, **stored).fit(X, Y)


def wait_until(condition):
    """Wait until something is true, for five minutes on a machine however slow."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(condition)


OF_MAIN = {
    "joblib": ("joblib", nullcontext),
    "dask": ("distributed", on_dask),
    "ray": ("ray", on_ray),
}


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers notice the end of their parent on posix")
@pytest.mark.parametrize(
    ("name", "of_script"),
    [
        ("joblib", False),
        pytest.param("joblib", True, marks=pytest.mark.scale),
        pytest.param("dask", False, marks=pytest.mark.scale),
        pytest.param("ray", False, marks=pytest.mark.scale),
    ],
)
def test_workers_train_what_a_script_defines_and_end_with_it(
    name, of_script, tmp_path, monkeypatch
):
    """Fresh interpreters; also those of a cluster that the main process has started."""
    module, context = OF_MAIN[name]
    pytest.importorskip(module, reason=f"needs the extra {name}")
    script = None
    if of_script:
        script = tmp_path / "script.py"
        guarded = indent(SEARCH + DESCRIBED, "    ")
        script.write_text(f'{DEFINITIONS}\nif __name__ == "__main__":\n{guarded}')
    study = optuna.create_study(storage=open_storage(tmp_path / "minima.db"), study_name="sweep")
    main = forkserver().Process(target=search_waiting, args=(tmp_path, 2, context, script))
    main.start()
    wait_until(lambda: main.exitcode or len(study.get_trials(states=(TrialState.RUNNING,))) == 2)
    # two of them where both have claimed a candidate, which one has withdrawn
    workers = {tuple(trial.user_attrs["process"]) for trial in study.trials}
    assert len(workers) == 2
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
    assert sorted(trial.params["C"] for trial in complete) == CHOICES


class Sleeps(LogisticRegression):
    """Is ended by the parent, but for the first candidate."""

    def fit(self, X, y):
        time.sleep(0 if CHOICES[0] == self.C else 600)
        return super().fit(X, y)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_workers(tmp_path):
    def press(study, trial):  # while the search waits for its workers
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    begun = time.monotonic()
    search = make_search(Sleeps(max_iter=1000), storage=tmp_path / "minima.log", study_name="sweep")
    with pytest.warns(FlatnessWarning, match="interrupted: the search ends with the 1 candidates"):
        search.fit(X, Y, callbacks=[press])
    assert time.monotonic() - begun < 300
    assert search.minima_["param_C"].tolist() == CHOICES[:1]
    assert not search.study_.get_trials(states=(TrialState.RUNNING,))


@pytest.mark.scale
def test_notebook_defines_module_callback_and_functions():
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(code) for code in (DEFINITIONS, SEARCH)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, kernel_name="python3", timeout=300).execute()
    outputs = [output for cell in notebook.cells for output in cell.outputs]
    assert "".join(output["text"] for output in outputs if output.name == "stdout") == "done\n"


def local_nets():
    """Nets of classes that no other process can import: ours, with an instance, of skorch."""
    width = 8

    class Net(nn.Module):
        def __init__(self, n_features=4, n_outputs=3):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(n_features, width), nn.ReLU(), nn.Linear(width, n_outputs)
            )

        def forward(self, x):
            return self.layers(x)

    class Loss(nn.CrossEntropyLoss):
        pass

    plain = NeuralNetClassifier(Net, criterion=Loss, max_epochs=60, lr=0.01, verbose=0)
    return [make_net(Net, lr=0.05), make_net(Net(), lr=0.05), plain]


class HoldsLock(Callback):
    """Has something that no process can send to another."""

    def on_train_begin(self, net, **kwargs):
        self.lock_ = threading.Lock()


def test_workers_train_what_a_function_defines():
    """A pipeline with a function, and nets as its choices."""
    nets = local_nets()
    pipeline = make_pipeline(FunctionTransformer(lambda x: 2 * x), nets[0])
    tables, predicted = [], []
    for n_jobs in (1, 2):
        search = FlatMinimaSearch(
            pipeline, {pipeline.steps[1][0]: nets}, n_jobs=n_jobs, goal=1.0, random_state=0
        ).fit(X, Y)
        tables.append(search.minima_.sort_values("relative_flatness")["relative_flatness"].tolist())
        numbers = search.minima_.sort_values("relative_flatness")["trial"]
        predicted.append([search.get_estimator(one).predict_proba(X) for one in numbers])
    assert tables[0] == tables[1]
    assert len(tables[0]) == len(nets)
    np.testing.assert_array_equal(*predicted)


def test_a_network_that_cannot_be_sent_is_trained_again():
    net = make_net(lr=0.05, callbacks=[HoldsLock])
    one, two = (
        FlatMinimaSearch(net, {"lr": [0.05]}, n_jobs=n_jobs, goal=1.0, random_state=0).fit(X, Y)
        for n_jobs in (1, 2)
    )
    np.testing.assert_array_equal(one.predict_proba(X), two.predict_proba(X))

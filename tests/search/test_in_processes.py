"""Tasks on a cluster whose workers die, and data that are sent by the path of their file."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
from joblib import parallel_config
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss
from relflat_sk.search import _workers
from relflat_sk.search._transfer import ByPath
from relflat_sk.search._workers import n_processes
from tests.data_kinds import KINDS

X = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


def test_a_search_in_threads_finds_what_one_in_processes_finds():
    """Nested searches run so: scikit-learn's cross-validation fits them in processes."""
    search = FlatMinimaSearch(
        LogisticRegression(max_iter=1000), {"C": [0.01, 1.0]}, depth_band=None, random_state=0
    )
    alone = search.fit(X, Y).predict_proba(X)
    with parallel_config(backend="threading"):
        together = clone(search).set_params(n_jobs=2).fit(X, Y).predict_proba(X)
    np.testing.assert_array_equal(together, alone)


@pytest.fixture
def mapped(tmp_path):
    array = np.arange(60, dtype=np.float32).reshape(12, 5)
    np.save(tmp_path / "rows.npy", array)
    return np.load(tmp_path / "rows.npy", mmap_mode="r")


@pytest.mark.parametrize("part", [np.s_[:], np.s_[3:7], np.s_[3], np.s_[::1, None]], ids=str)
def test_parts_of_a_mapped_file_are_sent_by_path(mapped, part):
    sent = pickle.dumps(ByPath.wrap(mapped[part]))
    assert len(sent) < 1000
    got = pickle.loads(sent)
    assert isinstance(got, np.memmap)
    assert got.filename == mapped.filename
    np.testing.assert_array_equal(got, mapped[part])


def test_the_order_of_a_mapped_file_stays(tmp_path):
    array = np.memmap(tmp_path / "rows", np.float64, "w+", offset=8, shape=(4, 3), order="F")
    array[:] = np.arange(12).reshape(4, 3)
    array.flush()
    got = pickle.loads(pickle.dumps(ByPath.wrap(array)))
    np.testing.assert_array_equal(got, array)
    assert got.mode == "r"
    assert got.flags.f_contiguous


def test_other_data_are_sent_as_they_are(mapped):
    changed = np.load(mapped.filename, mmap_mode="c")
    changed[0, 0] = 7
    for value in (changed, mapped[:, 1], mapped[::2], X, [1, 2], None):
        assert ByPath.wrap(value) is value


@pytest.fixture
def hdf5(tmp_path):
    """A file of h5py, open for reading."""
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("rows/x", data=X, chunks=(7, 3))
    with h5py.File(tmp_path / "rows.h5", "r") as file:
        yield file


def test_rows_of_h5py_are_opened_by_path(hdf5):
    got = pickle.loads(pickle.dumps(ByPath.wrap(hdf5["rows/x"])))
    assert got.file.filename == hdf5.filename
    assert got.name == "/rows/x"
    assert got.file.mode == "r"
    np.testing.assert_array_equal(got[:], X)


def test_rows_of_h5py_that_no_other_process_can_read(tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    search = FlatMinimaSearch(LogisticRegression(), {"C": [0.1, 1.0]}, n_jobs=2)
    for given in ({"mode": "w"}, {"mode": "w", "driver": "core", "backing_store": False}):
        with h5py.File(tmp_path / "new.h5", **given) as file:
            rows = file.create_dataset("x", data=X)
            with pytest.raises(ValueError, match=r"open for reading: h5py\.File\(path, 'r'\)"):
                search.fit(rows, Y)


@pytest.mark.parametrize("kind", [*KINDS, "h5py"])
def test_a_search_in_two_processes_reads_data_of_all_kinds(kind, request, tmp_path):
    if kind == "h5py":
        given = request.getfixturevalue("hdf5")["rows/x"], Y
    else:
        given = KINDS[kind](tmp_path, X, Y)
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, batch_size=13 if kind == "loader" else 20, max_epochs=30, verbose=0,
        callbacks=[StopAtLoss(0.6)],
        module__hidden_layer_sizes=(4,), iterator_train__shuffle=False,
        module__n_features=3, module__n_outputs=2,
    )  # fmt: skip
    tables = [
        FlatMinimaSearch(net, {"lr": [0.1, 0.2]}, n_jobs=n_jobs, depth_band=None, random_state=0)
        .fit(*data)
        .minima_.set_index("param_lr")[["relative_flatness", "train_loss"]]
        for data, n_jobs in ((given, 2), ((X, Y), None))
    ]
    np.testing.assert_allclose(*(table.loc[[0.1, 0.2]] for table in tables), rtol=1e-5)


@pytest.mark.parametrize(("n_jobs", "expected"), [(None, 0), (1, 0), (3, 3)])
def test_how_many_processes_train(n_jobs, expected):
    assert n_processes(n_jobs) == expected


def test_no_processes_are_refused():
    with pytest.raises(ValueError, match="n_jobs == 0 has no meaning: give a number of processes"):
        n_processes(0)


def test_a_file_that_a_worker_does_not_reach_is_explained(monkeypatch, tmp_path):
    """As on another machine; here the file is moved before the first task."""
    train = _workers.train_in_processes

    def train_without_file(sweep, n_jobs, on_finished):
        sweep.file = tmp_path / "moved.db"
        train(sweep, n_jobs, on_finished)

    monkeypatch.setattr(_workers, "train_in_processes", train_without_file)
    search = FlatMinimaSearch(
        LogisticRegression(), {"C": [0.1, 1.0]}, n_jobs=2, storage=tmp_path / "minima.db"
    )
    match = r"the study's file .*moved.db is not on worker .*the URL of a database server"
    with pytest.raises(RuntimeError, match=match):
        search.fit(X, Y)


def test_workers_that_died_are_replaced_before_others_train(monkeypatch):
    """joblib would train in this process while a cluster has a single worker."""
    counts = [1, 1, 2]
    cluster = SimpleNamespace(effective_n_jobs=lambda n_jobs: counts.pop(0) if counts else 1)
    monkeypatch.setattr(_workers, "get_active_backend", lambda: (cluster, 2))
    assert _workers._are_workers_back(2)
    assert not counts
    monkeypatch.setattr(_workers, "_REPLACED", 0)
    assert not _workers._are_workers_back(2)

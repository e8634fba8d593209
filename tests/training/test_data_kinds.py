"""Nets, measures and searches give the same on arrays in memory and on data of other kinds."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from pandas.testing import assert_frame_equal
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.dataset import ValidSplit

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
    get_measure_names,
    relative_flatness,
)
from relflat_sk._network.batches import RowSource
from relflat_sk.search._provenance import digest
from relflat_sk.training import _batches
from relflat_sk.training._batches import StoredRows
from tests.data_kinds import ARRAYS, KINDS, LOADER, SETS, ComputedRows, zarr_array

N = 90
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = X[:, :3].argmax(axis=1)


def make(**params):
    sizes = {"module__n_features": 4, "module__n_outputs": 3}
    settings = {"max_epochs": 3, "lr": 0.01, "verbose": 0, "random_state": 0, **sizes}
    return RelativeFlatnessRegularizedClassifier(**{**settings, **params})


@pytest.fixture(scope="module")
def net():
    return make(max_epochs=10).fit(X, Y)


@pytest.mark.parametrize("kind", KINDS)
def test_flatness_and_scores(net, kind, tmp_path):
    inputs, labels = KINDS[kind](tmp_path, X, Y)
    assert_allclose(relative_flatness(net, inputs, labels), relative_flatness(net, X, Y))
    assert_allclose(FlatnessScorer()(net, inputs, labels), FlatnessScorer()(net, X, Y))


def report(net, *data):
    """Measure everything at all layers."""
    names = get_measure_names()
    params = {"random_state": 0, "n_draws": 2, "n_steps": 3, "percentile": 50}
    return flatness_report(net, *data, measures=names, **params).set_index("measure")


@pytest.fixture(scope="module")
def expected_report(net):
    return report(net, X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_measure(net, expected_report, kind, tmp_path):
    found = report(net, *KINDS[kind](tmp_path, X, Y))
    columns = ["value", "method", "n_samples"]
    assert_frame_equal(found[columns], expected_report[columns], rtol=1e-4, atol=1e-6)
    # a residual of rounding errors depends on the batches
    assert_allclose(found["stderr"], expected_report["stderr"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("own_loop")
def test_a_net_trains_and_predicts_as_with_arrays_in_memory(kind, tmp_path):
    inputs, labels = KINDS[kind](tmp_path, X, Y)
    # chunks are shuffled in another order, and so are data sets
    params = {"iterator_train__shuffle": kind in ARRAYS and kind != "zarr"}
    if kind == "loader":
        params["batch_size"] = 13
    trained, expected = make(**params).fit(inputs, labels), make(**params).fit(X, Y)
    assert trained.history[:, "train_loss"] == expected.history[:, "train_loss"]
    assert_allclose(trained.relative_flatness_, expected.relative_flatness_, rtol=1e-6)
    assert_array_equal(trained.predict_proba(inputs), expected.predict_proba(X))
    if kind in ARRAYS:
        assert trained.n_features_in_ == 4


@pytest.mark.parametrize("kind", ["memmap", "zarr", "computed"])
def test_samples_that_are_held_out_are_not_measured(kind, tmp_path):
    inputs, labels = ARRAYS[kind](tmp_path, X, Y)
    params = {"train_split": ValidSplit(3), "iterator_train__shuffle": False}
    weights = RNG.uniform(size=N)
    trained = make(**params).fit(inputs, labels, sample_weight=weights)
    expected = make(**params).fit(X, Y, sample_weight=weights)
    assert_allclose(trained.relative_flatness_, expected.relative_flatness_, rtol=1e-6)


def test_several_inputs():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.out = torch.nn.Linear(4, 3)

        def forward(self, a, b):
            return self.out(torch.cat([a, b], dim=1))

    params = {"module": Two, "max_epochs": 2, "verbose": 0, "random_state": 0}
    parts = {"b": X[:, 1:], "a": X[:, :1]}
    expected = RelativeFlatnessRegularizedClassifier(**params).fit(parts, Y)
    for stored in (
        {"b": X[:, 1:], "a": ComputedRows(X[:, :1])},
        {name: ComputedRows(part) for name, part in parts.items()},
    ):
        trained = RelativeFlatnessRegularizedClassifier(**params).fit(stored, Y)
        assert_allclose(trained.relative_flatness_, expected.relative_flatness_, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_transforms_rows_when_they_are_read(kind, tmp_path):
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    inputs, labels = KINDS[kind](tmp_path, X, Y)
    found = relative_flatness(model, inputs, labels, batch_size=20)
    assert_allclose(found, relative_flatness(model, X, Y), rtol=1e-6)
    if kind == "computed":
        assert inputs.most == 20


def test_a_net_in_a_pipeline(tmp_path):
    model = make_pipeline(StandardScaler(), StandardScaler(), make(batch_size=20)).fit(X, Y)
    pairs, _ = LOADER["loader"](tmp_path, X, Y)
    assert_allclose(relative_flatness(model, pairs), relative_flatness(model, X, Y), rtol=1e-6)


def test_labels_of_a_data_set_are_not_transformed(tmp_path):
    model = TransformedTargetRegressor(LinearRegression(), transformer=StandardScaler()).fit(X, Y)
    with pytest.raises(ValueError, match="transforms y, which it cannot do inside a TensorData"):
        relative_flatness(model, *SETS["tensors"](tmp_path, X, Y))


@pytest.mark.parametrize("kind", ["memmap", "zarr", "computed", "map-style", "stream", "loader"])
@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")  # no minimum
def test_a_search(kind, tmp_path):
    inputs, labels = KINDS[kind](tmp_path, X, Y)
    params = {"batch_size": 13} if kind == "loader" else {}
    space = {"flatness_weight": [0.0, 0.1]}

    def search(*data):
        estimator = make(iterator_train__shuffle=False, **params)
        return FlatMinimaSearch(estimator, space, goal=None, random_state=0).fit(*data)

    found, expected = search(inputs, labels), search(X, Y)
    names = ["param_flatness_weight", "relative_flatness", "train_loss"]
    assert_frame_equal(found.minima_[names], expected.minima_[names], rtol=1e-5)


@pytest.mark.parametrize("kind", ARRAYS)
def test_the_record_of_a_study_is_the_same_on_disk_and_in_memory(kind, tmp_path, monkeypatch):
    from relflat_sk.search import _provenance

    monkeypatch.setattr(_provenance, "_ROWS", 20)
    inputs, _ = ARRAYS[kind](tmp_path, X, Y)
    found = digest(inputs)
    if kind == "computed":
        assert inputs.most == 20
    assert found == digest(X)


# -- chunks --------------------------------------------------------------------------------


def _epoch(source, seed):
    """The numbers of an epoch's rows in their order."""
    torch.manual_seed(seed)
    rows = np.arange(len(source))
    return np.array(list(_batches._ByChunks(StoredRows(source), rows)))


def test_an_epoch_has_each_row_once_and_reads_each_chunk_once(tmp_path, monkeypatch):
    monkeypatch.setattr(_batches, "_WINDOW", 3 * 7 * 16)  # 3 chunks of 7 rows
    source = RowSource(zarr_array(tmp_path, X))
    order = _epoch(source, 0)
    assert sorted(order) == list(range(N))
    assert order.tolist() != _epoch(source, 1).tolist()
    assert len(set(order[:21] // 7)) <= 4  # the last chunk is not full
    read = []
    monkeypatch.setattr(
        source,
        "read_chunk",
        lambda chunk: read.append(chunk) or RowSource.read_chunk(source, chunk),
    )
    rows = StoredRows(source)
    batches = [rows[part] for part in np.array_split(order, 12)]
    assert_array_equal(np.concatenate(batches), X[order])
    assert sorted(read) == list(range(13))


def test_chunks_of_a_subset(tmp_path):
    chosen = np.sort(RNG.permutation(N)[:40])
    source = RowSource(zarr_array(tmp_path, X)).subset(chosen)
    order = _epoch(source, 0)
    assert sorted(order) == list(range(40))
    assert_array_equal(StoredRows(source)[order[:9]], X[chosen][order[:9]])


def test_a_net_refuses_what_is_not_finite_when_it_reads_it():
    with pytest.raises(ValueError, match="X contains NaN or infinity"):
        make().fit(ComputedRows(np.where(X > 2, np.nan, X)), Y)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (X[:, 0], r"X must have shape \(n_samples, n_features, ...\), got \(90,\)"),
        (X[:, :0], r"X has shape \(90, 0\), and there is nothing to learn from"),
    ],
    ids=["one axis", "no features"],
)
def test_shapes_on_disk_are_checked(inputs, message):
    with pytest.raises(ValueError, match=message):
        make().fit(ComputedRows(inputs), Y)


def test_another_number_of_features(net):
    with pytest.raises(ValueError, match="X has 3 features, but .* is expecting 4 features"):
        net.predict(ComputedRows(X[:, :3]))

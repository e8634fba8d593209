"""Nets, measures and searches give the same on arrays in memory and on data of other kinds."""

from functools import cache

import numpy as np
import pytest
import scipy.sparse
import torch
from numpy.testing import assert_allclose, assert_array_equal
from pandas.testing import assert_frame_equal
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.dataset import Dataset
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
    WeightAverage,
    feature_robustness,
    flatness_report,
    get_measure_names,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning
from tests.data_kinds import KINDS, Stream
from tests.rounding import FLOAT32, rounding
from tests.training.common import Binary, Classifier, same

N = 90
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
X[RNG.uniform(size=(N, 4)) < 0.2] = 0
Y = X[:, :3].argmax(axis=1)
SPARSE_KINDS = {
    name: lambda folder, X, y, name=name: (getattr(scipy.sparse, name)(X), y)
    for name in ("csr_array", "csc_matrix", "coo_array")
}


def make(kind=Classifier, **params):
    settings = {"max_epochs": 3, "lr": 0.01, "verbose": 0, "random_state": 0}
    return kind(**{**settings, **params})


def sized(**params):
    """Make a net that needs no arrays to know its sizes."""
    return make(module__n_features=4, module__n_outputs=3, **params)


@pytest.fixture(scope="module")
def net():
    return sized(max_epochs=10).fit(X, Y)


def report(net, *data):
    params = {"random_state": 0, "n_draws": 2, "n_steps": 3, "percentile": 50}
    names = get_measure_names()
    return flatness_report(net, *data, measures=names, **params).set_index("measure")


FEW = slice(30)  # samples for many passes


@pytest.fixture(scope="module")
def expected(net):
    return report(net, X[FEW], Y[FEW])


# the two ways of reading, slices of rows and a loader's batches
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memmap", "stream"])
def test_every_measure(net, expected, kind, tmp_path):
    found = report(net, *KINDS[kind](tmp_path, X[FEW], Y[FEW]))
    columns = ["value", "method", "n_samples"]
    assert_frame_equal(found[columns], expected[columns], rtol=1e-4, atol=1e-6)
    # a residual of rounding errors depends on the batches
    assert_allclose(found["stderr"], expected["stderr"], rtol=1e-4, atol=1e-4)


@cache
def trained_on_arrays(**params):
    return sized(**params).fit(X, Y)


@pytest.mark.parametrize("kind", KINDS | SPARSE_KINDS)
@pytest.mark.usefixtures("own_loop")
def test_a_net_trains_predicts_and_is_measured_as_with_arrays_in_memory(net, kind, tmp_path):
    inputs, labels = (KINDS | SPARSE_KINDS)[kind](tmp_path, X, Y)
    for function in (relative_flatness, FlatnessScorer()):
        assert_allclose(function(net, inputs, labels), function(net, X, Y), rtol=FLOAT32)
    # data sets are shuffled in another order
    params = {"iterator_train__shuffle": labels is not None}
    params |= {"batch_size": 13} if kind == "loader" else {}
    trained, expected = sized(**params).fit(inputs, labels), trained_on_arrays(**params)
    close = rounding(3 * -(-N // 13))
    losses = [fitted.history[:, "train_loss"] for fitted in (trained, expected)]
    assert_allclose(*losses, **close)
    assert_allclose(trained.relative_flatness_, expected.relative_flatness_, **close)
    constants = [fitted.constant_comparison_.loss for fitted in (trained, expected)]
    assert_allclose(*constants, rtol=FLOAT32)
    assert_allclose(trained.predict_proba(inputs), expected.predict_proba(X), **close)
    assert trained.score(inputs, Y) == expected.score(X, Y)
    assert trained.__sklearn_tags__().input_tags.sparse
    if labels is not None:
        assert trained.n_features_in_ == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_transforms_inputs_of_any_kind(kind, tmp_path):
    inputs, labels = KINDS[kind](tmp_path, X, Y)
    for last in (LogisticRegression(), sized(batch_size=20)):
        model = make_pipeline(StandardScaler(), StandardScaler(), last).fit(X, Y)
        found = relative_flatness(model, inputs, labels, batch_size=20)
        assert_allclose(found, relative_flatness(model, X, Y), rtol=FLOAT32)


class Once(IterableDataset):
    """Can be read once, like a socket."""

    def __init__(self):
        self.pairs = iter(Stream(X, Y))

    def __iter__(self):
        return self.pairs


class Sized(Stream):
    def __len__(self):
        return N


@pytest.mark.parametrize("stream", [Stream, Sized])
@pytest.mark.usefixtures("own_loop")
def test_streams_with_all_layers_in_further_training_and_validation(stream):
    streamed = sized(flatness_layer="all").fit(stream(X, Y))
    fitted = sized(flatness_layer="all", iterator_train__shuffle=False).fit(X, Y)
    losses = [net.history[:, "train_loss"] for net in (streamed, fitted)]
    assert_allclose(*losses, **rounding(3))
    assert_allclose(streamed.relative_flatness_, fitted.relative_flatness_, **rounding(3))
    net = sized(train_split=predefined_split(stream(X, Y))).partial_fit(stream(X, Y))
    assert_allclose(net.relative_flatness_, relative_flatness(net, X, Y), rtol=FLOAT32)
    assert len(net.history[:, "valid_loss"]) == 3


def test_labels_of_a_data_set_that_are_no_targets_are_refused():
    names = np.array(["a", "b", "c"])[Y]
    message = r"labels of a batch are no numbers, got .*'[abc]'.* classes_"
    with pytest.raises(TypeError, match=message):
        sized(train_split=predefined_split(Dataset(X, names))).fit(X, names)


@pytest.mark.parametrize("callback", [StopAtLoss(0.6), StopAtGradientNorm(0.5)], ids=type)
def test_callbacks_of_convergence_read_the_stream_again(callback):
    with pytest.raises(ValueError, match="let its __iter__ return a new iterator each time"):
        sized(callbacks=[callback]).fit(Once())
    streamed, fitted = (
        sized(max_epochs=60, callbacks=[callback], iterator_train__shuffle=False).fit(*data)
        for data in [(Stream(X, Y),), (X, Y)]
    )
    assert streamed.converged_
    assert len(streamed.history) == len(fitted.history) < 60


def test_a_stream_that_is_read_once_is_trained_and_not_measured():
    params = {"batch_size": 30, "max_epochs": 1}
    in_order = sized(**params, iterator_train__shuffle=False).fit(X, Y)
    net = sized(**params)
    with pytest.warns(FlatnessWarning, match="X is a stream .* let its __iter__ return a new"):
        net.fit(Once())
    assert np.isnan(net.relative_flatness_)
    for name in ("train_loss", "flatness_penalty", "flatness_clipped"):  # recorded on the way
        assert net.history[0, name] == pytest.approx(in_order.history[0, name], rel=FLOAT32)


def test_a_loader_that_shuffles_is_measured_and_predicts_nothing(net):
    pairs = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = DataLoader(pairs, batch_size=30, shuffle=True)
    assert_allclose(relative_flatness(net, loader), relative_flatness(net, X, Y), rtol=FLOAT32)
    with pytest.raises(ValueError, match="random order"):
        net.predict(loader)


class Named(nn.Module):
    """A network whose inputs have names."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, values, mask):
        return self.head(self.norm(torch.tanh(self.first(values * mask))))


class Rows(torch.utils.data.Dataset):
    """A data set of dicts, as of transformers."""

    def __init__(self, inputs, labels):
        self.columns = {**inputs, "labels": torch.from_numpy(labels)}

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


@pytest.mark.filterwarnings("ignore:.*has not reached:sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("loaded", [True, False], ids=["loader", "data set"])
def test_dicts_with_labels_train_as_pairs_do(loaded):
    inputs = {"values": torch.from_numpy(X), "mask": torch.from_numpy(np.sign(X**2))}
    rows = Rows(inputs, Y)
    data = DataLoader(rows, batch_size=15) if loaded else rows
    params = {"batch_size": 15, "iterator_train__shuffle": False, "train_split": None}
    params |= {"callbacks": [StopAtGradientNorm(1e-9), WeightAverage(start=1)]}
    trained, expected = make(module=Named, **params), make(module=Named, **params)
    trained.fit(data), expected.fit(inputs, Y)
    same(trained, expected, rtol=FLOAT32, atol=FLOAT32)
    assert_allclose(trained.relative_flatness_, expected.relative_flatness_, rtol=FLOAT32)
    assert_allclose(trained.predict_proba(data), expected.predict_proba(inputs), rtol=FLOAT32)
    for name in ("train_loss", "flatness_penalty"):
        assert_allclose(*(net.history[:, name] for net in (trained, expected)), rtol=FLOAT32)
    scorer = FlatnessScorer(non_minimum="accept")
    assert_allclose(scorer(trained, data, None), scorer(expected, inputs, Y), rtol=FLOAT32)
    if not loaded:
        held = {"train_split": predefined_split(rows), "callbacks": None}
        trained.set_params(**held).fit(rows, sample_weight=Y + 0.5)
        expected.set_params(callbacks=None).fit(inputs, Y, sample_weight=Y + 0.5)
        same(trained, expected, rtol=FLOAT32, atol=FLOAT32)
        assert trained.history[-1, "valid_acc"] == trained.score(rows, Y)


DENSE = RNG.normal(size=(N, 20)) * (RNG.uniform(size=(N, 20)) < 0.2)
SPARSE = scipy.sparse.csr_array(DENSE)
Z = DENSE[:, :3].argmax(axis=1)


def test_sparse_labels_give_what_dense_ones_do():
    labels = (X[:, :3] > 0).astype(int)
    y = scipy.sparse.csc_array(labels)
    dense_net, net = make(Binary).fit(X, labels), make(Binary).fit(X, y)
    same(net, dense_net)
    assert_array_equal(net.predict(X), dense_net.predict(X))
    assert net.score(X, y) == dense_net.score(X, labels)
    assert relative_flatness(net, X, y) == relative_flatness(dense_net, X, labels)
    same(net.partial_fit(X, y), dense_net.partial_fit(X, labels))


def test_only_a_batch_is_made_dense(monkeypatch):
    rows = []
    for kind in (scipy.sparse.csr_array, scipy.sparse.csr_matrix):

        def toarray(matrix, original=kind.toarray):
            rows.append(matrix.shape[0])
            return original(matrix)

        monkeypatch.setattr(kind, "toarray", toarray)
    net = make(batch_size=16, iterator_valid__batch_size=16)
    net.fit(SPARSE, Z, sample_weight=np.ones(N)).predict(SPARSE)
    relative_flatness(net, SPARSE, Z, batch_size=16)
    flatness_report(net, SPARSE, Z, measures=["relative_flatness"], batch_size=16)
    cross_val_score(net, SPARSE, Z, cv=3)
    assert set(rows) <= set(range(1, 17))
    assert 16 in rows


IRIS, SPECIES = load_iris(return_X_y=True)
WEIGHTS = np.linspace(1, 2, len(IRIS))
NAMES = ["a", "b", "c", "d"]
FRAMES = {
    "pandas": lambda pd: (
        pd.DataFrame(IRIS, columns=NAMES), pd.Series(SPECIES), pd.Series(WEIGHTS)
    ),
    "polars": lambda pl: (
        pl.DataFrame(IRIS, schema=NAMES), pl.Series(SPECIES), pl.Series(WEIGHTS)
    ),
    "pyarrow": lambda pa: (
        pa.table(dict(zip(NAMES, IRIS.T, strict=True))), pa.array(SPECIES), pa.array(WEIGHTS)
    ),
}  # fmt: skip


@pytest.fixture
def _warn_each_time():
    torch.set_warn_always(True)  # else torch warns of read-only arrays only once in a process
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("_warn_each_time")
@pytest.mark.parametrize("library", FRAMES)
def test_frames_train_the_net_that_arrays_train(library):
    module = pytest.importorskip(library, reason=f"needs {library}")
    frame, labels, weights = FRAMES[library](module)
    net = RelativeFlatnessRegularizedClassifier(max_epochs=2, random_state=0, verbose=0)
    expected = net.fit(IRIS, SPECIES, sample_weight=WEIGHTS).predict_proba(IRIS)
    flatness = net.relative_flatness_
    net.fit(frame, labels, sample_weight=weights)
    close = rounding(2 * 2, torch.float64)  # columns lie in another order in memory
    assert_allclose(net.predict_proba(frame), expected, **close)
    assert net.feature_names_in_.tolist() == NAMES
    found = relative_flatness(net, frame, labels, sample_weight=weights)
    assert_allclose(found, flatness, **close)
    search = FlatMinimaSearch(net, {"random_state": [0]}, goal=0.9)
    search.fit(frame, labels, sample_weight=weights, X_test=frame, y_test=labels)
    assert search.feature_names_in_.tolist() == NAMES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_refuses_a_device_that_is_not_there(net):
    message = "device='cuda' cannot be used here: .* Pass device='cpu'"
    absent = make(device="cuda")
    criterion = nn.CrossEntropyLoss()
    for call in [
        lambda: absent.fit(X, Y),
        lambda: absent.partial_fit(X, Y),
        lambda: relative_flatness(net, X, Y, device="cuda"),
        lambda: relative_flatness(net.module_, X, Y, criterion=criterion, device="cuda"),
        lambda: FlatnessScorer(measure_params={"device": "cuda"})(net, X, Y),
        lambda: feature_robustness(net, X, Y, 0.1, device="cuda"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not absent.initialized_

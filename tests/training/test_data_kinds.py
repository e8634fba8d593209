"""Data of other kinds, batches cut out of arrays, targets with several axes: all give the same."""

from functools import cache, partial
from itertools import product

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
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import SliceDataset, predefined_split
from torch import nn
from torch.testing import assert_close
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    FlatnessWarning,
    StopAtGradientNorm,
    StopAtLoss,
    WeightAverage,
    feature_robustness,
    flatness_report,
    get_measure_names,
    relative_flatness,
)
from relflat_sk.training._data import ArrayRows, make_loader, with_weights
from tests.cases import Net
from tests.data_kinds import KINDS, Stream
from tests.rounding import FLOAT32, rounding
from tests.training.common import Binary, Classifier, Regressor, make, results_of, same

N = 90
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4)).astype(np.float32)
X[RNG.uniform(size=(N, 4)) < 0.2] = 0
Y = X[:, :3].argmax(axis=1)
SPARSE_KINDS = {
    name: lambda folder, X, y, name=name: (getattr(scipy.sparse, name)(X), y)
    for name in ("csr_array", "csc_matrix", "coo_array")
}


def sized(**params):
    """Make a net that needs no arrays to know its sizes."""
    params = {"batch_size": 128, "lr": 0.01, **params}
    return make(module__n_features=4, module__n_outputs=3, **params)


@pytest.fixture(scope="module")
def net():
    return sized(max_epochs=10).fit(X, Y)


def report(net, *data):
    params = {"random_state": 0, "n_draws": 2, "n_steps": 3, "percentile": 50}
    names = get_measure_names()
    return flatness_report(net, *data, measures=names, **params).set_index("measure")


FEW = slice(30)  # samples for many passes


# the two ways of reading, slices of rows and a loader's batches
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memmap", "stream"])
def test_every_measure(net, kind, tmp_path):
    expected = report(net, X[FEW], Y[FEW])
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
    results = results_of(trained, inputs), results_of(expected, X)
    assert_close(*results, **rounding(3 * -(-N // 13)))
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
    assert_close(results_of(streamed, X), results_of(fitted, X), **rounding(3))
    net = sized(train_split=predefined_split(stream(X, Y))).partial_fit(stream(X, Y))
    assert_allclose(net.relative_flatness_, relative_flatness(net, X, Y), rtol=FLOAT32)
    assert len(net.history[:, "valid_loss"]) == 3


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


def named(net, values, mask):
    return net.head(net.norm(torch.tanh(net.first(values * mask))))


def make_named():
    torch.manual_seed(0)
    return Net(named, first=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), head=nn.Linear(6, 3))


class Rows(torch.utils.data.Dataset):
    """A data set of dicts, as of transformers."""

    def __init__(self, inputs, labels):
        self.columns = {**inputs, "labels": torch.from_numpy(labels)}

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


@pytest.mark.parametrize("loaded", [True, False], ids=["loader", "data set"])
def test_dicts_with_labels_train_as_pairs_do(loaded):
    inputs = {"values": torch.from_numpy(X), "mask": torch.from_numpy(np.sign(X**2))}
    rows = Rows(inputs, Y)
    data = DataLoader(rows, batch_size=15) if loaded else rows
    params = {"batch_size": 15, "iterator_train__shuffle": False, "train_split": None}
    params |= {"callbacks": [StopAtGradientNorm(1e-9), WeightAverage(start=1)]}
    trained, expected = make(module=make_named, **params), make(module=make_named, **params)
    trained.fit(data), expected.fit(inputs, Y)
    same(trained, expected, rtol=FLOAT32, atol=FLOAT32)
    assert_close(results_of(trained, data), results_of(expected, inputs), **rounding())
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
    rows = set()
    for kind in (scipy.sparse.csr_array, scipy.sparse.csr_matrix):

        def toarray(matrix, original=kind.toarray):
            rows.add(matrix.shape[0])
            return original(matrix)

        monkeypatch.setattr(kind, "toarray", toarray)
    net = make(batch_size=16, iterator_valid__batch_size=16)
    net.fit(SPARSE, Z, sample_weight=np.ones(N)).predict(SPARSE)
    relative_flatness(net, SPARSE, Z, batch_size=16)
    flatness_report(net, SPARSE, Z, measures=["relative_flatness"], batch_size=16)
    cross_val_score(net, SPARSE, Z, cv=3)
    assert max(rows) == 16


IRIS, SPECIES = load_iris(return_X_y=True)
WEIGHTS = np.linspace(1, 2, len(IRIS))
NAMES = ["a", "b", "c", "d"]
FRAMES = {  # from a module, to inputs, labels and weights
    "pandas": lambda pd: (pd.DataFrame(IRIS, columns=NAMES), *map(pd.Series, (SPECIES, WEIGHTS))),
    "polars": lambda pl: (pl.DataFrame(IRIS, schema=NAMES), *map(pl.Series, (SPECIES, WEIGHTS))),
    "pyarrow": lambda pa: (pa.table([*IRIS.T], NAMES), *map(pa.array, (SPECIES, WEIGHTS))),
}


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
    net = make(max_epochs=2, batch_size=128)
    expected = net.fit(IRIS, SPECIES, sample_weight=WEIGHTS).predict_proba(IRIS)
    flatness = net.relative_flatness_
    net.fit(frame, labels, sample_weight=weights)
    close = rounding(2 * 2, torch.float64)  # columns lie in another order in memory
    assert_allclose(net.predict_proba(frame), expected, **close)
    assert net.feature_names_in_.tolist() == NAMES
    measured = relative_flatness(net, frame, labels, sample_weight=weights)
    assert_allclose(measured, flatness, **close)
    search = FlatMinimaSearch(net, {"random_state": [0]}, goal=0.9)
    search.fit(frame, labels, sample_weight=weights, X_test=frame, y_test=labels)
    assert search.feature_names_in_.tolist() == NAMES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_refuses_a_device_that_is_not_there(net):
    message = "device='cuda' cannot be used here: .* Pass device='cpu'"
    absent = make(device="cuda")
    there = {"device": "cuda"}
    for call in [
        lambda: absent.fit(X, Y),
        lambda: absent.partial_fit(X, Y),
        lambda: relative_flatness(net, X, Y, **there),
        lambda: relative_flatness(net.module_, X, Y, criterion=nn.CrossEntropyLoss(), **there),
        lambda: FlatnessScorer(measure_params=there)(net, X, Y),
        lambda: feature_robustness(net, X, Y, 0.1, **there),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not absent.initialized_


# -- batches cut out of arrays -----------------------------------------------------------


class Doubled(Dataset):
    def transform(self, X, y):
        return 2 * X, y


IMAGES = RNG.normal(size=(N, 3, 5, 5)).astype("f4")
ROWS, DRAWN = RNG.permutation(N)[:60], np.arange(N) // 2  # as many as there are, some twice
PAIRS, SPARSE_PAIRS = Dataset(X, Y), Dataset(scipy.sparse.csr_matrix(X), Y)
CUT = {
    "matrix": PAIRS,
    "images": Dataset(IMAGES, Y.astype("f4")[:, None]),
    "no labels": Dataset(X),
    "half": Dataset(torch.tensor(X).bfloat16(), torch.tensor(Y).half()),
    "dict": Dataset({"a": X, "b": torch.tensor(Y)}, Y),
    "list": Dataset([X, torch.tensor(X[:, :2])], Y),
    "several labels": Dataset({"a": X}, (Y, X)),
    "tensor data set": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "subset of a subset": Subset(Subset(PAIRS, ROWS), [5, 3, 3, 0]),
    "subset of weights": Subset(with_weights(PAIRS, WEIGHTS[:N]), ROWS),
    "weights of a bootstrap": with_weights(Subset(PAIRS, DRAWN), WEIGHTS[:N]),
    "subset of sparse": Subset(SPARSE_PAIRS, ROWS),
    "weights of sparse": with_weights(SPARSE_PAIRS, WEIGHTS[:N]),
    "nan": Dataset(np.where(X > 0, X, np.nan), Y),
    **{dtype: Dataset(X.astype(dtype), Y.astype(dtype)) for dtype in ("i1", "?", "c16")},
}
BY_TORCH = {
    "own data set": Doubled(X, Y),
    "three tensors": TensorDataset(*[torch.tensor(X)] * 3),
    "reversed": Dataset(X[::-1], Y),
    "python labels": Dataset(X, Y.tolist()),
    "unequal lengths": Dataset({"a": X}, Y, length=7),
}
ORDERS = [
    *(
        {"shuffle": shuffles, "drop_last": drops}
        for shuffles, drops in product([False, True], repeat=2)
    ),
    {"collate_fn": default_collate},
    {"sampler": SequentialSampler(range(4))},
]
LOADED = [
    *product(CUT, [7], ORDERS[:4]),
    *product(["matrix"], [1, N - 1, N, 10 * N], ORDERS[:4]),
    *product(["matrix"], [7], ORDERS[4:]),
    *product(BY_TORCH, [7], ORDERS[:4]),
]


@pytest.mark.parametrize(("name", "batch_size", "order"), LOADED)
def test_batches_are_those_of_torchs_loader(name, batch_size, order):
    dataset, arguments = (CUT | BY_TORCH)[name], {"batch_size": batch_size, **order}
    ours, theirs = make_loader(dataset, **arguments), DataLoader(dataset, **arguments)
    assert (type(ours.dataset) is ArrayRows) == (name in CUT and order in ORDERS[:4])
    assert len(ours) == len(theirs)
    epochs, states = [], []
    for loader in (ours, theirs):
        torch.manual_seed(3)
        epochs.append([*loader, *loader])
        states.append(torch.get_rng_state())
    assert_close(*epochs, rtol=0, atol=0, equal_nan=True, check_stride=True)  # and dtypes
    assert_close(*states)
    assert list(map(type, epochs[0])) == list(map(type, epochs[1]))


def test_batches_share_no_memory_with_the_data():
    data = torch.zeros(4, 2)
    for shuffle in (False, True):
        for batch, _ in make_loader(Dataset(data), batch_size=4, shuffle=shuffle):
            batch.add_(1)
    assert not data.any()


class OwnLoader(DataLoader):
    """A loader of the user's own."""


@pytest.mark.parametrize("training", [False, True])
def test_nets_cut_batches_unless_the_user_chose_a_loader(training):
    def loader(**params):
        net = make(**params)
        return net.get_iterator(net.get_dataset(X, Y), training=training)

    assert type(loader(batch_size=-1).dataset) is ArrayRows
    assert len(loader(batch_size=-1)) == 1
    assert len(loader(batch_size=np.int64(5))) == 18
    assert type(loader(iterator_train=OwnLoader, iterator_valid=OwnLoader)) is OwnLoader
    by_torch = loader(iterator_train__num_workers=0, iterator_valid__num_workers=0)
    assert type(by_torch.dataset) is not ArrayRows


# -- targets with several axes, and rows of different lengths ----------------------------

PICTURES = RNG.normal(size=(40, 1, 6, 6)).astype("float32")
MASKS = (PICTURES[:, 0] > 0).astype("int32")
TOKENS = RNG.integers(1, 12, (40, 7))
TAGS = np.where(TOKENS > 9, -100, TOKENS % 3)
SERIES = RNG.normal(size=(40, 9, 4)).astype("float32")


def tagger():
    return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 3), Net(lambda _, z: z.transpose(1, 2)))


def convolution(n):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, n, 1))


def forecast():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Unflatten(1, (3, 2)))


SMOOTH, one_channel = {"criterion": nn.SmoothL1Loss}, partial(convolution, 1)
AXES = {
    "masks": (Classifier, lambda: convolution(2), {}, PICTURES, MASKS),
    "masks of one logit": (Binary, one_channel, {}, PICTURES, MASKS[:, None] > 0),
    "tags": (Classifier, tagger, {}, TOKENS, TAGS),
    "images": (Regressor, one_channel, {}, PICTURES, PICTURES),
    "images, absolute": (Regressor, one_channel, SMOOTH, PICTURES, PICTURES.astype(float)),
    "series": (Regressor, forecast, {}, SERIES, SERIES[:, :3, :2]),
}


@pytest.mark.parametrize("case", AXES)
def test_arrays_train_as_a_dataset_does(case):
    kind, module, params, inputs, y = AXES[case]
    torch.manual_seed(0)
    module = module()
    dtype = torch.int64 if kind is Classifier else torch.float32
    data = TensorDataset(torch.tensor(inputs), torch.tensor(y).to(dtype))
    net = make(kind, module=module, **params).fit(inputs, y)
    same(net, make(kind, module=module, **params).fit(data, None), rtol=1e-5, atol=1e-6)
    expected = relative_flatness(net, data)
    found = relative_flatness(net, inputs, y.astype(str(dtype)[6:]))
    assert [found, net.relative_flatness_] == pytest.approx([expected] * 2, rel=1e-4)
    predicted = net.predict(inputs)
    assert predicted.shape == y.shape
    if kind is Regressor:
        error, spread = ((y - to) ** 2 for to in (predicted, y.mean(axis=0)))
        score = np.mean(1 - error.sum(axis=0) / spread.sum(axis=0))
    else:
        score = (predicted == y)[y != -100].mean()
    assert net.score(inputs, y) == pytest.approx(score, rel=1e-5)
    make(kind, module=module, train_split=ValidSplit(4), **params).fit(inputs, y)


class Sentences(torch.utils.data.Dataset):
    def __init__(self):
        self.rows = [torch.tensor(RNG.integers(1, 9, n)) for n in RNG.integers(2, 7, 60)]
        self.labels = np.array(["even", "odd"])[[int(1 in row) for row in self.rows]]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.labels[i]


def padded(batch):
    rows, labels = zip(*batch, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.tensor(np.array(labels))


def bag():
    return Net(
        lambda net, x: net.out(net.words(x).sum(dim=1)),
        words=nn.Embedding(9, 6, padding_idx=0),
        out=nn.Linear(6, 2),
    )


def test_rows_of_different_lengths_are_cross_validated():
    data = Sentences()
    params = {f"iterator_{name}__collate_fn": padded for name in ("train", "valid")}
    net = make(module=bag, lr=0.05, max_epochs=20, **params)
    rows = SliceDataset(data)
    assert cross_val_score(net, rows, data.labels, cv=3, error_score="raise").mean() > 0.8
    assert net.fit(rows, data.labels).relative_flatness_ > 0
    assert set(net.predict(rows)) == {"even", "odd"}
    with pytest.raises(ValueError, match="inhomogeneous"):
        make(module=bag).fit(rows, data.labels)

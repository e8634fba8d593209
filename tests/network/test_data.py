"""Data of every kind: what cannot be cut into batches is refused, all else gives one value."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_array_equal
from scipy.sparse import csr_array, csr_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
    relative_flatness,
)
from relflat_sk._network.batches import cast_inputs, copy_rows
from tests.cases import Net
from tests.data_kinds import Stream, memmap
from tests.processes import run_module
from tests.rounding import FLOAT32

CE = nn.CrossEntropyLoss()
N = 12
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3
COUNTS = np.random.default_rng(0).integers(0, 5, size=(N, 4))
TENSOR, LABELS = torch.from_numpy(X), torch.from_numpy(Y)
FRAME = pd.DataFrame(X, columns=["w", "x", "y", "z"])
READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
SWAPPED = np.dtype(np.float32).newbyteorder("S")


@pytest.fixture
def net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def measured(net, inputs, labels=Y, **options):
    return relative_flatness(net, inputs, labels, **{"criterion": CE, **options})


def make_classifier():
    return RelativeFlatnessRegularizedClassifier(
        nn.Linear, module__in_features=4, module__out_features=3, verbose=0, max_epochs=2,
        random_state=0,
    )  # fmt: skip


FORMS = {
    "array": (X, Y),
    "lists": (X.tolist(), Y.tolist()),
    "data frame": (FRAME, pd.Series(Y)),
    "tensor": (TENSOR, LABELS),
    "float64": (X.astype(float), Y),
    "read-only": (READ_ONLY, Y),
    "reversed view": (X[::-1].copy()[::-1], Y[::-1].copy()[::-1]),
    "fortran order": (np.asfortranarray(X), Y),
    "sparse matrix": (csr_matrix(X), Y),
    "sparse array": (csr_array(X), Y),
    "tuple": ((X,), Y),
    "dict": ({"input": X}, Y),
    "another byte order": (X.astype(SWAPPED), Y.astype(np.dtype(int).newbyteorder("S"))),
    "extended precision": (X.astype(np.longdouble), Y),
    "dict of another byte order": ({"input": X.astype(SWAPPED)}, Y),
    "sparse with extended precision": (csr_matrix(X.astype(np.longdouble)), Y),
    "column of labels": (X, Y[:, None]),
    "float labels": (X, Y.astype(float)),
    "int8 labels": (X, Y.astype(np.int8)),
    "dataset": (TensorDataset(TENSOR, LABELS), None),
    "loader": (DataLoader(TensorDataset(TENSOR, LABELS), 3), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_data_changes_nothing(net, form):
    inputs, labels = FORMS[form]
    expected = measured(net, TENSOR, LABELS)
    assert measured(net, inputs, labels, batch_size=5) == pytest.approx(expected, rel=1e-12)


def test_numbers_that_torch_does_not_know_and_whole_numbers(net):
    expected = make_classifier().fit(X, Y).predict_proba(X)
    data = X.astype(SWAPPED)
    assert_array_equal(make_classifier().fit(data, Y).predict_proba(data), expected)
    assert measured(net, COUNTS) == pytest.approx(measured(net, COUNTS.astype(float)))
    # they stay integers for an embedding
    words = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 3))
    assert cast_inputs(torch.tensor([1]), words).dtype == torch.int64
    assert measured(words, COUNTS) > 0


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids, mask=None):
        return self.head(input_ids if mask is None else input_ids * mask)


@pytest.mark.parametrize("names", [["input_ids"], ["mask", "input_ids"]])
def test_loaders_may_give_dicts_with_labels_as_those_of_transformers(names):
    net, parts = Named(), {"input_ids": TENSOR, "mask": TENSOR.sign()}
    inputs = {name: parts[name] for name in names}
    rows = [{n: part[i] for n, part in inputs.items()} | {"labels": LABELS[i]} for i in range(N)]
    loader = DataLoader(rows, batch_size=5)
    expected = measured(net, inputs)
    assert measured(net, loader, None) == pytest.approx(expected, rel=1e-6)
    report = flatness_report(net, loader, None, measures="relative_flatness", criterion=CE)
    assert report["value"].tolist() == pytest.approx([expected], rel=1e-6)
    for unlabelled in ({"input_ids": TENSOR[0]}, {"labels": LABELS[0]}):
        with pytest.raises(TypeError, match='"labels"'):
            measured(net, DataLoader([unlabelled]), None)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_drops_samples_gives_a_warning(shuffle, net):
    data = TensorDataset(TENSOR, LABELS)
    with pytest.warns(FlatnessWarning, match="drop_last=True: the samples of an incomplete"):
        measured(net, DataLoader(data, 5, shuffle=shuffle, drop_last=True), None)
    whole = measured(net, X)
    loader = DataLoader(data, 6, shuffle=shuffle, drop_last=True)  # drops none
    assert measured(net, loader, None) == pytest.approx(whole)
    with pytest.warns(FlatnessWarning, match="drop_last=True"):
        measured(net, DataLoader(Stream(X, Y), 5, drop_last=True), None)


@pytest.mark.filterwarnings("ignore:relative_flatness is 0.* may be sat:relflat_sk.FlatnessWarning")
def test_an_overflowing_sum_is_not_mistaken_for_infinity():
    net = nn.Linear(2, 2)
    huge = np.full((4, 2), 3e38, dtype=np.float32)
    assert not torch.isfinite(torch.from_numpy(huge).sum())
    with pytest.raises(ValueError, match="X contains NaN"):
        measured(net, np.where(huge > 0, np.inf, 0), [0, 1, 0, 1])
    measured(net, huge, [0, 1, 0, 1])  # no complaint


V, T = ValueError, TypeError
BCE, FEW = nn.BCEWithLogitsLoss, np.full((12, 3), 2)
NO_WEIGHTS = "must be finite, not negative, and not all zero"


def bent(bend, n_outputs=3):
    """Returns something else than a row for each sample and a column for each class."""
    return Net(lambda net, x: bend(net.out(x)), out=nn.Linear(4, n_outputs))


BAD = [
    ({"X": np.where(X > 1, np.nan, X)}, V, "X contains NaN or infinity"),
    ({"X": np.where(X > 1, np.inf, X)}, V, "X contains NaN or infinity"),
    ({"y": Y[:9]}, V, "X has 12 samples, y has 9 labels"),
    ({"y": 3}, V, "X has 12 samples, y has no labels.$"),
    ({"X": X[0], "y": 3}, V, r"X has 4 samples, y has no labels. X is 1-D, .*reshape\(1, -1\)"),
    ({"X": X[:0], "y": Y[:0]}, V, "X has no samples"),
    ({"X": TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "y": None}, V, "X has no samples"),
    ({"y": np.array(list("abc"))[Y]}, V, "labels of type <U1 such as .*'a'.* encode"),
    ({"y": np.where(Y == 1, np.nan, Y)}, V, "y contains NaN"),
    ({"y": torch.full((12,), torch.nan)}, V, "y contains NaN"),
    ({"y": Y + 1}, V, "class indices from 0 to 2, one per output, got .* from 1 to 3"),
    ({"y": Y - 1}, V, "got values from -1 to 1"),
    ({"y": Y + 0.5}, V, "needs class indices 0, 1, ..., got fractions such as 2.5"),
    ({"y": np.zeros((12, 2))}, V, r"outputs of shape \(12, 3\) needs .* got \(12, 2\)"),
    ({"X": "text"}, T, "a row of numbers .* got str"),
    ({"X": np.array([["a"] * 4] * 12)}, T, "a row of numbers .* got ndarray: .*'a'"),
    ({"X": 3.0}, T, "a row of numbers .* got float"),
    ({"X": {"a": X, "b": X[:3]}}, V, r"must have equal lengths, got \[3, 12\]"),
    ({"X": TensorDataset(TENSOR), "y": None}, T, r"must give \(x, y\) pairs"),
    ({"X": TensorDataset(torch.zeros(2, 4))}, V, "has its own labels"),
    ({"criterion": nn.MSELoss()}, V, r"MSELoss needs targets of the outputs' shape \(12, 3\), got"),
    ({"criterion": BCE(), "y": FEW}, V, "needs targets from 0 to 1, got .* 2 to 2"),
    ({"criterion": nn.PoissonNLLLoss(), "y": -FEW}, V, "needs counts, .* got -2"),
    ({"criterion": lambda z, y: z[:5, 0]}, V, r"gave losses of shape \(5,\) for 12 samples"),
    ({"criterion": lambda z, y: 1.0}, V, "returned float, expected a tensor"),
    ({"criterion": nn.CosineEmbeddingLoss()}, V, r"CosineEmbeddingLoss raised .* outputs of"),
    ({"net": bent(lambda z: z.squeeze(1), 1)}, V, r"one output per class, .* of shape \(12,\)"),
    ({"net": bent(lambda z: z.mean(0, keepdim=True))}, V, "turned 12 rows at layer 'out' into"),
    ({"sample_weight": np.ones(3)}, V, r"shape \(12,\), one weight per sample, got \(3,\)"),
    ({"sample_weight": np.ones((N, 1))}, V, r"must have shape \(12,\)"),
    ({"sample_weight": 1.0}, V, r"must have shape \(12,\)"),
    ({"sample_weight": np.r_[-1.0, np.ones(N - 1)]}, V, NO_WEIGHTS),
    ({"sample_weight": np.r_[np.nan, np.ones(N - 1)]}, V, NO_WEIGHTS),
    ({"sample_weight": np.zeros(N)}, V, NO_WEIGHTS),
]


@pytest.mark.filterwarnings("ignore:it could not be checked")
@pytest.mark.parametrize(("bad", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_data_that_do_not_fit(net, bad, error, message):
    good = {"net": net, "X": X, "y": Y, "criterion": CE}
    at = {**good, **bad}
    with pytest.raises(error, match=message):
        relative_flatness(at.pop("net"), at.pop("X"), at.pop("y"), **at)


class Pair(NamedTuple):
    one: object
    two: object


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, a, b):
        return self.out(torch.cat([a, b], dim=1))


def test_several_inputs():
    net, parts = Two().double(), (X[:, :1], X[:, 1:])
    expected = measured(net.out, X)
    for inputs in (parts, Pair(*parts), {"b": X[:, 1:], "a": X[:, :1]}):
        assert measured(net, inputs) == pytest.approx(expected)
    rows = [(Pair(*row), y) for *row, y in zip(*parts, Y, strict=True)]
    loader = DataLoader(rows, batch_size=4)  # its batches are of the type of the samples
    assert measured(net, loader, None) == pytest.approx(expected)


def test_losses_of_some_outputs_fit(net):
    assert np.isfinite(measured(net, X, criterion=lambda output, y: output[:, :2].square()))


def with_column(values):
    return FRAME.assign(c=values)


DATES = np.full((N, 2), np.datetime64("2020-01-01"))
BATCHES = [(TENSOR[:6], LABELS[:6]), (TENSOR[6:], LABELS[6:])]
REFUSED = {
    "category": with_column(pd.Categorical(np.array(list("abc"))[Y])),
    "missing": with_column(pd.array([pd.NA] * (N - 1) + ["u"], dtype="string")),
    "date": with_column(pd.Timestamp("2020-01-01") + pd.to_timedelta(Y, unit="D")),
    "period": with_column(pd.period_range("2020", periods=N, freq="D")),
    "dates": DATES,
    "frame of dates": pd.DataFrame(DATES),
    "coo": TENSOR.to_sparse(),
    "in a tuple": (TENSOR, TENSOR.to_sparse()),
    "complex": TENSOR.to(torch.complex64),
    "complex numbers": X.astype(complex),
    "meta": TENSOR.to("meta"),
    "batches": BATCHES,
    "dicts": [{"x": TENSOR}],
    "unequal batches": [X[:5], X[5:]],
    "generator": (batch for batch in BATCHES),
}


@pytest.fixture(scope="module")
def fitted():
    return make_classifier().fit(X, Y)


@pytest.mark.filterwarnings("ignore:X has feature names")
@pytest.mark.parametrize("kind", REFUSED)
def test_refused_everywhere_before_anything_is_computed(kind, fitted):
    data, new, net = REFUSED[kind], make_classifier(), fitted
    for call in [
        lambda: new.fit(data, Y),
        lambda: net.predict(data),
        lambda: relative_flatness(net, data, Y),
        lambda: relative_flatness(net.module_, data, Y, criterion=CE),
    ]:
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            call()
    assert not new.initialized_


def test_columns_of_numbers_of_any_type_are_trained_on():
    frame = with_column(pd.Categorical(Y)).assign(d=Y > 1, e=Y.astype(object))
    net = RelativeFlatnessRegularizedClassifier(verbose=0, max_epochs=1, random_state=0)
    assert net.fit(frame, Y).n_features_in_ == 7
    assert relative_flatness(net, frame, Y) == pytest.approx(net.relative_flatness_, rel=FLOAT32)


@pytest.mark.parametrize("mode", ["c", "r+"], ids=["private", "shared"])
def test_changes_of_a_mapping_are_kept(mode, tmp_path):
    mapped = memmap(tmp_path, X, mode=mode)
    mapped[3] = 7
    copy_rows(mapped, slice(10))
    assert (mapped[3] == 7).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "kind"), [("measure", "memmap"), ("measure", "Dataset"), ("fit", "Dataset")]
)
def test_memory_does_not_grow_with_the_number_of_rows(function, kind):
    run = run_module("tests.peak_memory", function, kind)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 192  # MiB, of 256

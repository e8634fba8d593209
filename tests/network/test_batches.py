"""Cutting all kinds of inputs into batches, and refusing what cannot be."""

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import csr_array, csr_matrix
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from relflat_sk import FlatnessWarning, relative_flatness
from relflat_sk._network.batches import cast_inputs, make_batches

CE = nn.CrossEntropyLoss()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(10, 4))
Y = np.arange(10) % 3


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.fixture
def expected(net):
    return relative_flatness(net, torch.from_numpy(X), torch.from_numpy(Y), criterion=CE)


READ_ONLY = X.copy()
READ_ONLY.flags.writeable = False
FORMS = {
    "array": (X, Y),
    "lists": (X.tolist(), Y.tolist()),
    "data frame": (pd.DataFrame(X), pd.Series(Y)),
    "tensor": (torch.from_numpy(X), torch.from_numpy(Y)),
    "read-only": (READ_ONLY, Y),
    "reversed view": (X[::-1].copy()[::-1], Y[::-1].copy()[::-1]),
    "fortran order": (np.asfortranarray(X), Y),
    "sparse matrix": (csr_matrix(X), Y),
    "sparse array": (csr_array(X), Y),
    "tuple": ((X,), Y),
    "dict": ({"input": X}, Y),
    "column of labels": (X, Y[:, None]),
    "float labels": (X, Y.astype(float)),
    "int8 labels": (X, Y.astype(np.int8)),
    "dataset": (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), None),
    "loader": (DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 3), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_data_changes_nothing(net, expected, form):
    inputs, labels = FORMS[form]
    value = relative_flatness(net, inputs, labels, criterion=CE, batch_size=4)
    assert value == pytest.approx(expected, rel=1e-12)


def test_float64_data_for_a_float32_network(net, expected):
    value = relative_flatness(net.float(), X, Y, criterion=CE)
    assert value == pytest.approx(expected, rel=1e-4)


def test_whole_numbers_for_a_floating_network(net):
    counts = RNG.integers(0, 5, size=(10, 4))
    assert relative_flatness(net, counts, Y, criterion=CE) == pytest.approx(
        relative_flatness(net, counts.astype(float), Y, criterion=CE)
    )


def test_integers_stay_integers_for_an_embedding():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 3))
    assert cast_inputs(torch.tensor([1]), net).dtype == torch.int64
    assert relative_flatness(net, RNG.integers(0, 5, size=(10, 4)), Y, criterion=CE) > 0


class Pair(NamedTuple):
    one: object
    two: object


def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, a, b):
            return self.out(torch.cat([a, b], dim=1))

    net = Two().double()
    whole = nn.Sequential(net.out)
    expected = relative_flatness(whole, X, Y, criterion=CE)
    parts = (X[:, :1], X[:, 1:])
    for inputs in (parts, Pair(*parts), {"b": X[:, 1:], "a": X[:, :1]}):
        assert relative_flatness(net, inputs, Y, criterion=CE) == pytest.approx(expected)
    rows = [(Pair(*row), y) for *row, y in zip(*parts, Y, strict=True)]
    loader = DataLoader(rows, batch_size=4)  # its batches are of the type of the samples
    assert relative_flatness(net, loader, criterion=CE) == pytest.approx(expected)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_that_drops_samples_gives_a_warning(shuffle, net):
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    with pytest.warns(FlatnessWarning, match="drop_last=True: 2 of its 10 samples are left out"):
        relative_flatness(net, DataLoader(data, 4, shuffle=shuffle, drop_last=True), criterion=CE)
    whole = relative_flatness(net, X, Y, criterion=CE)
    loader = DataLoader(data, 5, shuffle=shuffle, drop_last=True)  # drops none
    assert relative_flatness(net, loader, criterion=CE) == pytest.approx(whole)
    with pytest.warns(FlatnessWarning, match="those of an incomplete batch are left out"):
        relative_flatness(net, DataLoader(Stream(), 4, drop_last=True), criterion=CE)


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "message"),
    [
        (np.where(X > 1, np.nan, X), Y, ValueError, "X contains NaN or infinity"),
        (np.where(X > 1, np.inf, X), Y, ValueError, "X contains NaN or infinity"),
        (X, Y[:9], ValueError, "X has 10 samples, y has 9 labels"),
        (X, 3, ValueError, "X has 10 samples, y has no labels.$"),
        (X[0], 3, ValueError, r"X has 4 samples, y has no labels. X is 1-D, .*reshape\(1, -1\)"),
        (X[:0], Y[:0], ValueError, "X has no samples"),
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), None, ValueError, "X has no samples"),
        (X, np.array(list("abcabcabca")), ValueError, "labels of type <U1 such as .*'a'.* encode"),
        (X, np.where(Y == 1, np.nan, Y), ValueError, "y contains NaN"),
        (X, torch.full((10,), torch.nan), ValueError, "y contains NaN"),
        (X, Y + 1, ValueError, "class indices from 0 to 2, one per output, got .* from 1 to 3"),
        (X, Y - 1, ValueError, "got values from -1 to 1"),
        (X, Y + 0.5, ValueError, "needs class indices 0, 1, ..., got fractions such as 0.5"),
        (X, np.zeros((10, 2)), ValueError, r"outputs of shape \(10, 3\) needs .* got \(10, 2\)"),
        ("text", Y, TypeError, "X must hold numbers"),
        (np.array([["a"] * 4] * 10), Y, TypeError, "X must hold numbers, got ndarray of <U1"),
        (3.0, Y, TypeError, "X must be an array of samples, got float 3.0"),
        (
            {"a": X, "b": X[:3]},
            Y,
            ValueError,
            r"must have equal lengths, got \[3, 10\]",
        ),
        (TensorDataset(torch.from_numpy(X)), None, TypeError, r"must give \(x, y\) pairs"),
        (TensorDataset(torch.zeros(2, 4)), Y, ValueError, "has its own labels"),
    ],
)
def test_bad_data(net, inputs, labels, error, message):
    with pytest.raises(error, match=message):
        relative_flatness(net, inputs, labels, criterion=CE)


@pytest.mark.parametrize(
    ("criterion", "labels", "message"),
    [
        (nn.MSELoss(), Y, r"MSELoss needs targets of the outputs' shape \(10, 3\), got \(10,\)"),
        (nn.BCEWithLogitsLoss(), np.full((10, 3), 2), "needs targets from 0 to 1, got .* 2 to 2"),
        (nn.PoissonNLLLoss(), np.full((10, 3), -1), "needs counts, .* got -1"),
        (
            nn.BCEWithLogitsLoss(weight=torch.ones(10, 1)),
            np.ones((10, 3)),
            r"weight of BCEWithLogitsLoss has shape \(10, 1\)",
        ),
        (lambda output, y: output[:, :2].square(), Y, None),
        (lambda output, y: output[:5, 0], Y, r"gave losses of shape \(5,\) for 10 samples"),
        (lambda output, y: 1.0, Y, "returned float, expected a tensor"),
        (nn.CosineEmbeddingLoss(), Y, r"CosineEmbeddingLoss cannot take outputs of shape"),
    ],
)
def test_criterion_and_labels_that_do_not_fit(net, criterion, labels, message):
    if message is None:
        assert np.isfinite(relative_flatness(net, X, labels, criterion=criterion))
        return
    with pytest.raises(ValueError, match=message):
        relative_flatness(net, X, labels, criterion=criterion)


def test_one_output_for_a_softmax_loss(net):
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 1).double()

        def forward(self, x):
            return self.out(x).squeeze(1)

    with pytest.raises(ValueError, match=r"one output per class, .* got outputs of shape \(10,\)"):
        relative_flatness(Flat(), X, Y, criterion=CE)


def test_outputs_that_are_not_one_per_sample():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3).double()

        def forward(self, x):
            return self.out(x).mean(0, keepdim=True)

    with pytest.raises(ValueError, match="turned 10 rows at layer 'out' into outputs of shape"):
        relative_flatness(Pooled(), X, Y, criterion=CE)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones(3), r"must have shape \(10,\), one weight per sample, got \(3,\)"),
        (-np.ones(10), "must be finite, not negative, and not all zero"),
        (np.zeros(10), "must be finite, not negative, and not all zero"),
    ],
)
def test_bad_sample_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        make_batches(X, Y, sample_weight=weights)


def test_an_overflowing_sum_is_not_mistaken_for_infinity():
    net = nn.Linear(2, 2)
    huge = np.full((4, 2), 3e38, dtype=np.float32)
    assert not torch.isfinite(torch.from_numpy(huge).sum())
    with pytest.raises(ValueError, match="X contains NaN"):
        relative_flatness(net, np.where(huge > 0, np.inf, 0), [0, 1, 0, 1], criterion=CE)
    relative_flatness(net, huge, [0, 1, 0, 1], criterion=CE)  # no complaint

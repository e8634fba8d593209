"""Inputs that hold no numbers or cannot be cut into batches are refused, and others pass."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.sparse import dok_array
from torch import nn

from relflat_sk import (
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
    relative_flatness,
)
from relflat_sk._network import check_kind

N = 12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = np.arange(N) % 3
FRAME = pd.DataFrame(X, columns=["x", "y", "z"])
TENSOR = torch.from_numpy(X)
BATCHES = [(TENSOR[:6], torch.from_numpy(Y[:6])), (TENSOR[6:], torch.from_numpy(Y[6:]))]


def with_column(values):
    return FRAME.assign(c=values)


class ArrowFrame:
    """What the frames of polars and of pyarrow have in common, under polars' names."""

    def __init__(self, **columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]

    def __arrow_c_stream__(self, requested_schema=None):
        raise NotImplementedError


class ArrowTable(ArrowFrame):
    """The same under pyarrow's names."""

    def __init__(self, **columns):
        super().__init__(**columns)
        self.column_names, self.columns = self.columns, list(columns.values())


DATES = np.full(N, np.datetime64("2020-01-01"))


REFUSED = {
    "category": (
        with_column(pd.Categorical(np.array(list("abc"))[Y])),
        r"columns that hold no numbers: 'c' \(category, such as 'a'\). Encode categories",
    ),
    "object": (with_column(np.array(["u", "v", "w"], dtype=object)[Y]), r"'c' \(.*, such as 'u'\)"),
    "string": (with_column(pd.array(["u"] * N, dtype="string")), r"'c' \(string, such as 'u'\)"),
    "missing": (with_column(pd.array([pd.NA] * 11 + ["u"], dtype="string")), "such as 'u'"),
    "date": (
        with_column(pd.Timestamp("2020-01-01") + pd.to_timedelta(Y, unit="D")),
        r"'c' \(datetime64.*such as Timestamp\('2020-01-01 00:00:00'\)\).*turn dates into numbers",
    ),
    "duration": (with_column(pd.to_timedelta(Y, unit="D")), r"'c' \(timedelta64"),
    "period": (with_column(pd.period_range("2020", periods=N, freq="D")), r"'c' \(period"),
    "empty dates": (with_column(pd.Series([pd.NaT] * N)), r"'c' \(datetime64\[.*\]\)\. Encode"),
    "polars": (ArrowFrame(x=X[:, 0], d=DATES), r"numbers: 'd' \(datetime64.*turn dates"),
    "pyarrow": (ArrowTable(x=X[:, 0], d=DATES), r"numbers: 'd' \(datetime64.*turn dates"),
    "many": (pd.DataFrame({str(i): ["a"] * N for i in range(7)}), "'4' .* and 2 more. Encode"),
    "array of dates": (
        np.full((N, 2), np.datetime64("2020-01-01")),
        "X holds dates or times, of type datetime64",
    ),
    "series of dates": (pd.Series(pd.to_timedelta(Y, unit="D")), "X holds dates or times"),
    "coo": (TENSOR.to_sparse(), r"a sparse tensor \(torch.sparse_coo\).*Pass X.to_dense\(\)"),
    "in a dict": ({"x": TENSOR.to_sparse()}, "a sparse tensor"),
    "in a tuple": ((TENSOR, TENSOR.to_sparse()), "a sparse tensor"),
    "complex": (TENSOR.to(torch.complex64), r"complex numbers \(torch.complex64\)"),
    "meta": (TENSOR.to("meta"), "on the meta device, which holds no values"),
    "batches": (BATCHES, "a list of 2 tuples, like the batches or samples of a loader"),
    "lists of batches": ([list(batch) for batch in BATCHES], "a list of 2 lists"),
    "dicts": ([{"x": TENSOR}], "a list of 1 dicts, .*torch.cat"),
    "unequal batches": (
        [X[:5], X[5:]],
        r"a list of arrays of different shapes, such as \(5, 3\) and \(7, 3\)",
    ),
    "tuple of batches": (tuple([list(b) for b in BATCHES]), "a list of arrays of different shapes"),
    "generator": ((batch for batch in BATCHES), "a generator, which can be read only once"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_everywhere_before_anything_is_computed(kind):
    data, message = REFUSED[kind]
    net = RelativeFlatnessRegularizedClassifier(verbose=0, max_epochs=1, random_state=0)
    with pytest.raises(TypeError, match=message):
        net.fit(data, Y)
    assert not net.initialized_
    net.fit(X, Y)
    criterion = nn.CrossEntropyLoss()
    for call in [
        lambda: net.predict(data),
        lambda: net.score(data, Y),
        lambda: relative_flatness(net, data, Y),
        lambda: relative_flatness(net.module_, data, Y, criterion=criterion),
        lambda: flatness_report(net, data, Y),
        lambda: FlatnessScorer()(net, data, Y),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


def test_a_sparse_csr_tensor():
    with pytest.warns(UserWarning, match="beta"):
        sparse = TENSOR.to_sparse_csr()
    with pytest.raises(TypeError, match=r"a sparse tensor \(torch.sparse_csr\)"):
        check_kind(sparse)


@pytest.mark.parametrize(
    "data",
    [
        X,
        X.tolist(),
        list(TENSOR),
        [[X[0], X[1]], [X[2], X[3]]],
        [[]],
        [],
        FRAME,
        with_column(Y > 1),
        with_column(pd.Categorical(Y)),
        with_column(Y.astype(object)),
        with_column(pd.array([1, None] * 6, dtype="Int64")),
        with_column(pd.Series([1.0, None] * 6, dtype=object)),
        dok_array(X),
        {"a": X, "b": TENSOR},
        (X, TENSOR),
        None,
        "text",
    ],
    ids=lambda data: type(data).__name__,
)
def test_passes(data):
    check_kind(data)


def test_columns_of_numbers_of_any_type_are_trained_on():
    frame = with_column(pd.Categorical(Y)).assign(d=Y > 1, e=Y.astype(object))
    net = RelativeFlatnessRegularizedClassifier(verbose=0, max_epochs=1, random_state=0)
    assert net.fit(frame, Y).n_features_in_ == 6
    assert relative_flatness(net, frame, Y) == net.relative_flatness_

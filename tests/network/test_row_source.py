"""Arrays of which rows are read when they are needed."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from torch import nn

from relflat_sk import relative_flatness
from relflat_sk._network.batches import (
    RowSource,
    copy_rows,
    is_row_source,
    make_batches,
    mapped_file,
)
from tests.data_kinds import ComputedRows, memmap, npy, zarr_array

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype(np.float32)
Y = np.arange(50) % 3

MAKERS = {
    "memmap": memmap,
    "np.load": npy,
    "zarr": zarr_array,
    "computed": lambda folder, X: ComputedRows(X),
}
ROWS = {
    "slice": slice(3, 40, 2),
    "all": slice(None),
    "none": slice(4, 4),
    "in order": np.array([3, 4, 5, 9, 40]),
    "shuffled": np.array([40, 3, 49, 3, 0]),
    "from the end": np.array([-1, -50]),
    "one": 7,
    "last": -1,
    "scikit-learn's": (np.array([5, 1]), ...),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_are_those_of_the_array(kind, rows, tmp_path):
    source = RowSource(MAKERS[kind](tmp_path, X))
    found = source[ROWS[rows]]
    assert_array_equal(found, X[ROWS[rows]])
    assert found.dtype == X.dtype
    assert found.flags.writeable


def test_columns_are_refused():
    with pytest.raises(IndexError, match=r"by whole rows here, got the index \[0\] of other axes"):
        RowSource(X)[:, 0]


@pytest.mark.parametrize("kind", MAKERS)
def test_subsets_of_subsets(kind, tmp_path):
    chosen = np.array([40, 3, 17, 8, 9])
    source = RowSource(MAKERS[kind](tmp_path, X)).subset(chosen)
    assert source.shape == (5, 4)
    assert_array_equal(source[1:4], X[chosen][1:4])
    assert_array_equal(source.subset(np.array([4, 0]))[:], X[chosen][[4, 0]])
    assert_array_equal(np.asarray(source), X[chosen])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, False),
        (X[0, 0], False),
        (X.tolist(), False),
        (ComputedRows(X), True),
        (RowSource(X), True),
        (nn.Linear(2, 2).weight, False),
        (nn.Linear(2, 2), False),
    ],
    ids=["array", "number", "list", "computed", "source", "tensor", "module"],
)
def test_what_is_read_by_rows(value, expected):
    assert is_row_source(value) is expected


def test_only_what_a_batch_needs_is_read():
    rows = ComputedRows(X)
    assert [len(batch.x) for batch in make_batches(rows, Y, batch_size=20)()] == [20, 20, 10]
    assert rows.most == 20


def test_labels_are_read_with_their_batch(tmp_path):
    labels = ComputedRows(RNG.normal(size=(50, 3)))
    net = nn.Linear(4, 3)
    expected = relative_flatness(net, X, labels._array, criterion=nn.SmoothL1Loss())
    found = relative_flatness(net, X, labels, criterion=nn.SmoothL1Loss(), batch_size=20)
    assert found == pytest.approx(expected)
    assert labels.most == 20


@pytest.mark.parametrize(
    ("inputs", "labels", "error", "message"),
    [
        (ComputedRows(np.where(X > 1, np.nan, X)), Y, ValueError, "X contains NaN or infinity"),
        (ComputedRows(X.astype(str)), Y, TypeError, "X must hold numbers, got ComputedRows of <U"),
        (ComputedRows(X), Y[:9], ValueError, "X has 50 samples, y has 9 labels"),
        (ComputedRows(X[:0]), Y[:0], ValueError, "X has no samples"),
        (X, ComputedRows(np.where(Y == 1, np.nan, Y)), ValueError, "y contains NaN"),
    ],
    ids=["nan", "text", "lengths", "empty", "nan in y"],
)
def test_bad_data(inputs, labels, error, message):
    net = nn.Linear(4, 3)
    with pytest.raises(error, match=message):
        relative_flatness(net, inputs, labels, criterion=nn.CrossEntropyLoss())


def test_a_view_of_a_mapped_file_is_recognised(tmp_path):
    mapped = memmap(tmp_path, X)
    view = np.asarray(mapped)[10:, None]
    assert mapped_file(view) is not None
    assert mapped_file(X) is None
    assert mapped_file(mapped[[1, 2]]) is None  # a copy in memory
    assert_array_equal(copy_rows(view, slice(2)), X[10:12, None])


def test_changes_of_a_private_mapping_are_kept(tmp_path):
    mapped = memmap(tmp_path, X, mode="c")
    mapped[3] = 7
    copy_rows(mapped, slice(10))
    assert (mapped[3] == 7).all()


def test_changes_of_a_shared_mapping_are_kept(tmp_path):
    mapped = memmap(tmp_path, X, mode="r+")
    mapped[3] = 7
    copy_rows(mapped, slice(10))
    assert (mapped[3] == 7).all()

"""Batches cut out of arrays equal those of torch's loader, in values, types, shapes and order."""

import numpy as np
import pytest
import scipy.sparse
import torch
from skorch.dataset import Dataset as SkorchDataset
from torch.testing import assert_close
from torch.utils.data import DataLoader, SequentialSampler, Subset, TensorDataset

from relflat_sk.training._data import ArrayRows, make_loader, with_weights
from tests.training.common import make

N = 23
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 4))
Y = RNG.integers(0, 3, N)
WEIGHTS = RNG.uniform(size=N)
ROWS = RNG.permutation(N)[:17]
DRAWN = np.arange(N) // 2  # as many samples as the base has, some of them twice


def _same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)  # compares dtype and device
        assert ours.stride() == theirs.stride()
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, part in theirs.items():
            _same(ours[name], part)
    else:
        assert len(ours) == len(theirs)
        for part, other in zip(ours, theirs, strict=True):
            _same(part, other)


def _cuts(loader):
    return type(loader.dataset) is ArrayRows


def _same_batches(dataset, *, cut=True, **arguments):
    """Compare two epochs, and the random state after them."""
    ours, theirs = make_loader(dataset, **arguments), DataLoader(dataset, **arguments)
    assert _cuts(ours) is cut
    assert len(ours) == len(theirs)
    states = []
    epochs = []
    for loader in (ours, theirs):
        torch.manual_seed(3)
        epochs.append([*loader, *loader])
        states.append(torch.get_rng_state())
    _same(*epochs)
    assert torch.equal(*states)


DTYPES = ["i1", "?", "c16"]
DATA = {
    "matrix": SkorchDataset(X, Y),
    "images": SkorchDataset(RNG.normal(size=(N, 3, 5, 5)).astype("f4"), Y.astype("f4")[:, None]),
    "no labels": SkorchDataset(X),
    "half": SkorchDataset(torch.tensor(X).bfloat16(), torch.tensor(Y).half()),
    "dict": SkorchDataset({"a": X, "b": torch.tensor(Y)}, Y),
    "list": SkorchDataset([X, torch.tensor(X[:, :2])], Y),
    "several labels": SkorchDataset({"a": X}, (Y, X)),
    "tensor data set": TensorDataset(torch.tensor(X), torch.tensor(Y)),
    "subset of a subset": Subset(Subset(SkorchDataset(X, Y), ROWS), [5, 3, 3, 0]),
    "subset of weights": Subset(with_weights(SkorchDataset(X, Y), WEIGHTS), ROWS),
    "weights of a bootstrap": with_weights(Subset(SkorchDataset(X, Y), DRAWN), WEIGHTS),
    "subset of sparse": Subset(SkorchDataset(scipy.sparse.csr_matrix(X), Y), ROWS),
    "weights of sparse": with_weights(SkorchDataset(scipy.sparse.csr_matrix(X), Y), WEIGHTS),
    "nan": SkorchDataset(np.where(X > 0, X, np.nan), Y),
} | {dtype: SkorchDataset(X.astype(dtype), Y.astype(dtype)) for dtype in DTYPES}


@pytest.mark.parametrize("dataset", DATA.values(), ids=DATA.keys())
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
def test_equals_torchs_loader(dataset, shuffle, drop_last):
    _same_batches(dataset, batch_size=5, shuffle=shuffle, drop_last=drop_last)


@pytest.mark.parametrize("batch_size", [1, N - 1, N, 10 * N])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sizes(batch_size, drop_last):
    _same_batches(DATA["matrix"], batch_size=batch_size, shuffle=True, drop_last=drop_last)


class _Doubled(SkorchDataset):
    def transform(self, X, y):
        return 2 * X, y


SHUFFLED = {"shuffle": True}
OTHERS = {
    "own data set": (_Doubled(X, Y), SHUFFLED),
    "three tensors": (TensorDataset(*[torch.tensor(X)] * 3), SHUFFLED),
    "reversed": (SkorchDataset(X[::-1], Y), SHUFFLED),
    "python labels": (SkorchDataset(X, Y.tolist()), SHUFFLED),
    "unequal lengths": (SkorchDataset({"a": X}, Y, length=7), SHUFFLED),
    "collate_fn": (DATA["matrix"], {"collate_fn": torch.utils.data.default_collate}),
    "sampler": (DATA["matrix"], {"sampler": SequentialSampler(DATA["matrix"])}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_and_arguments_of_the_user_go_to_torchs_loader(name):
    dataset, arguments = OTHERS[name]
    _same_batches(dataset, cut=False, batch_size=5, **arguments)


def test_batches_share_no_memory_with_the_data():
    data = torch.zeros(4, 2)
    for shuffle in (False, True):
        for batch, _ in make_loader(SkorchDataset(data), batch_size=4, shuffle=shuffle):
            batch.add_(1)
    assert not data.any()


class _Loader(DataLoader):
    """A loader of the user's own."""


@pytest.mark.parametrize("training", [False, True])
def test_net_uses_it_unless_the_user_chose_a_loader(training):
    def loader(**params):
        net = make(**params)
        return net.get_iterator(net.get_dataset(X, Y), training=training)

    assert _cuts(loader(batch_size=-1))
    assert len(loader(batch_size=-1)) == 1
    assert len(loader(batch_size=np.int64(5))) == 5
    assert type(loader(iterator_train=_Loader, iterator_valid=_Loader)) is _Loader
    assert not _cuts(loader(iterator_train__num_workers=0, iterator_valid__num_workers=0))

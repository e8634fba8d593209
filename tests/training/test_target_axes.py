"""Targets with several axes as arrays, and rows of different lengths."""

import numpy as np
import pytest
import torch
from sklearn.model_selection import cross_val_score
from skorch.dataset import ValidSplit
from skorch.helper import SliceDataset
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from relflat_sk import relative_flatness
from tests.training.common import Binary, Classifier, Net, Regressor, make, same

rng = np.random.default_rng(3)
IMAGES = rng.normal(size=(40, 1, 6, 6)).astype("float32")
MASKS = (IMAGES[:, 0] > 0).astype("int32")
TOKENS = rng.integers(1, 12, (40, 7))
TAGS = np.where(TOKENS > 9, -100, TOKENS % 3)
SERIES = rng.normal(size=(40, 9, 4)).astype("float32")


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.tags = nn.Embedding(12, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.tags(self.words(x)).transpose(1, 2)


def convolution(n):
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, n, 1))


def forecast():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 6), nn.Unflatten(1, (3, 2)))


CASES = {
    "masks": (Classifier, lambda: convolution(2), {}, IMAGES, MASKS),
    "masks of one logit": (Binary, lambda: convolution(1), {}, IMAGES, MASKS[:, None] > 0),
    "tags": (Classifier, Tagger, {}, TOKENS, TAGS),
    "images": (Regressor, lambda: convolution(1), {}, IMAGES, IMAGES),
    "images, absolute": (Regressor, lambda: convolution(1), {"criterion": nn.SmoothL1Loss},
                         IMAGES, IMAGES.astype("float64")),
    "series": (Regressor, forecast, {}, SERIES, SERIES[:, :3, :2]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_arrays_train_as_a_dataset_does(case):
    kind, module, params, X, y = CASES[case]
    torch.manual_seed(0)
    module = module()
    dtype = torch.int64 if kind in (Classifier, Net) else torch.float32
    data = TensorDataset(torch.tensor(X), torch.tensor(y).to(dtype))
    net = make(kind, module=module, **params).fit(X, y)
    same(net, make(kind, module=module, **params).fit(data, None), rtol=1e-5, atol=1e-6)
    expected = relative_flatness(net, data)
    assert relative_flatness(net, X, y.astype(str(dtype)[6:])) == pytest.approx(expected, rel=1e-4)
    assert net.relative_flatness_ == pytest.approx(expected, rel=1e-4)
    predicted = net.predict(X)
    assert predicted.shape == y.shape
    if kind is Regressor:
        error, spread = ((y - to) ** 2 for to in (predicted, y.mean(axis=0)))
        score = np.mean(1 - error.sum(axis=0) / spread.sum(axis=0))
    else:
        score = (predicted == y)[y != -100].mean()
    assert net.score(X, y) == pytest.approx(score, rel=1e-5)
    make(kind, module=module, train_split=ValidSplit(4), **params).fit(X, y)


ONE_HOT = np.eye(3, dtype=int)[TOKENS[:, 0] % 3]


@pytest.mark.parametrize(
    ("module", "y"),
    [
        ({}, ONE_HOT),
        ({"module": nn.Linear(7, 3)}, ONE_HOT),
        ({"module": nn.Linear(7, 3)}, ONE_HOT + 0.5),
        ({"module": nn.Linear(7, 3)}, ONE_HOT.astype(str)),
        ({"module": convolution(2)}, MASKS[:30]),
    ],
    ids=["default module", "one-hot", "fractions", "strings", "too few"],
)
def test_targets_that_do_not_fit_are_refused(module, y):
    X = IMAGES if len(y) == 30 else TOKENS.astype("float32")
    with pytest.raises(ValueError, match="1d array|needs targets of shape|30 labels"):
        make(**module).fit(X, y)


class Sentences(Dataset):
    def __init__(self):
        self.rows = [torch.tensor(rng.integers(1, 9, n)) for n in rng.integers(2, 7, 60)]
        self.labels = np.array(["even", "odd"])[[int(1 in row) for row in self.rows]]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], self.labels[i]


def padded(batch):
    rows, labels = zip(*batch, strict=True)
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True), torch.tensor(np.array(labels))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.words(x).sum(dim=1))


def test_rows_of_different_lengths_are_cross_validated():
    data = Sentences()
    params = {f"iterator_{name}__collate_fn": padded for name in ("train", "valid")}
    net = make(module=Bag, lr=0.05, max_epochs=20, **params)
    X = SliceDataset(data)
    assert cross_val_score(net, X, data.labels, cv=3, error_score="raise").mean() > 0.8
    assert net.fit(X, data.labels).relative_flatness_ > 0
    assert set(net.predict(X)) == {"even", "odd"}
    with pytest.raises(ValueError, match="inhomogeneous"):
        make(module=Bag).fit(X, data.labels)

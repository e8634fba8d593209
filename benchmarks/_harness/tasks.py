"""The data sets and the candidates of the study of choices, `benchmarks.worth.selection`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn import datasets
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import OneHotEncoder
from torch import Tensor

from benchmarks._harness.data import load_images, mislabel
from benchmarks._harness.stacked import Candidate

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]  # X, y, X_test and y_test
Draw = Callable[[int, str | None], Arrays]  # takes a seed and the path of the images
N_TEST = 2000  # of data that are drawn, or plentiful
IMAGES = 10_000  # of which training and test images are drawn


class Split(NamedTuple):
    """Training and test data, standardised by the training data."""

    X: Tensor
    y: Tensor
    X_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class Task:
    """A data set: how training and test data are drawn, and how deep it is trained."""

    draw: Draw
    goal: float = 0.05  # training loss of candidates of equal loss, a share of a constant's
    worst: float = 0.5  # candidates of a larger share have not been trained, and may not be chosen
    needs_images: bool = False

    def split(self, seed: int, images: str | None = None) -> Split:
        """Draw training and test data."""
        X, y, X_test, y_test = self.draw(seed, images)
        mean, spread = X.mean(axis=0), X.std(axis=0)
        spread[spread == 0] = 1
        if y.dtype.kind == "f":
            y_test, y = (y_test - y.mean()) / y.std(), (y - y.mean()) / y.std()
        kind = torch.float32 if y.dtype.kind == "f" else torch.int64
        inputs = [torch.as_tensor((part - mean) / spread).float() for part in (X, X_test)]
        targets = [torch.as_tensor(part).to(kind) for part in (y, y_test)]
        return Split(inputs[0], targets[0], inputs[1], targets[1])


def from_table(load: Any, n: int, wrong: float = 0.0) -> Draw:
    """Draw training samples of a table; all others are for testing."""

    def draw(seed: int, images: str | None) -> Arrays:
        X, y = load(return_X_y=True)
        stratify = y if y.dtype.kind == "i" else None
        X, X_test, y, y_test = train_test_split(
            X, y, train_size=n, stratify=stratify, random_state=seed
        )
        return X, mislabel(y, wrong, seed), X_test, y_test

    return draw


def generated(make: Any, n: int, wrong: float = 0.0, shift: float = 0.0, **arguments: Any) -> Draw:
    """Draw training and test samples by a function of scikit-learn."""

    def draw(seed: int, images: str | None) -> Arrays:
        X, y = make(n_samples=n + N_TEST, random_state=seed, **arguments)
        if make is datasets.make_hastie_10_2:  # classes -1 and 1
            y = (y > 0).astype(np.int64)
        rng = np.random.default_rng(seed)
        move = shift * X.std(axis=0) * rng.choice([-1, 1], X.shape[1])
        return X[:n], mislabel(y[:n], wrong, seed), X[n:] + move, y[n:]

    return draw


def from_images(n: int, wrong: float = 0.0) -> Draw:
    """Draw images of 8 x 8 blocks of CIFAR-10's pixels, and test images."""

    def draw(seed: int, path: str | None) -> Arrays:
        X, y = load_images(IMAGES, path)
        X = torch.nn.functional.avg_pool2d(X, 4).flatten(1)
        order = np.random.default_rng(seed).permutation(IMAGES)
        train, test = order[:n], order[n : n + N_TEST]
        labels = mislabel(y[train].numpy(), wrong, seed)
        return X[train].numpy(), labels, X[test].numpy(), y[test].numpy()

    return draw


def _make_categories(n_samples: int, random_state: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw five categorical columns, one-hot, and five of numbers, of which two noisy classes."""
    rng = np.random.default_rng(random_state)
    levels = [2, 3, 5, 8, 12]
    encoder = OneHotEncoder(categories=[range(n) for n in levels], sparse_output=False)
    categories = encoder.fit_transform(rng.integers(0, levels, (n_samples, len(levels))))
    numbers = rng.normal(size=(n_samples, 5))
    logits = categories @ rng.normal(size=sum(levels)) + numbers @ rng.normal(size=5)
    logits += numbers[:, 0] * (categories @ rng.normal(size=sum(levels)))
    is_second = logits - np.median(logits) + rng.logistic(0, 0.5, n_samples) > 0
    return np.hstack([categories, numbers]), is_second.astype(np.int64)


CLUSTERS = {"n_features": 20, "n_informative": 8, "n_redundant": 4, "n_classes": 4}
_clusters = partial(generated, datasets.make_classification, 500, **CLUSTERS)
TASKS = {
    "digits": Task(from_table(datasets.load_digits, 500)),
    "wine": Task(from_table(datasets.load_wine, 90)),
    "digits, 20% wrong labels": Task(from_table(datasets.load_digits, 500, wrong=0.2), 0.1),
    "clusters": Task(_clusters()),
    "breast cancer": Task(from_table(datasets.load_breast_cancer, 280)),
    "clusters, 10% wrong labels": Task(_clusters(wrong=0.1), 0.1),
    "hastie": Task(generated(datasets.make_hastie_10_2, 500), 0.1),
    "clusters, shifted test": Task(_clusters(shift=0.5)),
    "quantiles": Task(
        generated(datasets.make_gaussian_quantiles, 500, n_features=10, n_classes=3), 0.1
    ),
    "CIFAR-10": Task(from_images(800), 0.1, 0.8, needs_images=True),
    "friedman": Task(generated(datasets.make_friedman1, 400, noise=1.0), 0.1),
    "diabetes": Task(from_table(datasets.load_diabetes, 220), 0.3, 0.8),
}
# beside those of the study, for `benchmarks.worth.baselines`
FURTHER = {
    "digits, 40% wrong labels": Task(from_table(datasets.load_digits, 500, wrong=0.4)),
    "breast cancer, 20% wrong labels": Task(
        from_table(datasets.load_breast_cancer, 280, wrong=0.2)
    ),
    "wine, 20% wrong labels": Task(from_table(datasets.load_wine, 90, wrong=0.2)),
    "digits, 100 samples": Task(from_table(datasets.load_digits, 100)),
    "iris, 45 samples": Task(from_table(datasets.load_iris, 45)),
    "categories": Task(generated(_make_categories, 600)),
    "friedman, little noise": Task(generated(datasets.make_friedman1, 800, noise=0.1)),
    "friedman3": Task(generated(datasets.make_friedman3, 400, noise=0.05)),
}
# constants are chosen on these data sets, and reported on the others
CHOSEN_ON = (
    "digits", "digits, 20% wrong labels", "breast cancer", "hastie", "quantiles", "friedman",
)  # fmt: skip
SPACES = ("equal", "mixed")
N_MIXED = 64


def candidates(space: str, split: int, goal: float) -> list[Candidate]:
    """Return the candidates of a space and a split, from whose number the seeds follow.

    "equal" has 60 of batch sizes, rates and seeds, which train to the goal. "mixed" has 64 of other
    widths, depths, weight decays, dropouts, epochs, batch sizes and rates, without a goal.
    """
    if space == "equal":
        grid = [(size, lr) for size in (16, 32, 64, 128) for lr in (0.02, 0.05, 0.1)]
        return [
            Candidate((64,), *grid[i % len(grid)], seed=1000 * split + i, epochs=100, goal=goal)
            for i in range(5 * len(grid))
        ]
    rng = np.random.default_rng(0)  # the same settings in all data sets and splits
    shapes = [((width,) * depth, size) for width in (16, 48, 128) for depth in (1, 2)
              for size in (32, 128)]  # fmt: skip
    return [
        Candidate(
            *shapes[i % len(shapes)],
            lr=float(0.02 * 10 ** rng.random()),
            seed=1000 * split + i,
            weight_decay=float(rng.choice([0.0, 1e-4, 1e-3, 1e-2])),
            dropout=float(rng.choice([0.0, 0.25])),
            epochs=int(rng.choice([15, 30, 60])),
        )
        for i in range(N_MIXED)
    ]


def constant_loss(y: Tensor) -> float:
    """Return the loss of the best constant: the labels' entropy, or the variance."""
    if y.is_floating_point():
        return float(y.var(correction=0))
    shares = y.bincount().double() / len(y)
    return -sum(p * math.log(p) for p in shares.tolist() if p)

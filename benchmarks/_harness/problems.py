"""The data sets and networks on which accuracies are compared."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from benchmarks._harness.data import load_images
from benchmarks._harness.networks import SmallConvNet
from relflat_sk import MLP

Arrays = tuple[np.ndarray, np.ndarray]

TABLES = {"wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits}


@dataclass(frozen=True)
class Problem:
    """Training data, test data, and the arguments of a net that make its module."""

    name: str
    train: Arrays
    test: Arrays
    network: dict[str, Any]


def load_problem(name: str, n_train: int | None = None, images: str | None = None) -> Problem:
    """Load half of a table (or n samples), or 1,000 images (or n) of "CIFAR-10", and test data."""
    if name == "CIFAR-10":
        n_train = n_train or 1000
        X, y = (tensor.numpy() for tensor in load_images(n_train + 5000, images))
        parts = (X[:n_train], y[:n_train]), (X[n_train:], y[n_train:])
        return Problem(f"{name} {n_train}", *parts, {"module": SmallConvNet})
    X, y = TABLES[name](return_X_y=True)
    n_train = n_train or len(y) // 2
    X, X_test, y, y_test = train_test_split(X, y, train_size=n_train, stratify=y, random_state=0)
    scaler = StandardScaler().fit(X)
    X, X_test = (scaler.transform(part).astype(np.float32) for part in (X, X_test))
    network = {"module": MLP, "module__hidden_layer_sizes": (128, 64)}
    return Problem(f"{name} {n_train}", (X, y), (X_test, y_test), network)


def mislabel(y: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Replace a share of the labels by another class, drawn at random."""
    if not share:
        return y
    rng, n_classes = np.random.default_rng(seed), int(y.max()) + 1
    rows = rng.permutation(len(y))[: round(share * len(y))]
    y = y.copy()
    y[rows] = (y[rows] + rng.integers(1, n_classes, len(rows))) % n_classes
    return y

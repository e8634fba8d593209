"""Time of a fit on arrays, next to scikit-learn's MLP, a torch loop and skorch's own net.

All train a network with one hidden layer of 100 units by Adam, for the same number of epochs, in
shuffled batches of 32 samples and in the dtype of the data.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale
from skorch import NeuralNetClassifier
from torch import nn

from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, compare, environment, interleave, ratio, verdict
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier

BATCH_SIZE = 32
LEARNING_RATE = 0.01
OURS = "defaults"
OTHERS = "scikit-learn", "torch loop", "skorch"


@dataclass(frozen=True)
class Data:
    """A data set, and the number of epochs of a fit on it."""

    name: str
    X: np.ndarray
    y: np.ndarray
    epochs: int
    # largest ratios of our time to scikit-learn's, without penalty and with the default one
    limits: tuple[float, float]


def load_data() -> list[Data]:
    """Load three data sets of scikit-learn, and draw a random one of the size of images."""
    rng = np.random.default_rng(0)
    random = rng.normal(size=(2000, 784)).astype(np.float32)
    return [
        _standardised("iris", load_iris, 50, (1.6, 1.8)),
        _standardised("breast cancer", load_breast_cancer, 25, (1.1, 1.3)),
        _standardised("digits", load_digits, 10, (1.0, 1.2)),
        Data("random, 2,000 x 784", random, rng.integers(0, 10, 2000), 5, (1.5, 1.5)),
    ]


def _standardised(name: str, load: Callable[..., Any], *options: Any) -> Data:
    X, y = load(return_X_y=True)
    return Data(name, scale(X), y, *options)


class Network(MLP):
    """Our default network, in a dtype of choice."""

    def __init__(self, dtype: torch.dtype, **sizes: int) -> None:
        super().__init__(**sizes)
        self.to(dtype)


def fit_sklearn(data: Data) -> None:
    """Fit scikit-learn's MLP, without stopping early."""
    net = MLPClassifier(
        batch_size=BATCH_SIZE, learning_rate_init=LEARNING_RATE, max_iter=data.epochs,
        n_iter_no_change=data.epochs + 1,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        net.fit(data.X, data.y)


def fit_loop(data: Data) -> None:
    """Fit by a loop of a few lines."""
    X, y = torch.from_numpy(data.X), torch.from_numpy(data.y)
    net = Network(X.dtype, **_sizes(data))
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    cross_entropy = nn.functional.cross_entropy
    training = epochs(
        lambda rows: cross_entropy(net(X[rows]), y[rows]), optimizer, len(X), BATCH_SIZE
    )
    for _ in range(data.epochs):
        next(training)


def fit_skorch(data: Data) -> None:
    """Fit skorch's own classifier."""
    NeuralNetClassifier(
        partial(Network, torch.from_numpy(data.X).dtype, **_sizes(data)),
        criterion=nn.CrossEntropyLoss, optimizer=torch.optim.Adam, lr=LEARNING_RATE,
        batch_size=BATCH_SIZE, max_epochs=data.epochs, iterator_train__shuffle=True,
        train_split=None, verbose=0,
    ).fit(data.X, data.y)  # fmt: skip


def fit_ours(data: Data, **arguments: object) -> None:
    """Fit our classifier with its defaults."""
    RelativeFlatnessRegularizedClassifier(
        lr=LEARNING_RATE, batch_size=BATCH_SIZE, max_epochs=data.epochs, verbose=0, **arguments
    ).fit(data.X, data.y)


def _sizes(data: Data) -> dict[str, int]:
    return {"n_features": data.X.shape[1], "n_outputs": int(data.y.max()) + 1}


METHODS: dict[str, Callable[[Data], None]] = {
    "scikit-learn": fit_sklearn,
    "torch loop": fit_loop,
    "skorch": fit_skorch,
    "no penalty": partial(fit_ours, flatness_weight=0.0),
    OURS: fit_ours,
}


def main() -> int:
    options = read_options(__doc__, rounds=(11, 1))
    torch.set_num_threads(1)
    print(f"Fits with batches of {BATCH_SIZE} samples, {options.rounds} of each method")
    print(environment())
    budgets = []
    problems = load_data()
    measured = [replace(problems[2], epochs=1)] if options.quick else problems
    for data in measured:
        ways = {name: partial(fit, data) for name, fit in METHODS.items()}
        times = interleave(ways, options.rounds)
        print(f"\n{data.name}, {data.epochs} epochs\n{compare(times, *OTHERS).to_string()}")
        budgets += [
            Budget(f"{data.name}, {way} / {other}", ratio(times[way], times[other]).value, limit)
            for way, other, limit in (
                ("no penalty", OTHERS[0], data.limits[0]),
                (OURS, OTHERS[0], data.limits[1]),
                *((OURS, other, 1.0) for other in OTHERS[1:]),
            )
        ]
    return verdict(budgets, judged=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())

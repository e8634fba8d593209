"""Show what penalties of any weight do to a network's accuracy and to its flatness.

A penalty is to be harmless and effective. A dead network (all units zero, all outputs constant)
is perfectly flat, so that a large penalty without limit ends there; a limit that is too strict
does nothing. For each optimizer, learning rate, penalised layer and weight, this benchmark trains
networks with the default `flatness_clip`, and compares them with networks trained without penalty
at the same learning rate with the same seeds. It prints the difference in test accuracy, and the
relative flatness of the penalised layers as a share of that without penalty. Both flatnesses are
taken at the same training loss, interpolated between the epochs before and after it.

    python -m benchmarks.worth.stability --problem "breast cancer"    # 10 minutes
    python -m benchmarks.worth.stability --problem CIFAR-10 --data NPZ --epochs 25 --loss 1
    python -m benchmarks.worth.stability --wrong 0.2 --every 4 --start 0.5  # wrong labels
    python -m benchmarks.worth.stability --clip none                  # as published

With ``--store FOLDER`` each training is saved, and an interrupted run can be continued.
"""

import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from joblib import Memory
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import Callback

from benchmarks._harness.data import load_images, mislabel
from benchmarks._harness.networks import SmallConvNet
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.timing import environment, table
from relflat_sk import (
    MLP,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    flatness_report,
)
from relflat_sk._models.network_of import open_model
from relflat_sk._network.network import mean_loss

Arrays = tuple[np.ndarray, np.ndarray]
TABLES = {"wine": load_wine, "breast cancer": load_breast_cancer, "digits": load_digits}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9},
    "Adam": {"optimizer": torch.optim.Adam},
}
# up to the edge of what trains a network; at a third of these, 25 epochs do not train SmallConvNet
RATES = {
    "MLP": {"SGD": (0.02, 0.05, 0.1), "Adam": (0.003, 0.01, 0.03)},
    "SmallConvNet": {"SGD": (0.01, 0.02, 0.04), "Adam": (0.001, 0.002, 0.004)},
}
LAYERS = {"last": -1, "first": 0, "all": "all"}
WEIGHTS = [0.1, 1.0, 3.0, 10.0, 30.0]


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


class FlatnessAtLoss(Callback):
    """Measures the penalised layers of a net, added up, where its training loss meets a target."""

    def __init__(self, data: Arrays, layer: Any, loss: float) -> None:
        self.data = data
        self.layer = layer
        self.loss = loss

    def on_train_begin(self, net: Any, **kwargs: Any) -> None:
        """Forget an earlier training."""
        self.before: tuple[float, dict[str, torch.Tensor]] | None = None
        self.value = float("nan")  # as long as the loss has not reached the target

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        """Interpolate between the networks before and after the first epoch that ends below."""
        if np.isfinite(self.value):
            return
        risk = mean_loss(open_model(net, *self.data))
        weights = deepcopy(net.module_.state_dict())
        if risk <= self.loss and self.before:
            after = self._flatness(net)
            earlier, weights_before = self.before
            net.module_.load_state_dict(weights_before)
            before = self._flatness(net)
            net.module_.load_state_dict(weights)
            losses = np.log(np.maximum([risk, earlier], 1e-300))
            self.value = float(
                np.exp(np.interp(np.log(self.loss), losses, np.log([after, before])))
            )
        self.before = risk, weights

    def _flatness(self, net: Any) -> float:
        report = flatness_report(
            net, *self.data, measures=["relative_flatness"], layers=self.layer, random_state=0
        )
        return max(float(report["value"].sum()), 1e-300)


def train(
    problem: Problem, cell: tuple[str, float, str, float], seed: int, loss: float, **params: Any
) -> list[float]:
    """Train a network; return its test accuracy in percent, and its flatness at a loss."""
    optimizer, rate, layer, weight = cell
    flatness = FlatnessAtLoss(problem.train, LAYERS[layer], loss)
    net = RelativeFlatnessRegularizedClassifier(
        **problem.network,
        **OPTIMIZERS[optimizer],
        **params,
        lr=rate,
        flatness_layer=LAYERS[layer],
        flatness_weight=weight,
        callbacks=[("flatness_at_loss", flatness)],
        random_state=seed,
        verbose=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # ruined networks count as results
        net.fit(*problem.train)
    (callback,) = [one for name, one in net.callbacks_ if name == "flatness_at_loss"]
    return [100 * float(net.score(*problem.test)), callback.value]


def main() -> None:
    """Train, print two lines for each optimizer, learning rate and layer, and the worst cells."""
    arguments = read_options(
        __doc__, problem="digits", data=IMAGES, n_train=(int, 80), epochs=(30, 2),
        seeds=(range(3), [0]), optimizers=OPTIMIZERS, layers=LAYERS,
        weights=(WEIGHTS, [0.1, 1000.0]), loss=0.03, wrong=0.0, clip="1", store=str, every=1,
        start=0.0,
    )  # fmt: skip
    problem = load_problem(arguments.problem, arguments.n_train, arguments.data)
    if arguments.wrong:
        X, y = problem.train
        name = f"{problem.name}, {arguments.wrong:.0%} wrong labels"
        problem = replace(problem, name=name, train=(X, mislabel(y, arguments.wrong, 0)))
    epochs, seeds, loss = arguments.epochs, arguments.seeds, arguments.loss
    rarely = {"flatness_every": arguments.every, "flatness_start": arguments.start}
    clip = None if arguments.clip == "none" else float(arguments.clip)
    fit = Memory(arguments.store, verbose=0).cache(train)
    print(f"{problem.name}, {len(problem.test[1])} to test, {epochs} epochs, {len(seeds)} seeds")
    print(f"flatness_clip={clip}; flatness at a loss of {loss:g}; {environment()}", flush=True)

    def found(*cell: Any) -> np.ndarray:
        penalty = {"flatness_clip": clip, **rarely} if cell[-1] else {"flatness_clip": None}
        return np.array([
            fit(problem, cell, seed, loss, max_epochs=epochs, **penalty) for seed in seeds
        ]).T

    kind = problem.network["module"].__name__
    rates = [(name, rate) for name in arguments.optimizers for rate in RATES[kind][name]]
    columns = [f"weight {weight:g}" for weight in arguments.weights]
    rows = [["optimizer", "learning rate", "layer", "", "no penalty", *columns]]
    summary = [["layer", "", *columns]]
    for layer in arguments.layers:
        shape = len(rates), len(arguments.weights), len(seeds)
        differences, shares = np.empty(shape), np.empty(shape)
        for i, (optimizer, rate) in enumerate(rates):
            plain, of_plain = found(optimizer, rate, layer, 0.0)
            for j, weight in enumerate(arguments.weights):
                accuracy, flatness = found(optimizer, rate, layer, weight)
                differences[i, j], shares[i, j] = accuracy - plain, flatness / of_plain
            name = [optimizer, f"{rate:.2g}", layer]
            rows += [
                [*name, "points", f"{plain.mean():.1f}", *map(_interval, differences[i])],
                [*name, "flatness", f"{of_plain.mean():.3g}", *map(_geometric_mean, shares[i])],
            ]
            print("  ".join(rows[-2]), flush=True)
            print("  ".join(rows[-1]), flush=True)
        means = differences.mean(axis=2)
        cells = zip(means.mean(axis=0), means.min(axis=0), strict=True)
        summary.append([layer, "points", *(f"{m:+.1f} ({least:+.1f})" for m, least in cells)])
        every = [_geometric_mean(shares[:, j]) for j in range(shares.shape[1])]
        largest = [
            max((_geometric_mean(cell) for cell in shares[:, j]), key=float)
            for j in range(shares.shape[1])
        ]
        cells = zip(every, largest, strict=True)
        summary.append([layer, "flatness", *(f"{mean} ({most})" for mean, most in cells)])
    print()
    print(table(rows))
    print("\nTest accuracy in percent; with a penalty, the difference to none in points, and its")
    print(
        "standard error over seeds. Relative flatness of the penalised layers at equal loss; with"
    )
    print("a penalty, its share of that without (geometric mean over seeds; nan: the loss was not")
    print("reached). Mean over optimizers and learning rates (the worst of them):\n")
    print(table(summary))


def _geometric_mean(shares: np.ndarray) -> str:
    """Write the mean over the networks that reached the loss; nan if none did."""
    reached = shares[np.isfinite(shares)]
    return f"{np.exp(np.log(reached).mean()):.2g}" if len(reached) else "nan"


def _interval(differences: np.ndarray) -> str:
    """Write the mean of differences and its standard error."""
    if len(differences) < 2:
        return f"{differences.mean():+.1f}"
    error = differences.std(ddof=1) / np.sqrt(len(differences))
    return f"{differences.mean():+.1f} +- {error:.1f}"


if __name__ == "__main__":
    main()

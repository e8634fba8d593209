"""Show what penalties of any weight do to a network's accuracy and to its flatness.

A dead network is perfectly flat, so that a large penalty without limit ends there; a limit that is
too strict does nothing. For each optimizer, learning rate, penalised layer and weight, networks
with a penalty are compared with networks without one of the same seeds. Both flatnesses are taken
at the same training loss, interpolated between the epochs before and after it. With
``--store FOLDER`` each training is saved, and an interrupted run can be continued.
"""

import warnings
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Memory
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from skorch.callbacks import Callback
from tqdm import tqdm

from benchmarks._harness.data import load_images, mislabel
from benchmarks._harness.networks import SmallConvNet
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.tasks import Task, from_table
from benchmarks._harness.timing import environment
from relflat_sk import MLP, FlatnessWarning, RelativeFlatnessRegularizedClassifier, flatness_report
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


def load_problem(name: str, n_train: int | None, images: str | None, wrong: float) -> Problem:
    """Load half of a table (or n samples), or 1,000 images (or n) of "CIFAR-10", and test data."""
    if name == "CIFAR-10":
        n_train = n_train or 1000
        X, y = (tensor.numpy() for tensor in load_images(n_train + 5000, images))
        train = X[:n_train], mislabel(y[:n_train], wrong, 0)
        test, network = (X[n_train:], y[n_train:]), {"module": SmallConvNet}
    else:
        n_train = n_train or len(TABLES[name]().target) // 2
        split = Task(from_table(TABLES[name], n_train, wrong)).split(0)
        X, y, *others = (tensor.numpy() for tensor in split)
        train, test = (X, y), tuple(others)
        network = {"module": MLP, "module__hidden_layer_sizes": (128, 64)}
    name = f"{name} {n_train}" + (f", {wrong:.0%} wrong labels" if wrong else "")
    return Problem(name, train, test, network)


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
            log = np.interp(np.log(self.loss), losses, np.log([after, before]))
            self.value = float(np.exp(log))
        self.before = risk, weights

    def _flatness(self, net: Any) -> float:
        report = flatness_report(
            net, *self.data, measures=["relative_flatness"], layers=self.layer, random_state=0
        )
        return max(float(report["value"].sum()), 1e-300)


def train(
    problem: Problem, cell: tuple[str, float, str, float], seed: int, loss: float, **params: Any
) -> list[float]:
    """Train a network; return its test accuracy in percent, flatness at a loss, and seconds."""
    optimizer, rate, layer, weight = cell
    flatness = FlatnessAtLoss(problem.train, LAYERS[layer], loss)
    net = RelativeFlatnessRegularizedClassifier(
        **problem.network, **OPTIMIZERS[optimizer], **params, lr=rate, random_state=seed, verbose=0,
        flatness_layer=LAYERS[layer], flatness_weight=weight,
        callbacks=[("flatness_at_loss", flatness)],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # ruined networks count as results
        net.fit(*problem.train)
    (callback,) = [one for name, one in net.callbacks_ if name == "flatness_at_loss"]
    seconds = float(sum(net.history[:, "dur"]))  # of the epochs alone
    return [100 * float(net.score(*problem.test)), callback.value, seconds]


def main() -> None:
    arguments = read_options(
        __doc__, problem="digits", data=IMAGES, n_train=(int, 80), epochs=(30, 2),
        seeds=(range(3), [0]), optimizers=OPTIMIZERS, layers=LAYERS,
        weights=(WEIGHTS, [0.1, 1000.0]), loss=0.03, wrong=0.0, clip="1", store=str, every=1,
        start=0.0,
    )  # fmt: skip
    problem = load_problem(arguments.problem, arguments.n_train, arguments.data, arguments.wrong)
    epochs, seeds, loss = arguments.epochs, arguments.seeds, arguments.loss
    rarely = {"flatness_every": arguments.every, "flatness_start": arguments.start}
    clip = None if arguments.clip == "none" else float(arguments.clip)
    fit = Memory(arguments.store, verbose=0).cache(train)
    print(f"{problem.name}, {len(problem.test[1])} to test, {epochs} epochs, {len(seeds)} seeds")
    print(f"flatness_clip={clip}; flatness at a loss of {loss:g}; {environment()}", flush=True)
    rates = RATES[problem.network["module"].__name__]
    cells = [
        (optimizer, rate, layer, weight)
        for layer in arguments.layers
        for optimizer in arguments.optimizers
        for rate in rates[optimizer]
        for weight in (0.0, *arguments.weights)
    ]
    found = {
        (*cell, seed): fit(problem, cell, seed, loss, max_epochs=epochs,
                           **({"flatness_clip": clip, **rarely} if cell[-1] else {}))
        for cell in tqdm(cells, desc="settings") for seed in seeds
    }  # fmt: skip
    names = pd.MultiIndex.from_tuples(found, names=["optimizer", "rate", "layer", "weight", "seed"])
    frame = pd.DataFrame([*found.values()], names, ["accuracy", "flatness", "seconds"])
    report(frame.unstack("weight"))


def report(frame: pd.DataFrame) -> None:
    """Print both tables of trainings (rows), with a column for each weight."""
    of_cell, of_layer = ["layer", "optimizer", "rate"], ["layer"]
    (accuracy, points), (flatness, shares) = (
        (values[0.0], values.drop(columns=0.0)) for values in (frame["accuracy"], frame["flatness"])
    )
    points, shares = points.sub(accuracy, axis=0), shares.div(flatness, axis=0)
    by_cell = [
        points.groupby(of_cell).agg(_interval),
        shares.groupby(of_cell).agg(_geometric_mean).map("{:.2g}".format),
    ]
    for table, plain in zip(by_cell, (accuracy, flatness), strict=True):
        means = plain.groupby(of_cell).mean()
        table.insert(0, "no penalty", means.map("{:.3g}".format))
    print(f"\n{pd.concat(by_cell, keys=['points', 'flatness'], names=['']).to_string()}")
    print("""
Test accuracy in percent; with a penalty, the difference to none in points, and its standard error
over seeds. Relative flatness of the penalised layers at equal loss; with a penalty, its share of
that without (geometric mean over seeds; nan: the loss was not reached). Mean over optimizers and
learning rates (the worst of them):
""")
    means = points.groupby(of_cell).mean().groupby(of_layer)
    largest = shares.groupby(of_cell).agg(_geometric_mean).groupby(of_layer).max()
    every = shares.groupby(of_layer).agg(_geometric_mean)
    summary = [
        means.mean().map("{:+.1f}".format) + means.min().map(" ({:+.1f})".format),
        every.map("{:.2g}".format) + largest.map(" ({:.2g})".format),
    ]
    print(pd.concat(summary, keys=["points", "flatness"], names=[""]).to_string())
    times = frame["seconds"].drop(columns=0.0).div(frame["seconds"][0.0], axis=0)
    print(f"\nTime of the epochs over that without penalty, median:\n{times.median().to_string()}")


def _geometric_mean(shares: "pd.Series[float]") -> float:
    """Average over the networks that reached the loss; nan if none did."""
    return float(np.exp(np.log(shares).mean()))


def _interval(differences: "pd.Series[float]") -> str:
    """Write the mean of differences and its standard error."""
    error = f" +- {differences.sem():.1f}" if len(differences) > 1 else ""
    return f"{differences.mean():+.1f}{error}"


if __name__ == "__main__":
    main()

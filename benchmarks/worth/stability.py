"""Show what penalties of any weight do to a network's accuracy and to its flatness.

A penalty is to be harmless and effective. A dead network (all units zero, all outputs constant)
is perfectly flat, so that a large penalty without limit ends there; a limit that is too strict
does nothing. For each optimizer, learning rate, penalised layer and weight, this benchmark trains
networks with the default `flatness_clip`, and compares them with networks trained without penalty
at the same learning rate with the same seeds. It prints the difference in test accuracy, and the
relative flatness of the penalised layers as a share of that without penalty. Both flatnesses are
taken at the same training loss, interpolated between the epochs before and after it.

    python -m benchmarks.worth.stability                              # digits, 30 minutes
    python -m benchmarks.worth.stability --problem "breast cancer"    # 10 minutes
    python -m benchmarks.worth.stability --problem CIFAR-10 --data NPZ --epochs 25 --loss 1
    python -m benchmarks.worth.stability --wrong 0.2                  # a fifth of the labels wrong
    python -m benchmarks.worth.stability --clip none                  # as published
    python -m benchmarks.worth.stability --quick                      # a smoke run

With ``--results FILE`` each training is saved, and an interrupted run can be continued. Runs with
different ``--seeds`` can share a file.
"""

import argparse
import json
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skorch.callbacks import Callback

from benchmarks._harness.problems import Arrays, Problem, add_problem_arguments, load_problem
from benchmarks._harness.timing import environment, table
from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier, flatness_report
from relflat_sk._models.network_of import open_model
from relflat_sk._network.network import mean_loss

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


def with_wrong_labels(problem: Problem, share: float) -> Problem:
    """Give a share of the training samples another class, drawn at random."""
    X, y = problem.train
    random = np.random.default_rng(0)
    rows = random.permutation(len(y))[: round(share * len(y))]
    labels, n_classes = y.copy(), y.max() + 1
    labels[rows] = (labels[rows] + random.integers(1, n_classes, len(rows))) % n_classes
    return replace(problem, name=f"{problem.name}, {share:.0%} wrong labels", train=(X, labels))


class FlatnessAtLoss(Callback):
    """Measures a net where its training loss comes down to a target.

    Parameters
    ----------
    data : tuple of ndarray
        The training data.
    layer : int, str
        The penalised layers; their flatnesses are added.
    loss : float
        The target.
    """

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


class Results:
    """Test accuracies and flatnesses by setting, saved line by line.

    Parameters
    ----------
    path : str, optional
        File to read and to append to.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.known: dict[str, list[float]] = {}
        if path and Path(path).exists():
            for line in Path(path).read_text().splitlines():
                key, value = json.loads(line)
                self.known[json.dumps(key)] = value

    def get(self, key: list[Any], compute: Any) -> list[float]:
        """Return a saved value, or compute and save it."""
        text = json.dumps(key)
        if text not in self.known:
            self.known[text] = compute()
            if self.path:
                with Path(self.path).open("a") as file:
                    file.write(json.dumps([key, self.known[text]]) + "\n")
        return self.known[text]


def main() -> None:
    """Train, print two lines for each optimizer, learning rate and layer, and the worst cells."""
    arguments = _parse()
    problem = load_problem(arguments.problem, arguments.n_train, arguments.data)
    if arguments.wrong:
        problem = with_wrong_labels(problem, arguments.wrong)
    clip, epochs, seeds, loss = arguments.clip, arguments.epochs, arguments.seeds, arguments.loss
    results = Results(arguments.results)
    print(f"{problem.name}, {len(problem.test[1])} to test, {epochs} epochs, {len(seeds)} seeds")
    print(f"flatness_clip={clip}; flatness at a loss of {loss:g}; {environment()}", flush=True)

    def found(*cell: Any) -> np.ndarray:
        limit = clip if cell[-1] else None
        return np.array([
            results.get(
                [problem.name, epochs, limit, loss, *cell, seed],
                lambda seed=seed: train(
                    problem, cell, seed, loss, max_epochs=epochs, flatness_clip=limit
                ),
            )
            for seed in seeds
        ]).T

    kind = problem.network["module"].__name__
    rates = [(name, rate) for name, several in RATES[kind].items() for rate in several]
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


def _parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problem_arguments(parser)
    parser.add_argument("--epochs", type=int, default=30, help="of each training (default: 30)")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(3), help="(default: 0 to 2)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--weights", nargs="+", type=float, default=WEIGHTS)
    parser.add_argument("--loss", type=float, default=0.03, help="to compare flatness at (nats)")
    parser.add_argument(
        "--wrong", type=float, default=0.0, help="share of wrong labels (default: 0)"
    )
    parser.add_argument("--clip", type=_number_or_none, default=0.5, help="(default: 0.5)")
    parser.add_argument("--results", metavar="FILE", help="JSON lines, to continue later")
    parser.add_argument("--quick", action="store_true", help="smoke run without meaning")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.n_train, arguments.epochs = 80, 2
        arguments.seeds, arguments.weights = [0], [0.1, 1000.0]
    return arguments


def _number_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


if __name__ == "__main__":
    main()

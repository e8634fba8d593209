"""Show what penalties of any weight do to a network's accuracy, by default and as published.

A dead network (all units zero, all outputs constant) is perfectly flat, so that a large penalty
without limit ends there. For each optimizer, learning rate, penalised layer and weight, this
benchmark trains networks with the default `flatness_clip`, and prints by how much their test
accuracy differs from that of networks trained without penalty at the same learning rate with the
same seeds.

    python -m benchmarks.worth.stability                              # digits, 30 minutes
    python -m benchmarks.worth.stability --problem "breast cancer"    # 10 minutes
    python -m benchmarks.worth.stability --problem CIFAR-10 --data NPZ --epochs 12
    python -m benchmarks.worth.stability --clip none                  # as published
    python -m benchmarks.worth.stability --quick                      # a smoke run

With ``--results FILE`` each training is saved, and an interrupted run can be continued. Runs with
different ``--seeds`` can share a file.
"""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._harness.problems import Problem, add_problem_arguments, load_problem
from benchmarks._harness.timing import environment, table
from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9},
    "Adam": {"optimizer": torch.optim.Adam},
}
# what trains a network well, and factors of it
FACTORS = (1 / 3, 1, 3)
RATES = {"MLP": {"SGD": 0.02, "Adam": 0.005}, "SmallConvNet": {"SGD": 0.01, "Adam": 0.001}}
LAYERS = {"last": -1, "first": 0, "all": "all"}
WEIGHTS = [0.01, 1.0, 100.0, 1000.0]


def train(problem: Problem, cell: tuple[str, float, str, float], seed: int, **params: Any) -> float:
    """Train a network, and return its test accuracy in percent."""
    optimizer, rate, layer, weight = cell
    net = RelativeFlatnessRegularizedClassifier(
        **problem.network,
        **OPTIMIZERS[optimizer],
        **params,
        lr=rate,
        flatness_layer=LAYERS[layer],
        flatness_weight=weight,
        random_state=seed,
        verbose=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)  # ruined networks count as results
        net.fit(*problem.train)
    return 100 * float(net.score(*problem.test))


class Results:
    """Test accuracies by setting, saved line by line.

    Parameters
    ----------
    path : str, optional
        File to read and to append to.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.known: dict[str, float] = {}
        if path and Path(path).exists():
            for line in Path(path).read_text().splitlines():
                key, value = json.loads(line)
                self.known[json.dumps(key)] = value

    def get(self, key: list[Any], compute: Any) -> float:
        """Return a saved value, or compute and save it."""
        text = json.dumps(key)
        if text not in self.known:
            self.known[text] = compute()
            if self.path:
                with Path(self.path).open("a") as file:
                    file.write(json.dumps([key, self.known[text]]) + "\n")
        return self.known[text]


def main() -> None:
    """Train, print a line for each optimizer, learning rate and layer, and the worst cell."""
    arguments = _parse()
    problem = load_problem(arguments.problem, arguments.n_train, arguments.data)
    clip, epochs, seeds = arguments.clip, arguments.epochs, arguments.seeds
    results = Results(arguments.results)
    print(f"{problem.name}, {len(problem.test[1])} to test, {epochs} epochs, {len(seeds)} seeds")
    print(f"flatness_clip={clip}; {environment()}", flush=True)

    def accuracies(*cell: Any) -> np.ndarray:
        limit = clip if cell[-1] else None
        return np.array([
            results.get(
                [problem.name, epochs, limit, *cell, seed],
                lambda seed=seed: train(
                    problem, cell, seed, max_epochs=epochs, flatness_clip=limit
                ),
            )
            for seed in seeds
        ])

    kind = problem.network["module"].__name__
    rates = [(name, rate * factor) for name, rate in RATES[kind].items() for factor in FACTORS]
    columns = [f"weight {weight:g}" for weight in arguments.weights]
    rows = [["optimizer", "learning rate", "layer", "no penalty", *columns]]
    summary = [["layer", *columns]]
    for layer in arguments.layers:
        differences = np.empty((len(rates), len(arguments.weights), len(seeds)))
        for i, (optimizer, rate) in enumerate(rates):
            plain = accuracies(optimizer, rate, "last", 0.0)
            for j, weight in enumerate(arguments.weights):
                differences[i, j] = accuracies(optimizer, rate, layer, weight) - plain
            row = [optimizer, f"{rate:.2g}", layer, f"{plain.mean():.1f}"]
            rows.append([*row, *map(_interval, differences[i])])
            print("  ".join(rows[-1]), flush=True)
        means = differences.mean(axis=2)
        cells = zip(means.mean(axis=0), means.min(axis=0), strict=True)
        summary.append([layer, *(f"{mean:+.1f} ({least:+.1f})" for mean, least in cells)])
    print()
    print(table(rows))
    print("\nTest accuracy in percent; with a penalty, the difference to none in points, and its")
    print(
        "standard error over seeds. Mean over optimizers and learning rates (the lowest of them):\n"
    )
    print(table(summary))


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
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5), help="(default: 0 to 4)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--weights", nargs="+", type=float, default=WEIGHTS)
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

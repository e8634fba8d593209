"""Minima per minute of a search that trains many nets as one stacked model, and its memory.

Every way finds minima of a training loss of 0.05 in a process of its own, in turns: the search
with a fleet and one by one, and a torch loop of a few lines, which only trains. All use the same
number of threads.
"""

import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from torch import nn

from benchmarks._harness.memory import in_fresh_process, peak_growth, peak_in_fresh_process
from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, ratio, verdict
from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
)

GOAL = 0.05  # training loss
EPOCHS = 60
# hidden layers, batch size, and the least ratio of minima per minute to those of the loop
PROBLEMS = {
    "64-128-64-10, batch 8": ((128, 64), 8, 3.0),
    "64-128-64-10, batch 32": ((128, 64), 32, 3.0),
    "784-50-50-50-30-10, batch 16": ((50, 50, 50, 30), 16, 2.0),
}
MOST_MEMORY = 1.2  # of the memory that one net takes, times the number of nets


def load(problem: str) -> tuple[Any, Any]:
    """Load the digits, or draw clusters of the size of images."""
    if problem.startswith("64"):
        X, y = load_digits(return_X_y=True)
        return (X / 16).astype(np.float32), y
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 2000)
    centres = rng.normal(size=(10, 784))
    return (0.15 * centres[y] + rng.normal(size=(2000, 784))).astype(np.float32), y


def search(problem: str, n: int, **arguments: Any) -> None:
    """Find minima by a search over seeds and learning rates, without a penalty."""
    hidden, size, _ = PROBLEMS[problem]
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=hidden, flatness_weight=0, batch_size=size, max_epochs=EPOCHS,
        callbacks=[StopAtLoss(GOAL)], verbose=0,
    )  # fmt: skip
    space = {"lr": [0.001, 0.002], "random_state": list(range(n // 2))}
    FlatMinimaSearch(net, space, refit=False, random_state=0, **arguments).fit(*load(problem))


def loop(problem: str, n: int) -> None:
    """Find minima by a loop of a few lines, which measures nothing."""
    hidden, size, _ = PROBLEMS[problem]
    X, y = (torch.from_numpy(np.asarray(part)) for part in load(problem))
    cross_entropy = nn.functional.cross_entropy
    for seed in range(n):
        torch.manual_seed(seed // 2)
        net = MLP(X.shape[1], 10, hidden)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.001 * (1 + seed % 2), fused=True)
        training = epochs(
            lambda rows, net=net: cross_entropy(net(X[rows]), y[rows]), optimizer, len(X), size
        )
        for epoch in training:
            with torch.no_grad():
                if epoch + 1 == EPOCHS or cross_entropy(net(X), y) <= GOAL:
                    break


WAYS = {
    "fleet": lambda problem, n: search(problem, n, fleet=n, n_threads=None),
    "one by one": search,
    "torch loop": loop,
}


def seconds_of(way: str, problem: str, n: int) -> float:
    """Find minima in this process; return the seconds for one of them."""
    warnings.simplefilter("ignore")
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the first one loads much of torch
    started = time.perf_counter()
    WAYS[way](problem, n)
    return (time.perf_counter() - started) / n


def peak_of(n: int) -> int:
    """Return the bytes that nets with large layers need at most, a single one without a fleet."""
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(500, 500), max_epochs=2, verbose=0,
        callbacks=[StopAtLoss(0.1)],  # checked on all data, and not reached
    )  # fmt: skip
    X, y = load("64")
    net.set_params(max_epochs=1).fit(X[:64], y[:64])  # what the first fit loads counts for none
    nets = [clone(net).set_params(random_state=seed) for seed in range(n)]
    trainer = FleetTrainer(nets, fleet=n if n > 1 else None)
    return peak_growth(lambda: trainer.fit(X, y))


def main() -> int:
    options = read_options(__doc__, rounds=(5, 1), way=str, problem=str, n=int)
    if options.n:  # in a fresh process
        n = options.n
        print(seconds_of(options.way, options.problem, n) if options.way else peak_of(n))
        return 0
    n = 2 if options.quick else 32
    few = max(2, n // 8)  # nets of the ways that train one by one
    print(f"Minima of {n} nets at a time, {options.rounds} rounds")
    print(environment())
    budgets = []
    for problem in list(PROBLEMS)[1:2] if options.quick else PROBLEMS:
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, times in seconds.items():
                number = str(n if way == "fleet" else few)
                more = ("--way", way, "--problem", problem, "--n", number)
                times.append(in_fresh_process("benchmarks.costs.fleet", *more))
        for way, times in seconds.items():
            print(f"{problem}, {way}: {60 / np.median(times):.1f} minima per minute")
        faster = ratio(seconds["torch loop"], seconds["fleet"]).value
        least = PROBLEMS[problem][-1]
        budgets.append(Budget(f"{problem}, fleet / torch loop", faster, least, at_least=True))
    if not options.quick:
        peaks = [peak_in_fresh_process("benchmarks.costs.fleet", "--n", str(k)) for k in (n, 1)]
        budgets.append(
            Budget(f"memory of {n} nets / {n} x one", peaks[0] / (n * peaks[1]), MOST_MEMORY)
        )
    return verdict(budgets, judged=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())

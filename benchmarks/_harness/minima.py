"""Find minima in one way, in a process of its own, and print the seconds and their number.

The script imports nothing of the other benchmarks, so that it runs with any version of the
package: that whose folder is in PYTHONPATH.
"""

import sys
import time
import warnings
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

GOAL = 0.05  # training loss
EPOCHS = 60
# hidden layers and batch size
PROBLEMS = {
    "64-128-64-10, batch 8": ((128, 64), 8),
    "64-128-64-10, batch 32": ((128, 64), 32),
    "784-50-50-50-30-10, batch 16": ((50, 50, 50, 30), 16),
}


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
    import relflat_sk as lib  # noqa: PLC0415

    hidden, size = PROBLEMS[problem]
    net = lib.RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=hidden,
        flatness_weight=0,
        batch_size=size,
        max_epochs=EPOCHS,
        callbacks=[lib.StopAtLoss(GOAL)],
        verbose=0,
    )
    space = {"lr": [0.001, 0.002], "random_state": list(range(n // 2))}
    found = lib.FlatMinimaSearch(net, space, refit=False, random_state=0, **arguments)
    found.fit(*load(problem))


def loop(problem: str, n: int) -> None:
    """Find minima by a loop of a few lines, which measures nothing."""
    hidden, size = PROBLEMS[problem]
    X, y = (torch.from_numpy(np.asarray(part)) for part in load(problem))
    sizes = [X.shape[1], *hidden, 10]
    for seed in range(n):
        torch.manual_seed(seed // 2)
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(sizes):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        net = nn.Sequential(*layers[:-1])
        optimizer = torch.optim.Adam(net.parameters(), lr=0.001 * (1 + seed % 2), fused=True)
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(X)).split(size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(X[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                if nn.functional.cross_entropy(net(X), y) <= GOAL:
                    break


WAYS = {
    "fleet": lambda problem, n: search(problem, n, fleet=n, n_threads=None),
    "auto": lambda problem, n: search(problem, n, fleet="auto", n_threads=None),
    "one by one": search,
    "torch loop": loop,
}


def main() -> None:
    """Find minima, and print the seconds that it took."""
    way, problem, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    warnings.simplefilter("ignore")
    if way != "torch loop":
        import relflat_sk  # noqa: F401, PLC0415
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the first one loads much of torch
    started = time.perf_counter()
    WAYS[way](problem, n)
    print(time.perf_counter() - started)


if __name__ == "__main__":
    main()

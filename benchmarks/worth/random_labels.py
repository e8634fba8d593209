"""Compare norms of networks that fit true labels and of networks that fit random labels.

A network that fits random labels cannot generalise, so a measure of generalisation must be larger
for it, at every number of training samples. This is a small version of Figure 1 of Neyshabur et
al., "Exploring Generalization in Deep Learning", NeurIPS 2017.

    python -m benchmarks.worth.random_labels                  # 2 minutes
    python -m benchmarks.worth.random_labels --quick          # a smoke run without verdict
"""

import sys
import time
from itertools import islice

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from benchmarks._harness.networks import epochs
from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import MLP, flatness_report

NORMS = ["l2_norm", "frobenius_product", "spectral_product", "l1_path_norm", "l2_path_norm"]
LABELS = ("true", "random")
SIZES = [100, 200, 400, 800, 1600]
CRITERION = nn.CrossEntropyLoss()
# training stops when all samples are right and the mean cross-entropy is at most this
LOSS = 0.01
MOST_EPOCHS = 3000
BATCH_SIZE = 50


def draw_data(n: int, labels: str, seed: int) -> tuple[Tensor, Tensor]:
    """Draw n of scikit-learn's 1,797 digits, with their own labels or with random ones."""
    rng = np.random.default_rng(seed)
    X, y = load_digits(return_X_y=True)
    chosen = rng.permutation(len(X))[:n]
    y = y[chosen] if labels == "true" else rng.integers(10, size=n)
    return torch.tensor(X[chosen] / 16 - 0.3, dtype=torch.float32), torch.tensor(y)


def train(X: Tensor, y: Tensor, seed: int) -> nn.Module:
    """Train an MLP with SGD until it fits all labels; otherwise it has no positive margin."""
    torch.manual_seed(seed)
    net = MLP(X.shape[1], 10, hidden_layer_sizes=(256, 256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    training = epochs(lambda rows: CRITERION(net(X[rows]), y[rows]), optimizer, len(X), BATCH_SIZE)
    for _ in islice(training, MOST_EPOCHS):
        with torch.no_grad():
            output = net(X)
        if CRITERION(output, y) <= LOSS and bool((output.argmax(dim=1) == y).all()):
            return net.eval()
    raise RuntimeError(f"{len(X)} samples are not fit after {MOST_EPOCHS} epochs.")


def measure_norms(net: nn.Module, X: Tensor, y: Tensor) -> dict[str, float]:
    """Measure all norms over the margin, the inverse squared margin, and all norms alone."""
    found = {}
    for names, over in [([*NORMS, "inverse_margin"], True), (NORMS, False)]:
        report = flatness_report(net, X, y, measures=names, criterion=CRITERION, over_margin=over)
        values = report.set_index("measure")["value"]
        found |= {name if over else f"{name} alone": values[name] for name in names}
    return found


def compare(sizes: list[int], seeds: int) -> pd.DataFrame:
    """Train and measure all networks; the columns are size, seed, labels and the norms."""
    rows = []
    for n in sizes:
        for seed in range(seeds):
            for labels in LABELS:
                X, y = draw_data(n, labels, seed)
                found = measure_norms(train(X, y, seed), X, y)
                rows.append({"size": n, "seed": seed, "labels": labels, **found})
    return pd.DataFrame(rows)


def random_over_true(minima: pd.DataFrame) -> pd.DataFrame:
    """Divide the norms with random labels by those with true labels, for each size and seed."""
    pairs = minima.set_index(["size", "seed", "labels"]).unstack("labels").swaplevel(axis=1)
    return pairs["random"] / pairs["true"]


def describe(ratios: pd.DataFrame, names: list[str]) -> str:
    """Lay out geometric means over seeds, with the smallest and the largest value in brackets."""
    rows = [["random / true", *(f"n = {n}" for n in ratios.index.unique("size"))]]
    for name in names:
        groups = ratios[name].groupby("size")
        cells = [
            f"{np.exp(np.log(one).mean()):.3g} [{one.min():.3g}, {one.max():.3g}]"
            for _, one in groups
        ]
        rows.append([name, *cells])
    return table(rows)


def main() -> int:
    arguments = read_options(__doc__, seeds=(5, 1))
    sizes, seeds = [30, 60] if arguments.quick else SIZES, arguments.seeds
    print(f"MLPs 64-256-256-10 on digits, SGD until cross-entropy {LOSS}, {seeds} seeds each")
    print(environment())
    start = time.perf_counter()
    minima = compare(sizes, seeds)
    ratios = random_over_true(minima)
    shown = [*NORMS, "inverse_margin"]
    print(f"\nOver the margin\n\n{describe(ratios, shown)}")
    print(f"\nNorms alone\n\n{describe(ratios, [f'{name} alone' for name in NORMS])}")
    print(f"\n{len(minima)} networks in {time.perf_counter() - start:.0f} s")
    means = np.exp(np.log(ratios).groupby("size").mean())
    budgets = [
        Budget(f"{name}, random / true, the least of all sizes", means[name].min(), 1, True)
        for name in NORMS
    ]
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())

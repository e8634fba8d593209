"""Compare correlations with the generalisation gap before and after a rescaling of weights.

Small networks are trained on scikit-learn's digits to one training loss, and measures at the last
layer correlated with the gap. Then each layer but the last is multiplied by a random factor in
[5, 25], and the last layer by the inverse of their product: the predictions stay the same, and so
should the correlation of a good measure.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, verdict
from relflat_sk import MLP, correlate_measures, flatness_report, get_measure_names, reparameterize
from relflat_sk.exceptions import FlatnessWarning

BATCH_SIZES = (8, 16, 32, 64, 128)
WIDTHS = (64, 48, 32, 10)
LOSS = 0.03
LOW, HIGH = 5.0, 25.0
CRITERION = nn.CrossEntropyLoss()
TOLERANCE = 1e-6
COEFFICIENTS = ("pearson", "spearman", "kendall")
# "destroyed": less than half of the rank correlation remains
LEFT = 0.5
DESTROYED = "hessian_trace"


def load_data(n_train: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the digits into `n_train` training samples and test samples."""
    X, y = load_digits(return_X_y=True)
    parts = train_test_split(X / 16, y, train_size=n_train, stratify=y, random_state=0)
    X_train, X_test, y_train, y_test = (torch.from_numpy(part) for part in parts)
    return X_train.float(), X_test.float(), y_train, y_test


def train(X: Tensor, y: Tensor, batch_size: int, seed: int, max_epochs: int) -> nn.Module | None:
    """Train by SGD until the mean loss on X is at most `LOSS`; None if it never is."""
    torch.manual_seed(seed)
    net = MLP(WIDTHS[0], WIDTHS[-1], WIDTHS[1:-1])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(max_epochs):
        for step, rows in enumerate(torch.randperm(len(X)).split(batch_size)):
            optimizer.zero_grad()
            CRITERION(net(X[rows]), y[rows]).backward()
            optimizer.step()
            # tested within the epoch, too: the losses should be equal, not only low
            if step % 2 == 0 and mean_loss(net, X, y) <= LOSS:
                return net
    return None


def mean_loss(net: nn.Module, X: Tensor, y: Tensor) -> float:
    """Return the mean loss on X."""
    with torch.no_grad():
        return float(CRITERION(net(X), y))


def rescale(net: nn.Module, X: Tensor, rng: np.random.Generator) -> nn.Module:
    """Multiply all layers but the last by random factors, and the last by their inverse."""
    factors = rng.uniform(LOW, HIGH, size=len(WIDTHS) - 2)
    return reparameterize(net, [*factors, 1 / factors.prod()], X=X)


def measure_all(net: nn.Module, X: Tensor, y: Tensor, names: Sequence[str] | None) -> pd.DataFrame:
    """Measure the last layer or the whole network; nan where a measure does not apply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)
        report = flatness_report(
            net, X, y, measures=names, layers=[-1], criterion=CRITERION, random_state=0
        )
    return report.set_index("measure")


def find_minima(
    data: tuple[Tensor, ...], seeds: int, max_epochs: int
) -> Iterator[tuple[nn.Module, dict[str, float]]]:
    """Train the networks; those that do not reach the loss are reported and left out."""
    X, X_test, y, y_test = data
    for batch_size, seed in itertools.product(BATCH_SIZES, range(seeds)):
        net = train(X, y, batch_size, seed, max_epochs)
        if net is None:
            print(f"batch size {batch_size}, seed {seed}: not at a loss of {LOSS}, left out")
            continue
        # in float64 factors of several hundred change nothing but the last digits
        net = copy.deepcopy(net).double()
        losses = mean_loss(net, X.double(), y), mean_loss(net, X_test.double(), y_test)
        key = {"param_batch_size": batch_size, "param_seed": seed}
        yield net, key | {"train_loss": losses[0], "generalization_gap": losses[1] - losses[0]}


def judge(
    before: pd.DataFrame, after: pd.DataFrame, invariant: set[str]
) -> tuple[pd.DataFrame, int]:
    """Compare the coefficients of each measure with the table of invariances."""
    rows, n_wrong = {}, 0
    for name in before.index:
        one, other = before.loc[name], after.loc[name]
        change = max(abs(one[c] - other[c]) for c in COEFFICIENTS)
        outcome = "unchanged, as promised" if change <= TOLERANCE else "changed"
        if other["n"] < one["n"]:
            outcome = f"changed, {other['n']:.0f} of {one['n']:.0f} measured"
        if all(np.isnan(which[c]) for which in (one, other) for c in COEFFICIENTS) and other["n"]:
            outcome = "the same for all networks"
        elif name in invariant and not change <= TOLERANCE:
            outcome, n_wrong = "CHANGED, AGAINST THE TABLE", n_wrong + 1
        if name == DESTROYED:
            is_destroyed = abs(other["kendall"]) < LEFT * abs(one["kendall"])
            outcome = "destroyed" if is_destroyed else "NOT DESTROYED"
            n_wrong += not is_destroyed
        rows[name] = {
            f"{kind}, {when}": f"{row[kind]:.3f}"
            for kind in ("kendall", "spearman")
            for when, row in (("before", one), ("after", other))
        } | {"largest change": f"{change:.1e}", "verdict": outcome}
    return pd.DataFrame(rows).T, n_wrong


def main() -> int:
    arguments = read_options(
        __doc__, seeds=(8, 1), n_train=400, max_epochs=2000, measures=[*get_measure_names()],
    )  # fmt: skip
    print(f"Digits, {arguments.n_train} for training; measures at the last layer")
    print(environment())
    data = load_data(arguments.n_train)
    X, y = data[0].double(), data[2]
    rng = np.random.default_rng(0)
    tables: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
    difference = 0.0
    for net, row in find_minima(data, arguments.seeds, arguments.max_epochs):
        same = rescale(net, X, rng)
        with torch.no_grad():
            difference = max(difference, float((net(X) - same(X)).abs().max()))
        for which, one in (("before", net), ("after", same)):
            report = measure_all(one, X, y, arguments.measures)
            tables[which].append({**row, **report["value"]})
    names = arguments.measures
    invariant = {
        name for name, kinds in report["invariance"].items() if "layer" in kinds.split(", ")
    }
    before, after = (pd.DataFrame(tables[which]) for which in ("before", "after"))
    print(
        f"\n{len(before)} minima at training losses of {before['train_loss'].min():.4f} to "
        f"{before['train_loss'].max():.4f}, gaps of {before['generalization_gap'].min():.3f} to "
        f"{before['generalization_gap'].max():.3f}; largest difference between logits before "
        f"and after: {difference:.0e}\n"
    )
    coefficients = [
        correlate_measures(minima, n_bootstrap=1, random_state=0).set_index("measure").loc[names]
        for minima in (before, after)
    ]
    table, n_wrong = judge(*coefficients, invariant)
    print(table.to_string())
    budget = Budget("measures against the table of invariances", n_wrong, 0)
    return verdict([budget], judged=not arguments.quick)


if __name__ == "__main__":
    raise SystemExit(main())

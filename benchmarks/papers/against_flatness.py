"""Han et al. 2025: train against flatness, then release; flatness and accuracy over the epochs.

The paper trains networks against flatness, which then generalise late: once the pressure ends,
relative flatness falls and the test accuracy rises (ResNet-18 on CIFAR-10). Here, a net with
``flatness_weight=-1`` is trained for half of the epochs, and without penalty for the other half,
beside a net of the same seed that has no penalty in either half.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from benchmarks._harness.networks import SmallConvNet
from benchmarks.papers._common import Arrays, Figure, losses_of, mean
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier

WEIGHTS = {"plain": 0.0, "against flatness": -1.0}
STOPS = 6  # of each half, at which flatness and accuracy are measured


def train_row(arm: str, seed: int, data: Arrays, epochs: int) -> dict[str, float]:
    """Train a net with a weight in the first half of the epochs, and measure it at each stop."""
    X, y, X_test, y_test = data
    module = SmallConvNet if X.ndim > 2 else MLP
    net = RelativeFlatnessRegularizedClassifier(
        module, flatness_weight=WEIGHTS[arm], random_state=seed, verbose=0
    )
    found: dict[str, float] = {}
    for stop in range(1, 2 * STOPS + 1):
        if stop == STOPS + 1:
            net.set_params(flatness_weight=0)
        net.set_params(max_epochs=epochs // STOPS).partial_fit(X, y)
        found[f"relative_flatness_{stop}"] = net.relative_flatness_
        found[f"test_accuracy_{stop}"] = net.score(X_test, y_test)
    return losses_of(net, data) | found


def differences(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what the claims are about, a row for each seed."""
    arms = {
        arm: frame[frame["param_arm"] == arm].set_index("param_seed").sort_index()
        for arm in WEIGHTS
    }
    plain, against = arms.values()
    half, end = STOPS, 2 * STOPS
    kappa = {stop: np.log10(against[f"relative_flatness_{stop}"]) for stop in (half, end)}
    accuracy = {stop: 100 * against[f"test_accuracy_{stop}"] for stop in (half, end)}
    return pd.DataFrame({
        "log10 flatness, against flatness minus plain": (
            kappa[half] - np.log10(plain[f"relative_flatness_{half}"])
        ),
        "points of accuracy, the same": accuracy[half] - 100 * plain[f"test_accuracy_{half}"],
        "log10 flatness, released minus before": kappa[end] - kappa[half],
        "points of accuracy, released minus before": accuracy[end] - accuracy[half],
        "points of accuracy, released minus plain": (
            accuracy[end] - 100 * plain[f"test_accuracy_{end}"]
        ),
    }).dropna()


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("against_flatness", __doc__, argv)
    images = bool(figure.data)
    n = 60 if figure.quick else 2000 if images else 600
    data = figure.load(n, 1000, images=images)
    runs = [
        {"param_arm": arm, "param_seed": seed}
        for seed in range(2 if figure.quick else 20)
        for arm in WEIGHTS
    ]
    epochs = STOPS if figure.quick else 60
    frame = figure.complete(runs, train_row, data, epochs)
    values = differences(frame)
    signs = ("> 0", "< 0", "< 0", "> 0", "> -1")
    claims = [
        mean(name, theirs, values[name], of=2) for name, theirs in zip(values, signs, strict=True)
    ]
    print(f"\nmedians at {2 * STOPS} stops, the networks released after {STOPS}")
    for arm, rows in frame.groupby("param_arm"):
        for name in ("relative_flatness", "test_accuracy"):
            medians = rows.filter(like=name).median()
            print(f"{arm}, {name}: {' '.join(f'{value:.3g}' for value in medians)}")
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

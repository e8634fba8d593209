"""Adilova et al. 2023 on equal terms: plain, decay, SAM, weight average, penalty, tuned alike.

In the authors' scripts, each arm has another rate, weight decay and schedule. Here all arms have
one recipe, SGD with momentum and a cosine schedule, and eight settings of rate and strength, of
which a fifth of the training data chooses one over all seeds. Arms are compared seed by seed on
test data.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from skorch.callbacks import LRScheduler

from benchmarks._harness.networks import SharpnessAwareClassifier, SmallConvNet
from benchmarks.papers._common import Arrays, Figure, losses_of, mean
from relflat_sk import MLP, FleetTrainer, RelativeFlatnessRegularizedClassifier, WeightAverage

RATES = (0.05, 0.15)
# parameters of the net that an arm tunes, four strengths each
STRENGTHS: dict[str, list[dict[str, Any]]] = {
    "plain": [{}],
    "weight decay": [{"optimizer__weight_decay": decay} for decay in (1e-4, 1e-3, 3e-3, 1e-2)],
    "SAM": [{"sharpness_radius": radius} for radius in (0.02, 0.05, 0.1, 0.3)],
    "weight average": [{"start": start} for start in (0.2, 0.4, 0.6, 0.8)],
    "penalty, last layer": [
        {"flatness_weight": weight, "flatness_layer": -1} for weight in (0.1, 1.0, 10.0, 30.0)
    ],
    "penalty, all layers": [
        {"flatness_weight": weight, "flatness_layer": "all"} for weight in (0.1, 0.3, 1.0, 3.0)
    ],
}
SETTINGS = {arm: list(product(RATES, strengths)) for arm, strengths in STRENGTHS.items()}
SETTINGS["plain"] = [(rate, {}) for rate in np.geomspace(0.01, 0.15, 8)]


def make(arm: str, setting: int, seed: int, module: Any, epochs: int) -> Any:
    """Make the net of an arm's setting."""
    rate, strength = SETTINGS[arm][setting]
    callbacks: list[Any] = [LRScheduler("CosineAnnealingLR", T_max=epochs)]
    if arm == "weight average":
        callbacks.append(WeightAverage(**strength))
        strength = {}
    kind = SharpnessAwareClassifier if arm == "SAM" else RelativeFlatnessRegularizedClassifier
    return kind(module, optimizer=torch.optim.SGD, optimizer__momentum=0.9, lr=float(rate),
                max_epochs=epochs, callbacks=callbacks, random_state=seed, verbose=0,
                **{"flatness_weight": 0} | strength)  # fmt: skip


def train_rows(runs: Sequence[dict[str, Any]], data: Arrays, epochs: int) -> list[dict[str, Any]]:
    """Train on four fifths of the training data; score on the last fifth and the test data."""
    X, y, X_test, y_test = data
    n = len(y) * 4 // 5
    module = SmallConvNet if X.ndim > 2 else MLP
    nets = [make(*run.values(), module, epochs) for run in runs]
    nets = FleetTrainer(nets, fleet=len(nets)).fit(X[:n], y[:n]).estimators_
    return [
        run
        | losses_of(net, (X[:n], y[:n], X_test, y_test))
        | {"held_out": net.score(X[n:], y[n:]), "accuracy": 100 * net.score(X_test, y_test)}
        for run, net in zip(runs, nets, strict=True)
    ]


def chosen(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the test accuracy of each arm's setting with the best held-out mean, by seed."""
    best = frame.groupby(["param_arm", "param_setting"])["held_out"].mean()
    settings = best.groupby("param_arm").idxmax()
    rows = frame.set_index(["param_arm", "param_setting"]).loc[list(settings)].reset_index()
    return rows.pivot(index="param_seed", columns="param_arm", values="accuracy")


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("equal_terms", __doc__, argv)
    images = bool(figure.data)
    n = 60 if figure.quick else 2000 if images else 400
    data = figure.load(n, 1000, images=images)
    runs = [
        {"param_arm": arm, "param_setting": setting, "param_seed": seed}
        for arm, settings in SETTINGS.items()
        for setting in range(2 if figure.quick else len(settings))
        for seed in range(2 if figure.quick else 10)
    ]
    epochs = 2 if figure.quick else 40
    accuracy = chosen(figure.complete(runs, train_rows, data, epochs, size=10))
    print(f"\nmean test accuracy\n{accuracy.mean().round(2).to_string()}")
    accuracy = accuracy.reindex(columns=[*STRENGTHS])
    pairs = [(arm, "plain") for arm in STRENGTHS if arm != "plain"]
    pairs += [(arm, "SAM") for arm in STRENGTHS if arm.startswith("penalty")]
    claims = []
    for arm, other in pairs:
        gains = (accuracy[arm] - accuracy[other]).dropna()
        claims.append(mean(f"points of test accuracy, {arm} minus {other}", "> 0", gains, of=2))
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

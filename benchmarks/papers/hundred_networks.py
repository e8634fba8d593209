"""Bennett 2026: 100 networks of one architecture and one training, measures against the test error.

The paper's own measure has a rank correlation of 0.37 with the test accuracy of 100 networks on
handwritten digits, where sharpness has the wrong sign. Here are those of all measures of the
library with the test error, and of the disagreement with the mean of all networks, in the
classes of training inputs with noise of 0.6 standard deviations.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.papers._common import Arrays, Figure, correlation, gaps_of
from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    get_measure_names,
    measure,
)

NAMES = [name for name in get_measure_names() if name != "parameter_count"]
NOISE = 0.6


def train_rows(runs: Sequence[dict[str, Any]], data: Arrays, epochs: int) -> list[dict[str, Any]]:
    """Train networks together, and measure them."""
    X, y, X_test, y_test = data
    nets = [
        RelativeFlatnessRegularizedClassifier(
            flatness_weight=0, max_epochs=epochs, random_state=run["param_seed"], verbose=0
        )
        for run in runs
    ]
    nets = FleetTrainer(nets, fleet=len(nets)).fit(X, y).estimators_
    noise = NOISE * X.std(axis=0) * np.random.default_rng(0).normal(size=X.shape)
    outputs = np.array([net.predict_proba((X + noise).astype(np.float32)) for net in nets])
    differs = outputs.argmax(axis=2) != outputs.mean(axis=0).argmax(axis=1)
    return [
        run
        | gaps_of(net, data)
        | {"test_error": float((net.predict(X_test) != y_test).mean())}
        | {"disagreement": float(differs[i].mean())}
        | {name: measure(name, net, X, y, random_state=0) for name in NAMES}
        for i, (run, net) in enumerate(zip(runs, nets, strict=True))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("hundred_networks", __doc__, argv)
    data = figure.load(100 if figure.quick else 600, 5000, images=False)
    runs = [{"param_seed": seed} for seed in range(4 if figure.quick else 100)]
    epochs = 60 if figure.quick else 30
    frame = figure.complete(runs, train_rows, data, epochs, size=100)
    of_errors = frame.assign(generalization_gap=frame["test_error"])
    names = ["disagreement", "train_loss", *NAMES]
    claims = [correlation(name, "> 0.37", of_errors, name, "spearman") for name in names]
    claims.sort(key=lambda claim: -claim.value)
    claims += [
        correlation(f"sign of {name}", "< 0", of_errors, name, "spearman")
        for name in ("relative_flatness", "hessian_trace")
    ]
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

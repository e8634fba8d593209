"""Adilova et al. 2023, and later findings: penalty, SAM, weight decay, augmentation.

Adilova et al. (FAM, 2023) report higher accuracy with a penalty at the penultimate layer than
without, and than with SAM. In the authors' code, that is the weight behind the penultimate layer's
features, our layer -1. Mason-Williams et al. (arXiv 2510.12451) report that regularised
networks are often sharper and generalise better. Two methods are compared over the seeds and batch
sizes that both have.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks._harness.networks import SharpnessAwareClassifier, SmallConvNet
from benchmarks.papers._common import Arrays, Claim, Figure, bootstrap, losses_of, mean, rank
from relflat_sk import RelativeFlatnessRegularizedClassifier, StopAtLoss, relative_flatness

METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalty -1": {"flatness_weight": 1.0, "flatness_layer": -1},
    "penalty -2": {"flatness_weight": 1.0, "flatness_layer": -2},
    # 0.1 times kappa / m, which is twice what our weight multiplies
    "penalty as published": {
        "flatness_weight": 0.2,
        "flatness_layer": -1,
        "flatness_clip": None,
        "optimizer__weight_decay": 5e-4,
    },
    "its weight decay": {"optimizer__weight_decay": 5e-4},
    "SAM": {"sharpness_radius": 0.1},
    "weight decay": {"optimizer__weight_decay": 1e-3},
    "augmentation": {},
}


def augment(X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Shift each image by up to two pixels, and flip half of them."""
    shifts = rng.integers(-2, 3, (len(X), 2))
    moved = [np.roll(x, tuple(s), (1, 2)) for x, s in zip(X, shifts, strict=True)]
    flip = rng.random(len(X)) < 0.5
    return np.stack([x[:, :, ::-1] if f else x for x, f in zip(moved, flip, strict=True)])


def train_row(
    method: str, batch_size: int, seed: int, data: Arrays, epochs: int, flips: bool
) -> dict[str, float]:
    """Train a network by a method to the loss 0.01, and measure it on the original images."""
    X, y, X_test, y_test = data
    if method == "augmentation":
        rng = np.random.default_rng(seed)
        copies = [augment(X, rng) if flips else np.roll(X, int(rng.integers(-2, 3)), 3)
                  for _ in range(3)]  # fmt: skip
        X_fit, y_fit = np.concatenate([X, *copies]), np.tile(y, 4)
    else:
        X_fit, y_fit = X, y
    kind = SharpnessAwareClassifier if method == "SAM" else RelativeFlatnessRegularizedClassifier
    own = {"flatness_weight": 0} | METHODS[method]
    net = kind(SmallConvNet, optimizer=torch.optim.SGD, lr=0.01, optimizer__momentum=0.9,
               batch_size=batch_size, max_epochs=epochs, callbacks=[StopAtLoss(0.01)],
               random_state=seed, verbose=0, **own)  # fmt: skip
    net.fit(X_fit, y_fit)
    given: Any = {"criterion": nn.CrossEntropyLoss(), "random_state": 0}
    flatness = {
        f"relative_flatness_{layer}": relative_flatness(net.module_, X, y, layer=layer, **given)
        for layer in (-1, -2)
    }
    test_error = float((net.predict(X_test) != y_test).mean())
    return losses_of(net, data) | {"test_error": test_error} | flatness


def difference(
    name: str, sign: str, frame: pd.DataFrame, column: str, one: str, other: str
) -> Claim:
    """Compute the mean difference of two methods over the seeds and batch sizes that both have."""
    keys = ["param_batch_size", "param_seed"]
    pairs = frame.pivot(index=keys, columns="param_method", values=column)
    pairs = pairs.reindex(columns=[one, other]).dropna()
    return mean(name, sign, pairs[one] - pairs[other], of=2)


def rank_within(rows: pd.DataFrame, name: str = "relative_flatness_-1") -> float:
    """Compute the mean over methods of the rank correlation of flatness and test error."""
    found = [part[name].rank().corr(part["test_error"].rank())
             for _, part in rows.groupby("param_method") if len(part) > 2]  # fmt: skip
    return float(np.mean(found)) if found else np.nan


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("regularised", __doc__, argv)
    n = 2000 if figure.data else 400
    data = figure.load(48 if figure.quick else n, 1000, images=True)
    runs = [
        {"param_method": method, "param_batch_size": size, "param_seed": seed}
        for seed in range(1 if figure.quick else 5)
        for size in ((32,) if figure.quick else (32, 128))
        for method in METHODS
    ]
    epochs = 5 if figure.quick else 100
    every = figure.complete(runs, train_row, data, epochs, bool(figure.data))
    # augmented data are not fitted within 100 epochs of small batches
    frame = every[every["train_loss"] <= (9 if figure.quick else 0.1)]
    logs = np.log(frame[["relative_flatness_-1", "train_loss"]])
    frame = frame.assign(
        log_flatness=logs.iloc[:, 0], log_flatness_over_loss=logs.iloc[:, 0] - logs.iloc[:, 1]
    )
    pairs = [(f"penalty {layer}", other) for layer in (-1, -2) for other in ("plain", "SAM")]
    pairs += [("penalty as published", other) for other in ("its weight decay", "SAM")]
    error = "test_error"
    claims = [
        difference(f"FAM: test error, {method} - {other}", "< 0", frame, error, method, other)
        for method, other in pairs
    ]
    later = {
        "test error": ("< 0", error),
        "log relative flatness": ("> 0", "log_flatness"),
        "the same over the loss": ("> 0", "log_flatness_over_loss"),
    }
    claims += [
        difference(f"later: {what}, {method} - plain", sign, frame, column, method, "plain")
        for method in ("SAM", "weight decay", "augmentation")
        for what, (sign, column) in later.items()
    ]
    claims += [
        rank("rank correlation of flatness and test error, pooled", "> 0", frame,
             "relative_flatness_-1", "test_error"),
        bootstrap("the same within methods", "> 0", frame, rank_within),
    ]  # fmt: skip
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

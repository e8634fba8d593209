"""N17 Figures 1 to 4: norms, sharpness and KL by labels, confusion sets and widths.

The networks are MLPs with 256 units in two layers, and with one hidden layer of growing width for
Figure 4; the paper trains VGG on CIFAR-10, and such MLPs on MNIST. `kl` is the divergence at which
the expected sharpness is 0.05; `distance` is that at alpha = 1, and `rise` the sharpness at others.
Sharpness grows with the loss: networks with 100 random labels, trained to the same loss, are 2.5
times as sharp as with true labels.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks.papers._common import Arrays, Figure, Statistic, bootstrap, rank
from relflat_sk import RelativeFlatnessRegularizedClassifier, StopAtLoss, flatness_report, measure

NORMS = ["frobenius_product", "l1_path_norm", "l2_path_norm", "spectral_product"]
ALPHAS = np.geomspace(3e-4, 0.1, 9)


def train_row(
    what: str, size: int, kind: str, seed: int, data: Arrays, quick: bool
) -> dict[str, float]:
    """Train a network of one experiment to the loss 1e-4, and measure it."""
    X, y, X_test, y_test = data
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(y))
    n = size if what == "labels" else min(400, len(y) // 2)
    fit, extra = order[:n], order[n : n + size] if what == "confusion" else order[:0]
    labels = rng.integers(10, size=n) if kind == "random" else y[fit]
    y_fit = np.concatenate([labels, rng.integers(10, size=len(extra))])
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=size if what == "width" else (32 if quick else 256,) * 2,
        flatness_weight=0,
        optimizer=torch.optim.SGD, lr=0.05, optimizer__momentum=0.9, batch_size=64,
        max_epochs=60 if quick else 10_000, callbacks=[StopAtLoss(1e-4)],
        random_state=seed, verbose=0,
    )  # fmt: skip
    net.fit(np.concatenate([X[fit], X[extra]]), y_fit)
    X_fit, target = torch.from_numpy(X[fit]), torch.from_numpy(labels)
    given: Any = {"criterion": nn.CrossEntropyLoss()}
    report = flatness_report(net.module_, X_fit, target, measures=NORMS, over_margin=True, **given)
    rises = [
        measure("expected_sharpness", net.module_, X_fit, target, alpha=alpha,
                n_draws=2 if quick else 5, random_state=0, **given)
        for alpha in ALPHAS
    ]  # fmt: skip
    sharpness = measure("keskar_sharpness", net.module_, X_fit, target, **given)
    # the sharpness grows by orders of magnitude from one alpha to the next
    logs = np.log(np.maximum(np.maximum.accumulate(rises), 1e-12))
    alpha = np.exp(np.interp(np.log(0.05), logs, np.log(ALPHAS)))
    weights = torch.cat([w.detach().flatten() for w in net.module_.parameters()]).abs()
    distance = float((weights / (10 * weights + 1)).square().sum()) / 2
    return {
        "train_loss": net.history[-1, "train_loss"],
        "test_error": float((net.predict(X_test) != y_test).mean()),
        **report.set_index("measure")["value"],
        "keskar_sharpness": sharpness,
        "kl": distance / alpha**2,
        "distance": distance,
        **{f"rise_{alpha:.3g}": rise for alpha, rise in zip(ALPHAS, rises, strict=True)},
    }


def random_over_true(name: str) -> Statistic:
    """Compute the mean log ratio of random to true labels over sizes."""

    def of(rows: pd.DataFrame) -> float:
        logs = np.log(rows[name]).groupby([rows["param_size"], rows["param_kind"]]).mean().unstack()
        both = {"random", "true"} <= set(logs.columns)
        return float((logs["random"] - logs["true"]).mean()) if both else np.nan

    return of


def growth(name: str) -> Statistic:
    """Compute by how much faster a measure grows with the sample for random labels."""

    def of(rows: pd.DataFrame) -> float:
        slopes = {}
        for kind, part in rows.groupby("param_kind"):
            size = np.log(part["param_size"])
            slopes[kind] = size.cov(np.log(part[name])) / size.var()
        return float(slopes.get("random", np.nan) - slopes.get("true", np.nan))

    return of


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("n17_figures_1_to_4", __doc__, argv)
    data = figure.load(200 if figure.quick else 1200, 1000, images=False)
    sizes = {"labels": [100, 200, 400, 800], "confusion": [0, 100, 200, 400, 800],
             "width": [8, 16, 32, 128, 512]}  # fmt: skip
    runs = [
        {"param_what": what, "param_size": size, "param_kind": kind, "param_seed": seed}
        for seed in range(1 if figure.quick else 5)
        for what, several in sizes.items()
        for size in (several[:2] if figure.quick else several)
        for kind in (["true", "random"] if what == "labels" else ["true"])
    ]
    every = figure.complete(runs, train_row, data, figure.quick)
    labels, confusion, width = (every[every["param_what"] == what] for what in sizes)
    # the paper plots the spectral norm without the number of units
    width = width.assign(spectral_product=width["spectral_product"] / width["param_size"])
    few, many = min(sizes["labels"]), max(sizes["labels"])
    claims = []
    for name in [*NORMS, "kl"]:
        number = 2 if name == "kl" else 1
        claims += [
            bootstrap(
                f"Figure {number}: log {name}, random - true", "> 0", labels, random_over_true(name)
            ),
            bootstrap(f"Figure {number}: growth of it, random - true", "> 0", labels, growth(name)),
        ]
    sharp = "keskar_sharpness"
    claims += [
        bootstrap(f"Figure 2: log sharpness, random - true, {n} samples", sign,
                  labels[labels["param_size"] == n], random_over_true(sharp))
        for n, sign in ((few, "< 0"), (many, "> 0"))
    ]  # fmt: skip
    size, error = "param_size", "test_error"
    claims.append(
        rank("Figure 3: test error with the confusion set", "> 0", confusion, size, error)
    )
    claims += [
        rank(f"Figure 3: {name} with the test error", sign, confusion, name, error)
        for name, sign in [*((name, "> 0") for name in NORMS), (sharp, "< 0.3"), ("kl", "> 0")]
    ]
    claims.append(rank("Figure 4: test error with the width", "< 0", width, size, error))
    narrow, wide = width[width[size] <= 128], width[width[size] >= 128]
    claims += [
        rank(f"Figure 4: {name} with the width, up to 128", "< 0", narrow, size, name)
        for name in [*NORMS, "kl"]
    ]
    claims += [
        rank(f"Figure 4: {name} with the width, from 128", sign, wide, size, name)
        for name, sign in zip(NORMS[:3], ("> 0", "> 0", "< 0"), strict=True)
    ]
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

"""P21 Figures 3 and 4: flatness, gap and approximated bound for four Gaussians in feature space.

A linear classifier is fitted in feature space; a random 4-layer network is inverted to make the
inputs. The paper's text leaves open the classifier, the number of features (8 here), and whether
the Gaussians are round, or mixed as in scikit-learn's `make_classification`. Means are twice the
separation apart. "mixed" and "round" have logistic regressions. "ridge" is the authors' code: ridge
classifiers with squared errors, and two of the features redundant. In that code, the kernel
estimate in Figure 4 is divided by the sample size twice, so that the held-out loss is what remains
of the representativeness. It exceeds the gap in any case. Where labels change everywhere, the size
of the weight determines both flatness and the fit to noise. Between round Gaussians that are far
apart, larger weights have larger gaps, but less curvature.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import make_classification
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.model_selection import cross_val_score
from torch import Tensor, nn

from benchmarks.papers._common import Claim, Figure, bootstrap, conditions, correlation, mean, rank
from relflat_sk import generalization_bound, label_constancy, relative_flatness

SEPARATIONS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
N_TRAIN, N_TEST, WIDTH, SLOPE = 500, 4500, 8, 0.5
AT_LOSS = 0.998  # of the loss of a constant, which all classifiers reach at separation 0.25
N_BOUNDS = 20  # data sets of a separation with a bound, which refits


def feature_extractor(seed: int) -> nn.Sequential:
    """Draw four layers that can be inverted."""
    torch.manual_seed(seed)
    layers = [(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(SLOPE)) for _ in range(4)]
    return nn.Sequential(*(part for pair in layers for part in pair)).double()


def invert(network: nn.Sequential, features: Tensor) -> Tensor:
    """Find the inputs that the network turns into the features."""
    for layer in reversed(network):
        if isinstance(layer, nn.Linear):
            features = torch.linalg.solve(layer.weight, (features - layer.bias).T).T
        else:
            features = torch.where(features > 0, features, features / SLOPE)
    return features.detach()


def gaussians(kind: str, separation: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw features and labels: scikit-learn's clusters of random shapes, or round ones."""
    n_redundant = 2 if kind == "ridge" else 0
    if kind == "round":
        rng = np.random.default_rng(seed)
        y = rng.integers(2, size=N_TRAIN + N_TEST)
        means = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0][:4] * separation * 2**0.5
        means = means[2 * y + rng.integers(2, size=len(y))]
        return means + rng.normal(size=means.shape), y
    phi, y = make_classification(
        N_TRAIN + N_TEST, WIDTH, n_informative=WIDTH - n_redundant, n_redundant=n_redundant,
        n_clusters_per_class=2, class_sep=separation, flip_y=0, random_state=seed,
    )  # fmt: skip
    return phi, y


def draw_row(kind: str, separation: float, seed: int) -> dict[str, float]:
    """Draw a data set, fit the classifier, and measure."""
    phi, y = gaussians(kind, separation, seed)
    train, test = slice(N_TRAIN), slice(N_TRAIN, None)
    ridge = kind == "ridge"
    head = RidgeClassifier() if ridge else LogisticRegression(max_iter=1000)
    head.fit(phi[train], y[train])
    extractor, linear = feature_extractor(seed), nn.Linear(WIDTH, 1).double()
    linear.weight.data = torch.from_numpy(head.coef_.reshape(1, -1))
    linear.bias.data = torch.from_numpy(np.reshape(head.intercept_, 1))
    X = invert(extractor, torch.from_numpy(phi))
    model = nn.Sequential(*extractor, linear)
    target = torch.from_numpy(2 * y - 1 if ridge else y).double()[:, None]
    loss = nn.MSELoss() if ridge else nn.BCEWithLogitsLoss()
    losses = [loss(model(X[part]), target[part]).item() for part in (train, test)]
    errors = [(head.predict(phi[part]) != y[part]).mean() for part in (train, test)]
    measured = partial(relative_flatness, model, X[train], target[train], criterion=loss)
    row = {
        "train_loss": losses[0],
        "generalization_gap": losses[1] - losses[0],
        "error_gap": errors[1] - errors[0],
        "relative_flatness": measured(),
        "relative_flatness_at_loss": measured(at_loss=AT_LOSS),
        "squared_weight": float((head.coef_**2).sum()),
        "label_constancy": label_constancy(model, X[train], y[train]),
        "bound": np.nan,
        "bound_without_kernel": np.nan,
    }
    if seed < N_BOUNDS and not ridge:
        found = generalization_bound(
            head, phi[train], y[train], refit=True, n_splits=5, random_state=seed
        )
        held_out = -cross_val_score(head, phi[train], y[train], scoring="neg_log_loss").mean()
        row["bound"] = found.representativeness + found.flatness_term
        row["bound_without_kernel"] = held_out + found.flatness_term
    return row


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("p21_figures_3_4", __doc__, argv, "gaussians")
    separations = (0.5, 3.0) if figure.quick else SEPARATIONS
    runs = [
        {"param_kind": kind, "param_separation": separation, "param_seed": seed}
        for seed in range(5 if figure.quick else 100)
        for kind in ("mixed", "round", "ridge")
        for separation in separations
    ]
    frame = figure.complete(runs, draw_row)
    first, last = min(separations), max(separations)

    def r(rows: pd.DataFrame, separation: float) -> float:
        rows = rows[rows["param_separation"] == separation]
        return float(rows["relative_flatness"].corr(rows["generalization_gap"]))

    claims: list[Claim] = []
    for kind, part in frame.groupby("param_kind"):
        name = f"Figure 3, {kind}: r"
        signs = ["< 0.3", *["> 0"] * len(separations)]
        claims += [
            correlation(f"{name} at separation {one}", sign,
                        part[part["param_separation"] == one], "relative_flatness")
            for one, sign in zip(separations, signs, strict=False)
        ]  # fmt: skip
        claims.append(bootstrap(f"{name} at {last} minus at {first}", "> 0", part,
                                lambda rows: r(rows, last) - r(rows, first)))  # fmt: skip
        claims += [
            correlation(f"{name} of squared weight at {one}", sign,
                        part[part["param_separation"] == one], "squared_weight")
            for one, sign in ((first, "< 0.3"), (last, "> 0"))
        ]  # fmt: skip
        for separation in (first, last):
            print(f"\n{kind}, separation {separation}")
            conditions(part[part["param_separation"] == separation], ["relative_flatness"])
    bounds = frame.dropna(subset=["bound"])
    gap = bounds["generalization_gap"]
    claims += [
        mean("Figure 4: share of data sets below the bound", "> 0.95", bounds["bound"] >= gap),
        mean("Figure 4: the same without the kernel's term", "> 0.95",
             bounds["bound_without_kernel"] >= gap),
        rank("Figure 4: rank correlation of bound and separation", "< 0", bounds, "bound",
             "param_separation"),
    ]  # fmt: skip
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

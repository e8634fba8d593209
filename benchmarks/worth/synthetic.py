"""Compare flatness with the generalisation gap on Gaussians, for several class separations.

As in figures 3 and 4 of Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021,
there are two classes of two Gaussians each. A small network is trained on 500 samples; fresh
samples give the gap between test and training loss.

First, flatness is correlated with the gap over the draws of each class separation. The theory
assumes that labels are constant in the neighbourhood of a sample, and so that classes are
separated. Second, the gap is compared with the approximated bound of `generalization_bound`, with
representativeness from refits on random splits.

    python -m benchmarks.worth.synthetic                              # 100 draws each, 3 minutes
    python -m benchmarks.worth.synthetic --quick                      # few draws, no verdict
"""

import sys
import warnings

import pandas as pd
from sklearn.datasets import make_classification
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import environment, table
from relflat_sk import (
    correlate_measures,
    feature_robustness,
    generalization_bound,
    label_constancy,
    relative_flatness,
)

SEPARATIONS = (0.5, 1.0, 1.5, 2.0, 3.0)
N_TRAIN, N_TEST = 500, 4500
N_SPLITS = 5
HIDDEN, ALPHA = 8, 0.5
BOUND = ["bound", "representativeness", "flatness term", "rise", "constancy"]
# smallest separation at which classes count as separated
APART = 1.5


def measure_draw(separation: float, seed: int, *, with_bound: bool) -> dict[str, float]:
    """Draw Gaussians, a sample and initial weights, train, and measure flatness, gap and bound."""
    X, y = make_classification(
        N_TRAIN + N_TEST, 8, n_informative=6, n_redundant=2, n_clusters_per_class=2,
        class_sep=separation, flip_y=0.001, random_state=seed,
    )  # fmt: skip
    X_test, y_test, X, y = X[N_TRAIN:], y[N_TRAIN:], X[:N_TRAIN], y[:N_TRAIN]
    # weight decay, because separated classes have no minimum without it
    network = MLPClassifier(
        (HIDDEN,), solver="lbfgs", alpha=ALPHA, max_iter=1000, random_state=seed
    ).fit(X, y)
    train_loss = log_loss(y, network.predict_proba(X))
    test_loss = log_loss(y_test, network.predict_proba(X_test))
    row = {
        "param_separation": separation,
        "param_seed": seed,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "generalization_gap": test_loss - train_loss,
        "relative_flatness": relative_flatness(network, X, y),
        "normalized_relative_flatness": relative_flatness(network, X, y, normalize=True),
    }
    if not with_bound:
        return row
    bound = generalization_bound(network, X, y, refit=True, n_splits=N_SPLITS, random_state=seed)
    # the rise of the loss, of which the flatness term is the second order
    rise, _ = feature_robustness(
        network, X, y, bound.delta, matrices="truncated_normal", random_state=seed
    )
    return row | {
        "bound": bound.total - bound.empirical_risk,
        "representativeness": bound.representativeness,
        "flatness term": bound.flatness_term,
        "rise": rise,
        "constancy": label_constancy(network, X, y),
    }


def correlations(rows: pd.DataFrame) -> pd.DataFrame:
    """Correlate flatness with the gap over the draws of each separation."""
    tables = []
    for separation, draws in rows.groupby("param_separation"):
        correlated = correlate_measures(draws.drop(columns="param_separation"), random_state=0)
        tables.append(correlated.assign(separation=separation))
    return pd.concat(tables)


def show_correlations(correlated: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Print coefficients with intervals, next to mean training loss and mean gap."""
    print("\nCorrelation with the gap over draws, 95% intervals")
    lines = [["separation", "measure", "train loss", "gap", "pearson", "spearman", "kendall"]]
    means = rows.groupby("param_separation")[["train_loss", "generalization_gap"]].mean()
    for _, row in correlated.iterrows():
        losses = (f"{value:.4f}" for value in means.loc[row["separation"]])
        coefficients = (
            f"{row[name]:z.2f} [{row[f'{name}_low']:z.2f}, {row[f'{name}_high']:z.2f}]"
            for name in ("pearson", "spearman", "kendall")
        )
        lines.append([f"{row['separation']}", row["measure"], *losses, *coefficients])
    print(table(lines))


def show_bounds(bounds: pd.DataFrame) -> None:
    """Print means over draws, and the share of draws whose gap is below the bound."""
    print("\nThe gap and its approximated bound, means over draws")
    means = bounds.groupby("separation").mean()
    covered = (bounds["bound"] >= bounds["gap"]).groupby(bounds["separation"]).mean()
    lines = [["separation", *means.columns, "draws below bound"]]
    for separation, row in means.iterrows():
        values = (f"{value:.4f}" for value in row)
        lines.append([f"{separation}", *values, f"{covered[separation]:.0%}"])
    print(table(lines))


def verdict(correlated: pd.DataFrame, bounds: pd.DataFrame, *, judged: bool) -> int:
    """Test that flatness orders the gaps of separated classes, and count where the bound holds."""
    means = bounds.groupby("separation").mean()
    above = int((means["bound"] > means["gap"]).sum())
    print(f"\nthe mean bound is above the mean gap at {above} of {len(means)} separations")
    of_flatness = correlated[correlated["measure"] == "relative_flatness"]
    holds = bool((of_flatness[of_flatness["separation"] >= APART]["spearman_low"] > 0).all())
    outcome = ("yes" if holds else "NO") if judged else "not judged (quick)"
    print(f"relative flatness orders the gaps of classes {APART} or more apart: {outcome}")
    return int(judged and not holds)


def main() -> int:
    arguments = read_options(__doc__, draws=(100, 4), bounds=(20, 1))
    print(
        f"Two classes of two Gaussians, {N_TRAIN} samples, {arguments.draws} draws; "
        f"{HIDDEN} hidden neurons, alpha={ALPHA:g}"
    )
    print(environment())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        rows = pd.DataFrame([
            measure_draw(separation, seed, with_bound=seed < arguments.bounds)
            for separation in (SEPARATIONS[2:4] if arguments.quick else SEPARATIONS)
            for seed in range(arguments.draws)
        ])
    names = {"param_separation": "separation", "generalization_gap": "gap"}
    bounds = rows.dropna(subset="bound").rename(columns=names)[["separation", "gap", *BOUND]]
    rows = rows.drop(columns=BOUND)
    correlated = correlations(rows)
    show_correlations(correlated, rows)
    show_bounds(bounds)
    return verdict(correlated, bounds, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())

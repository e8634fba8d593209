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
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray
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
# smallest separation at which classes count as separated
APART = 1.5


@dataclass(frozen=True)
class Draw:
    """A training sample and a test sample of the Gaussians, and the trained network."""

    X: NDArray[np.float64]
    y: NDArray[np.int64]
    X_test: NDArray[np.float64]
    y_test: NDArray[np.int64]
    network: MLPClassifier

    def losses(self) -> tuple[float, float]:
        """Return the mean losses on the training sample and on the test sample."""
        return (
            log_loss(self.y, self.network.predict_proba(self.X)),
            log_loss(self.y_test, self.network.predict_proba(self.X_test)),
        )


def make_draw(separation: float, seed: int) -> Draw:
    """Draw Gaussians, samples and initial weights, and train."""
    X, y = make_classification(
        n_samples=N_TRAIN + N_TEST,
        n_features=8,
        n_informative=6,
        n_redundant=2,
        n_clusters_per_class=2,
        class_sep=separation,
        flip_y=0.001,
        random_state=seed,
    )
    # weight decay, because separated classes have no minimum without it
    network = MLPClassifier(
        (HIDDEN,), solver="lbfgs", alpha=ALPHA, max_iter=1000, random_state=seed
    )
    network.fit(X[:N_TRAIN], y[:N_TRAIN])
    return Draw(X[:N_TRAIN], y[:N_TRAIN], X[N_TRAIN:], y[N_TRAIN:], network)


def measure_draw(draw: Draw, separation: float, seed: int) -> dict[str, float]:
    """Measure flatness and gap of a draw: a row for figure 3."""
    train_loss, test_loss = draw.losses()
    return {
        "param_separation": separation,
        "param_seed": seed,
        "train_loss": train_loss,
        "test_loss": test_loss,
        "generalization_gap": test_loss - train_loss,
        "relative_flatness": relative_flatness(draw.network, draw.X, draw.y),
        "normalized_relative_flatness": relative_flatness(
            draw.network, draw.X, draw.y, normalize=True
        ),
    }


def bound(draw: Draw, separation: float, seed: int) -> dict[str, float]:
    """Approximate the bound for a draw: a row for figure 4."""
    train_loss, test_loss = draw.losses()
    found = generalization_bound(
        draw.network, draw.X, draw.y, refit=True, n_splits=N_SPLITS, random_state=seed
    )
    # the rise of the loss, of which the flatness term is the second order
    rise, _ = feature_robustness(
        draw.network,
        draw.X,
        draw.y,
        found.delta,
        matrices="truncated_normal",
        random_state=seed,
    )
    return {
        "separation": separation,
        "gap": test_loss - train_loss,
        "bound": found.total - found.empirical_risk,
        "representativeness": found.representativeness,
        "flatness term": found.flatness_term,
        "rise": rise,
        "constancy": label_constancy(draw.network, draw.X, draw.y),
    }


def correlations(rows: pd.DataFrame) -> pd.DataFrame:
    """Correlate flatness with the gap over the draws of each separation."""
    found = []
    for separation, some in rows.groupby("param_separation"):
        one = correlate_measures(some.drop(columns="param_separation"), random_state=0)
        found.append(one.assign(separation=separation))
    return pd.concat(found)


def show_correlations(found: pd.DataFrame, rows: pd.DataFrame) -> None:
    """Print coefficients with intervals, next to mean training loss and mean gap."""
    print("\nCorrelation with the gap over draws, 95% intervals")
    lines = [["separation", "measure", "train loss", "gap", "pearson", "spearman", "kendall"]]
    means = rows.groupby("param_separation")[["train_loss", "generalization_gap"]].mean()
    for _, one in found.iterrows():
        loss, gap = means.loc[one["separation"]]
        coefficients = (
            f"{one[name]:z.2f} [{one[f'{name}_low']:z.2f}, {one[f'{name}_high']:z.2f}]"
            for name in ("pearson", "spearman", "kendall")
        )
        lines.append([
            f"{one['separation']}",
            one["measure"],
            f"{loss:.4f}",
            f"{gap:.4f}",
            *coefficients,
        ])
    print(table(lines))


def show_bounds(rows: pd.DataFrame) -> None:
    """Print means over draws, and the share of draws whose gap is below the bound."""
    print("\nThe gap and its approximated bound, means over draws")
    means = rows.groupby("separation").mean()
    covered = (rows["bound"] >= rows["gap"]).groupby(rows["separation"]).mean()
    lines = [["separation", *means.columns, "draws below bound"]]
    for separation, one in means.iterrows():
        share = f"{covered[separation]:.0%}"
        lines.append([f"{separation}", *(f"{value:.4f}" for value in one), share])
    print(table(lines))


def main() -> int:
    """Train, measure, print, and return the exit code."""
    arguments = read_options(__doc__, draws=(100, 4), bounds=(20, 1))
    separations = SEPARATIONS[2:4] if arguments.quick else SEPARATIONS
    print(
        f"Two classes of two Gaussians, {N_TRAIN} samples, {arguments.draws} draws; "
        f"{HIDDEN} hidden neurons, alpha={ALPHA:g}"
    )
    print(environment())
    measured, bounds = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        for separation in separations:
            for seed in range(arguments.draws):
                draw = make_draw(separation, seed)
                measured.append(measure_draw(draw, separation, seed))
                if seed < arguments.bounds:
                    bounds.append(bound(draw, separation, seed))
    rows, parts = pd.DataFrame(measured), pd.DataFrame(bounds)
    found = correlations(rows)
    show_correlations(found, rows)
    show_bounds(parts)
    return verdict(found, parts, judged=not arguments.quick)


def verdict(found: pd.DataFrame, bounds: pd.DataFrame, *, judged: bool) -> int:
    """Test that flatness orders the gaps of separated classes, and count where the bound holds."""
    means = bounds.groupby("separation").mean()
    above = int((means["bound"] > means["gap"]).sum())
    print(f"\nthe mean bound is above the mean gap at {above} of {len(means)} separations")
    apart = found[(found["measure"] == "relative_flatness") & (found["separation"] >= APART)]
    holds = bool((apart["spearman_low"] > 0).all())
    outcome = ("yes" if holds else "NO") if judged else "not judged (quick)"
    print(f"relative flatness orders the gaps of classes {APART} or more apart: {outcome}")
    return int(judged and not holds)


if __name__ == "__main__":
    sys.exit(main())

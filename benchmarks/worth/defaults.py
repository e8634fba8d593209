"""Compare our nets and scikit-learn's MLPs, both with their defaults, on eight data sets.

Inputs are standardised, targets are as they are. Each model is trained on the parts of a
cross-validation, and the table has its mean score on the rest (accuracy, R2), its mean log loss,
and the processor time of the fits.

    python -m benchmarks.worth.defaults               # 3 minutes
    python -m benchmarks.worth.defaults --weight 1    # another flatness_weight
    python -m benchmarks.worth.defaults --quick       # a smoke run
"""

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from sklearn.base import is_classifier
from sklearn.datasets import (
    load_diabetes,
    load_iris,
    make_friedman1,
    make_friedman2,
    make_friedman3,
)
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold, StratifiedKFold
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks._harness.problems import TABLES, Arrays
from benchmarks._harness.timing import environment, table
from relflat_sk import RelativeFlatnessRegularizedClassifier, RelativeFlatnessRegularizedRegressor

CLASSES: dict[str, Callable[[], Arrays]] = {
    name: partial(load, return_X_y=True) for name, load in {"iris": load_iris, **TABLES}.items()
}
NUMBERS: dict[str, Callable[[], Arrays]] = {
    "diabetes": partial(load_diabetes, return_X_y=True),
    "friedman1": partial(make_friedman1, 600, noise=1.0, random_state=0),
    "friedman2": partial(make_friedman2, 600, noise=20.0, random_state=0),
    "friedman3": partial(make_friedman3, 600, noise=0.05, random_state=0),
}
SKLEARN, OURS = "scikit-learn's MLP", "ours"


def make_models(name: str, seed: int, params: dict[str, Any]) -> dict[str, Any]:
    """Make both models for a data set, with all defaults but the given ones."""
    ours: Any = RelativeFlatnessRegularizedRegressor
    if name in CLASSES:
        ours = RelativeFlatnessRegularizedClassifier
    theirs: Any = MLPClassifier if name in CLASSES else MLPRegressor
    return {
        SKLEARN: theirs(random_state=seed),
        OURS: ours(random_state=seed, verbose=0, **params),
        f"{OURS}, no penalty": ours(random_state=seed, verbose=0, flatness_weight=0),
    }


def judge(model: Any, X: np.ndarray, y: np.ndarray, folds: int) -> tuple[float, float, float]:
    """Cross-validate a model: mean score, mean log loss (nan for numbers), seconds of all fits."""
    scores, losses, seconds = [], [], 0.0
    splitter = StratifiedKFold if is_classifier(model) else KFold
    for train, test in splitter(folds, shuffle=True, random_state=0).split(X, y):
        start = time.process_time()
        pipeline = make_pipeline(StandardScaler(), model).fit(X[train], y[train])
        seconds += time.process_time() - start
        scores.append(pipeline.score(X[test], y[test]))
        losses.append(
            log_loss(y[test], pipeline.predict_proba(X[test])) if is_classifier(model) else np.nan
        )
    return float(np.mean(scores)), float(np.mean(losses)), seconds


def main() -> None:
    """Print a line for each data set and model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--seeds", type=int, default=2, help="models of each kind (default: 2)")
    parser.add_argument("--weight", type=float, help="flatness_weight (default: the nets')")
    parser.add_argument("--quick", action="store_true", help="two data sets, one seed")
    arguments = parser.parse_args()
    sets = {**CLASSES, **NUMBERS}
    folds, seeds = arguments.folds, arguments.seeds
    params = {} if arguments.weight is None else {"flatness_weight": arguments.weight}
    if arguments.quick:
        sets, folds, seeds = {name: sets[name] for name in ("iris", "diabetes")}, 2, 1
    print(f"{folds} folds, {seeds} seeds; {environment()}", flush=True)
    rows = [["data", "model", "accuracy or R2", "log loss", "time of scikit-learn's"]]
    for name, load in sets.items():
        X, y = load()
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # scikit-learn's defaults as they are
            found = {
                model: np.mean(
                    [
                        judge(make_models(name, seed, params)[model], X, y, folds)
                        for seed in range(seeds)
                    ],
                    axis=0,
                )
                for model in make_models(name, 0, params)
            }
        for model, (score, loss, seconds) in found.items():
            accuracy = f"{100 * score:.1f}%" if name in CLASSES else f"{score:.2f}"
            loss_text = f"{loss:.3f}" if name in CLASSES else ""
            rows.append([name, model, accuracy, loss_text, f"{seconds / found[SKLEARN][2]:.1f}"])
            print("  ".join(rows[-1]), flush=True)
    print()
    print(table(rows))


if __name__ == "__main__":
    main()

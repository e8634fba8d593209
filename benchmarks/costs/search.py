"""Time of a search beside its training, and of a choice of the penalty by folds."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.preprocessing import scale

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, interleave, ratio, verdict
from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessPenaltyCV,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
)

LIMIT = 0.05 * 10  # seconds: 5% of a trial that takes 10 s
MOST_CHOOSING = 6  # times five folds of one setting
STORAGES: dict[str, Callable[[Path], Any]] = {
    "in memory": lambda folder: InMemoryStorage(),
    "sqlite": lambda folder: f"sqlite:///{folder / 'minima.db'}",
    "journal": lambda folder: folder / "minima.log",
}


def make_search(n_trials: int, storage: Any) -> FlatMinimaSearch:
    """Make a search over batch sizes and learning rates, without refit."""
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0, module__hidden_layer_sizes=(32,), batch_size=64, max_epochs=20,
        callbacks=[StopAtLoss(0.3)], verbose=0,
    )  # fmt: skip
    space = {"batch_size": [32, 64], "lr": FloatDistribution(0.003, 0.03, log=True)}
    return FlatMinimaSearch(
        net, space, n_trials=n_trials, storage=storage, study_name="costs", refit=False,
        random_state=0,
    )  # fmt: skip


def time_choice(X: np.ndarray, y: np.ndarray, rounds: int, epochs: int) -> Budget:
    """Time the choice of the penalty, over five folds of one setting without penalty."""
    net = RelativeFlatnessRegularizedClassifier(max_epochs=epochs, verbose=0, random_state=0)
    plain = RelativeFlatnessRegularizedClassifier(**net.get_params() | {"flatness_weight": 0})
    search = RelativeFlatnessPenaltyCV(net, refit=False)
    times = interleave(
        {"plain": lambda: cross_val_score(plain, X, y), "choice": lambda: search.fit(X, y)}, rounds
    )
    found = ratio(times["choice"], times["plain"])
    n_settings = len(search.cv_results_["params"])
    print(f"\nFive folds of {n_settings} settings, over those of one without penalty: {found}")
    return Budget("choice of the penalty / folds of one setting", found.value, MOST_CHOOSING)


def main() -> int:
    options = read_options(__doc__, trials=(20, 2))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("A search over nets on digits")
    print(environment())
    X, y = load_digits(return_X_y=True)
    X = scale(X).astype(np.float32)
    budgets = []
    print(f"\n{options.trials} trials each; the rest draws, measures, scores and records")
    for name, storage in STORAGES.items():
        with tempfile.TemporaryDirectory() as folder:
            search = make_search(options.trials, storage(Path(folder)))
            start = time.perf_counter()
            search.fit(X, y)
            whole = (time.perf_counter() - start) / options.trials
        training = float(search.minima_["seconds"].mean())
        rest = whole - training
        print(f"{name}: {whole:.3f} s per trial, {training:.3f} training, {rest:.3f} the rest")
        budgets.append(Budget(f"seconds beside the training of a trial, {name}", rest, LIMIT))
    budgets.append(time_choice(X, y, *((1, 1) if options.quick else (3, 10))))
    return verdict(budgets, judged=not options.quick)


if __name__ == "__main__":
    raise SystemExit(main())

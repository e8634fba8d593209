"""Time of a search beside its training.

python -m benchmarks.costs.search            # 2 minutes
python -m benchmarks.costs.search --quick    # a smoke run without verdict
python -m benchmarks.costs.search --url URL  # on a database of yours
"""

import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage
from sklearn.datasets import load_digits
from sklearn.preprocessing import scale

from benchmarks._harness.options import read_options
from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss

LIMIT = 0.05 * 10  # seconds: 5% of a trial that takes 10 s


STORAGES: dict[str, Callable[[Path], Any]] = {
    "in memory": lambda folder: InMemoryStorage(),
    "sqlite": lambda folder: f"sqlite:///{folder / 'minima.db'}",
    "journal": lambda folder: folder / "minima.log",
}


def open_storage(name: str, folder: Path) -> Any:
    """Make one of the storages above; another name is the URL of a database."""
    return STORAGES[name](folder) if name in STORAGES else name


def kind_of(name: str) -> str:
    """Name the kind of a storage without the rest of its URL, which may hold a password."""
    return name.partition(":")[0]


def load() -> tuple[Any, Any]:
    """Load scikit-learn's digits, standardised."""
    X, y = load_digits(return_X_y=True)
    return scale(X).astype(np.float32), y


def make_search(n_trials: int, **arguments: Any) -> FlatMinimaSearch:
    """Make a search over batch sizes and learning rates, without refit."""
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0,
        module__hidden_layer_sizes=(32,),
        batch_size=64,
        max_epochs=20,
        callbacks=[StopAtLoss(0.3)],
        verbose=0,
    )
    space = {"batch_size": [32, 64], "lr": FloatDistribution(0.003, 0.03, log=True)}
    return FlatMinimaSearch(net, space, n_trials=n_trials, random_state=0, refit=False, **arguments)


# -- time beside the training -----------------------------------------------------------------


def overhead(names: Iterable[str], n_trials: int) -> list[Budget]:
    """Time searches and the trainings within them, so that both see the same load."""
    X, y = load()
    rows = [["storage", "s per trial", "training", "the rest"]]
    budgets = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            storage = open_storage(name, Path(folder))
            name_of_study = None if storage is None else uuid.uuid4().hex
            search = make_search(n_trials, storage=storage, study_name=name_of_study)
            start = time.perf_counter()
            search.fit(X, y)
            whole = (time.perf_counter() - start) / n_trials
        training = float(search.minima_["seconds"].mean())
        rest = whole - training
        rows.append([kind_of(name), *(f"{seconds:.3f}" for seconds in (whole, training, rest))])
        budgets.append(
            Budget(f"seconds beside the training of a trial, {kind_of(name)}", rest, LIMIT)
        )
    print(f"\n{n_trials} trials each; the rest draws, measures, scores and records\n{table(rows)}")
    return budgets


def main() -> int:
    """Measure, print, and return the exit code."""
    options = read_options(__doc__, trials=(20, 2), url=str)
    url = [options.url] if options.url else None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("A search over nets on digits")
    print(environment())
    budgets = overhead(url or STORAGES, options.trials)
    return verdict(budgets, judged=not options.quick)


if __name__ == "__main__":
    sys.exit(main())

"""Compare ways to choose among candidates by the regret of the choice and by its cost.

On each data set at least 40 candidates (batch sizes, learning rates, seeds) are trained to the
same training loss on all training data. Each way then picks one of them:

flattest             the smallest relative flatness at the last layer, among the minima that a
                     search ranks, which are about equally deep; no data held out
flattest + risk      the smallest training loss + n^(-2/(4+m)) kappa/(2m), the first terms of the
                     bound of Petzka et al. (2021), Theorem 6
normalized flattest  the smallest normalised relative flatness
5-fold CV            the best mean score of five folds; five more fits per candidate
hold-out             the best score on a fifth of the training data; one more fit per candidate
random               the average candidate

The regret is the test score of the best candidate minus the test score of the pick, both trained
on all training data. The cost is the time of all fits that a way needs, divided by the time of
one fit of every candidate. The data are split into training and test data several times; the
table has means and standard errors over the splits.

    python -m benchmarks.worth.selection --results FILE    # 1 hour
    python -m benchmarks.worth.selection --results FILE --work all    # nothing held out
    python -m benchmarks.worth.selection --quick           # a smoke run

Finished work is read from the file and not repeated.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.scoring import loss_scoring
from torch import nn
from tqdm import tqdm

from benchmarks._harness.data import add_data_argument, load_images
from benchmarks._harness.timing import environment, table
from relflat_sk import (
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtLoss,
    flatness_report,
    rank_minima,
)

MEASURES = ("relative_flatness", "normalized_relative_flatness")


class SmallConv(nn.Sequential):
    """Three convolutions with stride 2 and two linear layers, for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def net(estimator: Any, goal: float, max_epochs: int, **arguments: Any) -> Any:
    """Make a net without penalty that trains until its training loss is at most `goal`."""
    return estimator(
        flatness_weight=0.0,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        iterator_train__shuffle=True,
        max_epochs=max_epochs,
        callbacks=[("stop", StopAtLoss(goal))],
        verbose=0,
        **arguments,
    )


def digits() -> tuple[Any, Any]:
    """Load 1,797 images of 8 x 8 pixels, ten classes."""
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y.astype(np.int64)


def cancer() -> tuple[Any, Any]:
    """Load 30 measurements of 569 tumours, two classes."""
    X, y = load_breast_cancer(return_X_y=True)
    return X.astype(np.float32), y.astype(np.int64)


def diabetes() -> tuple[Any, Any]:
    """Load 10 measurements of 442 patients; the target is the progress of their illness."""
    X, y = load_diabetes(return_X_y=True)
    return X.astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)


def images(path: str | None) -> tuple[Any, Any]:
    """Load 10,000 images of CIFAR-10; half of them are for testing."""
    X, y = load_images(10_000, path)
    return X.numpy(), y.numpy()


def shuffle_split(y: Any, n_splits: int, **sizes: Any) -> Any:
    """Split at random, with classes in proportion."""
    split = StratifiedShuffleSplit if y.dtype.kind == "i" else ShuffleSplit
    return split(n_splits, random_state=0, **sizes)


@dataclass(frozen=True)
class Task:
    """A data set with the network that is trained on it and the grid of candidates."""

    load: Callable[[], tuple[Any, Any]]
    n_train: int
    estimator: Any
    learning_rates: tuple[float, ...]
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128)
    n_seeds: int = 4
    scaled: bool = False

    def candidates(self) -> list[dict[str, Any]]:
        """Return all combinations of batch size, learning rate and seed."""
        seeds = range(self.n_seeds)
        return [
            {"batch_size": size, "lr": lr, "random_state": seed}
            for size, lr, seed in product(self.batch_sizes, self.learning_rates, seeds)
        ]

    def make(self, params: dict[str, Any]) -> Any:
        """Make a candidate, in a pipeline with a scaler if the task needs one."""
        candidate = clone(self.estimator).set_params(**params)
        return make_pipeline(StandardScaler(), candidate) if self.scaled else candidate

    def splits(self, n_splits: int) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Split the data into training and test data, several times."""
        X, y = self.load()
        for train, test in shuffle_split(y, n_splits, train_size=self.n_train).split(X, y):
            yield X[train], y[train], X[test], y[test]


def tasks(data: str | None) -> dict[str, Task]:
    """Return the tasks by name; CIFAR-10 needs a file."""
    classifier = RelativeFlatnessRegularizedClassifier
    found = {
        "digits": Task(
            digits,
            600,
            net(classifier, 0.05, 200, module__hidden_layer_sizes=(64, 32)),
            (0.02, 0.1),
        ),
        "breast cancer": Task(
            cancer,
            280,
            net(classifier, 0.02, 100, module__hidden_layer_sizes=(32, 16)),
            (0.02, 0.1),
            scaled=True,
        ),
        "diabetes": Task(
            diabetes,
            300,
            net(
                RelativeFlatnessRegularizedRegressor,
                0.25,
                200,
                module__hidden_layer_sizes=(32, 16),
            ),
            (0.005, 0.02),
            scaled=True,
        ),
    }
    if data is not None:
        found["CIFAR-10, 5,000 images"] = Task(
            partial(images, data),  # a partial can be pickled for other processes
            5_000,
            net(classifier, 0.5, 40, module=SmallConv),
            (0.01, 0.02),
            (32, 64, 128, 256),
            n_seeds=5,
        )
    return found


# -- fits and measurements ----------------------------------------------------------------


def on_all(task: Task, params: dict[str, Any], X: Any, y: Any, *test: Any) -> dict[str, Any]:
    """Train on all of X, and measure flatness, training loss and test score."""
    start = time.perf_counter()
    candidate = task.make(params).fit(X, y)
    seconds = time.perf_counter() - start
    final, inputs = (candidate[-1], candidate[:-1].transform(X)) if task.scaled else (candidate, X)
    report = flatness_report(candidate, X, y, measures=MEASURES, layers=[-1])
    return {
        "seconds": seconds,
        "converged": final.converged_,
        "train_loss": float(loss_scoring(final, inputs, y)),
        "n_features": last_layer(final.module_).in_features,
        "test_score": candidate.score(*test),
        **dict(zip(report["measure"], report["value"], strict=True)),
    }


def last_layer(module: nn.Module) -> nn.Linear:
    """Return the last linear layer, which all networks here end in."""
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)][-1]


def by_validation(
    folds: Any, task: Task, params: dict[str, Any], X: Any, y: Any, *test: Any
) -> dict[str, Any]:
    """Score on held-out parts of X, which are the same for all candidates."""
    start = time.perf_counter()
    cv = shuffle_split(y, 1, test_size=0.2) if folds is None else folds
    scores = cross_val_score(task.make(params), X, y, cv=cv, error_score="raise")
    return {"seconds": time.perf_counter() - start, "score": float(scores.mean())}


WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "all": on_all,
    "5-fold CV": partial(by_validation, 5),
    "hold-out": partial(by_validation, None),  # a fifth
}


def run(task: Task, data: tuple[Any, ...], what: str, index: int) -> dict[str, Any]:
    """Do one kind of work for one candidate, in a process of its own."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # candidates that do not converge are counted
        found = WORK[what](task, task.candidates()[index], *data)
    return {"what": what, "candidate": index, **found}


class Results:
    """Rows of finished work, each also a line of a file if a path is given."""

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self.rows: dict[tuple[str, int, str, int], dict[str, Any]] = {}
        if self.path is not None and self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                self.add(json.loads(line), write=False)

    def add(self, row: dict[str, Any], *, write: bool = True) -> None:
        """Add a row, and append it to the file."""
        self.rows[row["task"], row["split"], row["what"], row["candidate"]] = row
        if write and self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def of(self, task: str, split: int, what: str) -> list[dict[str, Any]]:
        """Return the rows of all candidates, in their order."""
        keys = sorted(key for key in self.rows if key[:3] == (task, split, what))
        return [self.rows[key] for key in keys]


def train(
    name: str, task: Task, work: list[str], n_splits: int, results: Results, n_jobs: int
) -> None:
    """Do the missing work of a task in parallel processes."""
    for at, data in enumerate(task.splits(n_splits)):
        missing = [
            (what, index)
            for what in work
            for index in range(len(task.candidates()))
            if (name, at, what, index) not in results.rows
        ]
        calls = (delayed(run)(task, data, what, i) for what, i in missing)
        done = Parallel(n_jobs=n_jobs, return_as="generator_unordered")(calls)
        for row in tqdm(done, total=len(missing), desc=f"{name}, split {at}", disable=not missing):
            results.add({"task": name, "split": at, **row})


# -- the ways to choose -----------------------------------------------------------------


def column(rows: list[dict[str, Any]], name: str) -> np.ndarray:
    """Return one column of the candidates' rows."""
    return np.array([row[name] for row in rows], dtype=float)


def picks(rows: dict[str, list[dict[str, Any]]], n_train: int) -> dict[str, int]:
    """Return the index of the candidate that each way picks."""
    fits = rows["all"]
    converged = column(fits, "converged").astype(bool)
    m = column(fits, "n_features")
    kappa = column(fits, "relative_flatness")
    bound = column(fits, "train_loss") + n_train ** (-2 / (4 + m)) * kappa / (2 * m)
    flat = {
        "flattest": kappa,
        "flattest + risk": bound,
        "normalized flattest": column(fits, "normalized_relative_flatness"),
    }
    losses = column(fits, "train_loss")
    minima = pd.DataFrame({"trial": range(len(fits)), "converged": converged, "depth": 1 / losses})
    # as a search ranks: depths relative to each other matter only, so that 1 stands for a constant
    found = {
        way: int(rank_minima(minima.assign(value=value), by="value")["trial"].iloc[0])
        for way, value in flat.items()
    }
    for way in [what for what in rows if what != "all"]:
        found[way] = int(column(rows[way], "score").argmax())
    return found


def summarize(name: str, task: Task, n_splits: int, results: Results) -> list[list[str]]:
    """Return the rows of the table for one task: regrets and costs of each way."""
    regrets: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for at in range(n_splits):
        rows = {what: results.of(name, at, what) for what in WORK}
        rows = {what: found for what, found in rows.items() if len(found) == len(rows["all"])}
        scores = column(rows["all"], "test_score")
        once = column(rows["all"], "seconds").sum()
        for way, index in picks(rows, task.n_train).items():
            regrets.setdefault(way, []).append(scores.max() - scores[index])
            more = column(rows[way], "seconds").sum() if way in rows else 0.0
            # after a choice by held-out data only the chosen candidate is trained on all data
            own = rows["all"][index]["seconds"] if way in rows else once
            costs.setdefault(way, []).append((more + own) / once)
        regrets.setdefault("random", []).append(scores.max() - scores.mean())
        one = column(rows["all"], "seconds").mean()
        costs.setdefault("random", []).append(one / once)
    return [
        [
            name,
            way,
            f"{100 * np.mean(found):.2f} +- {100 * standard_error(found):.2f}",
            f"{np.mean(costs[way]):.2f}",
        ]
        for way, found in regrets.items()
    ]


def standard_error(values: list[float]) -> float:
    """Return the standard error of the mean; nan for a single value."""
    n = len(values)
    return float(np.std(values, ddof=1) / n**0.5) if n > 1 else float("nan")


def main() -> int:
    """Do the missing work, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one split of one data set")
    parser.add_argument("--results", metavar="FILE", help="file of finished work")
    parser.add_argument("--splits", type=int, default=5, help="train-test splits (default: 5)")
    parser.add_argument(
        "--work", nargs="*", default=[*WORK], choices=WORK, help="fits (default: for all ways)"
    )
    parser.add_argument("--tasks", nargs="*", help="names of data sets (default: all)")
    parser.add_argument("--n-jobs", type=int, default=2, help="processes (default: 2)")
    add_data_argument(parser)
    arguments = parser.parse_args()
    known = tasks(arguments.data)
    names = ["breast cancer"] if arguments.quick else arguments.tasks or list(known)
    n_splits = 1 if arguments.quick else arguments.splits
    work = ["all", *(what for what in WORK if what in arguments.work and what != "all")]
    results = Results(arguments.results)
    print(environment())
    rows = [["data set", "way to choose", "regret, points of score", "cost, fits"]]
    for name in names:
        train(name, known[name], work, n_splits, results, arguments.n_jobs)
        fits = [row for at in range(n_splits) for row in results.of(name, at, "all")]
        print(
            f"{name}: {len(known[name].candidates())} candidates, {n_splits} splits, "
            f"{100 * column(fits, 'converged').mean():.0f} % converged"
        )
        rows += summarize(name, known[name], n_splits, results)
    print("\nCost: seconds of training, in units of one fit of every candidate.\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

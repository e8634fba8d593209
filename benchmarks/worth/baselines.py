"""Compare the search and the nets with what people would take instead, all with their defaults.

Twenty data sets: those of the study of choices, and others with wrong labels, few samples,
categories and little noise. CIFAR-10 needs ``--data``, and Bayesian ensembles ``pip install
sklearn-contrib-bde``. The tables of the stored rows are printed by ``--report``.
"""

import time
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import ensemble
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.svm import SVC, SVR

from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.stored import completed
from benchmarks._harness.tasks import FURTHER, TASKS, Split
from benchmarks._harness.timing import environment, interval
from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessPenaltyCV,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)

RESULTS = Path(__file__).parents[1] / "results" / "baselines.csv"
ALL_TASKS = TASKS | FURTHER
REGRESSIONS = [name for name in ALL_TASKS if name.startswith(("friedman", "diabetes"))]
N_SEEDS = 10
SEARCH, NEAREST = "search, mean", "search, nearest"
# the flattest network is of the same search as the mean
FLATTEST = "search, flattest"
OURS = ["net, default", "net, no penalty", "net, all layers, weight 1", "penalty by folds"]
THEIRS = ["MLP", "MLP, early stopping"]
BAYESIAN = "Bayesian ensemble"
NEURAL = [SEARCH, NEAREST, FLATTEST, *OURS, *THEIRS, BAYESIAN]
OTHERS = ["forest", "boosting", "linear", "support vectors"]
METHODS = [method for method in (*NEURAL, *OTHERS) if method != FLATTEST]


def make(method: str, seed: int, *, is_regression: bool) -> Any:
    """Make the estimator of a method, with its defaults."""
    kind, task = int(is_regression), "Regressor" if is_regression else "Classifier"
    ours: Any = (RelativeFlatnessRegularizedClassifier, RelativeFlatnessRegularizedRegressor)[kind]
    mlp: Any = (MLPClassifier, MLPRegressor)[kind]
    net = ours(verbose=0, random_state=seed)
    seeds = {"random_state": list(range(N_SEEDS * seed, N_SEEDS * (seed + 1)))}
    return {
        SEARCH: lambda: FlatMinimaSearch(net, seeds),
        NEAREST: lambda: FlatMinimaSearch(net, seeds, refit="nearest"),
        OURS[0]: lambda: net,
        OURS[1]: lambda: net.set_params(flatness_weight=0),
        OURS[2]: lambda: net.set_params(flatness_layer="all", flatness_weight=1),
        OURS[3]: lambda: RelativeFlatnessPenaltyCV(net),
        "MLP": lambda: mlp(random_state=seed),
        "MLP, early stopping": lambda: mlp(early_stopping=True, random_state=seed),
        BAYESIAN: lambda: getattr(import_module("bde"), f"Bde{task}")(seed=seed),
        "forest": lambda: getattr(ensemble, f"RandomForest{task}")(random_state=seed),
        "boosting": lambda: getattr(ensemble, f"HistGradientBoosting{task}")(random_state=seed),
        "linear": (LogisticRegression, Ridge)[kind],
        "support vectors": (SVC, SVR)[kind],
    }[method]()


@cache
def _split(name: str, seed: int, images: str | None) -> Split:
    return ALL_TASKS[name].split(seed, images)


def judge(name: str, split: int, method: str, images: str | None) -> dict[str, float]:
    """Fit a method to a split: score on the test data, and processor seconds."""
    parts = _split(name, split, images)
    X, y, X_test, y_test = (part.numpy() for part in (parts.X, parts.y, parts.X_test, parts.y_test))
    model = make(method, split, is_regression=name in REGRESSIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of defaults that do not converge
        start = time.process_time()
        model.fit(X, y)
        fitted = time.process_time()
        score = model.score(X_test, y_test)
        predicted = time.process_time()
        flattest = model.best_estimator_.score(X_test, y_test) if method == SEARCH else np.nan
    return {
        "score": round(100 * score, 3), "flattest": round(100 * flattest, 3),
        "fit_seconds": fitted - start, "predict_seconds": predicted - fitted,
    }  # fmt: skip


def scores(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the score of each method (columns) on each data set and split, the flattest's too."""
    values = rows.pivot(index=["param_data", "param_split"], columns="param_method", values="score")
    flattest = rows[rows["param_method"] == SEARCH].set_index(["param_data", "param_split"])
    values[FLATTEST] = flattest["flattest"]
    values = values.reindex(columns=[*NEURAL, *OTHERS])
    values = values.dropna(axis=1, how="all")
    return values.dropna(subset=values.columns.drop(BAYESIAN, errors="ignore"))


def compare(values: pd.DataFrame, seconds: pd.DataFrame) -> pd.DataFrame:
    """Compare the methods (rows) over data sets, of the splits that each has."""
    means, leads = (
        table.groupby("param_data").mean()
        for table in (values, -values.sub(values[SEARCH], axis=0))
    )
    seconds = seconds.reindex([*METHODS, FLATTEST])
    # one net of the search
    seconds.loc[FLATTEST] = [seconds.loc[SEARCH].iloc[0], seconds.loc[OURS[0]].iloc[1]]
    neural = means[means.columns.intersection(NEURAL)].rank(axis=1, ascending=False).mean()
    return pd.DataFrame({
        "splits": values.count(),
        "mean": means.mean().map("{:.1f}".format),
        "search's lead": leads.apply(lambda column: interval(column.dropna())),
        "largest lead over it": (-leads.min()).map("{:+.1f}".format),
        "rank": means.rank(axis=1, ascending=False).mean().map("{:.1f}".format),
        "neural": neural.map("{:.1f}".format),
        "fit": seconds["fit_seconds"].map("{:.2g}".format),
        "predict": seconds["predict_seconds"].map("{:.2g}".format),
    }).loc[means.columns].fillna("")  # fmt: skip


def report(rows: pd.DataFrame) -> None:
    """Print the scores of each data set, and the comparisons of both kinds of tasks."""
    values = scores(rows).rename_axis(columns=None)
    by_data = values.groupby("param_data", sort=False)
    means = by_data.mean()
    print("\nAccuracy or R2 on the test data, in percent, mean of the splits\n")
    print(means.assign(splits=by_data.size()).to_string(float_format="{:.1f}".format))
    is_regression, is_wrong = means.index.isin(REGRESSIONS), means.index.str.contains("wrong")
    groups = {
        "right labels": ~is_regression & ~is_wrong,
        "wrong labels": is_wrong,
        "regression": is_regression,
        "all": np.ones(len(means), dtype=bool),
    }
    for title, is_in in groups.items():
        if not is_in.any() or SEARCH not in means:
            continue
        names = means.index[is_in]
        part = rows[rows["param_data"].isin(names)].groupby("param_method")
        seconds = part[["fit_seconds", "predict_seconds"]].median()
        print(f"\n{title}: {is_in.sum()} data sets. The lead of the search's mean has a 95%")
        print("interval over data sets; processor seconds are medians\n")
        print(compare(values.loc[names], seconds).to_string())


def main(argv: Sequence[str] | None = None) -> int:
    arguments = read_options(
        __doc__, argv, splits=5, only=ALL_TASKS, methods=dict.fromkeys(METHODS), results=RESULTS,
        report=False, limit=int, jobs=1, data=IMAGES,
    )  # fmt: skip
    names = [name for name in arguments.only if arguments.data or not ALL_TASKS[name].needs_images]
    if arguments.quick:
        names, arguments.results = ["wine", "diabetes"], None
    if BAYESIAN in arguments.methods and not find_spec("bde"):
        print(f"{BAYESIAN}: sklearn-contrib-bde is not installed")
        arguments.methods.remove(BAYESIAN)
    print(environment(), flush=True)
    runs = [
        {"param_data": name, "param_split": split, "param_method": method}
        for split in range(arguments.splits)
        for name in names
        for method in arguments.methods
    ]
    report(completed(arguments, runs, judge, arguments.data))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

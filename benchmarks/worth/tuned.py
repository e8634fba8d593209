"""Compare regularisers whose strength the same folds choose, next to models without a network.

Each method has six settings, of which the first is no regulariser at all; the tool, which has
penalties and weight decay in one grid, has nine. A perceptron of two hidden layers is trained by
AdamW with each setting, on each fold and on all training data. The setting with the highest mean
accuracy over the folds counts, the weakest if several have it.

The tool's grid is that of earlier trials on the tables of `CHOSEN_ON`, less two settings that folds
hardly ever chose there. The other tasks are reported apart.
"""

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed
from sklearn import datasets
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

from benchmarks._harness.networks import Dropout, SharpnessAwareClassifier
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.stored import Run, completed
from benchmarks._harness.tasks import CLUSTERS, Split, Task, from_images, from_table, generated
from benchmarks._harness.timing import environment, interval
from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    WeightAverage,
    fleet_training,
)

Params = dict[str, Any]

# -- tasks -------------------------------------------------------------------------------

_SOURCES = {
    # name -> how data are drawn, number of training samples, and shares of wrong labels
    "digits 600": (from_table, datasets.load_digits, 600, (0.0, 0.1, 0.2, 0.4), {}),
    "digits 900": (from_table, datasets.load_digits, 900, (0.0, 0.2), {}),
    "breast cancer": (from_table, datasets.load_breast_cancer, 280, (0.0, 0.1, 0.2), {}),
    "wine": (from_table, datasets.load_wine, 100, (0.0, 0.2, 0.4), {}),
    "clusters": (generated, datasets.make_classification, 500, (0.0, 0.2, 0.4), CLUSTERS),
    "quantiles": (
        generated, datasets.make_gaussian_quantiles, 500, (0.0, 0.2),
        {"n_features": 10, "n_classes": 3},
    ),
    "hastie": (generated, datasets.make_hastie_10_2, 500, (0.0, 0.2), {}),
}  # fmt: skip
_OF_CIFAR = {1000: (0.0, 0.2, 0.4), 5000: (0.0,)}


def _name(source: str, share: float) -> str:
    return f"{source}, {share:.0%} wrong" if share else source


TASKS = {
    _name(source, share): Task(draw(make, n, wrong=share, **arguments))
    for source, (draw, make, n, shares, arguments) in _SOURCES.items()
    for share in shares
} | {
    _name(f"CIFAR-10 {n}", share): Task(from_images(n, wrong=share), needs_images=True)
    for n, shares in _OF_CIFAR.items()
    for share in shares
}
CHOSEN_ON = ("digits", "breast cancer", "wine", "clusters")

# -- methods -----------------------------------------------------------------------------

EPOCHS, WIDTHS = 50, (64, 64)
PLAIN: Params = {"flatness_weight": 0.0}
# kind of regulariser -> its strengths, the weakest first, and the parameters of a strength
_KINDS: dict[str, tuple[tuple[float, ...], Callable[[Any], Params]]] = {
    "epochs": ((30, 20, 12, 8, 4), lambda n: {"max_epochs": n}),
    "decay": ((0.3, 1, 3, 10, 30), lambda decay: {"optimizer__weight_decay": float(decay)}),
    "dropout": ((0.1, 0.2, 0.3, 0.5, 0.7), lambda p: {"module": Dropout, "module__dropout": p}),
    "SAM": ((0.05, 0.1, 0.2, 0.5, 1.0), lambda radius: {"sharpness_radius": radius}),
    "ASAM": (
        (0.5, 1.0, 2.0, 4.0, 8.0),
        lambda radius: {"sharpness_radius": radius, "sharpness_adaptive": True},
    ),
    "average": (
        (0.9, 0.75, 0.5, 0.25, 0.1),
        lambda start: {"callbacks": [("average", WeightAverage(start=start))]},
    ),
    "last": ((1, 3, 10), lambda weight: _penalty(-1, weight)),
    "first": ((1, 3, 10), lambda weight: _penalty(0, weight)),
    "all": ((0.1, 0.3, 1, 3, 10), lambda weight: _penalty("all", weight)),
}


def _penalty(layer: Any, weight: float) -> Params:
    return {"flatness_layer": layer, "flatness_weight": float(weight)}


_BOTH = [("all 1", "decay 1"), ("all 3", "decay 1"), ("all 1", "decay 3"), ("last 10", "decay 3")]
# what is not said is that of the first setting
SETTINGS: dict[str, Params] = {"none": {}} | {
    f"{kind} {strength:g}": make(strength)
    for kind, (strengths, make) in _KINDS.items()
    for strength in strengths
}
SETTINGS |= {f"{first}, {second}": SETTINGS[first] | SETTINGS[second] for first, second in _BOTH}
PENALTIES = ["none", "last 1", "last 10", "all 0.3", "all 1", "all 3"]
TOOL = [*PENALTIES, "decay 1", "decay 3", "all 1, decay 1"]
METHODS = {
    "plain": ["none"],
    **{
        kind: ["none", *(f"{kind} {strength:g}" for strength in _KINDS[kind][0])]
        for kind in ("epochs", "decay", "dropout", "SAM", "ASAM", "average")
    },
    "penalty": PENALTIES,
    "tool": TOOL,
}
PEERS = {
    "forest": RandomForestClassifier,
    "boosting": HistGradientBoostingClassifier,
    "SVM": SVC,
    "logistic": LogisticRegression,
}

# -- training ----------------------------------------------------------------------------


def make_net(setting: str, split: Split, seed: int, epochs: int) -> Any:
    """Make a net with a setting."""
    params = SETTINGS[setting]
    is_sharp = "sharpness_radius" in params
    kind = SharpnessAwareClassifier if is_sharp else RelativeFlatnessRegularizedClassifier
    shared = {"max_epochs": EPOCHS, "optimizer": torch.optim.AdamW, "optimizer__weight_decay": 0.0}
    net = kind(**PLAIN | shared | params, random_state=seed, verbose=0)
    n_outputs = int(split.y.max()) + 1
    sizes = {"n_features": split.X.shape[1], "n_outputs": n_outputs, "hidden_layer_sizes": WIDTHS}
    net.set_params(**{f"module__{name}": size for name, size in sizes.items()})
    net.set_params(max_epochs=max(1, net.max_epochs * epochs // EPOCHS))
    return clone(net)  # with callbacks of its own


def train_rows(runs: Sequence[Run], n_folds: int, epochs: int, images: str | None) -> list[Run]:
    """Train the settings of a task and seed together, and add what they reach."""
    rows = []
    for (task, seed), unit in groupby(runs, itemgetter("param_task", "param_seed")):
        split = TASKS[task].split(seed, images)
        reached = train([run["param_setting"] for run in unit], split, seed, n_folds, epochs)
        key = {"param_task": task, "param_seed": seed}
        rows += [key | {"param_setting": name} | values for name, values in reached.items()]
        print(f"{task}, seed {seed}", flush=True)
    return rows


def train(
    names: Sequence[str], split: Split, seed: int, n_folds: int, epochs: int
) -> dict[str, Run]:
    """Train settings on folds and on all data; of others of scikit-learn, there is the test only.

    "accuracy" and "loss" are means over folds; "test" and "mean" are test accuracies of one network
    trained on all data, and of the mean of the folds' networks.
    """
    X, y, X_test, y_test = (tensor.numpy() for tensor in split)
    folds = list(StratifiedKFold(n_folds, shuffle=True, random_state=seed).split(X, y))
    parts = [rows for rows, _ in folds] + [np.arange(len(y))]
    settings = [name for name in names if name in SETTINGS]
    jobs = [(name, rows) for name in settings for rows in parts]

    def fit(name: str, rows: Any) -> Any:
        return make_net(name, split, seed, epochs).fit(X[rows], y[rows])

    with warnings.catch_warnings(), fleet_training(len(jobs) or None):
        warnings.simplefilter("ignore", FlatnessWarning)  # networks that die count as results
        nets = iter(Parallel()(delayed(fit)(name, rows) for name, rows in jobs))
    found = {}
    for name in settings:
        *of_folds, last = [next(nets) for _ in parts]
        held_out = [
            net.predict_proba(X[rows]) for net, (_, rows) in zip(of_folds, folds, strict=True)
        ]
        labels = [y[rows] for _, rows in folds]
        mean = np.mean([net.predict_proba(X_test) for net in of_folds], axis=0)
        found[name] = {
            "accuracy": np.mean([*map(accuracy, held_out, labels)]),
            "loss": np.mean([*map(log_loss, labels, held_out)]),
            "test": accuracy(last.predict_proba(X_test), y_test),
            "mean": accuracy(mean, y_test),
        }
    for name in set(names) - {*settings}:
        model = PEERS[name](max_iter=1000) if name == "logistic" else PEERS[name]()
        if "random_state" in model.get_params():
            model.set_params(random_state=seed)
        test = float(model.fit(X, y).score(X_test, y_test))
        found[name] = {"accuracy": np.nan, "loss": np.nan, "test": test, "mean": np.nan}
    return found


def accuracy(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the share of samples whose class has the largest probability."""
    return float(np.mean(probabilities.argmax(axis=1) == y))


# -- tables ------------------------------------------------------------------------------


def judge(rows: pd.DataFrame) -> "pd.Series[float]":
    """Return the test accuracy of each method in percent, from a row for each setting."""
    # the first of several with the highest mean, but for rounding
    means = rows["accuracy"].round(9)
    chosen = {name: means[settings].idxmax() for name, settings in METHODS.items()}
    found = {name: rows.loc[setting, "test"] for name, setting in chosen.items()}
    found["tool, mean of folds"] = rows.loc[chosen["tool"], "mean"]
    found["tool, by log loss"] = rows.loc[rows.loc[TOOL, "loss"].round(9).idxmin(), "test"]
    return 100 * pd.Series(found | rows.loc[[*PEERS], "test"].to_dict())


def report(frame: pd.DataFrame, tasks: Sequence[str], seeds: int) -> None:
    """Print the tables of the units, tasks and seeds, that have all settings."""
    frame = frame[frame["param_task"].isin(tasks) & (frame["param_seed"] < seeds)]
    judged = {
        unit: judge(rows.set_index("param_setting"))
        for unit, rows in frame.groupby(["param_task", "param_seed"], sort=False)
        if len(rows) == len(SETTINGS) + len(PEERS)
    }
    by_task = pd.DataFrame(judged).T.groupby(level=0, sort=False)
    accuracies = by_task.mean()
    print("\nTest accuracy in percent, mean over seeds:\n")
    means = accuracies.assign(seeds=by_task.size().astype(str))
    print(means.to_string(float_format="{:.1f}".format))
    print("\nGain of single settings over none, in points:\n")
    tests = frame.pivot_table("test", "param_task", "param_setting", sort=False)[[*SETTINGS]]
    gains = 100 * tests.sub(tests["none"], axis=0).filter(regex="^(last|first|all) [0-9.]+$")
    print(gains.to_string(float_format="{:+.1f}".format))
    is_wrong = accuracies.index.str.contains("wrong")
    is_chosen = accuracies.index.str.startswith(CHOSEN_ON)
    for title, chosen in {
        "All tasks": is_wrong | ~is_wrong,
        "Tasks on which the tool's grid was not chosen": ~is_chosen,
        "Tasks with right labels": ~is_wrong,
        "Tasks with wrong labels": is_wrong,
    }.items():
        if chosen.any():
            print(f"\n{title} ({chosen.sum()}):\n\n{summary(accuracies[chosen]).to_string()}")
    print("\nMean accuracy over tasks; mean rank among the methods of one network, 1 is the best;")
    print("gain over plain and over tuned weight decay in points, with 95% intervals over tasks")
    print("(Student's t); the task with the smallest gain over plain. Plus is good.")


def summary(accuracies: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each method, from accuracies with a row for each task."""
    over_plain = accuracies.sub(accuracies["plain"], axis=0)
    over_decay = accuracies.sub(accuracies["decay"], axis=0)
    ranks = accuracies[[*METHODS]].rank(axis=1, ascending=False).mean()
    return pd.DataFrame({
        "accuracy": accuracies.mean().map("{:.1f}".format),
        "rank": ranks.map("{:.1f}".format),
        "over plain": over_plain.apply(interval),
        "over decay": over_decay.apply(interval),
        "worst": over_plain.min().map("{:+.1f}".format),
    }).loc[accuracies.columns].fillna("")  # fmt: skip


def main() -> None:
    options = read_options(
        __doc__, data=IMAGES, tasks=TASKS, seeds=(10, 1), folds=(3, 2), epochs=(EPOCHS, 2),
        results=Path(__file__).parents[1] / "results/tuned.csv", report=False, limit=int, jobs=1,
    )  # fmt: skip
    has_images = options.data or options.report
    tasks = [name for name in options.tasks if has_images or not TASKS[name].needs_images]
    if options.quick:
        tasks, options.results = ["wine", "wine, 20% wrong"], None
    print(environment(), flush=True)
    names = [*PEERS, *SETTINGS]
    runs = [
        {"param_task": task, "param_seed": seed, "param_setting": name}
        for seed, task, name in product(range(options.seeds), tasks, names)
    ]
    arguments = options.folds, options.epochs, options.data
    frame = completed(options, runs, train_rows, *arguments, size=len(names))
    report(frame, tasks, options.seeds)


if __name__ == "__main__":
    main()

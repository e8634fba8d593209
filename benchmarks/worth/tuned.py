"""Compare regularisers whose strength the same folds choose, next to models without a network.

Each method has six settings, of which the first is always no regulariser at all; the tool, which
has penalties and weight decay in one grid, has eleven. A perceptron of two hidden layers is trained
by AdamW with each setting, on each fold and on all training data. The setting with the highest mean
accuracy over the folds counts, the weakest if several have it, with its test accuracy when trained
on all data. Methods that share a setting share its networks. Forests, boosting, support vector
machines and logistic regression have scikit-learn's defaults.

    python -m benchmarks.worth.tuned --results FILE     # ten seeds, a minute or two a task and seed
    python -m benchmarks.worth.tuned --results FILE --report   # the tables of what is there
    python -m benchmarks.worth.tuned --data NPZ --tasks "CIFAR-10 1000"

With ``--results FILE`` each setting is saved when its networks are trained, and an interrupted run
can be continued. The tables have the seeds that all tasks have. Without ``--data``, CIFAR-10 is
left out. Its images are blocks of 8 x 8 pixels. The tool's grid is that of earlier trials on the
tables of `CHOSEN_ON`, and no result of this comparison has changed it; the others are reported
apart.
"""

import json
import warnings
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import (
    load_breast_cancer,
    load_digits,
    load_wine,
    make_classification,
    make_gaussian_quantiles,
    make_hastie_10_2,
)
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

from benchmarks._harness.networks import Dropout, SharpnessAwareClassifier
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.tasks import CLUSTERS, Split, Task, from_images, from_table, generated
from benchmarks._harness.timing import environment, table
from relflat_sk import (
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    WeightAverage,
    fleet_training,
)

Params = dict[str, Any]
# "accuracies" and "losses" of folds; "test" and "mean", test accuracies of one network trained on
# all data, and of the mean of the folds' networks
Row = dict[str, Any]

# -- tasks -------------------------------------------------------------------------------

_SOURCES = {
    # name -> how data are drawn, number of training samples, and shares of wrong labels
    "digits 600": (from_table, load_digits, 600, (0.0, 0.1, 0.2, 0.4), {}),
    "digits 900": (from_table, load_digits, 900, (0.0, 0.2), {}),
    "breast cancer": (from_table, load_breast_cancer, 280, (0.0, 0.1, 0.2), {}),
    "wine": (from_table, load_wine, 100, (0.0, 0.2, 0.4), {}),
    "clusters": (generated, make_classification, 500, (0.0, 0.2, 0.4), CLUSTERS),
    "quantiles": (
        generated, make_gaussian_quantiles, 500, (0.0, 0.2), {"n_features": 10, "n_classes": 3},
    ),
    "hastie": (generated, make_hastie_10_2, 500, (0.0, 0.2), {}),
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
WEIGHTS = {-1: (1, 3, 10), 0: (1, 3, 10), "all": (0.1, 0.3, 1, 3, 10)}
_LAYERS = {-1: "last", 0: "first", "all": "all"}
_PENALTIES = {
    f"{_LAYERS[layer]} {weight:g}": {"flatness_layer": layer, "flatness_weight": float(weight)}
    for layer, weights in WEIGHTS.items()
    for weight in weights
}
_DECAYS = {
    f"decay {decay:g}": {"optimizer__weight_decay": float(decay)} for decay in (0.3, 1, 3, 10, 30)
}
_BOTH = [("all 1", "decay 1"), ("all 3", "decay 1"), ("all 1", "decay 3"), ("last 10", "decay 3")]
# what is not said is that of the first setting
SETTINGS: dict[str, Params] = {
    "none": {},
    **{f"epochs {n}": {"max_epochs": n} for n in (4, 8, 12, 20, 30)},
    **_DECAYS,
    **{
        f"dropout {p:g}": {"module": Dropout, "module__dropout": p}
        for p in (0.1, 0.2, 0.3, 0.5, 0.7)
    },
    **{f"SAM {radius:g}": {"sharpness_radius": radius} for radius in (0.05, 0.1, 0.2, 0.5, 1.0)},
    **{
        f"ASAM {radius:g}": {"sharpness_radius": radius, "sharpness_adaptive": True}
        for radius in (0.5, 1.0, 2.0, 4.0, 8.0)
    },
    **{
        f"average {start:g}": {"callbacks": [("average", WeightAverage(start=start))]}
        for start in (0.9, 0.75, 0.5, 0.25, 0.1)
    },
    **_PENALTIES,
    **{f"{penalty}, {decay}": _PENALTIES[penalty] | _DECAYS[decay] for penalty, decay in _BOTH},
}
TOOL = [
    "none", "last 1", "last 10", "first 1", "all 0.1", "all 0.3", "all 1", "all 3",
    "decay 1", "decay 3", "all 1, decay 1",
]  # fmt: skip
METHODS = {
    "plain": ["none"],
    **{
        kind: ["none", *(name for name in SETTINGS if name.startswith(f"{kind} "))]
        for kind in ("epochs", "decay", "dropout", "SAM", "ASAM", "average")
    },
    "penalty": ["none", "last 1", "last 10", "all 0.3", "all 1", "all 3"],
    "tool": TOOL,
}
METHODS["epochs"][1:] = METHODS["epochs"][:0:-1]  # the weakest first
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


def train(
    settings: Sequence[str], split: Split, seed: int, n_folds: int, epochs: int
) -> dict[str, Row]:
    """Train all settings on folds and on all data, together; return what they reach."""
    X, y, X_test, y_test = (tensor.numpy() for tensor in split)
    folds = list(StratifiedKFold(n_folds, shuffle=True, random_state=seed).split(X, y))
    parts = [rows for rows, _ in folds] + [np.arange(len(y))]
    jobs = [(name, rows) for name in settings for rows in parts]

    def fit(name: str, rows: Any) -> Any:
        return make_net(name, split, seed, epochs).fit(X[rows], y[rows])

    with warnings.catch_warnings(), fleet_training(len(jobs)):
        warnings.simplefilter("ignore", FlatnessWarning)  # networks that die count as results
        nets = Parallel()(delayed(fit)(name, rows) for name, rows in jobs)
    found = {}
    for i, name in enumerate(settings):
        *of_folds, last = nets[i * len(parts) : (i + 1) * len(parts)]
        held_out = [
            (net.predict_proba(X[rows]), y[rows])
            for net, (_, rows) in zip(of_folds, folds, strict=True)
        ]
        mean = np.mean([net.predict_proba(X_test) for net in of_folds], axis=0)
        found[name] = {
            "accuracies": [accuracy(outputs, labels) for outputs, labels in held_out],
            "losses": [log_loss(labels, outputs) for outputs, labels in held_out],
            "test": accuracy(last.predict_proba(X_test), y_test),
            "mean": accuracy(mean, y_test),
        }
    return found


def accuracy(probabilities: np.ndarray, y: np.ndarray) -> float:
    """Return the share of samples whose class has the largest probability."""
    return float(np.mean(probabilities.argmax(axis=1) == y))


def fit_peer(name: str, split: Split, seed: int) -> Row:
    """Fit one of scikit-learn's models with its defaults."""
    X, y, X_test, y_test = (tensor.numpy() for tensor in split)
    model = PEERS[name]()
    if name == "logistic":
        model.set_params(max_iter=1000)
    if "random_state" in model.get_params():
        model.set_params(random_state=seed)
    return {"test": float(model.fit(X, y).score(X_test, y_test))}


def run(options: Namespace, tasks: Sequence[str], results: dict[tuple[str, int, str], Row]) -> None:
    """Train what is missing, seed by seed and task by task, and save it."""
    for seed in range(options.seeds):
        for task in tasks:
            missing = [name for name in SETTINGS if (task, seed, name) not in results]
            peers = [name for name in PEERS if (task, seed, name) not in results]
            if not missing and not peers:
                continue
            split = TASKS[task].split(seed, options.data)
            found = {name: fit_peer(name, split, seed) for name in peers}
            if missing:
                found |= train(missing, split, seed, options.folds, options.epochs)
            for name, row in found.items():
                results[task, seed, name] = row
                if options.results:
                    with Path(options.results).open("a") as file:
                        file.write(json.dumps([task, seed, name, row]) + "\n")
            print(f"{task}, seed {seed}", flush=True)


# -- tables ------------------------------------------------------------------------------


def judge(rows: Mapping[str, Row]) -> dict[str, float]:
    """Return the test accuracy of each method in percent, from the rows of a task and seed."""

    def choose(settings: Sequence[str], score: str, sign: int) -> Row:
        # the first of several with the highest mean, but for rounding
        means = [round(sign * float(np.mean(rows[name][score])), 9) for name in settings]
        return rows[settings[int(np.argmax(means))]]

    chosen = {name: choose(settings, "accuracies", 1) for name, settings in METHODS.items()}
    found = {name: row["test"] for name, row in chosen.items()}
    found["tool, mean of folds"] = chosen["tool"]["mean"]
    found["tool, by log loss"] = choose(TOOL, "losses", -1)["test"]
    found |= {name: rows[name]["test"] for name in PEERS}
    return {name: 100 * value for name, value in found.items()}


def report(results: Mapping[tuple[str, int, str], Row], tasks: Sequence[str], seeds: int) -> None:
    """Print the tables of the seeds that each of the tasks has."""
    units = {
        (task, seed): {name: results[task, seed, name] for name in (*SETTINGS, *PEERS)}
        for task in tasks
        for seed in range(seeds)
        if all((task, seed, name) in results for name in (*SETTINGS, *PEERS))
    }
    tasks = [task for task in tasks if (task, 0) in units]
    counts = {task: sum(name == task for name, _ in units) for task in tasks}
    judged = {unit: judge(rows) for unit, rows in units.items()}
    methods = list(judged[tasks[0], 0])
    accuracies = np.array([
        np.mean([list(judged[task, seed].values()) for seed in range(counts[task])], axis=0)
        for task in tasks
    ])
    print("\nTest accuracy in percent, mean over seeds:\n")
    rows = [["task", "seeds", *methods]]
    for task, values in zip(tasks, accuracies, strict=True):
        rows.append([task, str(counts[task]), *(f"{value:.1f}" for value in values)])
    print(table(rows))
    is_wrong = np.array(["wrong" in task for task in tasks])
    is_held_back = np.array([not task.startswith(CHOSEN_ON) for task in tasks])
    for title, chosen in (
        ("All tasks", is_wrong | ~is_wrong),
        ("Tasks on which the tool's grid was not chosen", is_held_back),
        ("Tasks with right labels", ~is_wrong),
        ("Tasks with wrong labels", is_wrong),
    ):
        if chosen.any():
            print(f"\n{title} ({chosen.sum()}):\n")
            print(table(_summary(methods, accuracies[chosen])))
    print("\nMean accuracy over tasks; mean rank among the methods of one network, 1 is the best;")
    print("gain over plain and over tuned weight decay in points, with 95% intervals over tasks")
    print("(Student's t); the task with the smallest gain over plain. Plus is good.")


def _summary(methods: Sequence[str], accuracies: np.ndarray) -> list[list[str]]:
    """Return a row for each method, from accuracies (tasks, methods)."""
    ranks = stats.rankdata(-accuracies[:, : len(METHODS)], axis=1).mean(axis=0)
    plain, decay = (accuracies[:, [methods.index(name)]] for name in ("plain", "decay"))
    over_plain = accuracies - plain
    rows = [["method", "accuracy", "rank", "over plain", "over decay", "worst"]]
    for j, method in enumerate(methods):
        rank = f"{ranks[j]:.1f}" if j < len(ranks) else ""
        gains = [interval(over_plain[:, j]), interval((accuracies - decay)[:, j])]
        rows.append([
            method, f"{accuracies[:, j].mean():.1f}", rank, *gains, f"{over_plain[:, j].min():+.1f}"
        ])  # fmt: skip
    return rows


def interval(values: np.ndarray) -> str:
    """Return the mean of differences and half the width of its 95% interval (Student's t)."""
    if len(values) < 2:
        return f"{values.mean():+.1f}"
    width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{values.mean():+.1f} +- {width:.1f}"


def main() -> None:
    """Train, and print the tables."""
    options = read_options(
        __doc__, data=IMAGES, tasks=TASKS, seeds=(10, 1), folds=(5, 2), epochs=(EPOCHS, 2),
        results=str, report=False,
    )  # fmt: skip
    tasks = ["wine", "wine, 20% wrong"] if options.quick else options.tasks
    tasks = [name for name in tasks if options.data or not TASKS[name].needs_images]
    results: dict[tuple[str, int, str], Row] = {}
    if options.results and Path(options.results).exists():
        for line in Path(options.results).read_text().splitlines():
            task, seed, name, row = json.loads(line)
            results[task, seed, name] = row
    print(f"{options.folds} folds, {options.epochs} epochs, hidden layers {WIDTHS}")
    print(environment(), flush=True)
    if not options.report:
        run(options, tasks, results)
    report(results, tasks, options.seeds)


if __name__ == "__main__":
    main()

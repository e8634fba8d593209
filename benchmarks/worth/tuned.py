"""Compare the test accuracy of regularisers that are tuned with the same number of trials.

Each Optuna trial trains on three random parts of the training images, and is scored on the rest of
each: with one such part of digits, chance chose the setting. The three best trials of a method are
scored on six further parts, with other seeds. All methods clip gradients. The setting that is the
best on all nine parts is then trained on all training images with several seeds, and scored on test
images that took no part in the tuning. Dead networks, which anybody would train again, are counted
and left out: on digits, nine parts chose a setting of SAM with which two of ten networks died.

    python -m benchmarks.worth.tuned                                   # scikit-learn's digits
    python -m benchmarks.worth.tuned --problem "breast cancer"         # or wine
    python -m benchmarks.worth.tuned --problem CIFAR-10 --data NPZ --n-train 5000
    python -m benchmarks.worth.tuned --quick                          # a smoke run, 2 minutes

With ``--jobs 10`` the networks of a trial, and of a judgement, are trained at the same time. With
``--store FOLDER`` results are saved, and an interrupted run can be continued.
"""

import time
import warnings
from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import optuna
import torch
from joblib import Memory, Parallel, delayed
from scipy import stats
from sklearn.model_selection import StratifiedShuffleSplit
from skorch.callbacks import GradientNormClipping, LRScheduler

from benchmarks._harness.networks import SharpnessAwareClassifier
from benchmarks._harness.options import IMAGES, read_options
from benchmarks._harness.problems import Arrays, load_problem
from benchmarks._harness.timing import environment, table
from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier

Params = dict[str, Any]
Part = tuple[Arrays, Arrays, int]  # training data, test data and a seed
# parts that score a trial, the number of trials that are scored again, and on how many parts
N_SPLITS, N_FINALISTS, N_FURTHER = 3, 3, 6
# The norm that gradients are clipped to, for all methods alike. Where trials chose it, chance
# decided which methods had it, and it mattered more than any method (4 points on CIFAR-10).
CLIP = 1.0
# A network is dead if its accuracy is no more than this times the share of the largest class.
DEAD = 1.1


# -- methods -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A regulariser: the parameter of its strength, the range of that, and fixed parameters."""

    strength: str | None = None
    low: float = 0.0
    high: float = 0.0
    fixed: Params | None = None
    kind: type = RelativeFlatnessRegularizedClassifier

    def suggest(self, trial: optuna.Trial) -> Params:
        """Draw the learning rate, which all methods tune, and the method's strength."""
        params: Params = {"lr": trial.suggest_float("lr", 0.003, 0.3, log=True)}
        if self.strength:
            params[self.strength] = trial.suggest_float(
                self.strength, self.low, self.high, log=True
            )
        return params


PLAIN = {"flatness_weight": 0.0}
ADAPTIVE = {**PLAIN, "sharpness_adaptive": True}
# Radii and weight decays around those in use. A larger one kills the network, and a range of which
# half does so wastes half of the trials; the best of SAM is 0.4 on digits and 0.04 on CIFAR-10.
METHODS = {
    "plain": Method(fixed=PLAIN),
    "weight decay": Method("optimizer__weight_decay", 1e-5, 0.01, PLAIN),
    "SAM": Method("sharpness_radius", 0.005, 0.5, PLAIN, SharpnessAwareClassifier),
    "ASAM": Method("sharpness_radius", 0.05, 5.0, ADAPTIVE, SharpnessAwareClassifier),
    "flatness, default": Method(),
    "flatness, last layer": Method("flatness_weight", 0.01, 100.0, {"flatness_layer": -1}),
    "flatness, first layer": Method("flatness_weight", 0.01, 100.0, {"flatness_layer": 0}),
    "flatness, all layers": Method("flatness_weight", 0.01, 100.0, {"flatness_layer": "all"}),
}


def fit_and_score(
    network: Params,
    n_epochs: int,
    batch_size: int,
    method: Method,
    params: Params,
    train: Arrays,
    test: Arrays,
    seed: int,
) -> tuple[float, float]:
    """Train by SGD with momentum and a cosine schedule; return the accuracy, and the seconds."""
    started = time.perf_counter()
    net = method.kind(
        **network,
        **(method.fixed or {}),
        **params,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        callbacks=[LRScheduler("CosineAnnealingLR", T_max=n_epochs), GradientNormClipping(CLIP)],
        batch_size=batch_size,
        max_epochs=n_epochs,
        random_state=seed,
        verbose=0,
    )
    with warnings.catch_warnings():
        # networks that diverge or die count as results
        warnings.simplefilter("ignore", FlatnessWarning)
        net.fit(*train)
    return float(net.score(*test)), time.perf_counter() - started


class Trainings:
    """Trainings with the settings that all methods share, of which a folder keeps the results."""

    def __init__(self, options: Namespace, network: Params) -> None:
        shared = network, options.epochs, options.batch_size
        self.run = partial(Memory(options.store, verbose=0).cache(fit_and_score), *shared)
        self.jobs = options.jobs
        self.seconds: list[float] = []

    def score(self, method: Method, params: Params, parts: list[Part]) -> np.ndarray:
        """Return the accuracy of a network for each part."""
        calls = (delayed(self.run)(method, params, *part) for part in parts)
        accuracies, seconds = zip(*Parallel(self.jobs)(calls), strict=True)
        self.seconds += seconds
        return np.array(accuracies)


# -- tuning and judging ------------------------------------------------------------------


def draw_parts(data: Arrays, n: int, *, random_state: int, first_seed: int) -> list[Part]:
    """Draw parts of the training data: what to train on, the rest, and a seed."""
    X, y = data
    splits = StratifiedShuffleSplit(n, test_size=0.2, random_state=random_state).split(X, y)
    return [
        ((X[fit], y[fit]), (X[valid], y[valid]), first_seed + i)
        for i, (fit, valid) in enumerate(splits)
    ]


def tune(method: Method, trainings: Trainings, data: Arrays, n: int) -> optuna.Study:
    """Run n trials, whose score is a mean accuracy on validation images."""

    def objective(trial: optuna.Trial) -> float:
        parts = draw_parts(data, N_SPLITS, random_state=1, first_seed=N_SPLITS * trial.number)
        return float(trainings.score(method, method.suggest(trial), parts).mean())

    sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=max(4, n // 4))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(objective, n_trials=n)
    return study


def choose(
    study: optuna.Study, method: Method, trainings: Trainings, data: Arrays
) -> tuple[Params, float]:
    """Score the best trials again; return the parameters of the best, and its mean of all parts."""
    finalists = sorted(study.trials, key=lambda trial: -(trial.value or 0.0))[:N_FINALISTS]
    scores = []
    for trial in finalists:
        first_seed = 500 + N_FURTHER * trial.number
        parts = draw_parts(data, N_FURTHER, random_state=2, first_seed=first_seed)
        further = trainings.score(method, trial.params, parts)
        scores.append((N_SPLITS * (trial.value or 0.0) + further.sum()) / (N_SPLITS + N_FURTHER))
    best = int(np.argmax(scores))
    return finalists[best].params, float(scores[best])


def interval(values: np.ndarray, sign: str = "") -> str:
    """Return the mean and half the width of its 95% interval (Student's t), in percent.

    Dead networks, whose accuracy is nan, are left out. With fewer than two others, there is none.
    """
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return f"too few networks ({len(values)})"
    width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{100 * values.mean():{sign}.1f} +- {100 * width:.1f}"


def main() -> None:
    options = read_options(
        __doc__, problem="digits", data=IMAGES, n_train=(int, 100), trials=(25, 3), seeds=(5, 2),
        epochs=(60, 8), batch_size=32, methods=METHODS, jobs=1, device="cpu", store=str,
    )  # fmt: skip
    problem = load_problem(options.problem, options.n_train, options.data)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(
        f"{problem.name} samples, {len(problem.test[1])} to test; {options.trials} trials a method,"
    )
    print(f"{options.seeds} seeds, {options.epochs} epochs, batches of {options.batch_size}")
    print(environment(), flush=True)

    largest_class = np.unique(problem.test[1], return_counts=True)[1].max() / len(problem.test[1])
    rows = [["method", "test accuracy", "dead", "validation", "best setting", "s/training"]]
    results: dict[str, np.ndarray] = {}
    for name in options.methods:
        method = METHODS[name]
        trainings = Trainings(options, problem.network | {"device": options.device})
        study = tune(method, trainings, problem.train, options.trials)
        params, validation = choose(study, method, trainings, problem.train)
        tests = [(problem.train, problem.test, 1000 + seed) for seed in range(options.seeds)]
        accuracies = trainings.score(method, params, tests)
        results[name] = np.where(accuracies > DEAD * largest_class, accuracies, np.nan)
        n_dead = int(np.isnan(results[name]).sum())
        row = [name, interval(results[name]), str(n_dead), f"{100 * validation:.1f}"]
        rows.append([*row, _setting(params), f"{np.mean(trainings.seconds):.1f}"])
        print("  ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    print("\nTest accuracy in percent, mean and 95% interval over seeds (Student's t), without the")
    print("networks that are no better than the most frequent class, which are counted as dead.")
    _compare_with_sam(results)


def _compare_with_sam(results: dict[str, np.ndarray]) -> None:
    """Print the differences to SAM with the same seeds, if SAM is among the methods."""
    if "SAM" not in results:
        return
    print("Difference to SAM with the same seeds, in points:")
    for name in [name for name in results if name != "SAM"]:
        print(f"  {name}: {interval(results[name] - results['SAM'], sign='+')}")


def _setting(params: Params) -> str:
    """Write parameters in short, such as ``lr=0.1 weight=3``."""
    short = {
        name.split("_")[-1]: f"{value:.2g}" if isinstance(value, float) else value
        for name, value in params.items()
    }
    return " ".join(f"{name}={value}" for name, value in short.items())


if __name__ == "__main__":
    main()

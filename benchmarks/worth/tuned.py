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
``--storage FILE`` trials and results are saved, and an interrupted run can be continued.
"""

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import torch
from joblib import Parallel, delayed
from scipy import stats
from sklearn.model_selection import StratifiedShuffleSplit
from skorch.callbacks import GradientNormClipping, LRScheduler

from benchmarks._harness.networks import SharpnessAwareClassifier
from benchmarks._harness.problems import Arrays, Problem, add_problem_arguments, load_problem
from benchmarks._harness.timing import environment, table
from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier

Params = dict[str, Any]
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


@dataclass(frozen=True)
class Training:
    """The settings that all methods share."""

    network: Params
    epochs: int
    batch_size: int
    jobs: int = 1

    def score(
        self, method: Method, params: Params, parts: list[tuple[Arrays, Arrays, int]]
    ) -> Iterator[float]:
        """Yield the accuracies of networks: for each, training data, test data and a seed."""

        def one(train: Arrays, test: Arrays, seed: int) -> float:
            return float(self.fit(method, params, train, seed).score(*test))

        return Parallel(self.jobs, return_as="generator")(delayed(one)(*part) for part in parts)

    def fit(self, method: Method, params: Params, data: Arrays, seed: int) -> Any:
        """Train a network by SGD with momentum and a cosine schedule of the learning rate."""
        net = method.kind(
            **self.network,
            **(method.fixed or {}),
            **params,
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            callbacks=[
                LRScheduler("CosineAnnealingLR", T_max=self.epochs),
                GradientNormClipping(CLIP),
            ],
            batch_size=self.batch_size,
            max_epochs=self.epochs,
            random_state=seed,
            verbose=0,
        )
        with warnings.catch_warnings():
            # networks that diverge or die count as results
            warnings.simplefilter("ignore", FlatnessWarning)
            return net.fit(*data)


# -- tuning and judging ------------------------------------------------------------------


def tune(study: optuna.Study, method: Method, training: Training, data: Arrays, n: int) -> None:
    """Run the trials that are missing to `n`; the score is a mean accuracy on validation images."""

    def objective(trial: optuna.Trial) -> float:
        parts = _parts(data, N_SPLITS, random_state=1, first_seed=N_SPLITS * trial.number)
        return float(np.mean(list(training.score(method, method.suggest(trial), parts))))

    done = sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)
    # a seed of its own, or a continued run would repeat the draws of the interrupted one
    study.sampler = optuna.samplers.TPESampler(seed=done, n_startup_trials=max(4, n // 4))
    study.optimize(objective, n_trials=max(0, n - done))


def _parts(
    data: Arrays, n: int, *, random_state: int, first_seed: int
) -> list[tuple[Arrays, Arrays, int]]:
    """Draw parts of the training data: what to train on, the rest, and a seed."""
    X, y = data
    splits = StratifiedShuffleSplit(n, test_size=0.2, random_state=random_state).split(X, y)
    return [
        ((X[fit], y[fit]), (X[valid], y[valid]), first_seed + i)
        for i, (fit, valid) in enumerate(splits)
    ]


def _saved(
    study: optuna.Study,
    keys: list[str],
    training: Training,
    method: Method,
    params: Params,
    parts: list[tuple[Arrays, Arrays, int]],
) -> np.ndarray:
    """Return the accuracy of each part by its key, and save those that are new with the study."""
    left = [
        (key, part) for key, part in zip(keys, parts, strict=True) if key not in study.user_attrs
    ]
    found = training.score(method, params, [part for _, part in left])
    for (key, _), accuracy in zip(left, found, strict=True):
        study.set_user_attr(key, accuracy)
    return np.array([study.user_attrs[key] for key in keys])


def choose(
    study: optuna.Study, method: Method, training: Training, data: Arrays
) -> tuple[optuna.trial.FrozenTrial, float]:
    """Score the best trials again; return the best of them, and its mean over all parts."""
    trials = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    finalists = sorted(trials, key=lambda trial: -(trial.value or 0.0))[:N_FINALISTS]
    scores = []
    for trial in finalists:
        keys = [f"trial {trial.number} part {i}" for i in range(N_FURTHER)]
        parts = _parts(data, N_FURTHER, random_state=2, first_seed=500 + N_FURTHER * trial.number)
        further = _saved(study, keys, training, method, trial.params, parts)
        scores.append((N_SPLITS * (trial.value or 0.0) + further.sum()) / (N_SPLITS + N_FURTHER))
    best = int(np.argmax(scores))
    return finalists[best], float(scores[best])


def judge(
    study: optuna.Study,
    best: optuna.trial.FrozenTrial,
    method: Method,
    training: Training,
    problem: Problem,
    seeds: int,
) -> np.ndarray:
    """Return the test accuracies of a setting, one per seed, saved with the study."""
    keys = [f"trial {best.number} seed {seed}" for seed in range(seeds)]
    parts = [(problem.train, problem.test, 1000 + seed) for seed in range(seeds)]
    return _saved(study, keys, training, method, best.params, parts)


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
    """Tune, judge, print."""
    arguments = _parse()
    trials, seeds, epochs = arguments.trials, arguments.seeds, arguments.epochs
    n_train = arguments.n_train
    problem = load_problem(arguments.problem, n_train, arguments.data)
    network = problem.network | {"device": arguments.device}
    training = Training(network, epochs, arguments.batch_size, arguments.jobs)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(f"{problem.name} samples, {len(problem.test[1])} to test; {trials} trials a method,")
    print(f"{seeds} seeds, {epochs} epochs, batches of {arguments.batch_size}")
    print(environment(), flush=True)

    largest_class = np.unique(problem.test[1], return_counts=True)[1].max() / len(problem.test[1])
    rows = [["method", "test accuracy", "dead", "validation", "best setting", "s/training"]]
    results: dict[str, np.ndarray] = {}
    for name in arguments.methods:
        method = METHODS[name]
        study = optuna.create_study(
            direction="maximize",
            storage=f"sqlite:///{arguments.storage}" if arguments.storage else None,
            study_name=f"{problem.name}, {epochs} epochs of {arguments.batch_size}, {name}",
            load_if_exists=True,
        )
        tune(study, method, training, problem.train, trials)
        best, validation = choose(study, method, training, problem.train)
        found = judge(study, best, method, training, problem, seeds)
        results[name] = np.where(found > DEAD * largest_class, found, np.nan)
        n_dead = int(np.isnan(results[name]).sum())
        # an interrupted trial has none
        durations = [trial.duration for trial in study.trials if trial.duration]
        seconds = np.mean([one.total_seconds() / N_SPLITS for one in durations])
        row = [name, interval(results[name]), str(n_dead), f"{100 * validation:.1f}"]
        rows.append([*row, _setting(best.params), f"{seconds:.1f}"])
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


def _parse() -> argparse.Namespace:
    """Read the command line; what is not given depends on ``--quick``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problem_arguments(parser)
    parser.add_argument("--trials", type=int, help="trials of each method (default: 25)")
    parser.add_argument("--seeds", type=int, help="trainings of the best setting (default: 5)")
    parser.add_argument("--epochs", type=int, help="epochs of each training (default: 60)")
    parser.add_argument("--batch-size", type=int, default=32, help="(default: 32)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=1, help="networks at the same time")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--storage", metavar="FILE", help="SQLite file, to continue later")
    parser.add_argument("--quick", action="store_true", help="smoke run without meaning")
    arguments = parser.parse_args()
    usual = {"n_train": None, "trials": 25, "seeds": 5, "epochs": 60}
    quick = {"n_train": 100, "trials": 3, "seeds": 2, "epochs": 8}
    for name, value in (quick if arguments.quick else usual).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def _setting(params: Params) -> str:
    """Write parameters in short, such as ``lr=0.1 weight=3``."""
    short = {
        name.split("_")[-1]: f"{value:.2g}" if isinstance(value, float) else value
        for name, value in params.items()
    }
    return " ".join(f"{name}={value}" for name, value in short.items())


if __name__ == "__main__":
    main()

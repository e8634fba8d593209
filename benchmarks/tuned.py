"""Which regulariser generalises best when all are tuned alike? Printed as it comes out.

Every method gets the same number of Optuna trials, each of which trains on a part of the
training images and is judged on the rest of them. The best setting is then trained on all
training images with several seeds, and judged on test images that nothing has looked at.

    python -m benchmarks.tuned                                  # scikit-learn's digits
    python -m benchmarks.tuned --data NPZ --n-train 1000        # CIFAR-10, see README.md
    python -m benchmarks.tuned --data NPZ --n-train 5000 --batch-size 128
    python -m benchmarks.tuned --quick                          # a smoke run, 2 minutes

With ``--storage FILE`` trials and results are kept, and a run that was stopped goes on.
"""

import argparse
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import torch
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch.callbacks import GradientNormClipping, LRScheduler
from torch import nn

from benchmarks.data import load_images
from benchmarks.timing import environment, table
from relflat_sk import (
    MLP,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    SharpnessAwareMixin,
)

Arrays = tuple[np.ndarray, np.ndarray]
Params = dict[str, Any]


class SharpnessAwareClassifier(SharpnessAwareMixin, RelativeFlatnessRegularizedClassifier):
    """The same loop with SAM's steps."""


# -- data and networks -------------------------------------------------------------------


class SmallConvNet(nn.Sequential):
    """Three convolutions and two linear layers, for 3x32x32 images."""

    def __init__(self) -> None:
        parts: list[nn.Module] = []
        for n_in, n_out in [(3, 16), (16, 32), (32, 64)]:
            parts += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        head = [nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10)]
        super().__init__(*parts, *head)


@dataclass(frozen=True)
class Problem:
    """Images to train on and to test on, and the network to train."""

    name: str
    train: Arrays
    test: Arrays
    network: Params


def digits(n_train: int) -> Problem:
    """Take some of scikit-learn's digits, 8x8 images, the others to test on."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    X, X_test, y, y_test = train_test_split(X, y, train_size=n_train, stratify=y, random_state=0)
    network = {"module": MLP, "module__hidden_layer_sizes": (128, 64)}
    return Problem(f"digits {n_train}", (X, y), (X_test, y_test), network)


def cifar(n_train: int, path: str, n_test: int = 5000) -> Problem:
    """Take the first images of CIFAR-10's training set, and those after them to test on."""
    X, y = (tensor.numpy() for tensor in load_images(n_train + n_test, path))
    parts = (X[:n_train], y[:n_train]), (X[n_train:], y[n_train:])
    return Problem(f"CIFAR-10 {n_train}", *parts, {"module": SmallConvNet})


# -- methods -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way of training, with the one strength that it has."""

    strength: str | None = None
    low: float = 0.0
    high: float = 0.0
    fixed: Params | None = None
    kind: type = RelativeFlatnessRegularizedClassifier

    def suggest(self, trial: optuna.Trial) -> Params:
        """Draw what all methods tune, and the method's own strength."""
        params: Params = {
            "lr": trial.suggest_float("lr", 0.003, 0.3, log=True),
            "clip": trial.suggest_categorical("clip", [1.0, None]),
        }
        if self.strength:
            params[self.strength] = trial.suggest_float(
                self.strength, self.low, self.high, log=True
            )
        return params


SAM = {"kind": SharpnessAwareClassifier}
METHODS = {
    "plain": Method(),
    "weight decay": Method("optimizer__weight_decay", 1e-5, 0.1),
    "SAM": Method("sharpness_radius", 0.01, 1.0, **SAM),
    "ASAM": Method("sharpness_radius", 0.1, 10.0, {"sharpness_adaptive": True}, **SAM),
    "flatness, last layer": Method("flatness_weight", 0.01, 30.0, {"flatness_layer": -1}),
    "flatness, first layer": Method("flatness_weight", 0.01, 30.0, {"flatness_layer": 0}),
    "flatness, all layers": Method("flatness_weight", 0.01, 30.0, {"flatness_layer": "all"}),
}


@dataclass(frozen=True)
class Training:
    """What is the same for all methods."""

    network: Params
    epochs: int
    batch_size: int

    def fit(self, method: Method, params: Params, data: Arrays, seed: int) -> Any:
        """Train one network: SGD with momentum, the learning rate decaying along a cosine."""
        chosen = {"flatness_weight": 0.0, **(method.fixed or {}), **params}
        clip = chosen.pop("clip")
        callbacks = [LRScheduler("CosineAnnealingLR", T_max=self.epochs)]
        net = method.kind(
            **self.network,
            **chosen,
            flatness_warmup=self.epochs // 2,
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            callbacks=callbacks if clip is None else [*callbacks, GradientNormClipping(clip)],
            batch_size=self.batch_size,
            max_epochs=self.epochs,
            iterator_train__shuffle=True,
            random_state=seed,
            verbose=0,
        )
        with warnings.catch_warnings():
            # networks that diverged or died are results, too
            warnings.simplefilter("ignore", FlatnessWarning)
            return net.fit(*data)


# -- tuning and judging ------------------------------------------------------------------


def tune(study: optuna.Study, method: Method, training: Training, data: Arrays, n: int) -> None:
    """Make up the trials that are missing to n; the score is accuracy on images held out."""
    X, y = data
    X, X_valid, y, y_valid = train_test_split(X, y, test_size=0.2, stratify=y, random_state=1)

    def objective(trial: optuna.Trial) -> float:
        net = training.fit(method, method.suggest(trial), (X, y), seed=trial.number)
        return float(net.score(X_valid, y_valid))

    done = sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in study.trials)
    # another seed, or a run that goes on would repeat the draws of the one before
    study.sampler = optuna.samplers.TPESampler(seed=done, n_startup_trials=max(4, n // 4))
    study.optimize(objective, n_trials=max(0, n - done))


def judge(
    study: optuna.Study, method: Method, training: Training, problem: Problem, seeds: int
) -> np.ndarray:
    """Test accuracies of the best setting, one for each seed, kept with the study."""
    best = study.best_trial
    for seed in range(seeds):
        key = f"trial {best.number} seed {seed}"
        if key not in study.user_attrs:
            net = training.fit(method, best.params, problem.train, 1000 + seed)
            study.set_user_attr(key, float(net.score(*problem.test)))
    return np.array([study.user_attrs[f"trial {best.number} seed {s}"] for s in range(seeds)])


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half the width of its 95% interval (Student's t), in points of a percent."""
    width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return 100 * values.mean(), 100 * float(width)


def main() -> None:
    """Tune, judge, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="NPZ", help="CIFAR-10 (default: digits)")
    parser.add_argument("--n-train", type=int, help="training images (default: 1000)")
    parser.add_argument("--trials", type=int, help="for each method (default: 25)")
    parser.add_argument("--seeds", type=int, help="of the best settings (default: 5)")
    parser.add_argument("--epochs", type=int, help="of each training (default: 60)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--storage", metavar="FILE", help="SQLite file, to go on later")
    parser.add_argument("--quick", action="store_true", help="a smoke run, says nothing")
    arguments = parser.parse_args()

    def option(value: int | None, full: int, quick: int) -> int:
        return (quick if arguments.quick else full) if value is None else value

    n_train = option(arguments.n_train, 1000, 200)
    trials, seeds = option(arguments.trials, 25, 3), option(arguments.seeds, 5, 2)
    epochs = option(arguments.epochs, 60, 8)
    problem = cifar(n_train, arguments.data) if arguments.data else digits(n_train)
    training = Training(problem.network, epochs, arguments.batch_size)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(f"{problem.name} images, {len(problem.test[1])} to test; {trials} trials a method,")
    print(f"{seeds} seeds, {epochs} epochs, batches of {arguments.batch_size}")
    print(environment(), flush=True)

    rows = [["method", "test accuracy", "validation", "best setting", "s/training"]]
    results: dict[str, np.ndarray] = {}
    for name in arguments.methods:
        method, start = METHODS[name], time.perf_counter()
        study = optuna.create_study(
            direction="maximize",
            storage=f"sqlite:///{arguments.storage}" if arguments.storage else None,
            study_name=f"{problem.name}, {epochs} epochs of {arguments.batch_size}, {name}",
            load_if_exists=True,
        )
        tune(study, method, training, problem.train, trials)
        results[name] = judge(study, method, training, problem, seeds)
        mean, width = interval(results[name])
        seconds = (time.perf_counter() - start) / (trials + seeds)
        row = [name, f"{mean:.1f} +- {width:.1f}", f"{100 * study.best_value:.1f}"]
        rows.append([*row, _setting(study.best_params), f"{seconds:.1f}"])
        print("  ".join(rows[-1]), flush=True)
    print()
    print(table(rows))
    print("\nTest accuracy in percent, mean and 95% interval over seeds (Student's t).")
    if "SAM" in results:
        print("Difference to SAM with the same seeds, in points:")
        for name in [name for name in results if name != "SAM"]:
            mean, width = interval(results[name] - results["SAM"])
            print(f"  {name}: {mean:+.1f} +- {width:.1f}")


def _setting(params: Params) -> str:
    short = {
        name.split("_")[-1]: f"{value:.2g}" if isinstance(value, float) else value
        for name, value in params.items()
    }
    return " ".join(f"{name}={value}" for name, value in short.items())


if __name__ == "__main__":
    main()

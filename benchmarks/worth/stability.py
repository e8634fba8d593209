"""Compare how networks survive large flatness weights with and without `flatness_clip`.

A dead network (all units zero, all outputs constant) is perfectly flat. A large penalty can
therefore kill a network early in training, and its units stay dead. For each layer and weight,
this benchmark trains a small multilayer perceptron on scikit-learn's digits in three ways: as
published; with the older remedies, a warm-up over half of the epochs and all gradients clipped at
norm 1; and with the penalty's gradient limited to half of the loss's, the default. It prints test
accuracy, training loss and the share of hidden units that are zero on all training images.

    python -m benchmarks.worth.stability            # 5 minutes
    python -m benchmarks.worth.stability --quick    # a smoke run
"""

import argparse
import time
import warnings

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch.callbacks import GradientNormClipping
from torch import Tensor, nn

from benchmarks._harness.timing import environment, table
from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]

LAYERS = {"last": -1, "first": 0, "all": "all"}
WEIGHTS = [0.1, 1.0, 10.0, 100.0, 1000.0]
# name -> (flatness_clip, are all gradients clipped with a warm-up?)
REMEDIES = {
    "as published": (None, False),
    "older remedies": (None, True),
    "flatness_clip": (0.5, False),
}


def load(n_train: int = 500) -> Split:
    """Split the digits into `n_train` training images and test images."""
    X, y = load_digits(return_X_y=True)
    X = (X / 16).astype(np.float32)
    X, X_test, y, y_test = train_test_split(X, y, train_size=n_train, stratify=y, random_state=0)
    return X, y, X_test, y_test


def make_net(
    layer: object, weight: float, remedy: str, epochs: int, seed: int
) -> RelativeFlatnessRegularizedClassifier:
    """Make a 64-128-64-10 network that is trained by SGD with momentum."""
    limit, older = REMEDIES[remedy]
    return RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(128, 64),
        flatness_layer=layer,
        flatness_weight=weight,
        flatness_clip=limit,
        flatness_warmup=epochs // 2 if older else 0,
        callbacks=[GradientNormClipping(1.0)] if older else [],
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.05,
        batch_size=32,
        max_epochs=epochs,
        iterator_train__shuffle=True,
        random_state=seed,
        verbose=0,
    )


def dead_units(module: nn.Sequential, X: np.ndarray) -> float:
    """Return the share of hidden units that are zero (or not finite) on every sample."""
    alive: list[Tensor] = []
    h = torch.from_numpy(X)
    with torch.no_grad():
        for part in module:
            h = part(h)
            if isinstance(part, nn.ReLU):
                alive.append((h > 0).any(dim=0))
    return 1 - torch.cat(alive).double().mean().item()


def main() -> None:
    """Train, and print a line for each layer, weight and remedy."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few epochs and weights, one seed")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind (default: 3)")
    parser.add_argument("--epochs", type=int, default=60, help="of each training (default: 60)")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["last", "first"])
    arguments = parser.parse_args()
    epochs = 4 if arguments.quick else arguments.epochs
    seeds = range(1 if arguments.quick else arguments.seeds)
    weights = [0.1, 30.0] if arguments.quick else WEIGHTS
    X, y, X_test, y_test = load()
    print(f"{len(X)} digits, 64-128-64-10, {epochs} epochs, means of {len(seeds)} seeds")
    print(environment(), flush=True)
    rows = [["layer", "weight", "remedy", "test accuracy", "train loss", "dead units", "seconds"]]
    cases = [("last", 0.0, "as published")]
    cases += [(k, w, r) for k in arguments.layers for w in weights for r in REMEDIES]
    for layer, weight, remedy in cases:
        start = time.perf_counter()
        found = []
        for seed in seeds:
            net = make_net(LAYERS[layer], weight, remedy, epochs, seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FlatnessWarning)  # dead networks are counted below
                net.fit(X, y)
            accuracy, loss = net.score(X_test, y_test), net.history[-1, "train_loss"]
            found.append([accuracy, loss, dead_units(net.module_, X)])
        accuracy, loss, dead = np.mean(found, axis=0)
        seconds = (time.perf_counter() - start) / len(seeds)
        row = [layer, f"{weight:g}", remedy, f"{100 * accuracy:.1f}%", f"{loss:.3f}"]
        rows.append([*row, f"{100 * dead:.0f}%", f"{seconds:.1f}"])
        print("  ".join(rows[-1]), flush=True)
    print()
    print(table(rows))


if __name__ == "__main__":
    main()

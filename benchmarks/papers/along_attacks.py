"""Walter et al. 2026: the flatness at single samples along an attack rises, then falls.

The paper attacks inputs by steps of their gradient's sign. The relative flatness around an attacked
sample rises until its label flips, and falls when the attack goes on: confident errors lie in flat
regions. Here, test samples that the network classifies rightly are attacked, and those whose label
flips are compared before the attack, at the flip, and at the last step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks._harness.networks import SmallConvNet
from benchmarks.papers._common import Arrays, Figure, losses_of, mean
from relflat_sk import MLP, RelativeFlatnessRegularizedClassifier, relative_flatness

STEPS = 30
AROUND = range(-8, 17)  # steps before and after the flip


def attack(net: Any, X: np.ndarray, y: np.ndarray, size: float) -> list[np.ndarray]:
    """Move inputs by steps of the gradient's sign that raise the loss; return them at each step."""
    path, labels = [X], torch.as_tensor(y)
    for _ in range(STEPS):
        inputs = torch.tensor(path[-1], requires_grad=True)
        (gradient,) = torch.autograd.grad(cross_entropy(net.module_(inputs), labels), inputs)
        path.append(path[-1] + size * gradient.sign().numpy())
    return path


def train_row(seed: int, data: Arrays, epochs: int, size: float) -> dict[str, Any]:
    """Train a network, and measure it along the attack."""
    net = RelativeFlatnessRegularizedClassifier(
        SmallConvNet if data[0].ndim > 2 else MLP,
        flatness_weight=0, max_epochs=epochs, random_state=seed, verbose=0,
    ).fit(*data[:2])  # fmt: skip
    return losses_of(net, data) | along(net, *data[2:], size)


def along(net: Any, X: np.ndarray, y: np.ndarray, size: float) -> dict[str, float]:
    """Compare the flatness at the samples that flip: before, at the flip, last, and around it."""
    right = net.predict(X) == y
    path = attack(net, X[right], y[right], size)
    wrong = np.array([net.predict(inputs) != y[right] for inputs in path])  # (steps, samples)
    kappa = np.array([relative_flatness(net, inputs, per_sample=True) for inputs in path])
    flips = wrong.any(axis=0) & wrong[-1]
    kappa, at_flip = kappa[:, flips], wrong[:, flips].argmax(axis=0)
    samples = np.arange(flips.sum())
    before, at, last = kappa[0], kappa[at_flip, samples], kappa[-1]
    found = {
        "flipped": float(flips.mean()),
        "rise": float(np.log10(at.mean() / before.mean())),
        "fall": float(np.log10(last.mean() / at.mean())),
        "share": float(((before < at) & (at > last)).mean()),
    }
    for step in AROUND:
        is_there = (at_flip + step >= 0) & (at_flip + step <= STEPS)
        values = kappa[(at_flip + step)[is_there], samples[is_there]]
        found[f"kappa_{step}"] = float(values.mean()) if len(values) else np.nan
    return found


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("along_attacks", __doc__, argv)
    images = bool(figure.data)
    n, n_test = (100, 50) if figure.quick else (2000, 500) if images else (800, 900)
    data = figure.load(n, n_test, images=images)
    runs = [{"param_seed": seed} for seed in range(3 if figure.quick else 20)]
    # of pixels between 0 and 1, or of a standard deviation
    epochs, step = (15, 0.005) if images else (30, 0.01)
    frame = figure.complete(runs, train_row, data, epochs, step)
    claims = [
        mean("log10 flatness at the flip minus before", "> 0", frame["rise"]),
        mean("log10 flatness at the last step minus at the flip", "< 0", frame["fall"]),
        mean("share of samples that rise, then fall", "> 0.5", frame["share"]),
    ]
    print(f"\nmean flatness {-AROUND[0]} steps before the flip to {AROUND[-1]} steps after it")
    print(" ".join(f"{frame[f'kappa_{step}'].mean():.3g}" for step in AROUND))
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

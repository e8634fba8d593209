"""Minima of LeNet-5, with the measures of P19's Figures 2 to 4 and of P21's Figure 5."""

import warnings
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks._harness.networks import LeNet5
from benchmarks.papers._common import Arrays, init, losses_of
from relflat_sk import (
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    measure,
    neuron_robustness,
    reparameterize,
)

OF_LAYER = ["relative_flatness", "trace_flatness", "eigenvalue_flatness", "hessian_trace"]
OF_NETWORK = ["fisher_rao_norm", "pac_bayes_flatness", "l2_norm"]
DELTA = 0.001


class InitializedLeNet5(LeNet5):
    """LeNet-5 with one of the paper's initialisations."""

    def __init__(self, kind: str = "xavier_normal") -> None:
        super().__init__()
        init(self, kind)


def train_row(
    data: Arrays,
    batch_size: int,
    lr: float,
    kind: str,
    seed: int,
    optimizer: str = "SGD",
    *,
    goal: float = 0.01,
    quick: bool = False,
) -> dict[str, float]:
    """Train a LeNet-5 until its loss is the goal, and measure at the last layer."""
    X, y, *_ = data
    net = RelativeFlatnessRegularizedClassifier(
        InitializedLeNet5, module__kind=kind, flatness_weight=0, lr=lr, batch_size=batch_size,
        optimizer=getattr(torch.optim, optimizer), max_epochs=8 if quick else 400,
        callbacks=[StopAtLoss(goal)], random_state=seed, verbose=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.fit(X, y)
        return {
            **losses_of(net, data),
            "epochs": len(net.history),
            **measures(net.module_, X, y, seed, n_draws=2 if quick else 10),
        }


def measures(module: nn.Module, X: Any, y: Any, seed: int, n_draws: int) -> dict[str, float]:
    """Measure a minimum, and again after fc2 is divided and fc3 multiplied by a factor."""
    given: Any = {"X": X, "y": y, "criterion": nn.CrossEntropyLoss(), "random_state": 0}
    factor = float(np.random.default_rng(seed).uniform(5, 25))
    rescaled = reparameterize(module, {"features.9": 1 / factor, "head": factor})
    found = {}
    for end, one in {"": module, "_rescaled": rescaled}.items():
        for name in [*OF_LAYER, *OF_NETWORK]:
            own = {"n_draws": n_draws} if name == "pac_bayes_flatness" else {}
            found[f"{name}{end}"] = measure(name, one, **given, **own)
    neurons = neuron_robustness(module, X, y, DELTA, layers=-1, criterion=nn.CrossEntropyLoss())
    found["robustness"] = neurons["robustness"].abs().max()
    return found

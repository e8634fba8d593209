"""Minima of LeNet-5, with the measures of P19's Figures 2 to 4 and of P21's Figure 5."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from benchmarks._harness.networks import LeNet5
from benchmarks._harness.stored import Run
from benchmarks.papers._common import Arrays, Figure, at_equal_loss, gaps_of, init
from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    measure,
    neuron_robustness,
    reparameterize,
)

DELTA = 0.001
AT_LOSS = 0.1  # of the loss of a constant
FIVE = ["relative_flatness", "hessian_trace", "fisher_rao_norm", "pac_bayes_flatness", "l2_norm"]
NAMES = [name for name in FIVE if name != "pac_bayes_flatness"] + ["normalized_relative_flatness"]

Measures = Callable[[nn.Module, Any, Any, Run], dict[str, float]]


class InitializedLeNet5(LeNet5):
    """LeNet-5 with one of the paper's initialisations."""

    def __init__(self, kind: str = "xavier_normal") -> None:
        super().__init__()
        init(self, kind)


def complete(
    figure: Figure, runs: Sequence[Run], lr: Callable[[Run], float], goal: float, measures: Measures
) -> pd.DataFrame:
    """Find the minima that are missing; on a GPU, 36 of a batch size and optimizer at a time.

    Large batches come first: their epochs have the fewest steps.
    """
    n, n_test = (50_000, 10_000) if figure.full else (5000 if figure.data else 1000, 1000)
    data = figure.load(48 if figure.quick else n, n_test, images=True)
    size = 1
    if figure.full or figure.device != "cpu":
        runs = sorted(runs, key=lambda run: (-run["param_batch_size"], run.get("param_optimizer")))
        size = 36
    return figure.complete(runs, train_rows, lr, data, goal, measures, figure, size=size)


def train_rows(
    runs: Sequence[Run],
    lr: Callable[[Run], float],
    data: Arrays,
    goal: float,
    measures: Measures,
    figure: Figure,
) -> list[Run]:
    """Train LeNet-5s together until their losses are the goal, and measure them."""
    X, y, *_ = data
    max_epochs = 8 if figure.quick else 100 if figure.full else 400
    nets = [
        RelativeFlatnessRegularizedClassifier(
            InitializedLeNet5, module__kind=run["param_init"], flatness_weight=0, lr=lr(run),
            batch_size=run["param_batch_size"],
            optimizer=getattr(torch.optim, run.get("param_optimizer", "SGD")),
            optimizer__weight_decay=run.get("param_decay", 0.0), max_epochs=max_epochs,
            callbacks=[StopAtLoss(goal)], device=figure.device,
            random_state=run["param_seed"], verbose=0,
        )
        for run in runs
    ]  # fmt: skip
    trained = FleetTrainer(nets, fleet=len(nets)).fit(X, y).estimators_
    return [
        run | gaps_of(net, data) | {"epochs": len(net.history)} | measures(net.module_, X, y, run)
        for run, net in zip(runs, trained, strict=True)
    ]


def of_layer(module: nn.Module, X: Any, y: Any, run: Run) -> dict[str, float]:
    """Measure P19's flatness, again after fc2 is divided and fc3 multiplied, and robustness.

    The factor is in [5, 25], another one for each minimum.
    """
    factor = float(np.random.default_rng(list(str(run).encode())).uniform(5, 25))
    rescaled = reparameterize(module, {"features.9": 1 / factor, "head": factor}, X=X)
    found = {
        f"{name}{end}": measure(name, one, X, y, criterion=nn.CrossEntropyLoss(), random_state=0)
        for end, one in {"": module, "_rescaled": rescaled}.items()
        for name in ("trace_flatness", "eigenvalue_flatness", "hessian_trace")
    }
    found["trace_flatness_at_loss"] = at_equal_loss(
        "trace_flatness", module, X, y, AT_LOSS, criterion=nn.CrossEntropyLoss()
    )
    neurons = neuron_robustness(module, X, y, DELTA, layers=-1, criterion=nn.CrossEntropyLoss())
    return found | {"robustness": neurons["robustness"].abs().max()}


def of_network(module: nn.Module, X: Any, y: Any, run: Run) -> dict[str, float]:
    """Compute P21's five measures, and two as the authors' code has them."""
    given: Any = {"criterion": nn.CrossEntropyLoss(), "random_state": run["param_seed"]}
    found = {name: measure(name, module, X, y, **given) for name in NAMES}
    # hundreds of passes: on a part of 50,000 images
    found["pac_bayes_flatness"] = measure(
        "pac_bayes_flatness", module, X[:5000], y[:5000], **given, n_draws=5
    )
    found["relative_flatness_at_loss"] = at_equal_loss(
        "relative_flatness", module, X, y, AT_LOSS, criterion=nn.CrossEntropyLoss()
    )
    return found | {"l2_norm_last": module.get_submodule("head").weight.square().sum().item()}

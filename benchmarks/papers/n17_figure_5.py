"""N17 Figure 5: conditions C1 to C3 of ten-layer networks, trained and at their random start.

The paper has one network with 1,000 units in each layer, on MNIST. Ours have 1,000, 400 and 100.
The picture shows each network's worst values, and Figures 6 to 8 as ratios to the random start:
the paper's "very similar" is read as a ratio of 1. `C_2` grows without limit as the disturbance
shrinks to the smallest unit.
"""

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.papers._common import Figure, mean
from relflat_sk import MLP, sharpness_conditions

DEPTH = 10
WIDTHS = 1000, 400, 100
# sizes of the disturbance: one unit close to zero makes any C_2 large at smaller ones
DELTAS = np.geomspace(0.02, 10, 15).tolist()


def train_row(width: int, seed: int, X: np.ndarray, y: np.ndarray, quick: bool) -> dict[str, float]:
    """Train a network to a loss, and find the worst constants over layers and 20 samples."""
    loss, n = (1.5, 2) if quick else (1e-3, 20)
    torch.manual_seed(seed)
    net = MLP(X.shape[1], 10, (width,) * (DEPTH - 1), init="kaiming_normal")
    initial = copy.deepcopy(net)
    inputs, target = torch.from_numpy(X), torch.from_numpy(y)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    found = np.inf
    for _ in range(1000):
        for rows in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            cross_entropy(net(inputs[rows]), target[rows]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        with torch.no_grad():
            found = cross_entropy(net(inputs), target).item()
        if found <= loss:
            break
    table = sharpness_conditions(net, inputs[:n], initial=initial)
    curve = sharpness_conditions(net, inputs[:n], detail="C2", deltas=DELTAS)
    row = {"train_loss": found, "C2_of_sizes": curve["ratio"].max()}
    row |= {f"flips_{delta:.3g}": worst
            for delta, worst in curve.groupby("delta")["largest_share"].max().items()}  # fmt: skip
    for condition, rows in table.groupby("condition"):
        worst = "min" if condition == "C1" else "max"
        row[condition] = rows["worst"].agg(worst)
        row[f"{condition}_median"] = rows["median"].median()
        row[f"{condition}_ratio"] = (rows["median"] / rows["initial_median"]).median()
    return row


def main(argv: Sequence[str] | None = None) -> int:
    figure = Figure("n17_figure_5", __doc__, argv)
    X, y, _, _ = figure.load(100 if figure.quick else 1000, 100, images=False)
    widths, n = ((20,), 3) if figure.quick else (WIDTHS, 20)
    runs = [{"param_width": width, "param_seed": seed} for width in widths for seed in range(n)]
    every = figure.complete(runs, train_row, X, y, figure.quick)
    frame = every[every["param_width"] == widths[0]]
    limits = {"C1": "> 0.25", "C2": "< 5", "C3": "< 3"}  # mu, C_2 and C_3
    claims = [
        mean(f"{condition}, {kind}", limit, frame[condition + end])
        for condition, limit in limits.items()
        for kind, end in {"worst of all": "", "median": "_median"}.items()
    ]
    flips = frame.filter(like="flips_") / DELTAS
    for first in (0, 2):
        worst = flips.iloc[:, first:].max(axis=1)
        name = f"C2, worst of disturbances from {DELTAS[first]:.2f}"
        claims.insert(4, mean(name, "< 5", worst))
    claims += [
        mean(f"{condition}, trained over initial, median", 1.0, frame[f"{condition}_ratio"])
        for condition in limits
    ]
    for width in widths[1:]:
        rows = every[every["param_width"] == width]
        claims += [
            mean(f"{name}, {width} units", theirs, rows[name])
            for name, theirs in {"C2_of_sizes": "< 5", "C1_ratio": 1.0, "C2_ratio": 1.0}.items()
            if len(rows)
        ]
    return figure.finish(claims)


if __name__ == "__main__":
    raise SystemExit(main())

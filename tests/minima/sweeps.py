"""Minima of a sweep over three hyper-parameters, whose gap is the flatness plus noise."""

from itertools import product

import numpy as np
import pandas as pd

AXES = {"batch_size": [8, 32, 128], "lr": [0.1, 0.2], "activation": ["relu", "tanh"]}


def make_minima(seed=0, repeats=2, ties=False):
    rng = np.random.default_rng(seed)
    cells = [cell for cell in product(*AXES.values()) for _ in range(repeats)]
    minima = pd.DataFrame(cells, columns=[f"param_{name}" for name in AXES])
    flatness, noise = rng.normal(size=(2, len(minima)))
    gap = flatness + noise
    minima["relative_flatness"] = flatness.round() if ties else flatness
    minima["generalization_gap"] = gap.round() if ties else gap
    return minima


def arrays_of(minima):
    """Levels of the hyper-parameters, measure and gap."""
    levels = np.stack([pd.factorize(minima[f"param_{name}"])[0] for name in AXES], axis=1)
    return levels, minima["relative_flatness"].to_numpy(), minima["generalization_gap"].to_numpy()


def rows_of(minima):
    """The same as a tuple for each minimum, for loops."""
    axes = [name for name in minima if name.startswith("param_")]
    return [
        (tuple(row[axis] for axis in axes), row["relative_flatness"], row["generalization_gap"])
        for _, row in minima.iterrows()
    ]

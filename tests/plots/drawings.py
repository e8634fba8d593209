"""A table of minima for the displays, and what stands in their drawings."""

import numpy as np
import pandas as pd

MEASURES = ["relative_flatness", "hessian_trace", "l2_norm"]


def table(n=12, spread=2.0, measures=(), **columns):
    """Minima of three batch sizes; their flatness lies between 1 and spread."""
    rng = np.random.default_rng(0)
    minima = {
        "trial": np.arange(n),
        "param_batch_size": np.resize([8, 32, 128], n),
        "relative_flatness": rng.permutation(np.linspace(1, spread, n)),
        **{name: rng.random(n) + 1 for name in measures},
        "train_loss": 0.01,
        "test_loss": 0.1 + rng.random(n),
        "converged": True,
        "state": "complete",
        "reason": "",
    }
    frame = pd.DataFrame({**minima, **columns})
    return frame.assign(generalization_gap=frame["test_loss"] - frame["train_loss"])


def noisy_table(n=24, **columns):
    """Minima with three measures, and of three shares of random labels."""
    columns = {"param_random_labels": np.repeat([0.0, 0.25, 0.5], n // 3), **columns}
    return table(n, measures=MEASURES[1:], **columns)


def points(ax, kind=0):
    """Positions of the converged minima, or of the crosses with kind 1."""
    return np.asarray(ax.collections[kind].get_offsets())


def lines(ax, epochs=2):
    """The curves, without the dots at their ends."""
    return [line for line in ax.lines if len(line.get_xdata()) >= epochs]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().texts]


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]

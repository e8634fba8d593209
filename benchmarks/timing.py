"""Compare the time of two or more ways of doing something, and say whether it is in budget.

The ways take turns, in an order drawn anew for each, so that whatever else the machine does
slows them alike; what is quoted is the median of the ratios within each turn, not a ratio of
absolute times.
"""

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import skorch
import torch

import relflat_sk

__all__ = ["Budget", "Ratio", "environment", "interleave", "ratio", "table", "verdict"]

Times = dict[str, list[float]]


def interleave(
    ways: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1, turn: int = 1
) -> Times:
    """Let every way have its turn in each round, in an order that each round draws anew.

    What ran before leaves its own data in the caches, or none after a garbage collection: in
    a fixed order one of the ways would always pay for that.

    Parameters
    ----------
    ways : dict of str to callable
    rounds : int
    warmup : int, default=1
        Rounds that do not count.
    turn : int, default=1
        How often a way is run in its turn.

    Returns
    -------
    dict of str to list of float
        Seconds of each run, those of a round at the same places for all ways.
    """
    times: Times = {name: [] for name in ways}
    order, generator = list(ways), random.Random(0)
    gc.collect()
    gc.disable()  # a collection would hit one of the two ways by chance
    try:
        for done in range(-warmup, rounds):
            generator.shuffle(order)
            for name in order:
                for _ in range(turn):
                    start = time.perf_counter()
                    ways[name]()
                    seconds = time.perf_counter() - start
                    if done >= 0:
                        times[name].append(seconds)
            if rounds <= 100:
                gc.collect()
    finally:
        gc.enable()
    return times


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios within each round, with their quartiles."""

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Compare two ways that took turns.

    Parameters
    ----------
    over, under : sequence of float
        Numerator and denominator, one of each per round.

    Returns
    -------
    Ratio
    """
    low, value, high = np.quantile(np.divide(over, under), [0.25, 0.5, 0.75])
    return Ratio(float(value), float(low), float(high), len(over))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of text in columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


@dataclass(frozen=True)
class Budget:
    """A number with its limit, `at_least` or (the default) at most."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the number keeps the limit; not a number does not."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def verdict(budgets: Sequence[Budget], *, judged: bool) -> int:
    """Print one line per budget.

    Parameters
    ----------
    budgets : sequence of Budget
    judged : bool
        False for smoke runs, which are too short to judge by.

    Returns
    -------
    int
        The exit code: 1 if a budget is missed, and judged.
    """
    print()
    for budget in budgets:
        outcome = ("ok" if budget.met else "OVER BUDGET") if judged else "not judged (quick)"
        limit = f"budget {'>= ' if budget.at_least else ''}{budget.limit:g}"
        print(f"{budget.name}: {budget.value:.2f} ({limit}) {outcome}")
    return int(judged and not all(budget.met for budget in budgets))


def environment() -> str:
    """Describe what the numbers were measured on."""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"relflat_sk {relflat_sk.__version__}, torch {torch.__version__}, "
        f"skorch {skorch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}\n"
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} torch threads, load {load} at the start"
    )

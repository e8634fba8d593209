"""Compare the times of several ways to do something, and judge the ratios by budgets.

The ways are run in rounds, each in a new random order, so that other programs on the machine
slow all of them alike. The reported ratio is the median of the ratios within each round, not
the ratio of two absolute times.
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

__all__ = [
    "Budget", "Ratio", "environment", "interleave", "ratio", "table", "verdict", "wait_for_device",
]  # fmt: skip

Times = dict[str, list[float]]


def interleave(ways: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> Times:
    """Time every way in each round, in an order that is drawn anew for each round.

    The time of a way includes its work on an accelerator.

    A run leaves its own data in the caches of the processor. In a fixed order, the same way
    would always pay for what its predecessor left there.

    Parameters
    ----------
    ways : dict of str to callable
        Name -> what to time, called without arguments.
    rounds : int
        Number of timed rounds.
    warmup : int, default=1
        Number of rounds before them that are not timed.

    Returns
    -------
    dict of str to list of float
        Name -> seconds of its runs, in order of the rounds.
    """
    times: Times = {name: [] for name in ways}
    wait_for_device()
    order, generator = list(ways), random.Random(0)
    gc.collect()
    gc.disable()  # a collection would slow one of the ways by chance
    try:
        for done in range(-warmup, rounds):
            generator.shuffle(order)
            for name in order:
                start = time.perf_counter()
                ways[name]()
                wait_for_device()
                seconds = time.perf_counter() - start
                if done >= 0:
                    times[name].append(seconds)
            if rounds <= 100:
                gc.collect()
    finally:
        gc.enable()
    return times


def wait_for_device() -> None:
    """Wait until the accelerator, if there is one, has done what was launched on it."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@dataclass(frozen=True)
class Ratio:
    """A median of ratios, with its quartiles and the number of ratios."""

    value: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Divide the times of two ways, run by run, and take the median.

    Parameters
    ----------
    over, under : sequence of float
        Seconds of the runs in the numerator and in the denominator, in the same order.

    Returns
    -------
    Ratio
        Median and quartiles of the ratios.
    """
    low, value, high = np.quantile(np.divide(over, under), [0.25, 0.5, 0.75])
    return Ratio(float(value), float(low), float(high), len(over))


def table(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows of text in columns.

    Parameters
    ----------
    rows : sequence of sequence of str
        The cells; the first row is the header. The first column is aligned to the left, all
        others to the right.

    Returns
    -------
    str
        The table, with a line under the header.
    """
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
    """A number with a limit: an upper one, or a lower one if `at_least` is true."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the number is within the limit; nan is not."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def verdict(budgets: Sequence[Budget], *, judged: bool) -> int:
    """Print one line per budget and return the exit code.

    Parameters
    ----------
    budgets : sequence of Budget
        The numbers with their limits.
    judged : bool
        Whether missed budgets count. False for smoke runs, which are too short for a verdict.

    Returns
    -------
    int
        1 if budgets are judged and one of them is missed, else 0.
    """
    print()
    for budget in budgets:
        outcome = ("ok" if budget.met else "OVER BUDGET") if judged else "not judged (quick)"
        limit = f"budget {'>= ' if budget.at_least else ''}{budget.limit:g}"
        print(f"{budget.name}: {budget.value:.2f} ({limit}) {outcome}")
    return int(judged and not all(budget.met for budget in budgets))


def environment() -> str:
    """Describe versions, machine, threads and load, in two lines of text.

    Returns
    -------
    str
        The description.
    """
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"relflat_sk {relflat_sk.__version__}, torch {torch.__version__}, "
        f"skorch {skorch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}\n"
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{device}, "
        f"{torch.get_num_threads()} torch threads, load {load} at the start"
    )

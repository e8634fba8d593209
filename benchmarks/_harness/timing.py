"""Compare the times of several ways to do something, and judge the ratios by budgets.

The ways are run in rounds, so that other programs on the machine slow all of them alike. The
reported ratio is the median of the ratios within each round.
"""

import gc
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import skorch
import torch
from scipy import stats

import relflat_sk

Times = dict[str, list[float]]


def interleave(ways: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 1) -> Times:
    """Time every way in each round, with its work on an accelerator, after rounds of warm-up.

    The order is drawn anew for each round. A run leaves its own data in the caches of the
    processor: in a fixed order, the same way would always pay for what its predecessor left there.
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
    """A median of ratios, with its quartiles."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Divide the times of two ways, run by run, and take median and quartiles."""
    low, value, high = np.quantile(np.divide(over, under), [0.25, 0.5, 0.75])
    return Ratio(float(value), float(low), float(high))


def compare(times: Times, *bases: str) -> pd.DataFrame:
    """Return a row for each way: its median, and its ratios to other ways with quartiles."""
    columns = {
        f"/ {base} [quartiles]": [str(ratio(seconds, times[base])) for seconds in times.values()]
        for base in bases
    }
    medians = [f"{1000 * np.median(seconds):.4g}" for seconds in times.values()]
    return pd.DataFrame({"median ms": medians} | columns, index=[*times])


def interval(values: "pd.Series[float]") -> str:
    """Write the mean of differences, and half the width of its 95% interval (Student's t)."""
    width = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values) if len(values) > 1 else None
    return f"{np.mean(values):+.1f}" + (f" +- {width:.1f}" if width is not None else "")


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
    """Print one line per budget; return 1 if they are judged and one of them is missed, else 0."""
    print()
    for budget in budgets:
        outcome = ("ok" if budget.met else "OVER BUDGET") if judged else "not judged (quick)"
        limit = f"budget {'>= ' if budget.at_least else ''}{budget.limit:g}"
        print(f"{budget.name}: {budget.value:.2f} ({limit}) {outcome}")
    return int(judged and not all(budget.met for budget in budgets))


def environment() -> str:
    """Describe versions, machine, threads and load, in two lines of text."""
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"relflat_sk {relflat_sk.__version__}, torch {torch.__version__}, "
        f"skorch {skorch.__version__}, numpy {np.__version__}, "
        f"Python {platform.python_version()}\n"
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{device}, "
        f"{torch.get_num_threads()} torch threads, load {load} at the start"
    )

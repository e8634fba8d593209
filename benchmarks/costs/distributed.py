"""The cost of measuring in two processes, each with a part of the rows, next to one process.

python -m benchmarks.costs.distributed            # 4 GiB of virtual rows, 3 minutes
python -m benchmarks.costs.distributed --quick    # a smoke run without verdict

The rows are computed when they are read. Each process has one thread, and is a fresh one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks._harness.memory import peak_growth
from benchmarks._harness.timing import Budget, environment, table, verdict
from benchmarks.costs.streaming import N_CLASSES, N_FEATURES, ROW, Rows
from relflat_sk import relative_flatness

LIMIT = 500  # MiB


class Found(NamedTuple):
    """What a process prints."""

    value: float
    start: float
    seconds: float
    mib: float


class Part(Rows):
    """The rows from one number to another."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__(stop - start)
        self.start = start

    def __getitem__(self, rows: Any) -> np.ndarray:
        numbers = self.start + np.arange(self.shape[0])[rows]
        return np.cos(0.1 * numbers, dtype=np.float32)[..., None] * self._pattern


def measure_part(rank: int, n_processes: int, n: int, folder: str, begun: float) -> Found:
    """Measure the part of a process, together with the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(N_FEATURES, 16), nn.ReLU(), nn.Linear(16, N_CLASSES))
    arguments: dict[str, Any] = {"criterion": nn.CrossEntropyLoss()}
    start, stop = n * rank // n_processes, n * (rank + 1) // n_processes
    X, y = Part(start, stop), np.arange(start, stop) % N_CLASSES
    relative_flatness(model, X[:64], y[:64], **arguments)  # loads libraries
    if n_processes > 1:
        where = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", where, rank=rank, world_size=n_processes)
        arguments["process_group"] = "world"
        dist.barrier()
    begun_here, values = time.time(), []
    peak = peak_growth(lambda: values.append(relative_flatness(model, X, y, **arguments)))
    seconds = time.time() - begun_here
    return Found(values[0], begun_here - begun, seconds, peak / 2**20)


def measure_in(n_processes: int, n: int) -> list[Found]:
    """Measure in fresh processes, and return what each of them found."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.costs.distributed", "--cell"]
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for rank in range(n_processes):
            cell = [str(rank), str(n_processes), str(n), folder, str(time.time())]
            running.append(
                subprocess.Popen(
                    [*command, *cell],
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        printed = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise RuntimeError("a process has failed")
    return [Found(*json.loads(text)) for text in printed]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--gib", type=float, help="size of the rows (default: 4)")
    parser.add_argument("--cell", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if given.cell:
        rank, n_processes, n, folder, begun = given.cell
        found = measure_part(int(rank), int(n_processes), int(n), folder, float(begun))
        print(json.dumps(found), flush=True)
        os._exit(0)  # threads of gloo can abort a process that ends under load
    gib = given.gib or (0.1 if given.quick else 4)
    print(environment())
    rounds = 1 if given.quick else 3
    runs = {k: [measure_in(k, int(gib * 2**30) // ROW) for _ in range(rounds)] for k in (1, 2)}
    print(f"\nrelative_flatness of {gib:g} GiB of rows; medians of {rounds}")
    rows = [["processes", "start, s", "measure, s", "peak MiB of each"]]
    slowest, peaks = {}, {}
    for k, found in runs.items():
        start, slowest[k] = (
            statistics.median(max(getattr(one, name) for one in run) for run in found)
            for name in ("start", "seconds")
        )
        peaks[k] = max(one.mib for run in found for one in run)
        rows.append([str(k), f"{start:.1f}", f"{slowest[k]:.1f}", f"{peaks[k]:.0f}"])
    print(table(rows))
    (alone,), values = runs[1][0], [one.value for run in runs[2] for one in run]
    apart = max(abs(value / alone.value - 1) for value in values)
    return verdict(
        [
            Budget("values of two processes and of one, relative difference", apart, 1e-6),
            Budget("seconds of two processes / of one", slowest[2] / slowest[1], 1),
            Budget("peak MiB of a process", max(peaks.values()), LIMIT),
        ],
        judged=not given.quick,
    )


if __name__ == "__main__":
    sys.exit(main())

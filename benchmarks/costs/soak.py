"""A long search in one process: memory, open files and time per minimum, while others read.

python -m benchmarks.costs.soak                   # 2,000 minima in each storage, 15 minutes
python -m benchmarks.costs.soak --only journal    # in one of them
python -m benchmarks.costs.soak --quick           # a smoke run without verdict
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss
from relflat_sk.minima._table import attributes_of
from relflat_sk.search._study import open_storage

FILES = {"SQLite": "minima.db", "journal": "minima.log"}
SPACES: dict[str, Any] = {
    "draws": {"lr": FloatDistribution(0.05, 0.2, log=True)},
    "grid": {"lr": [0.05, 0.1], "random_state": None},
}
STUDY = "soak"


class Now(NamedTuple):
    """The state of the process that searches."""

    n_minima: int
    mib: float
    n_files: int
    n_threads: int
    training: float
    clock: float
    processor: float


def observe(n_minima: int, training: float) -> Now:
    """Read resident memory, open files, threads and the clock."""
    gc.collect()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    status = dict(line.split(":\t", 1) for line in lines)
    return Now(
        n_minima,
        int(status["VmRSS"].split()[0]) / 1024,
        len(os.listdir("/proc/self/fd")),
        int(status["Threads"]),
        training,
        time.perf_counter(),
        time.process_time(),
    )


def search_long(file: Path, kind: str, n_minima: int, every: int) -> None:
    """Search, and print the state of this process every few minima."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(100, 10)).astype(np.float32)
    y = (X[:, 0] > 0).astype(int)
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0,
        module__hidden_layer_sizes=(8,),
        batch_size=50,
        max_epochs=50,
        callbacks=[StopAtLoss(0.6)],
        verbose=0,
    )
    space = dict(SPACES[kind])
    if kind == "grid":
        space["random_state"] = list(range(n_minima // 2))
    training = 0.0

    def note(study: optuna.Study, trial: FrozenTrial) -> None:
        nonlocal training
        training += attributes_of(trial)["seconds"]
        n = trial.number + 1
        if n % every == 0:
            print(json.dumps(observe(n, training)), flush=True)

    FlatMinimaSearch(
        net,
        space,
        n_trials=None if kind == "grid" else n_minima,
        storage=file,
        study_name=STUDY,
        random_state=0,
    ).fit(X, y, callbacks=[note])


def read_until_done(file: Path, process: "subprocess.Popen[str]") -> tuple[int, int]:
    """Read a study while another process writes it; return the numbers of reads and of minima."""
    study, n_reads, n_read = None, 0, 0
    while process.poll() is None:
        time.sleep(1)
        if study is None:
            if not (file.exists() and STUDY in names(file)):
                continue
            study = optuna.load_study(study_name=STUDY, storage=open_storage(file))
        found = len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))
        if found < n_read:
            raise RuntimeError(f"{n_read} minima were there, and {found} are there now")
        n_reads, n_read = n_reads + 1, found
    study = study or optuna.load_study(study_name=STUDY, storage=open_storage(file))
    return n_reads, len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))


def names(file: Path) -> list[str]:
    """List the studies in a storage."""
    return [one.study_name for one in open_storage(file).get_all_studies()]


def soak(storage: str, kind: str, n_minima: int, every: int) -> list[Budget]:
    """Run a long search in a fresh process, read its study meanwhile, and print its states."""
    with tempfile.TemporaryDirectory() as folder:
        file, printed = Path(folder, FILES[storage]), Path(folder, "printed")
        with printed.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.costs.soak", "--cell", str(file), kind,
                 str(n_minima), str(every)],
                stdout=output, text=True,
            )  # fmt: skip
            n_reads, n_read = read_until_done(file, process)
        if process.returncode:
            raise RuntimeError(f"the search ended with exit code {process.returncode}")
        states = [Now(*json.loads(line)) for line in printed.read_text().splitlines()]
        mib = file.stat().st_size / 2**20
    print(f"\n{storage}, {kind}: {n_read} minima, {mib:.1f} MiB; read {n_reads} times meanwhile")
    rows = [["minima", "MiB", "files", "threads", "training, s", "the rest, s", "on the CPU, s"]]
    for before, now in pairwise(states):
        rows.append(
            [str(now.n_minima), f"{now.mib:.0f}", str(now.n_files), str(now.n_threads)]
            + [f"{seconds:.4f}" for seconds in per_minimum(before, now)]
        )
    print(table(rows))
    first, (*_, before, last) = states[0], states
    name = f"{storage}, {kind}"
    return [
        Budget(f"{name}, minima", n_read, n_minima, at_least=True),
        Budget(f"{name}, memory at the end / at the beginning", last.mib / first.mib, 1.1),
        Budget(
            f"{name}, open files at the end - at the beginning", last.n_files - first.n_files, 0
        ),
        Budget(
            f"{name}, seconds beside the training, at the end", per_minimum(before, last)[1], 0.1
        ),
    ]


def per_minimum(before: Now, now: Now) -> tuple[float, float, float]:
    """Return seconds per minimum between two states: training, the rest, and all on the CPU."""
    n = now.n_minima - before.n_minima
    training, clock, processor = ((b - a) / n for a, b in zip(before[4:], now[4:], strict=True))
    return training, clock - training, processor


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--only", choices=FILES, help="one of the storages")
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if given.cell:
        file, kind, n_minima, every = given.cell
        search_long(Path(file), kind, int(n_minima), int(every))
        return 0
    print(f"A search of tiny nets in one process\n{environment()}")
    storages = [given.only] if given.only else list(FILES)
    cells = [(storage, kind) for storage in storages for kind in SPACES]
    if given.quick:
        cells = [cells[0], cells[-1]]
    size = (20, 5) if given.quick else (2000, 200)
    budgets = [one for cell in cells for one in soak(*cell, *size)]
    return verdict(budgets, judged=not given.quick)


if __name__ == "__main__":
    sys.exit(main())

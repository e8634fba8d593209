"""Minima per minute of a search that trains many nets as one stacked model, and its memory.

Every way finds minima of a training loss of 0.05 in a process of its own, in turns: the fleet,
the search as it was before there was a fleet (read from the repository, at commit e84b214), and
a torch loop of a few lines, which only trains. All use the same number of threads.

    python -m benchmarks.costs.fleet            # 20 minutes
    python -m benchmarks.costs.fleet --quick    # a smoke run without verdict
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
from sklearn.base import clone

from benchmarks._harness.memory import in_fresh_process, peak_growth
from benchmarks._harness.minima import PROBLEMS, load
from benchmarks._harness.timing import Budget, environment, ratio, table, verdict
from relflat_sk import FleetTrainer, RelativeFlatnessRegularizedClassifier, StopAtLoss

ROOT = Path(__file__).parents[2]
BEFORE = "e84b214"  # the last commit whose search trains one by one only
FLEET = 32
# problem -> least ratio of minima per minute to the search before, and to the loop
TARGETS = {
    "64-128-64-10, batch 8": (6.0, 3.0),
    "64-128-64-10, batch 32": (6.0, 3.0),
    "784-50-50-50-30-10, batch 16": (3.0, 2.0),
}
MOST_MEMORY = 1.2  # of the memory that one net takes, times the number of nets


def main() -> int:
    """Measure, print, and return the exit code."""
    arguments = _parse()
    if arguments.memory:
        print(_peak(arguments.memory))
        return 0
    n = 2 if arguments.quick else FLEET
    rounds = 1 if arguments.quick else arguments.rounds
    problems = list(PROBLEMS)[1:2] if arguments.quick else list(PROBLEMS)
    print(f"Minima of {n} nets at a time, {rounds} rounds")
    print(environment())
    rows = [["problem", "fleet, minima per minute", "before", "torch loop"]]
    budgets = []
    with tempfile.TemporaryDirectory() as folder:
        before = _check_out(Path(folder))
        for problem in problems:
            seconds = _seconds(problem, n, rounds, before)
            rates = {way: 60 / float(np.median(times)) for way, times in seconds.items()}
            rows.append([problem, *(f"{rate:.1f}" for rate in rates.values())])
            for (way, times), least in zip(
                list(seconds.items())[1:], TARGETS[problem], strict=True
            ):
                found = ratio(times, seconds["fleet"])
                budgets.append(Budget(f"{problem}, fleet / {way}", found.value, least, True))
    if not arguments.quick:
        budgets.append(Budget(f"memory of {n} nets / {n} x one", memory_of(n), MOST_MEMORY))
    print()
    print(table(rows))
    return verdict(budgets, judged=not arguments.quick)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each way (default: 5)")
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _check_out(folder: Path) -> Path:
    """Write the package as it was before into a folder; return today's without its history."""
    command = ["git", "archive", BEFORE, "relflat_sk"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        print(f"commit {BEFORE} is not at hand: today's search one by one stands in for it")
        return ROOT
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _seconds(problem: str, n: int, rounds: int, before: Path) -> dict[str, list[float]]:
    """Time all ways in turns; return seconds per minimum."""
    few = max(2, n // 8)  # nets of the ways that train one by one
    runs = {"fleet": (ROOT, "fleet", n), "before": (before, "one by one", few)}
    runs["torch loop"] = (ROOT, "torch loop", few)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (root, way, number) in runs.items():
            seconds[name].append(_run(root, way, problem, number) / number)
    return seconds


def _run(root: Path, way: str, problem: str, n: int) -> float:
    """Return the seconds that one way takes in a process of its own."""
    script = ROOT / "benchmarks" / "_harness" / "minima.py"
    done = subprocess.run(
        [sys.executable, script, way, problem, str(n)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def memory_of(n: int) -> float:
    """Compare the peak memory of many nets with that of one.

    Parameters
    ----------
    n : int
        Number of nets.

    Returns
    -------
    float
        The ratio to `n` times the memory of one.
    """
    many, one = (in_fresh_process("benchmarks.costs.fleet", ["--memory", str(k)]) for k in (n, 1))
    return many / (n * one)


def _peak(n: int) -> int:
    """Return the bytes that nets with large layers need at most, a single one without a fleet."""
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(500, 500),
        max_epochs=2,
        callbacks=[StopAtLoss(0.1)],  # checked on all data, and not reached
        verbose=0,
    )
    X, y = load("64")
    net.set_params(max_epochs=1).fit(X[:64], y[:64])  # what the first fit loads counts for none
    nets = [clone(net).set_params(random_state=seed) for seed in range(n)]
    trainer = FleetTrainer(nets, fleet=n if n > 1 else None)
    return peak_growth(lambda: trainer.fit(X, y))


if __name__ == "__main__":
    sys.exit(main())

"""The cost of each step from one process to a cluster: one small search on several engines.

python -m benchmarks.costs.engines              # without a database server, 5 minutes
python -m benchmarks.costs.engines --url URL    # and on an empty database of yours
python -m benchmarks.costs.engines --quick      # a smoke run of two of them, without verdict

All engines train the same candidates and must find the same minima. From the second row on, two
workers of one thread each share them. An engine that is not installed is left out.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import optuna
from joblib import parallel_config
from optuna.trial import FrozenTrial, TrialState
from sklearn.datasets import load_digits

from benchmarks._harness.timing import Budget, environment, verdict
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.minima._table import attributes_of

N_WORKERS = 2
STUDY = "engines"
QUICK = {"one process", "two processes, a journal"}
COLUMNS = ("in all, s", "first after, s", "training, s", "the rest, s")

Trials = list[FrozenTrial]


class Engine(NamedTuple):
    """A way to search: the context of a search, and the search of a number of candidates."""

    context: Callable[[], AbstractContextManager[object]]
    search: Callable[[int], Trials]


def search(n_candidates: int, n_jobs: int | None = None, storage: str | None = None) -> Trials:
    """Search, and return the trials of all minima."""
    X, y = load_digits(return_X_y=True)
    net = RelativeFlatnessRegularizedClassifier(flatness_weight=0, max_epochs=30, lr=0.1, verbose=0)
    fitted = FlatMinimaSearch(
        net,
        {"batch_size": [16, 32], "random_state": list(range(n_candidates // 2))},
        goal=None,
        n_jobs=n_jobs,
        storage=storage,
        study_name=STUDY if storage else None,
        refit=False,
        random_state=0,
    ).fit((X / 16).astype(np.float32), y)
    return fitted.study_.get_trials(states=(TrialState.COMPLETE,))  # others were withdrawn


def in_processes(n_candidates: int, storage: str) -> Trials:
    """Start processes that share a storage, as on several machines, and read their trials."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.costs.engines"]
    arguments = ["--worker", storage, "--n-candidates", str(n_candidates)]
    workers = [subprocess.Popen([*command, *arguments]) for _ in range(N_WORKERS)]
    exit_codes = [worker.wait() for worker in workers]
    if any(exit_codes):
        raise RuntimeError("a process of the search failed")
    return search(n_candidates, storage=storage)  # trains nothing more


@contextmanager
def on_dask() -> Iterator[None]:
    """Start a cluster of dask on this machine."""
    from distributed import Client, LocalCluster  # noqa: PLC0415

    cluster = LocalCluster(n_workers=N_WORKERS, threads_per_worker=1, dashboard_address=None)
    with cluster, Client(cluster), parallel_config(backend="dask"):
        yield


@contextmanager
def on_ray() -> Iterator[None]:
    """Start a cluster of ray on this machine."""
    import ray  # noqa: PLC0415
    from ray.util.joblib import register_ray  # noqa: PLC0415

    register_ray()
    ray.init(
        num_cpus=N_WORKERS, include_dashboard=False, logging_level="ERROR", log_to_driver=False
    )
    try:
        with parallel_config(backend="ray"):
            yield
    finally:
        ray.shutdown()


def find_engines(folder: Path, url: str | None) -> dict[str, Engine]:
    """List the engines that are there, by name."""
    files = {"SQLite": str(folder / "minima.db"), "a journal": str(folder / "minima.log")}
    storages = files if url is None else files | {url.partition(":")[0]: url}
    both = partial(search, n_jobs=N_WORKERS)
    found = {"one process": Engine(nullcontext, search), "n_jobs=2": Engine(nullcontext, both)}
    for kind, storage in storages.items():
        shared = partial(in_processes, storage=storage)
        found[f"two processes, {kind}"] = Engine(nullcontext, shared)
    for kind, module, context in (("dask", "distributed", on_dask), ("ray", "ray", on_ray)):
        if find_spec(module):
            found[f"two workers of {kind}"] = Engine(context, both)
    return found


def seconds_of(trials: Trials) -> tuple[float, float]:
    """Return seconds of training, and of all else in a worker, for each candidate.

    The time of a worker counts from the beginning of its first candidate to the end of its last.
    """
    spans: dict[str, list[float]] = defaultdict(list)
    for trial in trials:
        assert trial.datetime_start is not None
        assert trial.datetime_complete is not None
        times = (trial.datetime_start.timestamp(), trial.datetime_complete.timestamp())
        spans[str(trial.user_attrs["process"])] += times
    at_work = sum(max(times) - min(times) for times in spans.values())
    training = sum(attributes_of(trial)["seconds"] for trial in trials)
    return training / len(trials), (at_work - training) / len(trials)


def measure(engine: Engine, n_candidates: int) -> tuple[list[float], list[float]]:
    """Return seconds in the order of the columns, and the flatness of all minima."""
    begun = time.time()
    with engine.context():
        trials = engine.search(n_candidates)
        in_all = time.time() - begun
    begins = [trial.datetime_start.timestamp() for trial in trials if trial.datetime_start]
    flatness = sorted(trial.user_attrs["relative_flatness"] for trial in trials)
    return [in_all, min(begins) - begun, *seconds_of(trials)], flatness


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--url", help="URL of an empty database")
    parser.add_argument("--n-candidates", type=int, help="candidates (default: 16)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.simplefilter("ignore", FlatnessWarning)  # all train for 30 epochs, to no goal
    n_candidates = given.n_candidates or (4 if given.quick else 16)
    if given.worker:
        search(n_candidates, storage=given.worker)
        return 0
    print(f"One search of {n_candidates} MLPs on digits, 30 epochs each\n{environment()}\n")
    print(" " * 26 + "".join(f"{name:>16}" for name in COLUMNS))
    search(2)  # loads libraries
    budgets, expected = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name, engine in find_engines(Path(folder), given.url).items():
            if given.quick and name not in QUICK:
                continue
            seconds, found = measure(engine, n_candidates)
            print(f"{name:<26}" + "".join(f"{s:>16.2f}" for s in seconds), flush=True)
            expected = expected or found
            n_same = sum(a == b for a, b in zip(found, expected, strict=True))
            budgets.append(
                Budget(f"{name}, minima as in one process", n_same, n_candidates, at_least=True)
            )
    return verdict(budgets, judged=not given.quick)


if __name__ == "__main__":
    sys.exit(main())

"""The cost of sharing candidates through a storage, by simulated workers that train nothing.

python -m benchmarks.costs.claims                # SQLite and a journal, 20 minutes
python -m benchmarks.costs.claims --quick        # a smoke run without verdict
python -m benchmarks.costs.claims --url URL      # on a database of yours

Files are in the folder for temporary files (TMPDIR), and so on the disk that is to be measured.
"""

import argparse
import heapq
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import optuna
from optuna.trial import TrialState, create_trial

from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk.search import _claims as claims_module
from relflat_sk.search._claims import Plan, claim
from relflat_sk.search._measure import write_record
from relflat_sk.search._study import open_storage

N_PROCESSES = 2
FILES = {"SQLite": "minima.db", "journal": "minima.log"}
# about as many attributes as a trial of a search has, and as long
ATTRIBUTES = {f"attribute_{n}": 0.123456789012345678 for n in range(4)}
ATTRIBUTES |= {"converged": True, "ended_by": "goal", "depth": 20.0, "seed": "1", "in_fleet": True}
ATTRIBUTES |= {"seconds": 1.0, "reason": "", "train_score": 0.9, "test_score": 0.8}
ATTRIBUTES |= {"curves": [round(0.01 * n, 4) for n in range(20)]}


def elsewhere(worker: int) -> list[Any]:
    """Describe a process of another machine: nobody here can tell whether it is gone."""
    return [f"machine-{worker}", 1, None, 0]


def as_worker(worker: int) -> Any:
    """Let claims be those of a simulated worker."""
    return mock.patch.object(claims_module, "this_process", return_value=elsewhere(worker))


def record(study: optuna.Study, trial: optuna.Trial) -> None:
    """Record what a search records of a minimum."""
    write_record(trial, ATTRIBUTES)
    study.tell(trial, trial.number)


# -- all at the same moment -------------------------------------------------------------------


class Together:
    """A barrier for all workers that have no candidate yet."""

    def __init__(self, n: int) -> None:
        self.n, self.n_waiting, self.turn = n, 0, 0
        self.changed = threading.Condition()

    def wait(self) -> None:
        """Wait for all others."""
        with self.changed:
            turn, self.n_waiting = self.turn, self.n_waiting + 1
            self._go_on()
            self.changed.wait_for(lambda: self.turn != turn)

    def leave(self) -> None:
        """Wait for nobody any more."""
        with self.changed:
            self.n -= 1
            self._go_on()

    def _go_on(self) -> None:
        if self.n_waiting == self.n:
            self.n_waiting, self.turn = 0, self.turn + 1
            self.changed.notify_all()


def claim_at_once(n_workers: int) -> tuple[int, int]:
    """Let workers read the same state before any of them claims, again and again.

    Returns the number of different candidates that they hold, and of withdrawn trials.
    """
    study, together = optuna.create_study(), Together(n_workers)
    plan, add_trial = Plan({}, n_trials=2 * n_workers), claims_module._add_trial
    study.sampler = optuna.samplers.RandomSampler(seed=0)

    def add_with_others(*arguments: Any) -> list[Any]:
        together.wait()
        return add_trial(*arguments)

    def of_this_thread() -> list[Any]:
        return elsewhere(threading.get_ident())

    def work() -> None:
        claim(study, plan, uuid.uuid4().hex)
        together.leave()

    with (
        mock.patch.object(claims_module, "this_process", of_this_thread),
        mock.patch.object(claims_module, "_add_trial", add_with_others),
    ):
        workers = [threading.Thread(target=work) for _ in range(n_workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    trials = study.get_trials(deepcopy=False)
    held = {t.user_attrs["candidate"] for t in trials if t.state == TrialState.RUNNING}
    return len(held), sum(trial.state == TrialState.FAIL for trial in trials)


def at_once(sizes: Sequence[int]) -> list[Budget]:
    """Print how often workers withdraw that all claim at the same moment."""
    rows, budgets = [["workers", "withdrawn trials for each"]], []
    for n_workers in sizes:
        n_held, n_withdrawn = claim_at_once(n_workers)
        rows.append([str(n_workers), f"{n_withdrawn / n_workers:.1f}"])
        name = f"{n_workers} workers at the same moment, candidates"
        budgets.append(Budget(name, n_held, n_workers, at_least=True))
    print(f"\nWorkers that all read the study before any of them claims, in memory\n{table(rows)}")
    return budgets


# -- simulated workers on a storage -----------------------------------------------------------


class Times(NamedTuple):
    """Seconds of each claim and of each record."""

    claims: list[float]
    records: list[float]


def work(storage: str, study_name: str, workers: Sequence[int], n_trials: int) -> Times:
    """Let simulated workers claim, train for no time, and record, until no candidate is left."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(study_name=study_name, storage=open_storage(storage))
    study.sampler = optuna.samplers.RandomSampler()
    plan, times, rng = Plan({}, n_trials=n_trials), Times([], []), random.Random(workers[0])
    # by the simulated time at which a worker acts next
    queue: list[tuple[float, int, Any]] = [(0.0, worker, None) for worker in workers]
    while queue:
        now, worker, claimed = heapq.heappop(queue)
        if claimed is not None:
            started = time.perf_counter()
            record(study, claimed)
            times.records.append(time.perf_counter() - started)
        started = time.perf_counter()
        with as_worker(worker):
            claimed = claim(study, plan, "sweep")
        if claimed is not None:
            times.claims.append(time.perf_counter() - started)
            heapq.heappush(queue, (now + rng.lognormvariate(0, 0.5), worker, claimed))
    return times


def share(kind: str, storage: str, n_workers: int, n_trials: int) -> list[Budget]:
    """Share a study between simulated workers of two processes, and count what they did."""
    study_name = uuid.uuid4().hex
    study = optuna.create_study(study_name=study_name, storage=open_storage(storage))
    context = get_context("forkserver")
    context.set_forkserver_preload(["relflat_sk.search"])
    started = time.perf_counter()
    parts = [
        (storage, study_name, range(n, n_workers, N_PROCESSES), n_trials)
        for n in range(N_PROCESSES)
    ]
    with context.Pool(N_PROCESSES) as pool:
        found = pool.starmap(work, parts)
    seconds = time.perf_counter() - started
    trials = study.get_trials(deepcopy=False)
    complete = Counter(
        trial.user_attrs["candidate"] for trial in trials if trial.state == TrialState.COMPLETE
    )
    n_withdrawn = len(trials) - complete.total()
    claims, records = (
        f"{1000 * statistics.median(t for part in parts for t in part):.0f} ms"
        for parts in zip(*found, strict=True)
    )
    print(
        f"\n{kind}: {n_workers} simulated workers in {N_PROCESSES} processes, {n_trials} "
        f"candidates in {seconds:.0f} s\na claim takes {claims}, the record of a minimum "
        f"{records} (medians, both processes at work); {n_withdrawn} trials were withdrawn"
    )
    return [
        Budget(f"{kind}, candidates trained", len(complete), n_trials, at_least=True),
        Budget(f"{kind}, candidates trained twice", complete.total() - len(complete), 0),
    ]


# -- by the size of a study -------------------------------------------------------------------


def fill(study: optuna.Study, n_trials: int) -> None:
    """Add finished trials."""
    for number in range(len(study.get_trials(deepcopy=False)), n_trials):
        study.add_trial(
            create_trial(
                value=0.0,
                user_attrs=ATTRIBUTES
                | {"process": elsewhere(number), "sweep": "sweep", "candidate": str(number)},
            )
        )


def by_size(kind: str, storage: str, sizes: Sequence[int], rounds: int) -> None:
    """Print the cost of a claim, of a record and of the first read by the size of the study."""
    study_name = uuid.uuid4().hex
    study = optuna.create_study(study_name=study_name, storage=open_storage(storage))
    study.sampler = optuna.samplers.RandomSampler(seed=0)
    rows = [["trials", "a claim, ms", "a record, ms", "first read of a trial, ms"]]
    for size in sizes:
        fill(study, size)
        started = time.perf_counter()
        new = optuna.load_study(study_name=study_name, storage=open_storage(storage))
        n_read = len(new.get_trials(deepcopy=False))
        seconds = time.perf_counter() - started
        times = Times([], [])
        for worker in range(rounds):
            started = time.perf_counter()
            with as_worker(worker):
                claimed = claim(study, Plan({}, n_trials=size + rounds), "sweep")
            times.claims.append(time.perf_counter() - started)
            assert claimed is not None
            started = time.perf_counter()
            record(study, claimed)
            times.records.append(time.perf_counter() - started)
        medians = [f"{1000 * statistics.median(part):.1f}" for part in times]
        rows.append([str(size), *medians, f"{1000 * seconds / n_read:.2f}" if n_read else ""])
    print(f"\n{kind}: one worker, in a study with finished trials\n{table(rows)}")


def by_running(kind: str, storage: str, n_running: int) -> None:
    """Print the time to read a study in which many trials run."""
    study = optuna.create_study(study_name=uuid.uuid4().hex, storage=open_storage(storage))
    for number in range(n_running):
        attributes = {"process": elsewhere(number), "sweep": "sweep"}
        template = create_trial(state=TrialState.RUNNING, user_attrs=attributes)
        study.add_trial(template)
    times = []
    for _ in range(5):
        started = time.process_time()
        study.get_trials(deepcopy=False)
        times.append(time.process_time() - started)
    milliseconds = 1000 * statistics.median(times)
    print(f"\n{kind}: {n_running} trials that run are read in {milliseconds:.1f} ms on the CPU")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--only", choices=["moment", "share", "size"], help="one of the parts")
    parser.add_argument("--url", help="URL of a database, in place of files")
    parser.add_argument("--n-workers", type=int, help="simulated workers (default: 100)")
    parser.add_argument("--n-trials", type=int, help="their candidates (default: two for each)")
    given = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print(f"Simulated workers that share candidates\n{environment()}")
    n_workers = given.n_workers or (6 if given.quick else 100)
    sizes = (0, 10) if given.quick else (0, 500, 2000)
    budgets = []
    if given.only in {None, "moment"}:
        budgets += at_once((2, 10) if given.quick else (10, 100, 1000))
    if given.only == "moment":
        return verdict(budgets, judged=not given.quick)
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: f"{Path(folder, name)}" for kind, name in FILES.items()}
        storages = {given.url.partition(":")[0]: given.url} if given.url else files
        for kind, storage in storages.items():
            if given.only != "size":
                budgets += share(kind, storage, n_workers, given.n_trials or 2 * n_workers)
            if given.only != "share":
                by_size(kind, storage, sizes, 2 if given.quick else 20)
                by_running(kind, storage, 10 if given.quick else 1000)
    return verdict(budgets, judged=not given.quick)


if __name__ == "__main__":
    sys.exit(main())

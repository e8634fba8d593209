"""Time of a search beside its training, and completeness of a search with killed processes.

python -m benchmarks.costs.search            # 10 minutes
python -m benchmarks.costs.search --quick    # a smoke run without verdict
python -m benchmarks.costs.search --url URL  # on a database of yours
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import FloatDistribution
from optuna.storages import InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import TrialState
from sklearn.datasets import load_digits
from sklearn.preprocessing import scale

from benchmarks._harness.timing import Budget, environment, table, verdict
from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss
from relflat_sk.minima._table import attributes_of

LIMIT = 0.05 * 10  # seconds: 5% of a trial that takes 10 s


def open_journal(path: Path) -> JournalStorage:
    """Open a journal file whose lock can be taken from a killed process after 3 s."""
    # a process that is killed while it holds the lock leaves it behind; Optuna waits 30 s
    lock = JournalFileSymlinkLock(str(path), grace_period=3)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


STORAGES: dict[str, Callable[[Path], Any]] = {
    "in memory": lambda folder: InMemoryStorage(),
    "sqlite": lambda folder: f"sqlite:///{folder / 'minima.db'}",
    "journal": lambda folder: open_journal(folder / "minima.log"),
}


def open_storage(name: str, folder: Path) -> Any:
    """Make one of the storages above; another name is the URL of a database."""
    return STORAGES[name](folder) if name in STORAGES else name


def kind_of(name: str) -> str:
    """Name the kind of a storage without the rest of its URL, which may hold a password."""
    return name.partition(":")[0]


def load() -> tuple[Any, Any]:
    """Load scikit-learn's digits, standardised."""
    X, y = load_digits(return_X_y=True)
    return scale(X).astype(np.float32), y


def make_search(n_trials: int, **arguments: Any) -> FlatMinimaSearch:
    """Make a search over batch sizes and learning rates, without refit."""
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=0,
        module__hidden_layer_sizes=(32,),
        batch_size=64,
        max_epochs=20,
        callbacks=[StopAtLoss(0.3)],
        verbose=0,
    )
    space = {"batch_size": [32, 64], "lr": FloatDistribution(0.003, 0.03, log=True)}
    return FlatMinimaSearch(net, space, n_trials=n_trials, random_state=0, refit=False, **arguments)


# -- time beside the training -----------------------------------------------------------------


def overhead(names: Iterable[str], n_trials: int) -> list[Budget]:
    """Time searches and the trainings within them, so that both see the same load."""
    X, y = load()
    rows = [["storage", "s per trial", "training", "the rest"]]
    budgets = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            storage = open_storage(name, Path(folder))
            name_of_study = None if storage is None else uuid.uuid4().hex
            search = make_search(n_trials, storage=storage, study_name=name_of_study)
            start = time.perf_counter()
            search.fit(X, y)
            whole = (time.perf_counter() - start) / n_trials
        training = float(search.minima_["seconds"].mean())
        rest = whole - training
        rows.append([kind_of(name), *(f"{seconds:.3f}" for seconds in (whole, training, rest))])
        budgets.append(
            Budget(f"seconds beside the training of a trial, {kind_of(name)}", rest, LIMIT)
        )
    print(f"\n{n_trials} trials each; the rest draws, measures, scores and records\n{table(rows)}")
    return budgets


# -- killed processes -------------------------------------------------------------------------


def work(storage: str, folder: Path, study_name: str, n_trials: int) -> None:
    """Run as one of the processes that share a study."""
    X, y = load()
    search = make_search(n_trials, storage=open_storage(storage, folder), study_name=study_name)
    search.fit(X, y)


def n_complete(study: optuna.Study) -> int:
    """Count the trials that are finished."""
    return len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)))


def killed(storage: str, n_trials: int, every: float) -> list[Budget]:
    """Share a study between two processes and kill them in turn, one every few seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.costs.search"])
    n_killed, start = 0, time.perf_counter()
    study_name = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def begin() -> Any:
            worker = context.Process(target=work, args=(storage, folder, study_name, n_trials))
            worker.start()
            return worker

        study = optuna.create_study(study_name=study_name, storage=open_storage(storage, folder))
        n_finished = 0
        workers = [begin(), begin()]
        while True:
            turn = n_killed % 2
            workers[turn].join(every)
            if workers[turn].exitcode is None:
                if n_complete(study) == n_finished:
                    continue  # on a busy machine, nothing would ever be finished
                n_finished = n_complete(study)
                os.kill(workers[turn].pid, signal.SIGKILL)
                workers[turn].join()
                n_killed += 1
            elif workers[turn].exitcode == 0:
                break  # all trials are done or in the other process
            else:
                raise RuntimeError(f"a worker failed with exit code {workers[turn].exitcode}")
            workers[turn] = begin()
        for worker in workers:
            worker.join()
        trials = study.get_trials()
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    minima = Counter(trial.user_attrs["candidate"] for trial in complete)
    reasons = Counter(
        str(attributes_of(t)["reason"])[:200] for t in trials if "failed" in t.user_attrs
    )
    distinct = {tuple(sorted(trial.params.items())) for trial in complete}
    print(
        f"\n{kind_of(storage)}: {n_trials} trials by two processes, one killed every {every:g} s, "
        f"{n_killed} times; {time.perf_counter() - start:.0f} s\n"
        f"{dict(Counter(trial.state.name for trial in trials))}, {len(minima)} candidates "
        f"finished with {len(distinct)} different parameters; failed by themselves: {dict(reasons)}"
    )
    return [
        Budget(
            f"{kind_of(storage)}, distinct minima", min(len(minima), len(distinct)), n_trials, True
        ),
        Budget(f"{kind_of(storage)}, minima found twice", len(complete) - len(minima), 0),
    ]


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smoke run without verdict")
    parser.add_argument("--only", choices=["overhead", "killed"], help="one of the two parts")
    parser.add_argument(
        "--n-trials", type=int, help="trials of the search with killed processes (default: 200)"
    )
    parser.add_argument("--kill-every", type=float, help="seconds between two kills (default: 20)")
    parser.add_argument("--url", help="URL of a database, in place of the other storages")
    arguments = parser.parse_args()
    url = [arguments.url] if arguments.url else None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    print("A search over nets on digits")
    print(environment())
    budgets: list[Budget] = []
    if arguments.only != "killed":
        budgets += overhead(url or STORAGES, 2 if arguments.quick else 20)
    if arguments.only != "overhead":
        n_trials = arguments.n_trials or (6 if arguments.quick else 200)
        every = arguments.kill_every or (6 if arguments.quick else 20)
        for storage in url or ("sqlite", "journal"):
            budgets += killed(storage, n_trials, every)
    return verdict(budgets, judged=not arguments.quick)


if __name__ == "__main__":
    sys.exit(main())

"""Train the candidates of a search in worker processes, here or on a cluster."""

import socket
from collections.abc import Generator
from contextlib import closing
from functools import partial
from typing import Any

import joblib
import optuna
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.trial import FrozenTrial

from relflat_sk.fleet import fleet_size
from relflat_sk.search._optuna_internals import file_of
from relflat_sk.search._sharing.abandoned import give_up
from relflat_sk.search._sharing.claims import is_suspect
from relflat_sk.search._sharing.clusters import WorkersDiedError, find_cluster, results_of
from relflat_sk.search._sharing.transfer import unpacked
from relflat_sk.search._trial import CallError

__all__ = ["n_processes", "train_in_processes"]

Found = list[tuple[FrozenTrial, bytes | None]]


def n_processes(n_jobs: int | None) -> int:
    """Return the number of worker processes that train."""
    if n_jobs == 0:
        raise ValueError("n_jobs == 0 has no meaning: give a number of processes, or -1.")
    if n_jobs is None or n_jobs == 1:
        return 0
    cluster = find_cluster()
    if cluster is None:
        found = int(joblib.effective_n_jobs(n_jobs))
        return found if found > 1 else 0
    return n_jobs if n_jobs > 0 else cluster.n_workers()


def train_in_processes(study: optuna.Study, sweep: Any, n_jobs: int, on_finished: Any) -> None:
    """Train all candidates left in worker processes, because threads share torch's random state."""
    sweep.objective_to_send()  # refuses data that no other process can read
    while not sweep.is_due(study) and (n_left := sweep.n_left(study)):
        n_killed, death = sweep.n_killed(study), None
        n = min(fleet_size(sweep.fleet) or 1, -(-n_left // n_jobs))
        try:
            with closing(_results(study, sweep, -(-n_left // n), n, n_jobs)) as results:
                for found in results:
                    for trial, estimator in found:
                        on_finished(trial, unpacked(estimator))
        except (TerminatedWorkerError, WorkersDiedError) as error:
            death = error
        # no worker trains any more: what seems to be running was killed, on whichever machine
        trials = study.get_trials(deepcopy=False)
        give_up(study, sweep.owns, partial(_blame, trials=trials))
        if death is not None and sweep.n_killed(study) == n_killed:
            raise death


def _results(
    study: optuna.Study, sweep: Any, n_tasks: int, n: int, n_jobs: int
) -> Generator[Found, None, None]:
    """Yield what tasks of n candidates each have found, as soon as a task has ended."""
    cluster = find_cluster()
    if cluster is not None:
        cluster.send(_train_on_cluster, (sweep, study))
        yield from results_of(cluster, n_tasks, n, n_jobs)
        return
    tasks = (delayed(sweep.train_some_in_worker)(study, n) for _ in range(n_tasks))
    yield from Parallel(n_jobs=n_jobs, return_as="generator_unordered")(tasks)


def _train_on_cluster(sent: tuple[Any, optuna.Study], n: int) -> Found:
    """Train n candidates in a worker process that may be on another machine."""
    sweep, study = sent
    file = file_of(study)
    if file is not None and not file.exists():
        raise CallError(
            f"the study's file {file.absolute()} is not on worker {socket.gethostname()}. Give the "
            "search a storage that all workers reach: the URL of a database server, or a file "
            "ending in .log in a folder that all machines share."
        )
    found: Found = sweep.train_some_in_worker(study, n)
    return found


def _blame(trial: FrozenTrial, trials: list[FrozenTrial]) -> dict[str, Any]:
    """Return the attributes of a killed trial: its candidate is tried again once."""
    if not is_suspect(trial, trials):
        return {"killed": True}
    reason = "the process that trained was killed twice, perhaps for lack of memory"
    return {"killed": True, "reason": reason, "failed": True}

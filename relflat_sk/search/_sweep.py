"""Train the candidates of a search, in this process or in workers that know no storage.

If a worker dies, what was in training is trained again, each candidate alone, when no others are
left. A candidate that its worker dies of again is recorded as failed.
"""

import logging
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import joblib
import optuna
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend
from optuna.trial import FrozenTrial

from relflat_sk._checks import is_integer
from relflat_sk.fleet._fleet import Fleet, fleet_size
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._candidates import Candidate, Candidates
from relflat_sk.search._failures import StorageFailedError, blame_storage
from relflat_sk.search._fit import OnEpoch, isolated, nets_of
from relflat_sk.search._task import Task, Trained, train
from relflat_sk.training import RelativeFlatnessRegularizedNet

_LOG = logging.getLogger("relflat_sk")
_REPLACED = 120  # seconds in which a cluster is to replace workers that died
KILLED = "the process that trained was killed twice, perhaps for lack of memory"

Result = tuple[Candidate, Minimum, Trained | None]
OnFinished = Callable[[FrozenTrial, Trained | None], None]


def n_processes(n_jobs: int | None) -> int:
    """Return the number of worker processes that train; 0 if this process does."""
    if n_jobs is not None and not is_integer(n_jobs):
        raise TypeError(f"n_jobs must be an integer or None, got {n_jobs!r}.")
    n = 1 if n_jobs is None else int(joblib.effective_n_jobs(n_jobs))  # which refuses 0
    return n if n > 1 else 0


def sweep(
    candidates: Candidates, n_jobs: int, fleet: int | str | None, on_finished: OnFinished
) -> bool:
    """Train all candidates left; return whether Ctrl-C ended it."""
    task = candidates.recipe.task

    def tell(*result: Any) -> None:
        on_finished(candidates.tell(*result), result[-1])

    try:
        if n_jobs:
            _Workers(candidates, task, n_jobs, fleet, tell).train_all()
        else:
            _train_together(
                task, candidates, fleet, tell, lambda c: pruning(candidates.trials[c.number][0])
            )
    except StorageFailedError:
        raise  # nothing more can be written; who comes next finds that this process has moved on
    except BaseException as error:
        candidates.give_up()
        if not isinstance(error, KeyboardInterrupt):
            raise
        return True
    return False


def _train_together(
    task: Task,
    candidates: Iterator[Candidate],
    fleet: int | str | None,
    on_trained: Callable[[Candidate, Minimum, Trained | None], None],
    on_epoch: Callable[[Candidate], OnEpoch | None],
) -> None:
    """Train candidates until there is none left, several at a time if their nets can be stacked."""

    def train_next() -> bool:
        candidate = next(candidates, None)
        if candidate is None:
            return False
        if candidate.problem:
            on_trained(candidate, Minimum(failed=True, reason=candidate.problem), None)
        else:
            result = train(task, candidate.params, candidate.seed, on_epoch(candidate))
            on_trained(candidate, *result)
        return True

    size, nets = fleet_size(fleet), nets_of(task.estimator)
    if size is not None and any(isinstance(x, RelativeFlatnessRegularizedNet) for x in nets):
        with isolated(task.n_threads):
            Fleet(size, auto=fleet == "auto").run(train_next)
        return
    if size is not None:
        level = logging.INFO if fleet == "auto" else logging.WARNING
        kind = type(task.estimator).__name__
        _LOG.log(level, f"trained one by one: {kind} holds no net of relflat_sk")
    while train_next():
        pass


def pruning(trial: Any) -> OnEpoch | None:
    """Return what reports the epochs of a trial to the pruner of its study, if it has one."""
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1:
        return None
    if isinstance(study.pruner, optuna.pruners.NopPruner):
        return None

    def on_epoch(epoch: int, loss: float) -> bool:
        with blame_storage(study):
            trial.report(loss, epoch)
            return bool(trial.should_prune())

    return on_epoch


# -- processes -----------------------------------------------------------------------------------


def _train_in_worker(
    task: Task, X: Any, y: Any, X_test: Any, y_test: Any, candidates: list[Candidate], fleet: Any
) -> list[Result]:
    """Train candidates in a worker, which has the data from arguments: dask sends those once."""
    task = replace(task, X=X, y=y, X_test=X_test, y_test=y_test)
    results: list[Result] = []

    def keep(candidate: Candidate, minimum: Minimum, trained: Trained | None) -> None:
        minimum.error = None  # which perhaps cannot be pickled
        results.append((candidate, minimum, trained and trained.to_send()))

    _train_together(task, iter(candidates), fleet, keep, lambda candidate: None)
    return results


class _Workers:
    """Sends candidates to workers, and brings back what they have become."""

    def __init__(
        self,
        candidates: Candidates,
        task: Task,
        n_jobs: int,
        fleet: int | str | None,
        tell: Callable[..., None],
    ) -> None:
        self.candidates, self.n_jobs, self.fleet, self.tell = candidates, n_jobs, fleet, tell
        self.task = replace(task, X=None, y=None, X_test=None, y_test=None)
        self.data = task.X, task.y, task.X_test, task.y_test
        self.at_a_time = min(fleet_size(fleet) or 1, -(-len(candidates) // n_jobs)) or 1
        self.n_finished = 0
        self.in_training: dict[int, Candidate] = {}

    def train_all(self) -> None:
        """Train all candidates; what a worker died of last, and alone."""
        suspects: deque[Candidate] = deque()
        while True:
            n_before, death = self.n_finished, self._run(self.candidates, self.at_a_time)
            suspects.extend(self.in_training.values())
            if death is not None and not _are_workers_back(self.n_jobs):
                raise death
            if death is None or self.n_finished == n_before:
                while suspects:
                    self._try_alone(suspects.popleft())
            if death is None:
                return
            if self.n_finished == n_before:  # no candidate comes through, not even alone
                return

    def _try_alone(self, candidate: Candidate) -> None:
        """Train a candidate of which a worker may have died while nothing else trains."""
        death = self._run(iter([candidate]), 1)
        if death is not None:
            self.tell(candidate, Minimum(failed=True, reason=KILLED), None)
            if not _are_workers_back(self.n_jobs):
                raise death

    def _run(self, candidates: Iterator[Candidate], at_a_time: int) -> BaseException | None:
        """Train candidates until there are none left or a worker dies; return of what it died."""
        self.in_training.clear()
        try:
            with closing(self._results(self._chunks(candidates, at_a_time))) as results:
                for result in chain.from_iterable(results):
                    del self.in_training[result[0].number]
                    self.n_finished += 1
                    self.tell(*result)
        except _deaths() as death:
            return death
        return None

    def _chunks(self, candidates: Iterator[Candidate], n: int) -> Iterator[Any]:
        """Yield calls for n candidates each."""
        while chunk := list(islice(candidates, n)):
            self.in_training |= {candidate.number: candidate for candidate in chunk}
            yield delayed(_train_in_worker)(self.task, *self.data, chunk, self.fleet)

    def _results(self, calls: Iterator[Any]) -> Generator[list[Result], None, None]:
        """Yield what calls return as soon as they end, or in rounds if joblib's backend cannot."""
        backend, _ = get_active_backend()
        if not backend.supports_return_generator:  # multiprocessing, of which ray's is made
            while calls_of_round := list(islice(calls, self.n_jobs)):
                yield from Parallel(self.n_jobs)(calls_of_round)
            return
        parallel = Parallel(
            self.n_jobs, return_as="generator_unordered", pre_dispatch="n_jobs", batch_size=1
        )
        results = parallel(calls)
        try:
            for result in results:  # noqa: UP028  (`yield from` would close them, with a warning)
                yield result
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*tasks which", UserWarning)  # are given up
                results.close()


def _deaths() -> tuple[type[BaseException], ...]:
    """Return the errors by which backends of joblib say that a worker died."""
    scheduler = sys.modules.get("distributed.scheduler")
    of_dask = () if scheduler is None else (scheduler.KilledWorker,)
    return (BrokenProcessPool, CancelledError, *of_dask)


def _are_workers_back(n_jobs: int) -> bool:
    """Wait for the workers that replace dead ones; return whether there are several.

    With a single worker, joblib would call its functions in this process: a candidate that kills
    its process would kill the search.
    """
    backend, _ = get_active_backend()
    deadline = time.monotonic() + _REPLACED
    while backend.effective_n_jobs(n_jobs) < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

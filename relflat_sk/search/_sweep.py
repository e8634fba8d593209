"""The parent asks a study for candidates and tells it results; workers know no storage.

A trial that is running, but whose process is gone, was killed: its candidate is free. So is that
of a trial that failed without the attribute ``failed``: it was interrupted.

If a worker dies, what was in training is trained again, each candidate alone, when no others are
left. A candidate that its worker dies of again is recorded as failed.
"""

import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import optuna
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from relflat_sk._checks import check_kind, is_integer
from relflat_sk.fleet._fleet import Fleet, fleet_size
from relflat_sk.minima._table import Minimum
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._space import labels_of
from relflat_sk.search._storage import KEPT, CallError, StorageFailedError, blame_storage
from relflat_sk.search._task import STOPPED, OnEpoch, Task, Trained, isolated, nets_of, train
from relflat_sk.training import RelativeFlatnessRegularizedNet

_LOG = logging.getLogger("relflat_sk")
Point = Mapping[str, Any]

# -- the owner of a study ------------------------------------------------------------------------

OWNER = "owner"  # user attribute of a study and of a trial


def this_process() -> list[Any]:
    """Describe the calling thread, so that other processes can tell whether it still exists."""
    return [socket.gethostname(), os.getpid(), _start_time(os.getpid()), threading.get_ident()]


def _start_time(process_id: int) -> str | None:
    """Return when a process started, since ids are reused; None if unknown or a zombie."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else fields[18]


def _is_gone(owner: Sequence[Any] | None) -> bool:
    """Return whether a thread no longer exists, is the calling thread itself, or is not known."""
    if not owner:
        return True
    host, process_id, started, thread_id = owner
    if host != socket.gethostname():
        return False
    if started != _start_time(process_id):
        return True
    if process_id == os.getpid():
        alive = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
        return thread_id not in alive
    try:
        if os.name == "posix":  # it would end the process on Windows
            os.kill(process_id, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


@contextmanager
def owned(study: optuna.Study) -> Iterator[list[Any]]:
    """Own a study for a while, and free the trials whose process was killed.

    A study, or a running trial, of a process that is alive is refused.
    """
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    owners = [study.user_attrs.get(OWNER), *(trial.user_attrs.get(OWNER) for trial in running)]
    alive = next((owner for owner in owners if not _is_gone(owner)), None)
    if alive is not None:
        raise ValueError(
            f"study {study.study_name!r} belongs to process {alive[1]} on {alive[0]}. Wait until "
            "it ends; processes share a study by study.optimize(MinimaObjective(...)). If it is "
            f"gone, study.set_user_attr({OWNER!r}, None), and study.tell the running trials FAIL."
        )
    owner = this_process()
    study.set_user_attr(OWNER, owner)
    for trial in running:
        study.tell(trial.number, state=TrialState.FAIL)
    try:
        yield owner
    except StorageFailedError:  # nothing can be written, and who comes next finds no owner
        raise
    except BaseException:
        _release(study, owner)
        raise
    _release(study, owner)


def _release(study: optuna.Study, owner: list[Any]) -> None:
    with blame_storage(study):
        if study.user_attrs.get(OWNER) == owner:
            study.set_user_attr(OWNER, None)


# -- candidates ----------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """What a worker gets of a trial."""

    number: int
    params: dict[str, Any]
    seed: int
    problem: str  # why there are no parameters
    on_epoch: OnEpoch | None  # None for workers


class SearchStudy(optuna.Study):
    """A second object for a study, whose `stop` says that a search is to end.

    Callbacks and samplers call it outside of `Study.optimize`, where Optuna's own raises.
    """

    stopped = False

    def stop(self) -> None:
        """End the search after the candidates that are in training."""
        self.stopped = True


class _Fixed(RandomSampler):
    """Gives a trial the values of a point."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        self.point = point

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        if name in self.point:
            return self.point[name]
        return super().sample_independent(study, trial, name, distribution)


def _key(point: Point) -> frozenset[tuple[str, Any]]:
    """Return values in a form of which thousands are compared at once."""
    return frozenset(point.items())


def _is_interrupted(trial: FrozenTrial) -> bool:
    """Return whether a trial was interrupted or killed, so that its candidate is free."""
    return trial.state == TrialState.FAIL and not trial.user_attrs.get("failed")


def without_superseded(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """List finished trials, without those that were interrupted, or failed and were repeated."""
    finished = [t for t in trials if t.state.is_finished() and not _is_interrupted(t)]
    last = {_key(trial.params): trial.number for trial in finished if trial.params}
    return [
        trial
        for trial in finished
        if trial.state != TrialState.FAIL or last.get(_key(trial.params), -1) <= trial.number
    ]


@dataclass(eq=False)
class Candidates:
    """Asks a study for the candidates that are left, and tells it what became of them."""

    study: SearchStudy
    recipe: Recipe
    owner: list[Any]
    points: Sequence[Point] | None  # in this order, or None for draws
    n_trials: int
    sampler_of: Callable[[int], BaseSampler]  # of a draw, by its number
    retry_failed: bool
    deadline: float  # in seconds, as of time.time()
    keeps_trained: bool

    def __post_init__(self) -> None:
        self.sampler = self.study.sampler
        self.trials: dict[int, tuple[optuna.Trial, dict[str, Any]]] = {}  # in training
        self.trained = dict[int, Trained]()
        self._lock = threading.Lock()  # joblib asks for candidates in threads
        self._has_ended = False
        trials = self.study.get_trials(deepcopy=False)
        ended = [trial for trial in trials if trial.state.is_finished()]
        failed = [trial for trial in ended if trial.state == TrialState.FAIL]
        free = failed if self.retry_failed else list(filter(_is_interrupted, failed))
        self._taken = {_key(trial.params) for trial in ended if trial not in free}
        drawn = self.recipe.space.distributions().keys()
        again = {_key(t.params): t.params for t in free if t.params and drawn <= t.params.keys()}
        again = {key: point for key, point in again.items() if key not in self._taken}
        n_held = len(ended) - len(free) + len(again)
        n_left = max(self.n_trials - n_held, 0)
        n_enqueued = sum(trial.state == TrialState.WAITING for trial in trials)  # by a user
        left, n_draws = list[Point](), max(n_left - n_enqueued, 0)
        if self.points is not None:
            taken = self._taken | again.keys()
            left, n_draws = [point for point in self.points if _key(point) not in taken], 0
            left = left[:n_left] if self.n_trials < len(self.points) else left
        self.n_candidates = n_enqueued + len(left) + n_draws + len(again)
        self._samplers = chain(
            repeat(self.sampler, n_enqueued),  # which Optuna asks for first
            self._fixed(left),
            map(self.sampler_of, range(n_held, n_held + n_draws)),
            self._fixed(again.values()),  # the last: they may have killed a process
        )

    def _fixed(self, points: Iterable[Point]) -> Iterator[BaseSampler]:
        """Yield samplers of points, without those that a user enqueued."""
        return (_Fixed(point) for point in points if _key(point) not in self._taken)

    def __iter__(self) -> "Candidates":
        return self

    def __next__(self) -> Candidate:
        with self._lock:
            if self._has_ended or self.study.stopped or time.time() >= self.deadline:
                raise StopIteration
            sampler = next(self._samplers)
            with blame_storage(self.study):
                owner = self.study.user_attrs.get(OWNER)
                if owner != self.owner:
                    name = f"process {owner[1]} on {owner[0]}" if owner else "another program"
                    raise CallError(
                        f"{name} began to train study {self.study.study_name!r} at the same "
                        "moment. Fit again when it ends."
                    )
                return self._ask(sampler)

    def _ask(self, sampler: BaseSampler) -> Candidate:
        """Begin a trial, which has an owner from then on."""
        self.study.sampler = sampler
        try:
            trial = self.study.ask()
            trial.set_user_attr(OWNER, self.owner)
            params, problem = {}, ""
            try:
                params = self.recipe.space.suggest(trial)
            except ImportError as error:  # of a sampler, which lacks it for every candidate
                raise CallError(f"the sampler cannot draw: {error}.{KEPT}") from error
            except Exception as error:  # of a function of the user's
                problem = f"{type(error).__name__}: {error}"
        finally:
            self.study.sampler = self.sampler
        self._taken.add(_key(labels_of(trial)))
        self.trials[trial.number] = trial, params
        seed = self.recipe.seed_of(trial)
        return Candidate(trial.number, params, seed, problem, pruning(trial))

    def tell(self, candidate: Candidate, minimum: Minimum, trained: Trained | None) -> FrozenTrial:
        """Store what became of a candidate."""
        trial, params = self.trials[candidate.number]
        state = TrialState.PRUNED if minimum.reason == STOPPED else TrialState.COMPLETE
        state = TrialState.FAIL if minimum.failed else state
        values = minimum.values if state == TrialState.COMPLETE else None
        with blame_storage(self.study):
            self.recipe.record(trial, params, minimum, trained)
            told = self.study.tell(trial, values, state)
            del self.trials[candidate.number]
            if trained is not None and self.keeps_trained:
                self.trained[candidate.number] = trained
        return told

    def give_up(self) -> None:
        """Free the candidates that are in training, and ask for no others."""
        with self._lock:
            self._has_ended = True
        self.study.sampler = RandomSampler()  # which does not learn of the trials' end
        while self.trials:
            number, _ = self.trials.popitem()
            self.study.tell(number, state=TrialState.FAIL)


# -- training in this process --------------------------------------------------------------------

Result = tuple[Candidate, Minimum, Trained | None]
OnFinished = Callable[[FrozenTrial], None]
Tell = Callable[[Candidate, Minimum, Trained | None], None]


def n_processes(n_jobs: int | None) -> int:
    """Return the number of worker processes that train; 0 if this process does."""
    check_kind(n_jobs is None or is_integer(n_jobs), "n_jobs", n_jobs, "an integer or None")
    n = 1 if n_jobs is None else int(joblib.effective_n_jobs(n_jobs))  # which refuses 0
    return n if n > 1 else 0


def sweep(
    candidates: Candidates, n_jobs: int, fleet: int | str | None, on_finished: OnFinished
) -> bool:
    """Train all candidates left; return whether Ctrl-C ended it."""

    def tell(*result: Any) -> None:
        on_finished(candidates.tell(*result))

    try:
        if n_jobs:
            _Workers(candidates, n_jobs, fleet, tell).train_all()
        else:
            _train_together(candidates.recipe.task, candidates, fleet, tell)
    except StorageFailedError:
        raise  # nothing more can be written; who comes next finds that this process has moved on
    except BaseException as error:
        candidates.give_up()
        if not isinstance(error, KeyboardInterrupt):
            raise
        return True
    return False


def _train_together(
    task: Task, candidates: Iterator[Candidate], fleet: int | str | None, tell: Tell
) -> None:
    """Train candidates until there is none left, several at a time if their nets can be stacked."""

    def train_next() -> bool:
        candidate = next(candidates, None)
        if candidate is None:
            return False
        result: Any = Minimum(failed=True, reason=candidate.problem), None
        if not candidate.problem:
            result = train(task, candidate.params, candidate.seed, candidate.on_epoch)
        tell(candidate, *result)
        return True

    nets = nets_of(task.estimator)
    if fleet and any(isinstance(x, RelativeFlatnessRegularizedNet) for x in nets):
        with isolated(task.n_threads):
            Fleet(fleet_size(fleet), auto=fleet == "auto").run(train_next)
        return
    if fleet:
        level = logging.INFO if fleet == "auto" else logging.WARNING
        kind = type(task.estimator).__name__
        _LOG.log(level, f"trained one by one: {kind} holds no net of relflat_sk")
    while train_next():
        pass


def pruning(trial: Any) -> OnEpoch | None:
    """Return what reports the epochs of a trial to the pruner of its study, if it has one."""
    study = getattr(trial, "study", None)
    if study is None or len(study.directions) > 1 or isinstance(study.pruner, NopPruner):
        return None

    def on_epoch(epoch: int, loss: float) -> bool:
        with blame_storage(study):
            trial.report(loss, epoch)
            return bool(trial.should_prune())

    return on_epoch


# -- training in workers -------------------------------------------------------------------------

_REPLACED = 120  # seconds in which a cluster is to replace workers that died
KILLED = "the process that trained was killed twice, perhaps for lack of memory"


def _train_in_worker(
    task: Task, X: Any, y: Any, X_test: Any, y_test: Any, candidates: list[Candidate], fleet: Any
) -> list[Result]:
    """Train candidates in a worker, which has the data from arguments: dask sends those once."""
    results: list[Result] = []

    def keep(candidate: Candidate, minimum: Minimum, trained: Trained | None) -> None:
        minimum.error = None  # which perhaps cannot be pickled
        results.append((candidate, minimum, trained and trained.to_send()))

    task = replace(task, X=X, y=y, X_test=X_test, y_test=y_test)
    _train_together(task, iter(candidates), fleet, keep)
    return results


@dataclass(eq=False)
class _Workers:
    """Sends candidates to workers, and brings back what they have become."""

    candidates: Candidates
    n_jobs: int
    fleet: int | str | None
    tell: Tell

    def __post_init__(self) -> None:
        task = self.candidates.recipe.task
        self.task = replace(task, X=None, y=None, X_test=None, y_test=None)
        self.data = task.X, task.y, task.X_test, task.y_test
        size = fleet_size(self.fleet) if self.fleet else 1
        self.at_a_time = min(size, -(-self.candidates.n_candidates // self.n_jobs)) or 1
        self.n_finished = 0
        self.in_training: dict[int, Candidate] = {}

    def train_all(self) -> None:
        """Train all candidates; what a worker died of last, and alone."""
        suspects: list[Candidate] = []
        is_alive, n_before = False, -1
        while not is_alive and self.n_finished > n_before:  # else none comes through, even alone
            n_before = self.n_finished
            is_alive = self._run(self.candidates, self.at_a_time)
            suspects += self.in_training.values()
            if is_alive or self.n_finished == n_before:
                for candidate in suspects:
                    if not self._run(iter([candidate]), 1):
                        self.tell(candidate, Minimum(failed=True, reason=KILLED), None)
                suspects.clear()

    def _run(self, candidates: Iterator[Candidate], at_a_time: int) -> bool:
        """Train candidates until there are none left or a worker dies; return whether none died."""
        self.in_training.clear()
        try:
            with closing(self._results(self._chunks(candidates, at_a_time))) as results:
                for result in chain.from_iterable(results):
                    del self.in_training[result[0].number]
                    self.n_finished += 1
                    self.tell(*result)
        except _deaths():
            if not _are_workers_back(self.n_jobs):
                raise
            return False
        return True

    def _chunks(self, candidates: Iterator[Candidate], n: int) -> Iterator[Any]:
        """Yield calls for n candidates each."""
        while chunk := list(islice(candidates, n)):
            self.in_training |= {candidate.number: candidate for candidate in chunk}
            yield delayed(_train_in_worker)(self.task, *self.data, chunk, self.fleet)

    def _results(self, calls: Iterable[Any]) -> Generator[list[Result], None, None]:
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

"""Train the candidates of a search or study, in this process or in several."""

import copy
import logging
import os
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import count
from typing import Any

import joblib
import optuna
import torch
from joblib import Parallel, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from relflat_sk._checks import check_integer
from relflat_sk.fleet import Fleet, fleet_size
from relflat_sk.search._claims import (
    Plan,
    claim,
    end_with_parent,
    give_up,
    give_up_abandoned,
    is_cut_short,
    is_suspect,
)
from relflat_sk.search._clusters import WorkersDiedError, find_cluster, results_of
from relflat_sk.search._failures import CallError
from relflat_sk.search._fit import isolated
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._optuna_internals import (
    TELL_ERRORS,
    file_of,
    is_shared_by_threads,
    read_trial,
)
from relflat_sk.search._optuna_views import StoppableStudy
from relflat_sk.search._results import is_minimum
from relflat_sk.search._study import Stopping, log_level
from relflat_sk.search._transfer import ByPath, ByValue, packed, unpacked
from relflat_sk.training import RelativeFlatnessRegularizedNet


class Run:
    """The objective of `Study.optimize` for one trial, which holds the trained estimator."""

    def __init__(self, objective: MinimaObjective) -> None:
        self.objective = objective
        self.estimator: Any = None
        self.call_error: CallError | None = None

    def __call__(self, trial: optuna.Trial) -> Sequence[float]:
        """Train and measure a candidate."""
        try:
            found, self.estimator = self.objective.run(trial)
        except CallError as error:
            self.call_error = error
            raise
        values = found if isinstance(found, tuple) else (found,)
        # with one direction, the first measure alone, so that any sampler and pruner works
        return values[: len(trial.study.directions)]


# What a progress bar says of a search: the flattest minimum, goals reached, failures.


class Progress:
    """Counts of the candidates that are finished."""

    def __init__(self, trials: Iterable[FrozenTrial]) -> None:
        self.counts: Counter[str] = Counter()
        self.best: tuple[float, int] | None = None
        for trial in trials:
            if trial.state == TrialState.COMPLETE or "failed" in trial.user_attrs:
                self.add(trial)

    def add(self, trial: FrozenTrial) -> None:
        """Count a trial."""
        if is_minimum(trial):
            self.counts["plateau" if trial.user_attrs.get("ended_by") == "plateau" else "goal"] += 1
            found = (trial.values[0], trial.number)
            self.best = found if self.best is None else min(self.best, found)
        else:
            self.counts["open" if trial.state == TrialState.COMPLETE else "failed"] += 1

    def __str__(self) -> str:
        n = self.counts
        best = "no minimum yet"
        if self.best is not None:
            best = f"flattest {self.best[0]:.4g} (trial {self.best[1]})"
        return (
            f"{best}, goal reached {n['goal']}, plateau {n['plateau']}, "
            f"not converged {n['open']}, failed {n['failed']}"
        )


# Train the candidates of a search in worker processes, here or on a cluster.

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


# Train the candidates of a process together, as far as their nets can be stacked.

_LOG = logging.getLogger("relflat_sk")


def train_together(
    train: Callable[[], bool],
    study: optuna.Study,
    estimator: Any,
    fleet: int | str | None,
    n_threads: int | None,
) -> None:
    """Train candidates until there is none left, several at a time."""
    size = fleet_size(fleet)
    reason = None if size is None else _why_not(study, estimator)
    if size is None or reason is not None:
        if reason is not None:
            _LOG.log(logging.INFO if fleet == "auto" else logging.WARNING, reason)
        while train():
            pass
        return
    with isolated(n_threads):
        Fleet(size, auto=fleet == "auto").run(train)


def _why_not(study: optuna.Study, estimator: Any) -> str | None:
    """Return why candidates are trained one by one, before any is trained."""
    parts = [estimator, *estimator.get_params().values()]
    if not any(isinstance(part, RelativeFlatnessRegularizedNet) for part in parts):
        return f"trained one by one: {type(estimator).__name__} holds no net of relflat_sk"
    if not is_shared_by_threads(study):
        return "trained one by one: an SQLite database in memory has one thread"
    return None


# Train the candidates of a search, in this process or in several worker processes.

OnFinished = Callable[[FrozenTrial, Any], None]


class Sweep:
    """One call of `FlatMinimaSearch.fit`: claims candidates and trains them.

    Worker processes hold copies of it, which share its name.
    """

    def __init__(
        self,
        objective: MinimaObjective,
        plan: Plan,
        quiet: bool,
        fleet: int | str | None = None,
        stopping: Stopping | None = None,
    ) -> None:
        self.fleet = fleet
        self.stopping = stopping or Stopping()
        self.objective = objective
        self.plan = plan
        self.quiet = quiet
        self.name = uuid.uuid4().hex
        self.process_id = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"objective": self.objective_to_send()}

    def objective_to_send(self) -> MinimaObjective:
        """Return the objective in the form in which other processes get it."""
        objective = copy.copy(self.objective)
        for name in ("estimator", "space"):
            setattr(objective, name, ByValue(getattr(objective, name)))
        # joblib maps large arrays into the memory of all workers, and so does ray
        for name in ("X", "y", "X_test", "y_test"):
            setattr(objective, name, ByPath.wrap(getattr(objective, name)))
        return objective

    def n_left(self, study: optuna.Study) -> int:
        """Count the candidates left, while no process of this sweep trains."""
        return self.plan.n_left(give_up_abandoned(study))

    def n_killed(self, study: optuna.Study) -> int:
        """Count the trials of this sweep whose process died."""
        trials = study.get_trials(deepcopy=False)
        return sum("killed" in trial.user_attrs and self.owns(trial) for trial in trials)

    def n_open(self, study: optuna.Study) -> int:
        """Count the candidates left and those that this sweep is training."""
        trials = study.get_trials(deepcopy=False)
        running = sum(trial.state == TrialState.RUNNING and self.owns(trial) for trial in trials)
        return self.plan.n_left(trials) + running

    def owns(self, trial: FrozenTrial) -> bool:
        """Return whether a trial belongs to this sweep."""
        return bool(trial.user_attrs.get("sweep") == self.name)

    def is_due(self, study: optuna.Study) -> bool:
        """Return whether the sweep is to end, although there are candidates left."""
        return self.stopping.is_due(study, self.name)

    def train_one(self, study: optuna.Study, on_finished: OnFinished) -> bool:
        """Claim a candidate and train it in this process."""
        claimed = None if self.is_due(study) else claim(study, self.plan, self.name)
        if claimed is None:
            return False
        run = Run(self.objective)
        try:
            claimed.optimize(
                run,
                n_trials=1,
                catch=(Exception,),
                callbacks=[lambda _, trial: on_finished(trial, run.estimator)],
            )
        except TELL_ERRORS:
            # Another process took this one for dead (its machine slept, say) and gave the trial
            # up. The candidate is trained again, and this result is dropped.
            if not is_cut_short(read_trial(study, claimed.trial_id)):
                raise
        if run.call_error is not None:
            raise run.call_error
        if run.estimator is None:
            torch.cuda.empty_cache()  # the next candidate may fit, if this one ran out of memory
        return not claimed.stopped

    def train_left(
        self, study: optuna.Study, on_finished: OnFinished, at_most: int | None = None
    ) -> None:
        """Train the candidates left in this process."""
        numbers = count() if at_most is None else iter(range(at_most))

        def train() -> bool:
            return next(numbers, None) is not None and self.train_one(study, on_finished)

        objective = self.objective
        train_together(train, study, objective.estimator, self.fleet, objective.n_threads)

    def train_some_in_worker(
        self, study: optuna.Study, n: int
    ) -> list[tuple[FrozenTrial, bytes | None]]:
        """Claim candidates and train them in a worker process."""
        end_with_parent(self.process_id)
        found: list[tuple[FrozenTrial, Any]] = []
        study.sampler.reseed_rng()  # otherwise every worker would draw the same values
        with log_level(self.quiet):
            self.train_left(study, lambda *result: found.append(result), n)
        return [(trial, packed(estimator)) for trial, estimator in found]


def train_all(
    study: optuna.Study, sweep: Sweep, n_jobs: int, on_finished: OnFinished, *, progress: bool
) -> bool:
    """Train all candidates left."""
    so_far = Progress(study.get_trials(deepcopy=False) if progress else ())
    with tqdm(total=sweep.n_open(study), desc="minima", unit="net", disable=not progress) as bar:

        def show(trial: FrozenTrial, estimator: Any) -> None:
            # other searches may train candidates of the same study, or give them up
            if progress:
                bar.total = bar.n + 1 + sweep.n_open(study)
            so_far.add(trial)
            bar.set_postfix_str(str(so_far), refresh=False)
            bar.update()
            on_finished(trial, estimator)
            sweep.stopping.call(study, trial, sweep.name)

        try:
            if n_jobs:
                train_in_processes(study, sweep, n_jobs, show)
            else:
                sweep.train_left(study, show)
        except KeyboardInterrupt:
            give_up(study, sweep.owns)  # the trials that were running
            return True
        except Exception:
            with suppress(Exception):  # the storage may be what failed
                give_up(study, sweep.owns)
            raise
    return False


# Optimize a study of one's own, and train the nets of several trials together.


def optimize_study(
    study: optuna.Study,
    objective: MinimaObjective,
    n_trials: int | None = None,
    *,
    timeout: float | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Any = None,
    fleet: int | str | None = "auto",
) -> None:
    """Add trials to a study as `optuna.Study.optimize` does, and train their nets together.

    Several trials are in training at a time, in turns and in this process. Their nets take their
    steps as one stacked model, see `FleetTrainer`. The study gets the trials, attributes and
    weights that ``study.optimize(objective)`` gives it, up to rounding.

    Parameters
    ----------
    study : optuna.Study
        The study.
    objective : MinimaObjective
        Trains and measures one candidate per trial.
    n_trials : int, optional
        Number of trials to add. If None, trials are added until the sampler, a callback, `timeout`
        or Ctrl-C ends it.
    timeout : float, optional
        Seconds after which no trial begins; those in training are finished.
    catch : tuple of Exception types, default=()
        Exceptions of candidates that fail their trial only. After any other, the trials that are
        in training fail as well, and the exception is raised.
    callbacks : list of callable, optional
        Functions of the study and of a finished trial. In them, ``study.stop()`` ends it after the
        trials in training; the study that they get is a view of yours.
    fleet : int, "auto" or None, default="auto"
        Number of trials at a time, see `FlatMinimaSearch`; None for one after the other. A sampler
        that learns from results knows fewer of them.

    Raises
    ------
    TypeError
        If `objective` is no `MinimaObjective`, or `callbacks` is no list of functions.
    ValueError
        If a number is not valid, or the study's minima were made with something else.

    See Also
    --------
    FlatMinimaSearch : Makes such a study of its own.
    fleet_training : Trains nets together that scikit-learn or your own functions fit.

    Examples
    --------
    >>> import optuna
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import MinimaObjective, RelativeFlatnessRegularizedClassifier
    >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(max_epochs=50, lr=0.03, verbose=0)
    >>> objective = MinimaObjective(net, X, y, {"batch_size": [16, 32]}, goal=0.2, random_state=0)
    >>> study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    >>> optimize_study(study, objective, n_trials=4)
    >>> [trial.user_attrs["converged"] for trial in study.trials]
    [True, True, True, True]
    """
    if not isinstance(objective, MinimaObjective):
        raise TypeError(
            f"objective must be a MinimaObjective, got a {type(objective).__name__}. Functions of "
            "your own that fit nets can run inside of fleet_training(), by joblib.Parallel."
        )
    check_integer("n_trials", n_trials, minimum=1, optional=True)
    stopping = Stopping(timeout, callbacks)
    caught = catch if isinstance(catch, type) else tuple(catch)
    view, begun = StoppableStudy(study), set[int]()
    numbers = count() if n_trials is None else iter(range(n_trials))

    def run(trial: optuna.Trial) -> Any:
        begun.add(trial.number)
        return objective(trial)

    def train() -> bool:
        if view.stopped or stopping.is_due(study, "") or next(numbers, None) is None:
            return False
        view.optimize(run, n_trials=1, catch=caught, callbacks=list(stopping.callbacks))
        return True

    try:
        train_together(train, study, objective.estimator, fleet, objective.n_threads)
    except BaseException:  # Optuna has noted the end of trials that raise, not that of the others
        give_up(study, lambda trial: trial.number in begun)
        raise

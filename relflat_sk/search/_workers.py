"""Train the candidates of a search or study, in this process or in several."""

import copy
import io
import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from itertools import count
from math import isnan
from pathlib import Path
from typing import Any

import cloudpickle
import joblib
import numpy as np
import optuna
import torch
from joblib import Parallel, delayed
from joblib.parallel import get_active_backend
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, TrialState
from skorch import NeuralNet
from torch import Tensor
from tqdm import tqdm

from relflat_sk._checks import check_integer, check_number, is_integer
from relflat_sk._network.batches import mapped_file
from relflat_sk.fleet._fleet import Fleet, fleet_size
from relflat_sk.minima._table import attributes_of
from relflat_sk.search._claims import Plan, claim, give_up, give_up_abandoned, id_of
from relflat_sk.search._failures import CallError
from relflat_sk.search._fit import isolated, nets_of
from relflat_sk.search._goal import EQUAL_LOSS
from relflat_sk.search._objective import MinimaObjective
from relflat_sk.search._results import is_minimum
from relflat_sk.search._study import SearchStudy, log_level
from relflat_sk.training import RelativeFlatnessRegularizedNet

_LOG = logging.getLogger("relflat_sk")
# seconds in which a cluster is to replace workers that died
_REPLACED = 120

# attributes of the trials whose process was killed while others trained, and alone
_SUSPECTED: dict[str, Any] = {"killed": True}
_BLAMED: dict[str, Any] = _SUSPECTED | {
    "reason": "the process that trained was killed twice, perhaps for lack of memory",
    "failed": True,
}

Callback = Callable[[optuna.Study, FrozenTrial], Any]
OnFinished = Callable[[FrozenTrial, Any], None]
Found = list[tuple[FrozenTrial, bytes | None]]


def deadline_after(timeout: float | None) -> float | None:
    """Return the time after which no candidate begins, by the clock that all processes share."""
    check_number("timeout", timeout, optional=True)
    return None if timeout is None else time.time() + timeout


def check_callbacks(callbacks: Any) -> list[Callback]:
    """Refuse what are no functions of a study and a trial."""
    found = [] if callbacks is None else callbacks
    if not isinstance(found, list | tuple) or not all(map(callable, found)):
        raise TypeError(
            "callbacks must be a list of functions of a study and a trial, as in "
            f"Study.optimize, got {callbacks!r}."
        )
    return list(found)


def is_due(study: SearchStudy, deadline: float | None) -> bool:
    """Return whether no candidate is to begin, although there are candidates left."""
    return (deadline is not None and time.time() >= deadline) or study.is_stopped()


@dataclass
class Sweep:
    """One call of `FlatMinimaSearch.fit`: claims candidates and trains them.

    Worker processes hold copies of it.
    """

    study: SearchStudy
    storage: BaseStorage
    objective: MinimaObjective
    plan: Plan
    quiet: bool = True
    fleet: int | str | None = None
    deadline: float | None = None
    callbacks: Sequence[Callback] = ()
    file: Path | None = None  # of the study, which all workers must reach
    suspects: bool = True  # whether candidates are tried that a process died of
    process_id: int = field(default_factory=os.getpid)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"objective": self.objective_to_send(), "callbacks": ()}

    def __sizeof__(self) -> int:
        # joblib sends what seems large to dask once, not with each task
        return 10**6

    def objective_to_send(self) -> MinimaObjective:
        """Return the objective in the form in which other processes get it."""
        objective = copy.copy(self.objective)
        for name in ("estimator", "space"):
            setattr(objective, name, ByValue(getattr(objective, name)))
        # joblib maps large arrays into the memory of all workers
        for name in ("X", "y", "X_test", "y_test"):
            setattr(objective, name, ByPath.wrap(getattr(objective, name)))
        return objective

    def n_open(self) -> int:
        """Count the candidates left and those that this sweep is training."""
        trials = self.study.get_trials(deepcopy=False)
        running = sum(trial.state == TrialState.RUNNING and self.owns(trial) for trial in trials)
        return len(self.plan.left(trials)) + running

    def owns(self, trial: FrozenTrial) -> bool:
        """Return whether a trial belongs to this sweep."""
        return bool(trial.user_attrs.get("sweep") == self.study.sweep)

    def train_one(self, on_finished: OnFinished) -> bool:
        """Claim a candidate and train it in this process; return whether there was one."""
        if is_due(self.study, self.deadline):
            return False
        trial = claim(self.study, self.plan, self.study.sweep, suspects=self.suspects)
        if trial is None:
            return False
        # Another process may take this one for dead (its machine slept, say) and give the trial
        # up. The candidate is trained again, and this result is dropped.
        with suppress(UpdateFinishedTrialError):
            state, values, estimator = self._run(trial)
            told = self.study.tell(trial, values, state, skip_if_finished=True)
            if told.state == state:
                _log(told)
                on_finished(told, estimator)
            if estimator is None:
                torch.cuda.empty_cache()  # the next candidate may fit, if this one needed too much
        return True

    def _run(self, trial: optuna.Trial) -> tuple[TrialState, Sequence[float] | None, Any]:
        """Train and measure the candidate of a trial."""
        try:
            with _heartbeat(self.storage, trial):
                found, estimator = self.objective._run(trial)
        except (CallError, UpdateFinishedTrialError):
            raise
        except optuna.TrialPruned:
            return TrialState.PRUNED, None, None
        except Exception:  # which the trial has recorded
            return TrialState.FAIL, None, None
        values = found if isinstance(found, tuple) else (found,)
        if any(map(isnan, values)):
            return TrialState.FAIL, None, estimator
        return TrialState.COMPLETE, values, estimator

    def train_left(self, on_finished: OnFinished, at_most: int | None = None) -> None:
        """Train the candidates left in this process."""
        train_together(lambda: self.train_one(on_finished), self.objective, self.fleet, at_most)


@contextmanager
def _heartbeat(storage: BaseStorage, trial: optuna.Trial) -> Iterator[None]:
    """Tell the storage regularly that a trial is alive, if the storage has a heartbeat."""
    if not isinstance(storage, RDBStorage) or storage.get_heartbeat_interval() is None:
        yield
        return
    ended = threading.Event()

    def beat() -> None:
        while True:
            with suppress(Exception):  # the next one may succeed
                storage.record_heartbeat(id_of(trial))
            if ended.wait(storage.get_heartbeat_interval()):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _log(trial: FrozenTrial) -> None:
    """Say in Optuna's log how a trial ended, as `Study.optimize` does."""
    level = logging.WARNING
    text = f"ended as {trial.state.name}: {attributes_of(trial).get('reason', '')}"
    if trial.state == TrialState.COMPLETE:
        level = logging.INFO
        text = f"finished with values: {trial.values} and parameters: {trial.params}."
    optuna.logging.get_logger("optuna.study").log(level, f"Trial {trial.number} {text}")


def train_together(
    train: Callable[[], bool],
    objective: MinimaObjective,
    fleet: int | str | None,
    at_most: int | None,
) -> None:
    """Train candidates until there is none left, several at a time if their nets can be stacked."""
    numbers = count() if at_most is None else iter(range(at_most))

    def train_next() -> bool:
        return next(numbers, None) is not None and train()

    size, nets = fleet_size(fleet), nets_of(objective.estimator)
    if size is not None and any(isinstance(x, RelativeFlatnessRegularizedNet) for x in nets):
        with isolated(objective.n_threads):
            Fleet(size, auto=fleet == "auto").run(train_next)
        return
    if size is not None:
        level = logging.INFO if fleet == "auto" else logging.WARNING
        kind = type(objective.estimator).__name__
        _LOG.log(level, f"trained one by one: {kind} holds no net of relflat_sk")
    while train_next():
        pass


# -- processes -----------------------------------------------------------------------------------


def n_processes(n_jobs: int | None) -> int:
    """Return the number of worker processes that train; 0 if this process does."""
    if n_jobs is not None and not is_integer(n_jobs):
        raise TypeError(f"n_jobs must be an integer or None, got {n_jobs!r}.")
    found = 1 if n_jobs is None else int(joblib.effective_n_jobs(n_jobs))  # which refuses 0
    return found if found > 1 else 0


def train_in_processes(sweep: Sweep, n_jobs: int, on_finished: OnFinished) -> None:
    """Train all candidates left in worker processes, because threads share torch's random state.

    If a worker dies, the candidates that were in training are tried once more, one at a time and
    after all others, so that another death can only be the candidate's own.
    """
    sweep.objective_to_send()  # refuses data that no other process can read
    while not is_due(sweep.study, sweep.deadline):
        fresh, suspects = sweep.plan.split(give_up_abandoned(sweep.study))
        if not (fresh or suspects):
            return
        sweep.suspects = not fresh
        n_left = len(fresh) or 1
        n = min(fleet_size(sweep.fleet) or 1, -(-n_left // n_jobs))
        death, progress_made = None, False
        try:
            with closing(_results(sweep, -(-n_left // n), n, n_jobs)) as results:
                for found in results:
                    progress_made = True
                    for trial, content in found:
                        on_finished(trial, None if content is None else cloudpickle.loads(content))
        except (BrokenProcessPool, CancelledError) as error:  # CancelledError: of dask
            death = error
        # no worker trains any more: what seems to be running was killed, on whichever machine
        killed = give_up(sweep.study, sweep.owns, **(_BLAMED if sweep.suspects else _SUSPECTED))
        # a worker may also die between two candidates, but not again and again before the first
        if death is not None and not ((killed or progress_made) and _are_workers_back(n_jobs)):
            raise death


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


def _results(sweep: Sweep, n_tasks: int, n: int, n_jobs: int) -> Generator[Found, None, None]:
    """Yield what tasks of n candidates each have found, as soon as joblib's backend can."""
    backend, _ = get_active_backend()
    in_turn = backend.supports_return_generator
    at_once = n_tasks if in_turn else 4 * n_jobs  # ray's backend returns all results together
    parallel = Parallel(n_jobs, return_as="generator_unordered" if in_turn else "list")
    for first in range(0, n_tasks, at_once):
        numbers = range(first, min(first + at_once, n_tasks))
        yield from parallel(delayed(_train_in_worker)(sweep, n) for _ in numbers)


def _train_in_worker(sweep: Sweep, n: int) -> Found:
    """Claim n candidates and train them in a worker process, which may be on another machine."""
    if sweep.file is not None and not sweep.file.exists():
        raise CallError(
            f"the study's file {sweep.file.absolute()} is not on worker {socket.gethostname()}. "
            "Give the search a storage that all workers reach: the URL of a database server, or a "
            "file ending in .log in a folder that all machines share."
        )
    _end_with_parent(sweep.process_id)
    found: list[tuple[FrozenTrial, Any]] = []
    sweep.study.sampler.reseed_rng()  # one of the user would draw the same in every worker
    with log_level(sweep.quiet):
        sweep.train_left(lambda *result: found.append(result), n)
    return [(trial, packed(estimator)) for trial, estimator in found]


@cache  # one thread is enough
def _end_with_parent(process_id: int) -> None:
    """Let the calling process end soon after its parent, if that is the search's process.

    A process that is killed cannot end its workers. Without their parent, they would train their
    candidates to the end, for nobody. (On Windows, they still do.)
    """

    def watch() -> None:
        while os.getppid() == process_id:
            time.sleep(1)
        os._exit(1)

    if os.getppid() == process_id:
        threading.Thread(target=watch, daemon=True).start()


# -- a whole search ------------------------------------------------------------------------------


def progress(trials: Iterable[FrozenTrial]) -> str:
    """Count the candidates that are finished, and name the flattest."""
    n: Counter[str] = Counter()
    minima = []
    for trial in trials:
        if is_minimum(trial):
            minima.append((trial.values[0], trial.number))
            ended_by = attributes_of(trial).get("ended_by")
            n[ended_by if ended_by in {"plateau", EQUAL_LOSS} else "goal"] += 1
        elif trial.state == TrialState.COMPLETE or "failed" in trial.user_attrs:
            n["open" if trial.state == TrialState.COMPLETE else "failed"] += 1
    best = "flattest {:.4g} (trial {})".format(*min(minima)) if minima else "no minimum yet"
    return (
        f"{best}, goal reached {n['goal']}, plateau {n['plateau']}, "
        + f"{EQUAL_LOSS} {n[EQUAL_LOSS]}, " * bool(n[EQUAL_LOSS])
        + f"not converged {n['open']}, failed {n['failed']}"
    )


def train_all(sweep: Sweep, n_jobs: int, on_finished: OnFinished, *, shown: bool) -> bool:
    """Train all candidates left; return whether Ctrl-C ended it."""
    with tqdm(total=sweep.n_open(), desc="minima", unit="net", disable=not shown) as bar:

        def keep(trial: FrozenTrial, estimator: Any) -> None:
            # other searches may train candidates of the same study, or give them up
            if shown:
                bar.total = bar.n + 1 + sweep.n_open()
                bar.set_postfix_str(progress(sweep.study.get_trials(deepcopy=False)), refresh=False)
            bar.update()
            on_finished(trial, estimator)
            for callback in sweep.callbacks:
                callback(sweep.study, trial)

        try:
            if n_jobs:
                train_in_processes(sweep, n_jobs, keep)
            else:
                sweep.train_left(keep)
        except BaseException as error:
            with suppress(Exception):  # the storage may be what failed
                give_up(sweep.study, sweep.owns)
            if not isinstance(error, KeyboardInterrupt):
                raise
            return True
    return False


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
    weights that ``study.optimize(objective)`` gives it, up to rounding and to what its pruner
    stops, see `fleet`.

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
        that learns from results knows fewer of them, and so does a pruner that compares with
        finished trials, as Optuna's default does: it stops fewer nets, and later, some at
        their last epoch. A study with ``pruner=NopPruner()`` keeps all.

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
    deadline, after = deadline_after(timeout), check_callbacks(callbacks)
    caught = catch if isinstance(catch, type) else tuple(catch)
    view, begun = SearchStudy(study), set[int]()

    def run(trial: optuna.Trial) -> Any:
        begun.add(trial.number)
        return objective(trial)

    def train() -> bool:
        if is_due(view, deadline):
            return False
        view.optimize(run, n_trials=1, catch=caught, callbacks=after)
        return True

    try:
        train_together(train, objective, fleet, n_trials)
    except BaseException:  # Optuna has noted the end of trials that raise, not that of the others
        give_up(study, lambda trial: trial.number in begun)
        raise


# -- sending values to other processes, also with classes of a script or a notebook --------------


class ByValue:
    """A value whose classes and functions are pickled by their code.

    Unpickled, it is the value itself.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return cloudpickle.loads, (_dumps(self.value),)


class ByPath:
    """An array in a file, which other processes open by its path.

    Unpickled, it is the array, read-only.
    """

    def __init__(self, open_file: Callable[..., Any], *arguments: Any) -> None:
        self.open_file, self.arguments = open_file, arguments

    def __reduce__(self) -> Any:
        return self.open_file, self.arguments

    @classmethod
    def wrap(cls, value: Any) -> Any:
        """Return a value to pickle in place of another."""
        h5py = sys.modules.get("h5py")
        if h5py is not None and isinstance(value, h5py.Dataset):
            return cls(_open_hdf5, *_place_in_hdf5(value))
        mapped = mapped_file(value)
        if mapped is None or mapped.mode == "c" or not (mapped.filename and value.flags.forc):
            return value
        whole = mapped  # parts have the offset of the whole
        while isinstance(whole.base, np.memmap):
            whole = whole.base
        offset = whole.offset + value.ctypes.data - whole.ctypes.data
        order = "C" if value.flags.c_contiguous else "F"
        return cls(np.memmap, mapped.filename, value.dtype, "r", offset, value.shape, order)


def _place_in_hdf5(rows: Any) -> tuple[Path, str]:
    """Return the file of a data set of h5py, and its name there."""
    file = Path(rows.file.filename).absolute()
    if rows.file.mode != "r" or not file.exists():
        raise ValueError(
            "worker processes read rows of h5py from their file, which must be on disk and open "
            f"for reading: h5py.File(path, 'r'). Got {rows.file}."
        )
    return file, rows.name


def _open_hdf5(file: Path, name: str) -> Any:
    return import_module("h5py").File(file, "r")[name]  # the user's library


def packed(value: Any) -> bytes | None:
    """Pickle a value now, so that nothing can fail on its way to another process."""
    try:
        return _dumps(value)
    except Exception:  # pickling runs code of any class
        return None


def _dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles by cloudpickle what skorch nets pickle by Python's pickle: their torch parts."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, NeuralNet):
            # what the net pickles itself, and apart from it its torch parts
            prefixes = tuple(obj.cuda_dependent_attributes_)
            parts = {name: one for name, one in vars(obj).items() if name.startswith(prefixes)}
            without = object.__new__(type(obj))
            vars(without).update({name: x for name, x in vars(obj).items() if name not in parts})
            return _make_net, (type(obj), without.__getstate__(), parts)
        if type(obj) is Tensor and obj.is_cuda:
            return _on_device, (obj.detach().cpu(), obj.device.type)
        return super().reducer_override(obj)


def _make_net(kind: type, state: Any, parts: dict[str, Any]) -> Any:
    net: Any = object.__new__(kind)
    net.__setstate__(state)
    vars(net).update(parts)
    return net


def _on_device(tensor: Tensor, device: str) -> Tensor:
    """Return a tensor on its device, if this machine has it."""
    return tensor.to(device) if torch.cuda.is_available() else tensor

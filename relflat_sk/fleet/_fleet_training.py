"""Train the nets that scikit-learn fits, in cross-validation or a grid search, together."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from joblib import parallel_config
from joblib.parallel import FallbackToBackend, ParallelBackendBase, SequentialBackend

from relflat_sk.fleet._fleet import Fleet, fleet_size


@contextmanager
def fleet_training(fleet: int | str = "auto") -> Iterator[None]:
    """Train nets together that scikit-learn fits inside the context, as one stacked model.

    `GridSearchCV`, `cross_validate`, `learning_curve`, `BaggingClassifier`, and all else that fits
    its estimators by `joblib.Parallel`, leave the order of the fits open. Inside the context, they
    run in turns in this process, and the nets in them take their steps together, see
    `FleetTrainer`. Scores and fitted nets are those of one fit after the other, up to rounding.

    Parameters
    ----------
    fleet : int or "auto", default="auto"
        Number of fits at a time, as in `FleetTrainer`. It replaces `n_jobs`.

    Yields
    ------
    None
        joblib uses these fits in turns in place of its processes.

    Raises
    ------
    ValueError
        If `fleet` is not valid.

    See Also
    --------
    FleetTrainer : Fits a list of nets.
    FlatMinimaSearch : Has a `fleet` of its own.

    Notes
    -----
    Estimators other than the nets of relflat_sk are fitted as usual, one after the other. Times of
    fits, such as `mean_fit_time`, include the time of others. Parallel fits inside of fits, such
    as a grid search in `cross_validate`, run one after the other in each of the outer fits. Nets
    without a `random_state` have other seeds than outside.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from sklearn.model_selection import GridSearchCV
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(verbose=0, random_state=0)
    >>> search = GridSearchCV(net, {"lr": [0.003, 0.01, 0.03]}, cv=5)
    >>> with fleet_training():  # 15 nets at a time
    ...     search = search.fit(X, y)
    >>> bool(search.best_score_ > 0.9)
    True
    """
    size = fleet_size(fleet)
    if size is None:
        raise ValueError("fleet must be a positive integer or 'auto', got None.")
    with parallel_config(backend=_InTurns(size, auto=fleet == "auto"), n_jobs=size):
        yield


class _InTurns(ParallelBackendBase):
    """A backend of joblib that runs functions in turns, and trains the nets in them together."""

    uses_threads = True
    supports_sharedmem = True
    supports_timeout = False

    def __init__(self, size: int, *, auto: bool) -> None:
        super().__init__(nesting_level=0)
        self.size = size
        self.auto = auto
        # what joblib has submitted: the function's result to be, the function and its callback
        self._queue: deque[tuple[Future[Any], Callable[[], Any], Any]] = deque()
        self._ended: list[tuple[Future[Any], Any]] = []
        self._fleet: Fleet | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of functions at a time, whatever the caller asks for."""
        return self.size

    def configure(self, n_jobs: int = 1, parallel: Any = None, **kwargs: Any) -> int:
        """Begin a call of joblib; one that begins inside of another runs in order."""
        if self._fleet is not None:
            raise FallbackToBackend(SequentialBackend(nesting_level=1))
        self._fleet = Fleet(self.size, auto=self.auto)
        return self.effective_n_jobs(n_jobs)

    def submit(self, func: Callable[[], Any], callback: Any) -> Future[Any]:
        """Queue a function."""
        result: Future[Any] = Future()
        self._queue.append((result, func, callback))
        return result

    def retrieve_result(self, out: Future[Any], timeout: float | None = None) -> Any:
        """Run functions until one of them has ended, and return its result."""
        assert self._fleet is not None
        self._fleet.run(self._run_next, lambda: self._note_ended(out))
        return out.result()

    def _run_next(self) -> bool:
        """Run the next function of the queue; return whether there was one."""
        if not self._queue:
            return False
        result, function, callback = self._queue.popleft()
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)
        self._ended.append((result, callback))
        return True

    def _note_ended(self, awaited: Future[Any]) -> bool:
        """Tell joblib which functions have ended, so that it submits others."""
        ended, self._ended = self._ended, []
        for result, callback in ended:
            callback(result)
        return awaited.done()

    def terminate(self) -> None:
        """End what still runs, and wait for the next call of joblib."""
        self._end()
        self._fleet = None

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End what still runs, because a function has failed."""
        self._end()

    def _end(self) -> None:
        self._queue.clear()
        self._ended.clear()
        if self._fleet is not None:
            self._fleet.end()

    def get_nested_backend(self) -> tuple[Any, None]:
        """Return the backend of functions that run others: one after the other."""
        return SequentialBackend(nesting_level=1), None

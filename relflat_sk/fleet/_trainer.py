"""Fit several estimators at the same time: those of a list, or those that scikit-learn fits."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from joblib import Parallel, delayed, parallel_config
from joblib.parallel import FallbackToBackend, ParallelBackendBase, SequentialBackend
from sklearn.base import BaseEstimator, clone

from relflat_sk.fleet._fleet import Fleet, fleet_size


class FleetTrainer(BaseEstimator):
    """Fit many nets at the same time, as one stacked model.

    Small networks spend most of their training on the overhead of each step. Nets of one
    architecture take their steps together here, each with its own weights, seed, learning rate,
    weight decay, momentum, and weight of the penalty. Each is trained as by its own `fit`, up to
    rounding, and stops when its own callbacks stop it; the next one then takes its place.

    Parameters
    ----------
    estimators : list of estimator
        `RelativeFlatnessRegularizedNet` and its subclasses, also inside of pipelines. They are
        cloned. Those that cannot be stacked are fitted one by one.
    fleet : int, "auto" or None, default="auto"
        Number of estimators at a time. "auto" fits 64 at a time, and those nets one after the
        other that are about as fast so: networks with more than two million weights, and with
        convolutions on a CPU. None fits all one after the other.

    Attributes
    ----------
    estimators_ : list of estimator
        The fitted clones, in the order of `estimators`.

    See Also
    --------
    fleet_training : Fits nets to data of their own, by joblib, in this way.
    FlatMinimaSearch : Trains its candidates in this way with ``fleet="auto"``.

    Notes
    -----
    Nets are stacked if they have equal architectures, batch sizes and numbers of batches, and
    optimizers among SGD, Adam and AdamW. Networks that are no chain of layers must have equal
    numbers of samples. The criterion is a mean over samples by
    `CrossEntropyLoss` of classes, `BCEWithLogitsLoss` or `MSELoss`. Not stacked are nets with
    callbacks that are called in each step, with a `Checkpoint` that loads the best weights, with
    random operations other than `torch.nn.Dropout`, with ``flatness_normalize``, with a penalty at
    earlier layers unless the network is a chain of linear layers and piecewise linear activations,
    with parameters that the output does not depend on, with a bias in front of a batch norm and
    Adam, which amplifies its rounding errors, and
    networks that `torch.func.vmap` refuses. The log of the logger "relflat_sk" names the reason.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from relflat_sk import RelativeFlatnessRegularizedClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> nets = [
    ...     RelativeFlatnessRegularizedClassifier(lr=lr, verbose=0, random_state=seed)
    ...     for lr in (0.003, 0.01) for seed in range(4)
    ... ]
    >>> trainer = FleetTrainer(nets, fleet=8).fit(X, y)
    >>> min(net.score(X, y) for net in trainer.estimators_) > 0.9
    True
    """

    def __init__(self, estimators: Sequence[Any], *, fleet: Any = "auto") -> None:
        self.estimators = estimators
        self.fleet = fleet

    def fit(self, X: Any, y: Any = None, **fit_params: Any) -> "FleetTrainer":
        """Fit all estimators to the same data.

        Parameters
        ----------
        X : array-like of shape (n, ...)
            Inputs.
        y : array-like of shape (n,) or (n, n_outputs), optional
            Labels or values.
        **fit_params
            Further arguments of each estimator's `fit`, such as `sample_weight`.

        Returns
        -------
        FleetTrainer
            The trainer itself.

        Raises
        ------
        TypeError
            If `estimators` is no list.
        ValueError
            If `estimators` is empty, `fleet` is not valid, or an estimator does not fit the data.
        """
        if not isinstance(self.estimators, list | tuple):
            raise TypeError(f"estimators must be a list, got a {type(self.estimators).__name__}.")
        if not self.estimators:
            raise ValueError("estimators must hold at least one estimator, got an empty list.")
        fits = [partial(clone(net).fit, X, y, **fit_params) for net in self.estimators]
        if self.fleet is None:
            self.estimators_ = [fit() for fit in fits]
            return self
        with fleet_training(self.fleet):
            self.estimators_ = Parallel()(delayed(fit)() for fit in fits)
        return self


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
    with in_turns(fleet):
        yield


def in_turns(
    fleet: int | str = "auto", within: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Any:
    """Make the context of `fleet_training`, in which each function runs within another one."""
    size = fleet_size(fleet)
    return parallel_config(backend=_InTurns(size, within, auto=fleet == "auto"), n_jobs=size)


class _InTurns(ParallelBackendBase):
    """A backend of joblib that runs functions in turns, and trains the nets in them together."""

    uses_threads = True
    supports_sharedmem = True
    supports_timeout = False

    def __init__(
        self, size: int, within: Callable[[], AbstractContextManager[Any]], *, auto: bool
    ) -> None:
        super().__init__(nesting_level=0)
        self.size = size
        self._within = within
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
            with self._within():
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
        self.abort_everything()
        self._fleet = None

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End what still runs, because a function has failed."""
        self._queue.clear()
        self._ended.clear()
        if self._fleet is not None:
            self._fleet.end()

    def get_nested_backend(self) -> tuple[Any, None]:
        """Return the backend of functions that run others: one after the other."""
        return SequentialBackend(nesting_level=1), None

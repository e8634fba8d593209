"""Fit several estimators at the same time."""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from sklearn.base import BaseEstimator, clone

from relflat_sk.fleet._fleet import Fleet, fleet_size


class FleetTrainer(BaseEstimator):
    """Fit many nets at the same time, as one stacked model.

    Small networks spend most of their training on the overhead of each step. Nets of one
    architecture take their steps together here, each with its own weights, seed, learning rate,
    weight decay, momentum, data, and weight of the penalty. Each is trained as by its own `fit`,
    up to rounding, and stops when its own callbacks stop it; the next one then takes its place.

    Parameters
    ----------
    estimators : list of estimator
        `RelativeFlatnessRegularizedNet` and its subclasses, also inside of pipelines. They are
        cloned. Those that cannot be stacked are fitted one by one.
    fleet : int, "auto" or None, default="auto"
        Number of estimators at a time. "auto" fits 32 at a time, and those nets one after the
        other that are about as fast so: networks with more than two million weights, and with
        convolutions on a CPU. None fits all one after the other.

    Attributes
    ----------
    estimators_ : list of estimator
        The fitted clones, in the order of `estimators`.

    See Also
    --------
    FlatMinimaSearch : Trains its candidates in this way with ``fleet="auto"``.

    Notes
    -----
    Nets are stacked if they have equal architectures, numbers of samples, batch sizes and
    optimizers, one of SGD, Adam and AdamW. Not stacked are nets with callbacks that are called in
    each step, with random operations other than `torch.nn.Dropout`, with ``flatness_normalize``,
    with a penalty at earlier layers unless these are linear layers of a network without
    convolutions, normalisations and attention, and networks that `torch.func.vmap` refuses. The
    log of the logger "relflat_sk" names the reason.

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
        return self._fit((X, y, fit_params) for _ in self._checked())

    def fit_each(self, data: Iterable[tuple[Any, ...]]) -> "FleetTrainer":
        """Fit each estimator to data of its own.

        Parameters
        ----------
        data : iterable of (X, y) or (X, y, fit_params)
            Inputs and labels for each estimator, with a dict of further arguments of its `fit`
            if there are any.

        Returns
        -------
        FleetTrainer
            The trainer itself.

        Raises
        ------
        TypeError
            If `estimators` is no list.
        ValueError
            If `estimators` is empty, `fleet` is not valid, an estimator does not fit its data, or
            there are more or fewer data than estimators.
        """
        n = len(self._checked())
        if isinstance(data, Sized) and len(data) != n:  # before any is trained
            raise _wrong_number(n, str(len(data)))
        return self._fit((*one, {})[:3] for one in data)

    def _checked(self) -> Sequence[Any]:
        """Return the estimators, or refuse what is no list of them."""
        if not isinstance(self.estimators, list | tuple):
            raise TypeError(
                f"estimators must be a list, got a {type(self.estimators).__name__}. Pass a list "
                "of unfitted estimators, [estimator] if there is one only."
            )
        if not self.estimators:
            raise ValueError("estimators must hold at least one estimator, got an empty list.")
        return self.estimators

    def _fit(self, data: Iterable[tuple[Any, ...]]) -> "FleetTrainer":
        fitted = [clone(estimator) for estimator in self._checked()]
        jobs = _pair(fitted, data)
        size = fleet_size(self.fleet)

        def train() -> bool:
            for estimator, (X, y, fit_params) in jobs:
                estimator.fit(X, y, **fit_params)
                return True
            return False

        if size is None:
            while train():
                pass
        else:
            Fleet(size, auto=self.fleet == "auto").run(train)
        self.estimators_ = fitted
        return self


def _pair(estimators: Sequence[Any], data: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield each estimator with its data, which may be made one after the other."""
    others = iter(data)
    for number, estimator in enumerate(estimators):
        one = next(others, None)
        if one is None:
            raise _wrong_number(len(estimators), str(number))
        yield estimator, one
    if next(others, None) is not None:
        raise _wrong_number(len(estimators), "more")


def _wrong_number(n_estimators: int, n_data: str) -> ValueError:
    return ValueError(
        f"fit_each needs one (X, y) for each of the {n_estimators} estimators, got {n_data}."
    )

"""Fit several estimators at the same time."""

from collections.abc import Sequence
from typing import Any

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
        Number of estimators at a time. "auto" fits 32 at a time, and those nets one after the
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
    Nets are stacked if they have equal architectures, numbers of samples, batch sizes and
    optimizers, one of SGD, Adam and AdamW. Not stacked are nets with callbacks that are called in
    each step, with random operations other than `torch.nn.Dropout`, with ``flatness_normalize``,
    with a penalty at earlier layers unless these are linear layers of a network without
    convolutions, normalisations and attention, with a bias in front of a batch norm and Adam,
    which amplifies its rounding errors, and networks that `torch.func.vmap` refuses. The log of
    the logger "relflat_sk" names the reason.

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
            raise TypeError(
                f"estimators must be a list, got a {type(self.estimators).__name__}. Pass a list "
                "of unfitted estimators, [estimator] if there is one only."
            )
        if not self.estimators:
            raise ValueError("estimators must hold at least one estimator, got an empty list.")
        size, fitted = fleet_size(self.fleet), [clone(one) for one in self.estimators]
        jobs = iter(fitted)

        def train() -> bool:
            for estimator in jobs:
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

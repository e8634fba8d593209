"""A net as a scikit-learn estimator: fit, predict and score on data of any kind."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from skorch.utils import to_numpy
from torch.utils.data import Dataset

from relflat_sk._checks import check_device
from relflat_sk._models import (
    CRITERION_ALONE,
    DataOptions,
    skorch_batches,
    skorch_network,
    to_network,
)
from relflat_sk._network import Network, check_weights, count_samples
from relflat_sk.training._inputs import check_inputs, check_stream
from relflat_sk.training._outputs import check_measurable, log_probabilities
from relflat_sk.training._state import TrainingState, own_random_state
from relflat_sk.training._task_net import TaskNet
from relflat_sk.training._tasks import TASKS, Task

__all__ = ["EstimatorNet"]

# the attributes that `fit` learns from the data
_LEARNED = (
    "_knows_outputs",
    "classes_",
    "flat_target_",
    "is_double_",
    "multilabel_",
    "n_features_in_",
    "n_inputs_",
    "n_outputs_",
)


def _has_task(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type is not None


def _is_classifier(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type == "classifier"


def _has_probabilities(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type != "regressor"


class EstimatorNet(TaskNet):
    """Implementation of `RelativeFlatnessRegularizedNet`; see there for the parameters."""

    # -- fitting -------------------------------------------------------------------------

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, **fit_params: Any
    ) -> "EstimatorNet":
        """Train the net from its initial weights.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict, Dataset or DataLoader
            Training inputs. Arrays on disk, such as zarr's, are read batch by batch.
        y : array-like of shape (n,) or (n, n_outputs)
            Labels, or the values of a regression. None if X is a Dataset (a stream included) or
            a DataLoader, whose labels must be class indices or numbers.
        sample_weight : array-like of shape (n,), optional
            Weight of each sample in the loss and in the penalty. The loss of a batch is the
            mean weighted by the weights in that batch, as in scikit-learn's networks. Weights
            therefore act like repeated samples if one batch holds all the data.
        **fit_params
            Passed on to the module's forward, as in skorch.

        Returns
        -------
        self
            The fitted net.

        Raises
        ------
        ValueError
            If a parameter is out of its range, the data do not fit the task, or torch cannot use
            the device.
        TypeError
            If X holds no numbers.
        LayerNotFoundError
            If `flatness_layer` names no layer.
        """
        restart = not (self.warm_start and self.initialized_)
        with self._session(X, y, sample_weight, restart=restart) as (inputs, targets):
            epochs = 0 if restart else len(self.history)
            super().fit(inputs, targets, **fit_params)
            self._learn_from_outputs()
            self._record_outcome(self._state().dataset, epochs)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        **fit_params: Any,
    ) -> "EstimatorNet":
        """Train the net further, from its current weights.

        Many calls may follow each other. `relative_flatness_` is therefore not measured at the
        end of a call, but when it is first read, on the data of the last call. Until then, the
        net refers to these data; a pickle holds the measured value instead.

        Parameters
        ----------
        X, y : array-like
            As in `fit`.
        classes : array of shape (n_classes,), optional
            All classes, for the first call. If None, those in y.
        sample_weight : array-like of shape (n,), optional
            As in `fit`.
        **fit_params
            As in `fit`.

        Returns
        -------
        self
            The fitted net.

        Raises
        ------
        ValueError, LayerNotFoundError
            As in `fit`.
        """
        if fit_params.get("_routing_method") == "fit":  # skorch's fit calls it with checked data
            super().partial_fit(X, y, **fit_params)
            return self
        restart = not self.initialized_
        session = self._session(X, y, sample_weight, restart=restart, classes=classes)
        with session as (inputs, targets):
            super().partial_fit(inputs, targets, **fit_params)
            self._learn_from_outputs()
            self._record_flatness(self._state().dataset, now=False)
        return self

    @contextmanager
    def _session(
        self, X: Any, y: Any, sample_weight: Any, *, restart: bool, classes: Any = None
    ) -> Iterator[tuple[Any, Any]]:
        """Check everything, and train inside the context on the inputs and targets it yields."""
        self._check_penalty()
        self._check_task()
        check_device(self.device)
        check_stream(self, X, sample_weight)
        X, y, weights = self._prepare(X, y, sample_weight, reset=restart, classes=classes)
        self._training = TrainingState(weights, labels_encoded=True)
        self._unmeasured = None
        self._criterion_takes_whole = None
        try:
            with own_random_state(self, restart=restart):
                yield X, y
        finally:
            self._training = None

    def _prepare(
        self, X: Any, y: Any, sample_weight: Any, reset: bool, classes: Any
    ) -> tuple[Any, Any, np.ndarray | None]:
        """Check data and weights, and learn from them; a fitted net survives bad data."""
        labelled = y is not None or not isinstance(X, Dataset)
        # initialize() may have been called by hand, and labels may come after a Dataset
        reset = reset or (labelled and not self._knows_labels())
        attributes = self.__dict__  # skorch's own __delattr__ would unregister components
        learned = {name: attributes.pop(name) for name in _LEARNED if reset and name in attributes}
        try:
            X, y = self._learn(X, y, reset, classes)
            if sample_weight is None:
                return X, y, None
            n = len(X) if isinstance(X, Dataset) else count_samples(X)  # type: ignore[arg-type]
            return X, y, check_weights(sample_weight, n)
        except (TypeError, ValueError):
            attributes.update(learned)
            raise

    def _learn(self, X: Any, y: Any, reset: bool, classes: Any) -> tuple[Any, Any]:
        """Check inputs and encode labels; with `reset`, learn sizes and classes first."""
        X = check_inputs(self, X, reset=reset)
        if y is None and isinstance(X, Dataset):
            return X, None
        if reset:
            self._task.learn(self, y, classes)
            self._check_ignored()
        y = self._encode(y)
        if hasattr(X, "shape") and y is not None and len(y) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} samples, y has {len(y)} labels.")
        return X, y

    # -- prediction ----------------------------------------------------------------------

    def predict(self, X: Any) -> Any:
        """Predict class labels, or the values of a regression.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict or Dataset
            Inputs, with the features that the net was fitted with.

        Returns
        -------
        array of shape (n,) or (n, n_outputs)
            Labels as they were given to `fit`, or predicted values.
        """
        check_is_fitted(self, "module_")
        outputs = super().predict_proba(check_inputs(self, X, reset=False))
        predicted = self._task.predict(outputs)
        return predicted if self._gets_targets() else self._task.decode(self, predicted)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict the probability of each class.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict or Dataset
            Inputs, with the features that the net was fitted with.

        Returns
        -------
        array of shape (n, n_classes)
            Probabilities, with columns in the order of `classes_`.
        """
        check_is_fitted(self, "module_")
        outputs = super().predict_proba(check_inputs(self, X, reset=False))
        return self._task.probabilities(outputs)

    @available_if(_is_classifier)  # type: ignore[untyped-decorator]
    def predict_log_proba(self, X: Any) -> Any:
        """Predict the logarithm of the probability of each class.

        It is computed from the module's logits, and is finite also where a probability is too
        small to be told from 0. If the module returns probabilities (`NLLLoss`, `BCELoss`) or
        `predict_nonlinearity` is a function of your own, it is the logarithm of `predict_proba`.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict or Dataset
            Inputs, with the features that the net was fitted with.

        Returns
        -------
        array of shape (n, n_classes)
            Natural logarithms, with columns in the order of `classes_`.
        """
        check_is_fitted(self, "module_")
        binary = self._task is TASKS["binary"]
        logarithm = log_probabilities(self._choose_nonlinearity(), binary=binary)
        if logarithm is None:
            with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf
                return np.log(self.predict_proba(X))
        outputs = self.forward_iter(check_inputs(self, X, reset=False))
        return np.concatenate([to_numpy(logarithm(output)) for output in outputs])

    @available_if(_has_task)  # type: ignore[untyped-decorator]
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Compute a classifier's accuracy, or a regressor's coefficient of determination.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict or Dataset
            Inputs, with the features that the net was fitted with.
        y : array-like of shape (n,) or (n, n_outputs)
            True labels or values.
        sample_weight : array of shape (n,), optional
            Weight of each sample in the score.

        Returns
        -------
        float
            At most 1, which is a perfect prediction.
        """
        return self._task.score(y, self.predict(X), sample_weight)


# outside training, its loss is the criterion's
CRITERION_ALONE.add(EstimatorNet.get_loss)


@to_network.register
def _(model: EstimatorNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    if options.criterion is None:
        check_measurable(model)
    X = check_inputs(model, X, reset=False)
    if isinstance(X, Dataset):
        y = None  # the Dataset holds the labels
    elif y is not None:
        y = model._encode(y)
    return skorch_network(model, skorch_batches(model, X, y, options), options)

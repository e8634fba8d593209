"""A skorch net as a scikit-learn estimator: labels, data, random state, predictions."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils._tags import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from skorch.callbacks import EpochScoring, EpochTimer, PassthroughScoring, PrintLog
from torch import Tensor, nn
from torch.utils.data import Dataset

from relflat_sk._losses import TABLE, Loss, ProbabilityNLLLoss
from relflat_sk._models import (
    CRITERION_ALONE,
    DataOptions,
    skorch_batches,
    skorch_network,
    to_network,
)
from relflat_sk._network import Network, check_weights, count_samples
from relflat_sk.training._inputs import check_inputs, with_sizes
from relflat_sk.training._mlp import MLP
from relflat_sk.training._penalised_net import IN_TRAINING, PenalisedNet, original
from relflat_sk.training._random_state import own_random_state
from relflat_sk.training._tasks import TASKS, Task

__all__ = ["EstimatorNet"]


# what a net knows while it is trained only
_IN_TRAINING = ("_takes_targets", *IN_TRAINING)


def _has_task(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type is not None


def _has_probabilities(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type != "regressor"


def _accuracy_of_targets(net: Any, X: Any, y: Any) -> float:
    """Accuracy on the net's own data sets, which hold targets as the criterion takes them."""
    targets = y if isinstance(y, np.ndarray) else np.asarray([np.asarray(t) for t in y])
    return float(accuracy_score(targets, net.predict(X)))


# skorch sets these in __init__, which in scikit-learn is for parameters alone
_BEFORE_FIT: dict[str, Callable[[], Any]] = {
    "history_": lambda: None,
    "initialized_": lambda: False,
    "virtual_params_": dict,
}

# what `fit` learns from the data
_LEARNED = (
    "classes_",
    "flat_target_",
    "is_double_",
    "multilabel_",
    "n_features_in_",
    "n_inputs_",
    "n_outputs_",
)


class EstimatorNet(PenalisedNet):
    """What `RelativeFlatnessRegularizedNet` does, which has the parameters and says what for."""

    _fixed_task: ClassVar[str | None] = None
    # while the net trains, it and its callbacks work with targets as the criterion takes them
    _takes_targets: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, default in _BEFORE_FIT.items():
            if self.__dict__[name] == default():
                del self.__dict__[name]

    def __getattr__(self, name: str) -> Any:
        # skorch sets attributes in another way as long as `initialized_` is not there
        if name in _BEFORE_FIT and "_params_to_validate" in self.__dict__:
            return _BEFORE_FIT[name]()
        return object.__getattribute__(self, name)  # raises what was raised before

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        for name in _IN_TRAINING:
            state.pop(name, None)  # a copy made by a callback is not in training
        return state

    # -- the task ------------------------------------------------------------------------

    @property
    def _criterion_class(self) -> type:
        return self.criterion if isinstance(self.criterion, type) else type(self.criterion)

    @property
    def _criterion_task(self) -> str | None:
        row = TABLE.get(self._criterion_class)
        return None if row is None else row.task

    @property
    def _task(self) -> Task:
        return TASKS[self._fixed_task or self._criterion_task]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.estimator_type = self._task.estimator_type
        tags.target_tags.required = tags.estimator_type is not None
        if tags.estimator_type == "classifier":
            tags.classifier_tags = ClassifierTags(multi_class=self._task is not TASKS["binary"])
        elif tags.estimator_type == "regressor":
            tags.regressor_tags = RegressorTags()
            tags.target_tags.multi_output = True
        return tags

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        callbacks = [
            ("epoch_timer", EpochTimer()),
            ("train_loss", PassthroughScoring(name="train_loss", on_train=True)),
            (
                "flatness_penalty",
                PassthroughScoring(name="flatness_penalty", on_train=True, lower_is_better=None),
            ),
            ("valid_loss", PassthroughScoring(name="valid_loss")),
        ]
        if self._task.estimator_type == "classifier":
            accuracy = EpochScoring(_accuracy_of_targets, name="valid_acc", lower_is_better=False)
            callbacks.append(("valid_acc", accuracy))
        return [*callbacks, ("print_log", PrintLog())]

    def _get_param_names(self) -> list[str]:
        # skorch lists every attribute that does not end in an underscore
        return [name for name in super()._get_param_names() if not name.startswith("_")]

    # -- fitting -------------------------------------------------------------------------

    def fit(
        self, X: Any, y: Any = None, sample_weight: Any = None, **fit_params: Any
    ) -> "EstimatorNet":
        """Train the net from its initial weights.

        Parameters
        ----------
        X : array-like of shape (n, ...), tensor, dict or Dataset
        y : array-like of shape (n,) or (n, n_outputs)
            Labels or targets; None if X is a Dataset that holds class indices or numbers.
        sample_weight : array-like of shape (n,), optional
            Weight of each sample in the loss and the penalty. As in scikit-learn's networks,
            a batch's mean is over the weights in that batch, so that weights do the same as
            repeated samples where a batch holds all the data.
        **fit_params
            Passed on to the module's forward, as in skorch.

        Returns
        -------
        self
        """
        self._check_parameters()
        fresh = not (self.warm_start and self.initialized_)
        X, y, weights = self._prepare(X, y, sample_weight, reset=fresh)
        with self._session(weights, restart=fresh):
            super().fit(X, y, **fit_params)
            self._record_flatness()
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        **fit_params: Any,
    ) -> "EstimatorNet":
        """Train the net further, from where it is.

        Parameters
        ----------
        X, y : array-like
            As in `fit`.
        classes : array of shape (n_classes,), optional
            All classes there are, in the first call; those in y if None.
        sample_weight : array-like of shape (n,), optional
            As in `fit`.
        **fit_params
            As in `fit`.

        Returns
        -------
        self
        """
        if fit_params.get("_routing_method") == "fit":  # called by fit, which has prepared
            super().partial_fit(X, y, **fit_params)
            return self
        self._check_parameters()
        fresh = not self.initialized_
        X, y, weights = self._prepare(X, y, sample_weight, reset=fresh, classes=classes)
        with self._session(weights, restart=fresh):
            super().partial_fit(X, y, **fit_params)
            self._record_flatness()
        return self

    def _check_parameters(self) -> None:
        self._check_penalty()
        if self._fixed_task and self._criterion_task not in {None, self._fixed_task}:
            raise ValueError(
                f"{type(self).__name__} does {self._fixed_task}, but "
                f"{self._criterion_class.__name__} is a {self._criterion_task} loss; use "
                "RelativeFlatnessRegularizedNet, whose criterion decides."
            )

    def _prepare(
        self, X: Any, y: Any, sample_weight: Any, reset: bool, classes: Any = None
    ) -> tuple[Any, Any, np.ndarray | None]:
        reset = reset or not self._knows_targets()  # initialize() may have been called by hand
        learned = {
            name: self.__dict__.pop(name) for name in _LEARNED if reset and name in self.__dict__
        }
        try:
            X, y = self._learn(X, y, reset, classes)
            if sample_weight is None:
                return X, y, None
            n = len(X) if isinstance(X, Dataset) else count_samples(X)  # type: ignore[arg-type]
            return X, y, check_weights(sample_weight, n)
        except (TypeError, ValueError):
            self.__dict__.update(learned)  # what is fitted stays usable
            raise

    def _learn(self, X: Any, y: Any, reset: bool, classes: Any) -> tuple[Any, Any]:
        X = check_inputs(self, X, reset=reset)
        if y is None and isinstance(X, Dataset):
            return X, None
        if reset:
            self._task.learn(self, y, classes)
        y = self._encode(y)
        if hasattr(X, "shape") and y is not None and len(y) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} samples, y has {len(y)} labels.")
        return X, y

    def _encode(self, y: Any) -> Any:
        # trained on a Dataset, it has only ever seen targets
        known = self._knows_targets() and not self._takes_targets
        return self._task.encode(self, y) if known else y

    def initialize_module(self) -> "EstimatorNet":
        """Make the module, sized from the data where its constructor asks for sizes."""
        kwargs = self.get_params_for("module")
        if isinstance(self.module, nn.Module) and not kwargs:
            self.module_ = copy.deepcopy(self.module)
            return self
        sizes = {"n_features": getattr(self, "n_inputs_", None), "n_outputs": self._n_outputs()}
        factory = type(self.module) if isinstance(self.module, nn.Module) else self.module
        kwargs = with_sizes(factory, kwargs, sizes)
        self.module_ = self.initialized_instance(self.module, kwargs)
        # as scikit-learn's networks do; other modules are torch's, and float32 as they are made
        if factory is MLP and getattr(self, "is_double_", False) and str(self.device) == "cpu":
            self.module_.double()
        return self

    def _knows_targets(self) -> bool:
        return hasattr(self, self._task.learned)

    def _n_outputs(self) -> int | None:
        return self._task.n_outputs(self) if self._knows_targets() else None

    def initialize_criterion(self) -> "EstimatorNet":
        """Make the criterion; `NLLLoss` takes probabilities, as in skorch's classifiers."""
        super().initialize_criterion()
        own = self.criterion_
        if type(own) is nn.NLLLoss:
            self.criterion_ = ProbabilityNLLLoss(
                weight=own.weight, ignore_index=own.ignore_index, reduction=own.reduction
            )
        return self

    @contextmanager
    def _session(self, weights: np.ndarray | None, *, restart: bool) -> Iterator[None]:
        """Train on prepared data, with the net's own random state."""
        self._takes_targets = True
        self._weights = weights
        try:
            with own_random_state(self, restart=restart):
                yield
        finally:
            for name in _IN_TRAINING:
                self.__dict__.pop(name, None)

    def _check_output(self, criterion: Loss, y_pred: Tensor) -> None:
        n_outputs = self._n_outputs()
        if n_outputs is not None and y_pred.shape[1:].numel() != n_outputs:
            raise ValueError(
                f"y has {self._task.describe(self)}, which takes {n_outputs} output(s) for each "
                f"sample, but the module put out shape {tuple(y_pred.shape)} for a batch. Size "
                "the module by an argument n_outputs, which is set from y, or give partial_fit "
                "all classes."
            )
        if isinstance(criterion.criterion, ProbabilityNLLLoss) and bool((y_pred < 0).any()):
            raise ValueError(
                "NLLLoss takes probabilities here, as in skorch's classifiers, but the module "
                f"put out {y_pred.min().item():g}. End the module with a softmax, or use "
                "CrossEntropyLoss on logits."
            )

    # -- prediction ----------------------------------------------------------------------

    def predict(self, X: Any) -> Any:
        """Predict class labels, or the values of a regression.

        Parameters
        ----------
        X : array-like of shape (n, ...)

        Returns
        -------
        array of shape (n,) or (n, n_outputs)
        """
        check_is_fitted(self, "module_")
        outputs = super().predict_proba(check_inputs(self, X, reset=False))
        predicted = self._task.predict(outputs)
        return predicted if self._takes_targets else self._task.decode(self, predicted)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Any:
        """Predict the probability of each class.

        Parameters
        ----------
        X : array-like of shape (n, ...)

        Returns
        -------
        array of shape (n, n_classes)
            Columns in the order of `classes_`.
        """
        check_is_fitted(self, "module_")
        outputs = super().predict_proba(check_inputs(self, X, reset=False))
        return self._task.probabilities(outputs)

    def _get_predict_nonlinearity(self) -> Any:
        criterion = original(self.criterion_)
        if self.predict_nonlinearity == "auto":
            if isinstance(criterion, nn.BCEWithLogitsLoss):
                return torch.sigmoid  # skorch's own stacks two columns, of a 1-d output only
            if isinstance(criterion, nn.PoissonNLLLoss) and criterion.log_input:
                return torch.exp  # the expected count
        return super()._get_predict_nonlinearity()

    @available_if(_has_task)  # type: ignore[untyped-decorator]
    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy of a classifier, coefficient of determination of a regressor.

        Parameters
        ----------
        X : array-like of shape (n, ...)
        y : array-like of shape (n,) or (n, n_outputs)
        sample_weight : array of shape (n,), optional

        Returns
        -------
        float
        """
        return self._task.score(y, self.predict(X), sample_weight)


CRITERION_ALONE.add(EstimatorNet.get_loss)


@to_network.register
def _(model: EstimatorNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    X = check_inputs(model, X, reset=False)
    if isinstance(X, Dataset):
        y = None  # has its own
    elif y is not None:
        y = model._encode(y)
    return skorch_network(model, skorch_batches(model, X, y, options), options)

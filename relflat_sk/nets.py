"""skorch nets that are trained to be flat, as scikit-learn estimators."""

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils._tags import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data
from skorch import NeuralNet
from skorch.callbacks import EpochScoring, EpochTimer, PassthroughScoring, PrintLog
from skorch.utils import to_tensor
from torch import Tensor, nn
from torch.utils.data import Dataset

from relflat_sk._estimators import (
    CRITERION_ALONE,
    DataOptions,
    skorch_batches,
    skorch_network,
    to_network,
)
from relflat_sk._tasks import TASKS, Task
from relflat_sk.batches import cast_inputs
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.flatness import measure_flatness
from relflat_sk.layers import primary_output, weight_layers
from relflat_sk.loss_table import TABLE, ProbabilityNLLLoss
from relflat_sk.models import MLP
from relflat_sk.network import Network
from relflat_sk.penalty import RelativeFlatnessPenalty

__all__ = [
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedNet",
    "RelativeFlatnessRegularizedRegressor",
]


def _has_task(net: Any) -> bool:
    return net._task.estimator_type is not None


def _has_probabilities(net: Any) -> bool:
    return net._task.estimator_type != "regressor"


def _accuracy_of_indices(net: Any, X: Any, y: Any) -> float:
    """Accuracy on the net's own data sets, which hold targets as the criterion takes them."""
    predicted = net._task.encode(net, net.predict(X))
    targets = y if isinstance(y, np.ndarray) else np.asarray([np.asarray(t) for t in y])
    return float(accuracy_score(targets, predicted))


class RelativeFlatnessRegularizedNet(NeuralNet):
    r"""A skorch net that minimises its loss plus the price of not being flat.

    Each training step minimises ``criterion + flatness_weight * kappa / (2 m)``, where
    :math:`\kappa` is the relative flatness of the batch at a layer with `m` inputs. At the
    last layer it costs next to nothing; there is no second forward pass.

    The criterion decides the task: with a classification loss the net is a scikit-learn
    classifier (labels of any type, `classes_`, `predict_proba`), with a regression loss a
    regressor, with a loss that `relflat_sk` does not know a plain skorch net.

    Parameters
    ----------
    module : type or nn.Module, default=MLP
        Class of the network. If its constructor has arguments `n_features` or `n_outputs`
        that are not given as `module__n_features`, they are set from the data. An instance
        is copied, so that every `fit` starts from its weights.
    criterion : type or nn.Module, default=torch.nn.CrossEntropyLoss
        The loss. As in skorch's classifiers, `NLLLoss` expects a module that puts out
        probabilities.
    flatness_weight : float, default=0.1
        Weight of the penalty; 0 trains as without it.
    flatness_layer : int, str, sequence of these, or "all", default=-1
        Where flatness is measured: position among the layers with a weight matrix in
        forward order, or dotted module name. The penalties of several layers add.
    flatness_normalize : bool, default=False
        Measure features in units of their standard deviation.
    flatness_probes : int, default=1
        Random probes per sample where there is no closed form, as at earlier layers.
    flatness_warmup : int, default=0
        Epochs over which the weight of the penalty grows linearly to `flatness_weight`.
    random_state : int, RandomState or None, default=None
        Makes `fit` reproducible (initial weights, shuffling, dropout, probes) and leaves
        torch's global random state alone. With None, that global state is used.
    optimizer : type, default=torch.optim.Adam
    lr : float, default=0.01
    max_epochs : int, default=50
    batch_size : int, default=32
    train_split : callable or None, default=None
        Unlike in skorch, nothing is held out by default: flatness is a property of a
        minimum on all the data. Pass ``skorch.dataset.ValidSplit(5)`` for `valid_loss`.
    **skorch_arguments
        Any other argument of `skorch.NeuralNet`: `callbacks`, `device`, `verbose`,
        ``module__...``, ``optimizer__...``, ``criterion__...``.

    Attributes
    ----------
    relative_flatness_ : float
        Relative flatness on the training data at the end of `fit`, at `flatness_layer`
        (the sum over layers if there are several); normalised if `flatness_normalize`.
    history : skorch.history.History
        Per epoch: `train_loss` without the penalty, `flatness_penalty` as it was added to
        it, `valid_loss` (without penalty) where there is a `train_split`.
    classes_ : array of shape (n_classes,)
        Of a classifier.
    n_features_in_ : int
    module_ : nn.Module
        The trained network.
    converged_ : bool
        Whether a `StopAtLoss` or `StopAtGradientNorm` callback reached its goal.

    Raises
    ------
    ValueError
        From `fit`, if an argument is out of its range or the data do not fit the task.
    LayerNotFoundError
        From `fit`, if there is no such layer.

    References
    ----------
    .. [1] H. Petzka et al., "Relative Flatness and Generalization", NeurIPS 2021.
    .. [2] L. Adilova et al., "FAM: Relative Flatness Aware Minimization", TAG-ML 2023.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedNet(flatness_weight=1.0, verbose=0, random_state=0)
    >>> net.fit(X, y).score(X, y) > 0.9
    True
    """

    _fixed_task: ClassVar[str | None] = None

    def __init__(  # noqa: PLR0913
        self,
        module: Any = MLP,
        *,
        criterion: Any = nn.CrossEntropyLoss,
        flatness_weight: float = 0.1,
        flatness_layer: Any = -1,
        flatness_normalize: bool = False,
        flatness_probes: int = 1,
        flatness_warmup: int = 0,
        random_state: Any = None,
        optimizer: Any = torch.optim.Adam,
        lr: float = 0.01,
        max_epochs: int = 50,
        batch_size: int = 32,
        train_split: Any = None,
        **skorch_arguments: Any,
    ) -> None:
        super().__init__(
            module,
            criterion,
            optimizer=optimizer,
            lr=lr,
            max_epochs=max_epochs,
            batch_size=batch_size,
            train_split=train_split,
            **skorch_arguments,
        )
        self.flatness_weight = flatness_weight
        self.flatness_layer = flatness_layer
        self.flatness_normalize = flatness_normalize
        self.flatness_probes = flatness_probes
        self.flatness_warmup = flatness_warmup
        self.random_state = random_state

    # -- the task ------------------------------------------------------------------------

    @property
    def _task(self) -> Task:
        criterion = self.criterion if isinstance(self.criterion, type) else type(self.criterion)
        row = TABLE.get(criterion)
        known = row.task if row is not None else None
        if self._fixed_task is not None and known not in {None, self._fixed_task}:
            raise ValueError(
                f"{type(self).__name__} does {self._fixed_task}, but {criterion.__name__} is a "
                f"{known} loss; use RelativeFlatnessRegularizedNet, whose criterion decides."
            )
        return TASKS[known or self._fixed_task]

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
            accuracy = EpochScoring(_accuracy_of_indices, name="valid_acc", lower_is_better=False)
            callbacks.append(("valid_acc", accuracy))
        return [*callbacks, ("print_log", PrintLog())]

    def _get_param_names(self) -> list[str]:
        # skorch lists every attribute that does not end in an underscore
        return [name for name in super()._get_param_names() if not name.startswith("_")]

    # -- fitting -------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, **fit_params: Any) -> "RelativeFlatnessRegularizedNet":
        """Train the net from its initial weights.

        Parameters
        ----------
        X : array-like of shape (n, ...), tensor, dict or Dataset
        y : array-like of shape (n,) or (n, n_outputs)
            Labels or targets; None if X is a Dataset that holds class indices or numbers.
        **fit_params
            Passed on to the module's forward, as in skorch.

        Returns
        -------
        self
        """
        self._check_parameters()
        fresh = not (self.warm_start and self.initialized_)
        with self._seeded(restart=fresh):
            X, y = self._prepare(X, y, reset=fresh)
            super().fit(X, y, **fit_params)
            self._record_flatness(X, y)
        return self

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, **fit_params: Any
    ) -> "RelativeFlatnessRegularizedNet":
        """Train the net further, from where it is.

        Parameters
        ----------
        X, y : array-like
            As in `fit`.
        classes : array of shape (n_classes,), optional
            All classes there are, in the first call; those in y if None.
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
        with self._seeded(restart=fresh):
            X, y = self._prepare(X, y, reset=fresh, classes=classes)
            super().partial_fit(X, y, **fit_params)
            self._record_flatness(X, y)
        return self

    def _check_parameters(self) -> None:
        for name in ("flatness_weight", "flatness_warmup"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 <= value < np.inf:
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")
        self._penalty()
        assert self._task is not None

    def _penalty(self) -> RelativeFlatnessPenalty:
        return RelativeFlatnessPenalty(
            self.flatness_layer, self.flatness_normalize, self.flatness_probes
        )

    def _prepare(self, X: Any, y: Any, reset: bool, classes: Any = None) -> tuple[Any, Any]:
        X = self._check_X(X, reset=reset)
        if y is None and isinstance(X, Dataset):
            return X, None
        if reset:
            self._task.learn(self, y, classes)
        y = self._task.encode(self, y)
        if hasattr(X, "shape") and y is not None and len(y) != X.shape[0]:
            raise ValueError(f"X has {X.shape[0]} samples, y has {len(y)} labels.")
        return X, y

    def _check_X(self, X: Any, *, reset: bool) -> Any:
        # a scipy dok_matrix is a Mapping too
        free = isinstance(X, Mapping | tuple | Dataset) and not issparse(X)
        if free:
            return X
        if not isinstance(X, Tensor):
            X = validate_data(self, X, reset=reset, dtype="numeric", allow_nd=True)
        elif not bool(torch.isfinite(X).all()):
            raise ValueError("Input X contains NaN or infinity.")
        elif len(X) == 0:
            raise ValueError("Found array with 0 sample(s) while a minimum of 1 is required.")
        elif reset:
            self.n_features_in_ = X.shape[1] if X.ndim > 1 else 1
        if reset:
            self.n_inputs_ = int(np.prod(X.shape[1:]))
        return X

    def initialize_module(self) -> "RelativeFlatnessRegularizedNet":
        """Make the module, sized from the data where its constructor asks for sizes."""
        kwargs = self.get_params_for("module")
        if isinstance(self.module, nn.Module) and not kwargs:
            self.module_ = copy.deepcopy(self.module)
            return self
        sizes = {"n_features": getattr(self, "n_inputs_", None), "n_outputs": self._n_outputs()}
        factory = type(self.module) if isinstance(self.module, nn.Module) else self.module
        accepted = inspect.signature(factory).parameters
        for name, size in sizes.items():
            if name in accepted and name not in kwargs and size is not None:
                kwargs[name] = size
        self.module_ = self.initialized_instance(self.module, kwargs)
        return self

    def _n_outputs(self) -> int | None:
        learned = hasattr(self, "classes_") or hasattr(self, "n_outputs_")
        return self._task.n_outputs(self) if learned else None

    def initialize_criterion(self) -> "RelativeFlatnessRegularizedNet":
        """Make the criterion; `NLLLoss` takes probabilities, as in skorch's classifiers."""
        super().initialize_criterion()
        own = self.criterion_
        if type(own) is nn.NLLLoss:
            self.criterion_ = ProbabilityNLLLoss(
                weight=own.weight, ignore_index=own.ignore_index, reduction=own.reduction
            )
        return self

    @contextmanager
    def _seeded(self, *, restart: bool) -> Iterator[None]:
        """Use the net's own random state, and give torch's global one back."""
        if self.random_state is None:
            yield
            return
        cuda = [torch.device(self.device)] if str(self.device).startswith("cuda") else []
        with torch.random.fork_rng(devices=cuda):
            if restart or not hasattr(self, "rng_states_"):
                seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
                torch.manual_seed(seed)
            else:
                torch.set_rng_state(self.rng_states_[0])
                for device, state in zip(cuda, self.rng_states_[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield
            states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
            self.rng_states_ = states

    # -- the training step ---------------------------------------------------------------

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Run the module on a batch; watch the penalised layers if there will be gradients."""
        x = cast_inputs(to_tensor(x, device=self.device), self.module_)
        if not (torch.is_grad_enabled() and self.flatness_weight > 0):
            return super().infer(x, **fit_params)
        self.penalty_ = self._penalty()
        with self.penalty_.capture(getattr(self.module_, "_orig_mod", self.module_)):
            return super().infer(x, **fit_params)

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """Compute the loss of a batch, in training with the penalty added."""
        y_pred = primary_output(y_pred)
        y_true = to_tensor(y_true, device=self.device)
        if self._task is TASKS["binary"] or self._task is TASKS["regression"]:
            y_true = y_true.reshape(y_pred.shape).to(y_pred.dtype)
        loss: Tensor = super().get_loss(y_pred, y_true, X=X, training=training)
        penalty, self.penalty_ = getattr(self, "penalty_", None), None
        if not training:
            return loss
        if penalty is None:
            self.terms_ = loss.detach(), torch.zeros(())
            return loss
        ramp = min(1.0, len(self.history) / max(1, self.flatness_warmup))
        term = ramp * self.flatness_weight * penalty(self.criterion_, y_pred, y_true)
        self.terms_ = loss.detach(), term.detach()
        return loss + term

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """Run the module for its output alone."""
        try:
            return super().evaluation_step(batch, training=training)
        finally:
            self.penalty_ = None  # keeps no graph alive

    def train_step(self, batch: Any, **fit_params: Any) -> dict[str, Any]:
        """Make one optimisation step and report loss and penalty apart."""
        step = super().train_step(batch, **fit_params)
        (loss, term), self.terms_ = self.terms_, None
        self.history.record_batch("flatness_penalty", term.item())
        return {**step, "loss": loss}

    # -- flatness of the result ----------------------------------------------------------

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split as skorch does, and remember what is trained on."""
        train, valid = super().get_split_datasets(X, y, **fit_params)
        self.dataset_train_ = train
        return train, valid

    def _record_flatness(self, X: Any, y: Any) -> None:
        whole = self.train_split is None
        data = (X, y) if whole else (self.dataset_train_, None)
        self.dataset_train_ = None
        options = DataOptions()
        network = skorch_network(self, skorch_batches(self, *data, options), options)
        try:
            self.relative_flatness_ = sum(
                measure_flatness(
                    network,
                    layer,
                    normalize=self.flatness_normalize,
                    random_state=check_random_state(self.random_state)
                    if self.random_state is not None
                    else None,
                ).value
                for layer in self._layers()
            )
        except (TypeError, ValueError) as error:
            warnings.warn(
                f"relative_flatness_ could not be measured: {error}",
                FlatnessWarning,
                stacklevel=3,
            )
            self.relative_flatness_ = np.nan

    def _layers(self) -> list[Any]:
        if isinstance(self.flatness_layer, str) and self.flatness_layer == "all":
            return list(weight_layers(getattr(self.module_, "_orig_mod", self.module_)))
        several = isinstance(self.flatness_layer, list | tuple)
        return list(self.flatness_layer) if several else [self.flatness_layer]

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
        outputs = super().predict_proba(self._check_X(X, reset=False))
        return self._task.decode(self, outputs)

    @available_if(_has_probabilities)
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
        outputs = super().predict_proba(self._check_X(X, reset=False))
        return self._task.probabilities(outputs)

    def _get_predict_nonlinearity(self) -> Any:
        if self.predict_nonlinearity == "auto" and isinstance(
            self.criterion_, nn.BCEWithLogitsLoss
        ):
            return torch.sigmoid  # skorch's own stacks two columns, of a 1-d output only
        return super()._get_predict_nonlinearity()

    @available_if(_has_task)
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


CRITERION_ALONE.add(RelativeFlatnessRegularizedNet.get_loss)


class RelativeFlatnessRegularizedClassifier(RelativeFlatnessRegularizedNet):
    """A classifier with one output per class, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.
    A criterion that `relflat_sk` does not know is taken as a classification loss, with
    class indices as targets.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> net = RelativeFlatnessRegularizedClassifier(verbose=0, random_state=0).fit(X, y)
    >>> net.predict_proba(X).shape
    (150, 3)
    """

    _fixed_task = "classification"


class RelativeFlatnessRegularizedBinaryClassifier(RelativeFlatnessRegularizedNet):
    """A classifier with one logit for two classes, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.
    Labels may be of any type; with a 0/1 column per label it does multi-label tasks.

    Examples
    --------
    >>> import numpy as np
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.preprocessing import scale
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> labels = np.array(["malignant", "benign"])[y]
    >>> net = RelativeFlatnessRegularizedBinaryClassifier(verbose=0, random_state=0)
    >>> net.fit(scale(X), labels).predict(scale(X)[:2]).tolist()
    ['malignant', 'malignant']
    """

    _fixed_task = "binary"

    def __init__(
        self, module: Any = MLP, *, criterion: Any = nn.BCEWithLogitsLoss, **arguments: Any
    ) -> None:
        super().__init__(module, criterion=criterion, **arguments)


class RelativeFlatnessRegularizedRegressor(RelativeFlatnessRegularizedNet):
    """A regressor of one or more outputs, trained to be flat.

    `RelativeFlatnessRegularizedNet` with the task fixed: see there for the parameters.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.linspace(-1, 1, 200).reshape(-1, 1)
    >>> net = RelativeFlatnessRegularizedRegressor(verbose=0, random_state=0)
    >>> net.fit(X, X.ravel() ** 2).score(X, X.ravel() ** 2) > 0.9
    True
    """

    _fixed_task = "regression"

    def __init__(self, module: Any = MLP, *, criterion: Any = nn.MSELoss, **arguments: Any) -> None:
        super().__init__(module, criterion=criterion, **arguments)


@to_network.register
def _(model: RelativeFlatnessRegularizedNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    X = model._check_X(X, reset=False)
    targets = None if y is None or isinstance(X, Dataset) else model._task.encode(model, y)
    return skorch_network(model, skorch_batches(model, X, targets, options), options)

"""skorch nets that are trained to be flat, as scikit-learn estimators."""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
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
from relflat_sk.losses import Loss
from relflat_sk.models import MLP
from relflat_sk.network import Network
from relflat_sk.penalty import RelativeFlatnessPenalty

__all__ = [
    "RelativeFlatnessRegularizedBinaryClassifier",
    "RelativeFlatnessRegularizedClassifier",
    "RelativeFlatnessRegularizedNet",
    "RelativeFlatnessRegularizedRegressor",
]


# what a net knows while it is trained only
_IN_TRAINING = ("_takes_targets", "_captured", "_known_penalty", "_terms", "_trained_on")


def _has_task(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type is not None


def _has_probabilities(net: Any) -> bool:
    task: Task = net._task
    return task.estimator_type != "regressor"


def _check_finite(X: Any) -> None:
    finite = True
    if isinstance(X, Tensor):
        finite = bool(torch.isfinite(X).all())
    elif isinstance(X, np.ndarray) and X.dtype.kind in "fc":
        finite = bool(np.isfinite(X).all())
    if not finite:
        raise ValueError("Input X contains NaN or infinity.")


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
_LEARNED = ("classes_", "flat_target_", "multilabel_", "n_features_in_", "n_inputs_", "n_outputs_")


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
    criterion_: Any
    _rng_states: list[Tensor]
    # while the net trains, it and its callbacks work with targets as the criterion takes them
    _takes_targets: bool = False
    # of the training step in progress
    _captured: RelativeFlatnessPenalty | None = None
    _terms: tuple[Tensor, Tensor] | None = None

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
        self.flatness_weight = flatness_weight
        self.flatness_layer = flatness_layer
        self.flatness_normalize = flatness_normalize
        self.flatness_probes = flatness_probes
        self.flatness_warmup = flatness_warmup
        self.random_state = random_state
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
        X, y = self._prepare(X, y, reset=fresh)
        with self._session(restart=fresh):
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
        X, y = self._prepare(X, y, reset=fresh, classes=classes)
        with self._session(restart=fresh):
            super().partial_fit(X, y, **fit_params)
            self._record_flatness(X, y)
        return self

    def _check_parameters(self) -> None:
        for name in ("flatness_weight", "flatness_warmup"):
            value = getattr(self, name)
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not (number and 0 <= value < np.inf):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}.")
        self._penalty()
        if any(isinstance(layer, nn.Module) for layer in self._layers(None)):
            raise TypeError(
                "flatness_layer must be a position or a dotted name, got a module: the net "
                "trains a copy of its own. Use the layer's name, as in module.named_modules()."
            )
        if self._fixed_task and self._criterion_task not in {None, self._fixed_task}:
            raise ValueError(
                f"{type(self).__name__} does {self._fixed_task}, but "
                f"{self._criterion_class.__name__} is a {self._criterion_task} loss; use "
                "RelativeFlatnessRegularizedNet, whose criterion decides."
            )

    def _watcher(self) -> RelativeFlatnessPenalty:
        """Return one penalty for all steps with the same settings: it knows its way around."""
        settings = self.flatness_layer, self.flatness_normalize, self.flatness_probes
        known = self.__dict__.get("_known_penalty")
        if known is None or known[0] != settings:
            known = self.__dict__["_known_penalty"] = settings, self._penalty()
        return known[1]

    def _penalty(self) -> RelativeFlatnessPenalty:
        return RelativeFlatnessPenalty(
            self.flatness_layer, self.flatness_normalize, self.flatness_probes
        )

    def _prepare(self, X: Any, y: Any, reset: bool, classes: Any = None) -> tuple[Any, Any]:
        reset = reset or not self._knows_targets()  # initialize() may have been called by hand
        learned = {
            name: self.__dict__.pop(name) for name in _LEARNED if reset and name in self.__dict__
        }
        try:
            return self._learn(X, y, reset, classes)
        except (TypeError, ValueError):
            self.__dict__.update(learned)  # what is fitted stays usable
            raise

    def _learn(self, X: Any, y: Any, reset: bool, classes: Any) -> tuple[Any, Any]:
        X = self._check_X(X, reset=reset)
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

    def _check_X(self, X: Any, *, reset: bool) -> Any:
        if isinstance(X, Dataset):
            return X
        if isinstance(X, Mapping | tuple) and not issparse(X):  # a dok_matrix is a Mapping too
            for part in X.values() if isinstance(X, Mapping) else X:
                _check_finite(part)
            return X
        if isinstance(X, Tensor):
            self._check_tensor(X, reset)
        else:
            X = validate_data(self, X, reset=reset, dtype="numeric", allow_nd=True, order="C")
            if not X.flags.writeable:  # as joblib's memory maps; torch wants to own its arrays
                X = X.copy()
        if reset:
            self.n_inputs_ = int(np.prod(X.shape[1:]))
        return X

    def _check_tensor(self, X: Tensor, reset: bool) -> None:
        """Check as validate_data does, without a detour through numpy."""
        _check_finite(X)
        if X.ndim < 2:
            raise ValueError(
                f"X must have shape (n_samples, n_features, ...), got {tuple(X.shape)}. Use "
                "X.reshape(-1, 1) if there is a single feature."
            )
        if not X.numel():
            raise ValueError(f"X has shape {tuple(X.shape)}: there is nothing to learn from.")
        if reset:
            self.n_features_in_ = X.shape[1]
        elif getattr(self, "n_features_in_", X.shape[1]) != X.shape[1]:
            raise ValueError(
                f"X has {X.shape[1]} features, but {type(self).__name__} is expecting "
                f"{self.n_features_in_} features as input."
            )

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
            if name not in accepted or name in kwargs:
                continue
            if size is not None:
                kwargs[name] = size
            elif accepted[name].default is inspect.Parameter.empty:
                raise ValueError(
                    f"the module needs {name}, which cannot be told here: that takes fitting on "
                    f"arrays, and for outputs a known criterion. Pass module__{name}."
                )
        self.module_ = self.initialized_instance(self.module, kwargs)
        return self

    def _knows_targets(self) -> bool:
        return hasattr(self, self._task.learned)

    def _n_outputs(self) -> int | None:
        return self._task.n_outputs(self) if self._knows_targets() else None

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
    def _session(self, *, restart: bool) -> Iterator[None]:
        """Train on prepared data, with the net's own random state."""
        self._takes_targets = True
        try:
            with self._seeded(restart=restart):
                yield
        finally:
            for name in _IN_TRAINING:
                self.__dict__.pop(name, None)

    @contextmanager
    def _seeded(self, *, restart: bool) -> Iterator[None]:
        """Use the net's own random state, and give torch's global one back."""
        if self.random_state is None:
            yield
            return
        cuda = [torch.device(self.device)] if str(self.device).startswith("cuda") else []
        with torch.random.fork_rng(devices=cuda):
            if restart or not hasattr(self, "_rng_states"):
                seed = check_random_state(self.random_state).randint(np.iinfo(np.int32).max)
                torch.manual_seed(seed)
            else:
                torch.set_rng_state(self._rng_states[0])
                for device, state in zip(cuda, self._rng_states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield
            states = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in cuda)]
            self._rng_states = states

    # -- the training step ---------------------------------------------------------------

    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Run the module on a batch; watch the penalised layers if there will be gradients."""
        x = cast_inputs(to_tensor(x, device=self.device), self.module_)
        if not (torch.is_grad_enabled() and self.flatness_weight > 0):
            return super().infer(x, **fit_params)
        # past __setattr__, which skorch looks through all its components in
        penalty = self.__dict__["_captured"] = self._watcher()
        with penalty.capture(getattr(self.module_, "_orig_mod", self.module_)):
            return super().infer(x, **fit_params)

    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """Compute the loss of a batch, in training with the penalty added."""
        penalty: RelativeFlatnessPenalty | None = self.__dict__.pop("_captured", None)
        criterion = Loss(getattr(self.criterion_, "_orig_mod", self.criterion_))
        y_pred, y_true = self._check_batch(criterion, y_pred, y_true)
        loss: Tensor = super().get_loss(y_pred, y_true, X=X, training=training)
        if not training:
            return loss
        if penalty is None:
            self.__dict__["_terms"] = loss.detach(), torch.zeros(())
            return loss
        ramp = min(1.0, len(self.history) / max(1, self.flatness_warmup))
        term = ramp * self.flatness_weight * penalty.of_batch(criterion, y_pred, y_true)
        self.__dict__["_terms"] = loss.detach(), term.detach()
        return loss + term

    def _check_batch(self, criterion: Loss, y_pred: Any, y_true: Any) -> tuple[Tensor, Tensor]:
        y_pred = primary_output(y_pred)
        n_outputs = self._n_outputs()
        if n_outputs is not None and y_pred[:1].numel() != n_outputs:
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
        return y_pred, criterion.check_target(y_pred, to_tensor(y_true, device=self.device))

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """Run the module for its output alone."""
        try:
            return super().evaluation_step(batch, training=training)
        finally:
            self.__dict__.pop("_captured", None)  # keeps no graph alive

    def on_batch_end(
        self, net: Any, batch: Any = None, training: bool = False, **step: Any
    ) -> None:
        """Record loss and penalty of a training step apart."""
        super().on_batch_end(net, batch=batch, training=training, **step)
        if training and self._terms is not None:
            loss, term = self.__dict__.pop("_terms")
            self.history.record_batch("train_loss", loss.item())
            self.history.record_batch("flatness_penalty", term.item())

    # -- flatness of the result ----------------------------------------------------------

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split as skorch does, and remember what is trained on."""
        train, valid = super().get_split_datasets(X, y, **fit_params)
        self._trained_on = train
        return train, valid

    def _record_flatness(self, X: Any, y: Any) -> None:
        if self.train_split is not None:
            X, y = self._trained_on, None
        options = DataOptions()
        network = skorch_network(self, skorch_batches(self, X, y, options), options)
        with torch.random.fork_rng(devices=[]):  # a seed for probes, without taking a number
            seed = int(torch.randint(2**31 - 1, ()))
        try:
            self.relative_flatness_ = sum(
                measure_flatness(
                    network, layer, normalize=self.flatness_normalize, random_state=seed
                ).value
                for layer in self._layers(network.module)
            )
        except (TypeError, ValueError) as error:
            warnings.warn(
                f"relative_flatness_ could not be measured: {error}",
                FlatnessWarning,
                stacklevel=3,
            )
            self.relative_flatness_ = np.nan

    def _layers(self, module: nn.Module | None) -> list[Any]:
        if isinstance(self.flatness_layer, str) and self.flatness_layer == "all":
            return [] if module is None else list(weight_layers(module))
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
        outputs = super().predict_proba(self._check_X(X, reset=False))
        return self._task.probabilities(outputs)

    def _get_predict_nonlinearity(self) -> Any:
        criterion = getattr(self.criterion_, "_orig_mod", self.criterion_)
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
    if isinstance(X, Dataset):
        y = None  # has its own
    elif y is not None:
        y = model._encode(y)
    return skorch_network(model, skorch_batches(model, X, y, options), options)

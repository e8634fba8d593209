"""A skorch net with a task and a flatness penalty, as a scikit-learn estimator."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import ClassifierTags, RegressorTags
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from skorch.callbacks import EpochScoring, EpochTimer
from skorch.utils import to_numpy, to_tensor
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from relflat_sk._checks import check_device, check_number, warn
from relflat_sk._losses.loss import BatchLoss, Loss
from relflat_sk._losses.table import TABLE, ProbabilityNLLLoss
from relflat_sk._models.network_of import (
    CRITERION_ALONE,
    IGNORED,
    IS_MEASURED,
    DataOptions,
    skorch_batches,
    skorch_network,
    to_network,
)
from relflat_sk._network.batches import (
    cast_inputs,
    check_weights,
    count_samples,
    floating_parameter,
    split_target,
)
from relflat_sk._network.borrowing import uncompiled, unwrapped
from relflat_sk._network.network import Network, check_part, primary_output
from relflat_sk._network.recording import find_ending
from relflat_sk._numerics import full_precision
from relflat_sk._penalty.limit import PenaltyLimit
from relflat_sk._penalty.penalty import (
    SETTINGS,
    RelativeFlatnessPenalty,
    check_settings,
    record_step,
)
from relflat_sk._random import alone, draw_seed, fork_rng, get_states, seed_torch, set_states
from relflat_sk.measures._minimum import ConstantComparison
from relflat_sk.training._after_fit import Record, checksum, record_outcome
from relflat_sk.training._data import (
    check_inputs,
    check_stream,
    plain_batch,
    with_sizes,
    with_weights,
)
from relflat_sk.training._mlp import MLP
from relflat_sk.training._penalised_loss import Reading, penalised, warn_without_penalty
from relflat_sk.training._skorch_net import (
    EpochMean,
    QuietPrintLog,
    SkorchNet,
    check_start,
    epochs_before,
)
from relflat_sk.training._tasks import (
    TASKS,
    UNSEEN,
    Task,
    check_classes,
    check_ending,
    check_ignored,
    describe_labels,
    movable,
    to_array,
    to_predictions,
    with_class_weights,
)

# the attributes that `fit` learns from the data
_LEARNED = (
    "_learned",
    "classes_",
    "flat_target_",
    "is_double_",
    "multilabel_",
    "n_features_in_",
    "n_inputs_",
    "n_outputs_",
)


@dataclass(slots=True)
class _Training:
    """The state of one training, with that of its current step.

    A net drops it when the training ends, and leaves it out of copies and pickles.
    """

    sample_weight: np.ndarray | None = None  # (n,)
    labels_encoded: bool = False  # in `fit`, the net's own data sets hold targets
    dataset: Any = None
    penalty: RelativeFlatnessPenalty | None = None
    output_checked: bool = False
    # for a class that replaces parts of the step, see `_penalised_loss`
    in_infer: bool = False
    own_loss: Any = None
    own_criterion: Any = None
    reading: Reading | None = None
    is_penalised: bool = False  # whether any step has computed the penalty, or that was said
    # of the current step: its loss, then the penalty, then the share of it that the limit leaves
    recorded: bool = False
    rests: bool = False  # whether the step has no penalty, but others have
    terms: list[Tensor] | None = None


def _if_task(suits: Callable[[Task], bool]) -> Callable[[Any], Any]:
    """Let a net have a method only if its task suits."""
    return available_if(lambda net: suits(net._task))  # type: ignore[no-any-return]


def _recording(infer: Callable[..., Any]) -> Callable[..., Any]:
    """Let an `infer` record the penalised layers where it calls the network."""

    @wraps(infer)
    def recorded(net: Any, x: Any, **fit_params: Any) -> Any:
        penalty = net._penalty_of_pass()
        if penalty is None:
            return infer(net, x, **fit_params)
        state = net._state()
        state.in_infer = True  # that of a base class records nothing else
        try:
            with uncompiled(net.module_), record_step(penalty, unwrapped(net.module_)):
                output = infer(net, x, **fit_params)
        finally:
            state.in_infer = False
        state.recorded = True
        return output

    return recorded


class FlatNet(SkorchNet):
    """Implementation of `RelativeFlatnessRegularizedNet`; see there for the parameters.

    Penalty and sample weights enter in `infer` and `get_loss` only. Code that changes other parts
    of skorch's training step (accelerate, gradient accumulation, the two passes of SAM) therefore
    works together with this class. Those of a subclass need not call these, see `_penalised_loss`.
    """

    _fixed_task: ClassVar[str | None] = None
    _training: _Training | None = None
    _limit: PenaltyLimit | None = None  # a new network gets a new one
    _stepped: int | None = None  # the checksum of the weights that the last training stepped to
    _ending: str | None = UNSEEN  # the function that the module ends in
    # what `fit` measured on the training data
    _record: Record | None = None
    # the task that has learned from labels, and not from a Dataset, and the outputs that they need
    _learned: tuple[str | None, int | None] = (None, None)
    _rng_states: list[NDArray[np.uint8]]  # skops stores arrays, and no tensors

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base = next(kind for kind in cls.__mro__[1:] if issubclass(kind, FlatNet))
        for name, keep in (("infer", _recording), ("get_loss", penalised)):
            method = getattr(cls, name)
            if method is not getattr(base, name):  # of the class, or of a mixin before the base
                setattr(cls, name, keep(method))

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_training", None)  # a copy that a callback makes is not in training
        return state

    # -- fitting -------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None, **fit_params: Any) -> "FlatNet":
        """Train the net from its initial weights.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict, Dataset or DataLoader
            Training inputs. A memory-mapped file is read batch by batch.
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
        since = 0 if restart else len(self.history)
        with self._session(X, y, sample_weight, restart, classes=None, since=since) as data:
            super().fit(*data, **fit_params)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        classes: Any = None,
        sample_weight: Any = None,
        **fit_params: Any,
    ) -> "FlatNet":
        """Train the net further, from its current weights.

        Parameters
        ----------
        X, y : array-like
            As in `fit`. `relative_flatness_` is measured on the data of the last call.
        classes : array of shape (n_classes,), optional
            All classes, for the first call. If None, those in y. Later calls may repeat them.
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
            As in `fit`, or if `classes` are not those of the first call.
        """
        if self._gets_targets():  # skorch's fit calls it with checked data
            super().partial_fit(X, y, **fit_params)
            return self
        restart = not self.initialized_
        with self._session(X, y, sample_weight, restart, classes=classes, since=None) as data:
            super().partial_fit(*data, **fit_params)
        return self

    @contextmanager
    def _session(
        self, X: Any, y: Any, sample_weight: Any, restart: bool, classes: Any, since: int | None
    ) -> Iterator[tuple[Any, Any]]:
        """Check everything, train inside the context on the inputs and targets it yields, measure.

        Check how the epochs `since` one went, if given.
        """
        self._check_parameters()
        check_stream(self, X, sample_weight)
        *data, weights = self._prepare(X, y, sample_weight, reset=restart, classes=classes)
        self._training = _Training(weights, labels_encoded=True)
        self._record = None
        try:
            with self._own_random_state(restart=restart):
                yield tuple(data)
                record_outcome(self, self._training.dataset, since=since)
        finally:
            self._training = None

    @contextmanager
    def _own_random_state(self, *, restart: bool) -> Iterator[None]:
        """Use the net's own random state inside the context, and restore torch's afterwards."""
        if self.random_state is None:
            with alone():  # another thread's net may have a seed
                yield
            return
        with fork_rng(self.device):
            if restart or not hasattr(self, "_rng_states"):
                seed_torch(draw_seed(self.random_state))
            else:
                set_states(self.device, [torch.as_tensor(state) for state in self._rng_states])
            yield
            self._rng_states = [state.numpy() for state in get_states(self.device)]

    def _state(self) -> _Training:
        """Return the state of the training, a new one for steps made outside of `fit`."""
        if self._training is None:
            self._training = _Training()
        return self._training

    def _prepare(
        self, X: Any, y: Any, sample_weight: Any, reset: bool, classes: Any
    ) -> tuple[Any, Any, np.ndarray | None]:
        """Check data and weights, and learn from them; a fitted net survives bad data."""
        labelled = y is not None or not isinstance(X, Dataset | DataLoader)
        # initialize() may have been called by hand, and labels may come after a Dataset
        reset = reset or (labelled and self._n_outputs is None)
        attributes = self.__dict__  # skorch's own __delattr__ would unregister components
        learned = {name: attributes.pop(name) for name in _LEARNED if reset and name in attributes}
        try:
            X = check_inputs(self, X, reset=reset)
            positions = (
                self._task.read_positions(y) if labelled and self.module is not MLP else None
            )
            if positions is not None:  # they are targets, as those in a Dataset
                y = positions
            elif labelled:
                if reset:
                    n_outputs = self._task.learn(self, y, classes)
                    self._learned = self._fixed_task or self._criterion_task, n_outputs
                    check_ignored(self)
                check_classes(self, classes)
                y = self._encode(y)
            if labelled and hasattr(X, "shape") and y is not None and len(y) != X.shape[0]:
                raise ValueError(f"X has {X.shape[0]} samples, y has {len(y)} labels.")
            if sample_weight is None:
                return X, y, None
            n = len(X) if isinstance(X, Dataset) else count_samples(X)  # type: ignore[arg-type]
            return X, y, check_weights(sample_weight, n)
        except (TypeError, ValueError):
            attributes.update(learned)
            raise

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split off the validation data as skorch does, together with the sample weights.

        Targets get the network's precision.
        """
        state, weights = self._state(), self._state().sample_weight
        if isinstance(y, np.ndarray) and y.dtype == np.float64:
            parameter = floating_parameter(self.module_)
            if parameter is None or parameter.dtype != torch.float64:
                y = y.astype(np.float32)
        for name in ("iterator_train", "iterator_valid") if weights is not None else ():
            if self.get_params_for(name).get("collate_fn") is not None:
                raise ValueError(
                    f"sample_weight travels with the labels, which {name}__collate_fn may not "
                    "expect. Leave it out, or put the weights into a criterion of your own."
                )
        if weights is not None:
            X = with_weights(self.get_dataset(X, y), weights)
        state.dataset, valid = super().get_split_datasets(X, y, **fit_params)
        return state.dataset, valid

    # -- what fit measured ---------------------------------------------------------------

    @property
    def relative_flatness_(self) -> float:
        """Relative flatness on the training data, at the weights that `fit` ended with."""
        return self._read_record("relative_flatness_").value

    @property
    def constant_comparison_(self) -> ConstantComparison:
        """Mean loss on the training data, with that of the best constant prediction."""
        return self._read_record("constant_comparison_").comparison

    def _read_record(self, name: str) -> Record:
        """Return what `fit` measured; raise if the weights have changed since."""
        if self._record is None:
            raise AttributeError(f"{type(self).__name__} has no {name} before fit.")
        if self._record.weights != checksum(self.module_):
            raise AttributeError(
                f"{name} was measured at the end of fit, and the weights have changed since. "
                "Measure the network that it is now: relflat_sk.relative_flatness(net, X, y)."
            )
        return self._record

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
        predicted = self._task.predict(self._predictions(X, labels=True))
        return predicted if self._gets_targets() else self._task.decode(self, predicted)

    @_if_task(lambda task: task.estimator_type != "regressor")
    def predict_proba(self, X: Any) -> Any:
        """Predict the probability of each class.

        Parameters
        ----------
        X : array-like or sparse matrix of shape (n, ...), tensor, dict or Dataset
            Inputs, with the features that the net was fitted with.

        Returns
        -------
        array of shape (n, n_classes)
            Probabilities, with columns in the order of `classes_`. With a criterion of your own,
            a classifier applies softmax or sigmoid to the module's outputs unless the module ends
            in one of them; a `RelativeFlatnessRegularizedNet` returns the outputs, as skorch does.
        """
        return self._task.probabilities(self._predictions(X))

    @_if_task(lambda task: task.estimator_type == "classifier")
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
        logarithm = to_predictions(self, self._ending).logarithm
        if logarithm is not None:
            return _apply(logarithm, self._outputs(X))
        with np.errstate(divide="ignore"):  # the logarithm of 0 is -inf
            return np.log(self.predict_proba(X))

    @_if_task(lambda task: task.estimator_type is not None)
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
        truth, predicted = np.asarray(to_array(y)), self.predict(X)
        if self._task.estimator_type == "regressor":
            truth, predicted = (one.reshape(len(one), -1) for one in (truth, predicted))
            return float(r2_score(truth, predicted, sample_weight=sample_weight))
        # over all pixels or tokens, if these have labels
        if predicted.ndim > 1 and not getattr(self, "multilabel_", False):
            right = predicted == truth
            counts = truth != getattr(self.criterion_, "ignore_index", IGNORED)
            axes = tuple(range(1, predicted.ndim))
            right, counts = (right & counts).sum(axis=axes), counts.sum(axis=axes)
            weights = np.ones(len(truth)) if sample_weight is None else sample_weight
            return float((weights @ right) / (weights @ counts))
        return float(accuracy_score(truth, predicted, sample_weight=sample_weight))

    def _predictions(self, X: Any, *, labels: bool = False) -> Any:
        """Return what the module's outputs predict, or what labels are read from."""
        outputs = self._outputs(X)  # which show what the module ends in
        return _apply(to_predictions(self, self._ending, labels=labels).function, outputs)

    def _outputs(self, X: Any) -> list[Tensor]:
        """Return the module's outputs for all samples, batch by batch."""
        check_is_fitted(self, "module_")
        outputs = self.forward_iter(check_inputs(self, X, reset=False))
        return [full_precision(primary_output(output)) for output in outputs]

    # -- the task: network, criterion and labels -----------------------------------------

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

    @property
    def _n_outputs(self) -> int | None:
        """The number of outputs that the targets need, if the task has learned it from labels."""
        task, n_outputs = self._learned
        return n_outputs if task == (self._fixed_task or self._criterion_task) else None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.estimator_type = self._task.estimator_type
        tags.input_tags.sparse = True
        tags.target_tags.required = tags.estimator_type is not None
        if tags.estimator_type == "classifier":
            tags.classifier_tags = ClassifierTags(multi_class=self._task is not TASKS["binary"])
        elif tags.estimator_type == "regressor":
            tags.regressor_tags = RegressorTags()
            tags.target_tags.multi_output = True
        return tags

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        """Record time, losses, penalty and a classifier's accuracy per epoch, and print them."""
        callbacks: list[tuple[str, Any]] = [
            ("epoch_timer", EpochTimer()),
            ("train_loss", EpochMean("train_loss", on_train=True)),
            ("valid_loss", EpochMean("valid_loss")),
        ]
        for name in ("flatness_penalty", "flatness_clipped"):
            mean = EpochMean(name, on_train=True, lower_is_better=None)
            callbacks.append((name, mean))
        if self._task.estimator_type == "classifier":
            # of `score`, for the net's own data sets hold targets
            accuracy = EpochScoring(None, name="valid_acc", lower_is_better=False)
            callbacks.append(("valid_acc", accuracy))
        return [*callbacks, ("print_log", QuietPrintLog())]

    def _gets_targets(self) -> bool:
        """Return whether labels come as targets: in training, its own data sets hold targets."""
        return self._training is not None and self._training.labels_encoded

    def _encode(self, y: Any) -> Any:
        """Turn labels into the criterion's targets."""
        # a net that was trained on a Dataset has met targets only
        labels = self._n_outputs is not None and not self._gets_targets()
        return self._task.encode(self, y) if labels else y

    def initialize_module(self) -> "FlatNet":
        """Make the module, sized from the data where its constructor asks for sizes."""
        self._limit = None
        self.module_ = self._make_module()
        if self._record is not None:  # by set_params, for example
            self._record = replace(self._record, initialized=checksum(self.module_))
        return self

    def _make_module(self) -> nn.Module:
        """Copy the module, or call its class."""
        kwargs = self.get_params_for("module")
        if isinstance(self.module, nn.Module) and not kwargs:
            return copy.deepcopy(self.module)
        sizes = {"n_features": getattr(self, "n_inputs_", None), "n_outputs": self._n_outputs}
        factory = type(self.module) if isinstance(self.module, nn.Module) else self.module
        module: nn.Module = factory(**with_sizes(factory, kwargs, sizes))
        # float64 as in scikit-learn's networks; users choose the dtype of their own modules
        if factory is MLP and getattr(self, "is_double_", False) and str(self.device) == "cpu":
            module.double()
        return module

    def initialize_criterion(self) -> "FlatNet":
        """Make the criterion; `NLLLoss` takes probabilities, as in skorch's classifiers."""
        parameter = floating_parameter(self.module_)
        dtype = torch.float32 if parameter is None else parameter.dtype
        kwargs = with_class_weights(self._criterion_class, self.get_params_for("criterion"), dtype)
        made = self.initialized_instance(self.criterion, kwargs)
        if type(made) is nn.NLLLoss:
            made = ProbabilityNLLLoss.of(made)
        # class weights are float32 tensors, and data of float64 make an MLP of float64
        if isinstance(made, nn.Module) and type(self.module_) is MLP:
            made.to(dtype)
        self.criterion_ = made
        check_ignored(self)
        weight = getattr(made, "weight", None)
        of_classes = self._criterion_task == "classification" and self._n_outputs is not None
        if of_classes and weight is not None and weight.numel() != len(self.classes_):
            raise ValueError(
                f"criterion__weight has {weight.numel()} number(s), but y has "
                f"{describe_labels(self)}: pass one weight for each class, in this order."
            )
        return self

    def torch_compile(self, module: Any, name: str) -> Any:
        """Compile a module, if asked to, but no criterion, which is to be differentiated twice."""
        return module if name == "criterion" else super().torch_compile(module, name)

    # -- the penalty ---------------------------------------------------------------------

    def _check_parameters(self) -> None:
        """Refuse parameters with which the net cannot be trained."""
        check_settings(self, "flatness_")
        check_number("flatness_warmup", self.flatness_warmup, positive=False)
        check_start("flatness_start", self.flatness_start)
        if any(isinstance(layer, nn.Module) for layer in self._layers()):
            raise TypeError(
                "flatness_layer must be a position or a dotted name, got a module, of which the "
                "net trains a copy. Pass its name, as listed by module.named_modules()."
            )
        optimizer = self.optimizer
        searches = isinstance(optimizer, type) and issubclass(optimizer, torch.optim.LBFGS)
        if self.flatness_weight != 0 and searches:
            raise ValueError(
                f"{optimizer.__name__} compares values within a step, and the penalty may draw new "
                "probes for each. Use another optimizer, such as Adam, or flatness_weight=0."
            )
        if self._fixed_task and self._criterion_task not in {None, self._fixed_task}:
            raise ValueError(
                f"{type(self).__name__} does {self._fixed_task}, {self._criterion_class.__name__} "
                f"is a {self._criterion_task} loss. Use RelativeFlatnessRegularizedNet."
            )
        check_device(self.device)

    def _layers(self) -> Any:
        """Return the penalised layers in the form that measures take: a sequence or "all"."""
        layer = self.flatness_layer
        return layer if isinstance(layer, list | tuple) or layer == "all" else [layer]

    def _penalty(self) -> RelativeFlatnessPenalty:
        """Return the training's penalty, with the settings of this epoch."""
        penalty = self._state().penalty
        if penalty is None:
            penalty = self._state().penalty = RelativeFlatnessPenalty()
        for name in SETTINGS:
            setattr(penalty, name, getattr(self, f"flatness_{name}"))
        penalty.weight, penalty.limit = self._penalty_weight(), self._penalty_limit()
        return penalty

    def _penalty_limit(self) -> PenaltyLimit:
        """Return the limit of the penalty, with what past steps of the network have shown."""
        if self._limit is None:
            self._limit = PenaltyLimit()
        return self._limit

    def save_params(self, *args: Any, **kwargs: Any) -> None:
        """Save parameters, as skorch does; the optimizer's file gets what the limit knows.

        Parameters
        ----------
        *args, **kwargs
            As in skorch.
        """
        if self._limit is not None and hasattr(self, "optimizer_"):
            self.optimizer_.param_groups[0]["flatness_limit"] = self._limit.state_dict()
        super().save_params(*args, **kwargs)

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Load parameters, as skorch does, with what the limit knew.

        Parameters
        ----------
        *args, **kwargs
            As in skorch.
        """
        super().load_params(*args, **kwargs)
        groups = self.optimizer_.param_groups if hasattr(self, "optimizer_") else []
        saved = groups[0].pop("flatness_limit", None) if groups else None
        if saved is not None:
            self._penalty_limit().load_state_dict(saved)
            self._stepped = None

    def _penalty_weight(self) -> float:
        """Return the weight of the penalty in the current epoch, warm-up included."""
        if not (self.flatness_warmup or self.flatness_start):
            return float(self.flatness_weight)
        n_before = epochs_before(self.flatness_start, self.max_epochs)
        epoch = max(1, len(self.history or ())) - n_before
        if epoch <= 0:
            return 0.0
        return float(min(1.0, epoch / (self.flatness_warmup or epoch)) * self.flatness_weight)

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Let the limit take no weights that were replaced since the last training for a step."""
        super().on_train_begin(net, X=X, y=y, **kwargs)
        if self._limit is None or self._stepped is None:
            return  # without reading all weights
        if self._stepped != checksum(self.module_):
            self._limit.weights = None

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Note the weights before callbacks replace them, such as by their average."""
        super().on_train_end(net, X=X, y=y, **kwargs)
        if self._limit is not None:
            self._stepped = checksum(self.module_)

    # -- called by skorch in each step ---------------------------------------------------

    @_recording
    def infer(self, x: Any, **fit_params: Any) -> Any:
        """Run the module on a batch; record the penalised layers if gradients are enabled."""
        x = cast_inputs(to_tensor(x, device=self.device), self.module_)
        is_seen = self._criterion_task is not None or self._ending != UNSEEN
        if is_seen or torch.is_grad_enabled() or IS_MEASURED.get():
            return _on_tensors(full_precision, super().infer(x, **fit_params))
        # with a criterion of the user's own, predictions depend on what the module ends in
        with torch.enable_grad():  # the graph shows it
            output = super().infer(x, **fit_params)
        self._ending = find_ending(primary_output(output))
        return _on_tensors(lambda part: full_precision(part.detach()), output)

    def _penalty_of_pass(self) -> RelativeFlatnessPenalty | None:
        """Return the penalty of a pass through the module, if it has one that is not recorded."""
        if IS_MEASURED.get() or not torch.is_grad_enabled() or not self._penalty_weight():
            return None
        state = self._state()
        # the penalty is that of the output which get_loss receives, not of one that it computes
        if state.in_infer or state.own_loss is not None:
            return None
        if state.terms is None:  # further passes of a step have what the first one has
            state.rests = self._penalty_limit().is_resting(self.flatness_every)
        return None if state.rests else self._penalty()

    def _to_target(self, y_true: Any) -> Any:
        """Move the targets of a batch to the device; a Dataset may hold labels that are none."""
        try:
            return to_tensor(y_true, device=self.device)
        except TypeError as error:
            raise TypeError(
                f"the labels of a batch are no numbers, got {y_true!r:.60}. Those in a Dataset, "
                "also for validation (predefined_split), are the criterion's targets: for classes "
                "their positions in classes_, by np.searchsorted(net.classes_, labels)."
            ) from error

    @penalised
    def get_loss(self, y_pred: Any, y_true: Any, X: Any = None, training: bool = False) -> Tensor:
        """Compute the loss of a batch, to which training adds the penalty."""
        state, criterion = self._state(), Loss(unwrapped(self.criterion_))
        if not state.output_checked:
            check_part(criterion, y_pred, self._to_target(split_target(y_true)[0]), "net")
        output = full_precision(primary_output(y_pred))
        self._check_output(criterion, output)
        batch = self._read_loss(output, y_true)
        loss = batch(output)
        if state.own_loss is not None:
            state.reading = Reading(batch, loss, 1.0)
        return loss

    def _read_loss(self, output: Tensor, y_true: Any) -> BatchLoss:
        """Read the targets and the sample weights of a batch."""
        criterion = Loss(unwrapped(self.criterion_))
        y_true, weight = split_target(y_true)
        if not isinstance(y_true, Tensor):
            # all other labels are checked where they are, for which the host need not wait
            y_true = self._to_target(y_true)
        target = criterion.read_target(output, y_true)
        return BatchLoss(criterion, target, None if weight is None else weight.to(output))

    def _check_output(self, criterion: Loss, y_pred: Tensor) -> None:
        """Refuse outputs of another size than the labels need; at first, of another kind too."""
        state, n_outputs = self._state(), self._n_outputs
        if n_outputs is None:
            if not state.output_checked and y_pred.ndim <= 2:
                self._task.learn_from_outputs(self, y_pred.shape[1:].numel())
        elif y_pred.shape[1:].numel() != n_outputs:
            raise ValueError(
                f"y has {describe_labels(self)}, which takes {n_outputs} output(s) for each "
                f"sample, and the module returned shape {tuple(y_pred.shape)} for a batch. Give it "
                "an argument n_outputs, which is set from y, or pass all classes to partial_fit."
            )
        if not state.output_checked:
            ending = check_ending(criterion, y_pred)
            if y_pred.requires_grad:
                self._ending = ending
            state.output_checked = True

    def evaluation_step(self, batch: Any, training: bool = False) -> Any:
        """Run the module for its output alone, without keeping a graph for the penalty."""
        try:
            return movable(super().evaluation_step(batch, training=training))
        finally:
            state = self._training
            if state is not None and state.recorded:
                state.recorded, state.penalty = False, None

    def validation_step(self, batch: Any, **fit_params: Any) -> Any:
        """Compute output and loss of a validation batch, without what skorch cannot collect."""
        step = super().validation_step(batch, **fit_params)
        step["y_pred"] = movable(step["y_pred"])
        return step

    def notify(self, method_name: str, **cb_kwargs: Any) -> None:
        """Call the callbacks, which get batches without sample weights.

        Warn after an epoch whose steps were to compute the penalty and did not.
        """
        # before callbacks, of which some end the training
        has_trained = method_name == "on_epoch_end" and self.history[-1].get("train_batch_count", 1)
        if has_trained and self._penalty_weight() and not self._state().is_penalised:
            warn_without_penalty(self)
            self._state().is_penalised = True
        if "batch" in cb_kwargs:
            cb_kwargs["batch"] = plain_batch(cb_kwargs["batch"])
        super().notify(method_name, **cb_kwargs)

    def on_batch_begin(self, net: Any, batch: Any = None, training: bool = False) -> None:
        """Forget losses that were computed between steps."""
        super().on_batch_begin(net, batch=batch, training=training)
        self._state().terms = None

    def train_step(self, batch: Any, **fit_params: Any) -> Any:
        """Make a step of training; its numbers leave an accelerator in one transfer."""
        step, state = super().train_step(batch, **fit_params), self._state()
        loss = step["loss"].detach()
        if state.terms is not None and loss.device.type != "cpu":
            numbers = [loss, *(term.to(loss.dtype) for term in state.terms)]
            step["loss"], *state.terms = list(torch.stack(numbers).cpu())
        return step

    def on_batch_end(
        self, net: Any, batch: Any = None, training: bool = False, **step: Any
    ) -> None:
        """Record the loss and the penalty of a training step separately."""
        super().on_batch_end(net, batch=batch, training=training, **step)
        terms, self._state().terms = self._state().terms, None
        if not training or terms is None:
            return
        numbers: list[float] = [term.item() for term in terms]
        # without a penalty or a limit, its number needs no tensor
        loss, penalty, left = numbers + [0.0, 1.0][len(numbers) - 1 :]
        self.history.record_batch("train_loss", loss)
        self.history.record_batch("flatness_penalty", penalty * left)
        self.history.record_batch("flatness_clipped", 1.0 - left)


# outside training, its loss is the criterion's
CRITERION_ALONE.add(FlatNet.get_loss)


@to_network.register
def _(model: FlatNet, X: Any, y: Any, options: DataOptions) -> Network:
    check_is_fitted(model, "module_")
    made = None if model._record is None else model._record.initialized
    if made is not None and made == checksum(model.module_):
        # of the class only: one warning for many nets at a line
        warn(
            f"the {type(model).__name__} is not trained: its network was initialised again after "
            "fit, as set_params does for parameters of the module. Call fit again, or load_params."
        )
    X = check_inputs(model, X, reset=False)
    if isinstance(X, Dataset):
        y = None  # the Dataset holds the labels
    elif y is not None:
        y = model._encode(y)
    return skorch_network(model, skorch_batches(model, X, y, options), options)


def _on_tensors(function: Callable[[Tensor], Tensor], output: Any) -> Any:
    """Apply a function to a tensor, or to those of a tuple."""
    if type(output) is tuple:
        return tuple(_on_tensors(function, one) for one in output)
    return function(output) if isinstance(output, Tensor) else output


def _apply(function: Callable[[Tensor], Tensor], outputs: list[Tensor]) -> Any:
    return np.concatenate([to_numpy(function(output)) for output in outputs])

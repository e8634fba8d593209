"""A net that knows its task: a network sized from the data, outputs that fit the labels."""

import copy
from inspect import isfunction, signature
from typing import Any, ClassVar

import numpy as np
import torch
from sklearn.metrics import accuracy_score
from sklearn.utils._tags import ClassifierTags, RegressorTags
from skorch.callbacks import EpochScoring, EpochTimer, PrintLog
from torch import Tensor, nn

from relflat_sk._losses import TABLE, Loss, ProbabilityNLLLoss
from relflat_sk._models import IGNORED
from relflat_sk._network import floating_parameter
from relflat_sk.training._epoch_mean import EpochMean
from relflat_sk.training._inputs import with_sizes
from relflat_sk.training._mlp import MLP
from relflat_sk.training._outputs import check_ending, for_prediction
from relflat_sk.training._penalised_net import PenalisedNet, unwrap
from relflat_sk.training._tasks import TASKS, Task, with_class_weights

__all__ = ["TaskNet"]

# columns of the history that the net's own callbacks record on validation data
_OF_VALIDATION = ("valid_loss", "valid_loss_best", "valid_acc", "valid_acc_best")


class TaskNet(PenalisedNet):
    """Find the task in the criterion, and make network, criterion and callbacks for it."""

    _fixed_task: ClassVar[str | None] = None

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

    def _check_task(self) -> None:
        """Refuse a criterion of another task than the estimator's."""
        if self._fixed_task and self._criterion_task not in {None, self._fixed_task}:
            raise ValueError(
                f"{type(self).__name__} does {self._fixed_task}, but "
                f"{self._criterion_class.__name__} is a {self._criterion_task} loss. Use "
                "RelativeFlatnessRegularizedNet, which takes its task from the criterion."
            )

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
        """Record time, losses and the penalty per epoch, and a classifier's accuracy."""
        callbacks = [
            ("epoch_timer", EpochTimer()),
            ("train_loss", EpochMean(name="train_loss", on_train=True)),
            (
                "flatness_penalty",
                EpochMean(name="flatness_penalty", on_train=True, lower_is_better=None),
            ),
            (
                "flatness_clipped",
                EpochMean(name="flatness_clipped", on_train=True, lower_is_better=None),
            ),
            ("valid_loss", EpochMean(name="valid_loss")),
        ]
        if self._task.estimator_type == "classifier":
            accuracy = EpochScoring(_accuracy_of_targets, name="valid_acc", lower_is_better=False)
            callbacks.append(("valid_acc", accuracy))
        return [*callbacks, ("print_log", _PrintLog())]

    def on_epoch_begin(self, net: Any, dataset_valid: Any = None, **kwargs: Any) -> None:
        """Refuse callbacks that need validation data, if there are none, before any training.

        Raises
        ------
        ValueError
            If there is such a callback.
        """
        super().on_epoch_begin(net, dataset_valid=dataset_valid, **kwargs)
        if dataset_valid is not None:
            return
        for _, callback in self.callbacks_:
            monitor = getattr(callback, "monitor", None)
            if monitor in _OF_VALIDATION:
                raise ValueError(
                    f"the callback {type(callback).__name__} reads {monitor!r}, but no "
                    "validation data are held out: train_split=None is the default here. Pass "
                    "train_split=skorch.dataset.ValidSplit(5) to the net, or a monitor such as "
                    "'train_loss' to the callback."
                )

    # -- labels --------------------------------------------------------------------------

    # whether what the task knows comes from outputs, because the labels were in a Dataset
    _knows_outputs = False

    def _knows_labels(self) -> bool:
        """Return whether the task has learned from labels, rather than from a Dataset."""
        return hasattr(self, self._task.learned) and not self._knows_outputs

    def _learn_from_outputs(self) -> None:
        """After training on a Dataset, learn the classes from the number of outputs."""
        shape = self._state().output_shape
        if shape is not None and len(shape) <= 1:
            self._task.learn_from_outputs(self, shape.numel())
            self._knows_outputs = True

    def _gets_targets(self) -> bool:
        """Return whether labels come as targets: in training, its own data sets hold targets."""
        return self._training is not None and self._training.labels_encoded

    def _encode(self, y: Any) -> Any:
        """Turn labels into the criterion's targets."""
        # a net that was trained on a Dataset has met targets only
        labels = self._knows_labels() and not self._gets_targets()
        return self._task.encode(self, y) if labels else y

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        """Split off the validation data as skorch does, with targets in the network's precision.

        Parameters
        ----------
        X, y : array-like
            Inputs and targets.
        **fit_params
            Passed on to the `train_split` function.

        Returns
        -------
        dataset_train, dataset_valid : torch Dataset or None
            None for validation if nothing is held out.
        """
        if isinstance(y, np.ndarray) and y.dtype == np.float64:
            parameter = floating_parameter(self.module_)
            is_double = parameter is not None and parameter.dtype == torch.float64
            y = y if is_double else y.astype(np.float32)
        return super().get_split_datasets(X, y, **fit_params)

    # -- network and criterion -----------------------------------------------------------

    def initialize_module(self) -> "TaskNet":
        """Make the module, sized from the data where its constructor asks for sizes."""
        self._check_criterion()  # which tells the number of outputs
        kwargs = self.get_params_for("module")
        if isinstance(self.module, nn.Module) and not kwargs:
            self.module_ = copy.deepcopy(self.module)
            return self
        sizes = {"n_features": getattr(self, "n_inputs_", None), "n_outputs": self._n_outputs()}
        factory = type(self.module) if isinstance(self.module, nn.Module) else self.module
        kwargs = with_sizes(factory, kwargs, sizes)
        self.module_ = self.initialized_instance(self.module, kwargs)
        # float64 as in scikit-learn's networks; users choose the dtype of their own modules
        if factory is MLP and getattr(self, "is_double_", False) and str(self.device) == "cpu":
            self.module_.double()
        return self

    def _n_outputs(self) -> int | None:
        return self._task.n_outputs(self) if self._knows_labels() else None

    def initialize_criterion(self) -> "TaskNet":
        """Make the criterion; `NLLLoss` takes probabilities, as in skorch's classifiers.

        Raises
        ------
        TypeError
            If the criterion is a name or a function, or weights of classes are no numbers.
        ValueError
            If the criterion ignores a number that is another one among the encoded classes, or
            there are not as many weights as classes.
        """
        self._check_criterion()
        parameter = floating_parameter(self.module_)
        dtype = torch.float32 if parameter is None else parameter.dtype
        kwargs = with_class_weights(self._criterion_class, self.get_params_for("criterion"), dtype)
        made = self.criterion_ = self.initialized_instance(self.criterion, kwargs)
        self._check_ignored()
        self._check_n_weights()
        if type(made) is nn.NLLLoss:
            self.criterion_ = ProbabilityNLLLoss(
                weight=made.weight, ignore_index=made.ignore_index, reduction=made.reduction
            )
        # class weights are float32 tensors, and data of float64 make an MLP of float64
        if isinstance(self.criterion_, nn.Module) and type(self.module_) is MLP:
            self.criterion_.to(next(self.module_.parameters()).dtype)
        return self

    def initialize_optimizer(self, *args: Any, **kwargs: Any) -> "TaskNet":
        """Make the optimizer, as skorch does.

        Parameters
        ----------
        *args, **kwargs
            As in skorch.

        Returns
        -------
        TaskNet
            The net.

        Raises
        ------
        TypeError
            If the optimizer is not a class.
        """
        if not callable(self.optimizer):
            raise TypeError(
                "optimizer must be a class, such as torch.optim.Adam, which gets lr and the "
                f"parameters optimizer__*, got {self.optimizer!r}."
            )
        super().initialize_optimizer(*args, **kwargs)
        return self

    def _check_ignored(self) -> None:
        """Refuse an index to ignore that the encoding of labels gives another meaning."""
        criterion = getattr(self, "criterion_", None)
        if self._task is TASKS["classification"] and criterion is not None and self._knows_labels():
            _check_ignored(getattr(criterion, "ignore_index", IGNORED), self.classes_)

    def _check_n_weights(self) -> None:
        """Refuse weights of classes that are not as many as the classes."""
        weight = getattr(self.criterion_, "weight", None)
        if self._criterion_task != "classification" or weight is None or not self._knows_labels():
            return
        if weight.numel() != len(self.classes_):
            raise ValueError(
                f"criterion__weight has {weight.numel()} number(s), but y has "
                f"{self._task.describe(self)}: pass one weight for each class, in this order."
            )

    def _check_criterion(self) -> None:
        """Refuse a criterion of which a net can make no instance, such as a function."""
        criterion = self.criterion
        made = "criterion must be a class or a module, such as torch.nn.CrossEntropyLoss, got"
        if not callable(criterion):
            raise TypeError(f"{made} {criterion!r}.")
        if not isfunction(criterion):
            return
        try:  # a function may also make a criterion
            signature(criterion).bind(**self.get_params_for("criterion"))
        except TypeError:
            raise TypeError(
                f"{made} the function {criterion.__name__}. A net makes the criterion itself, as "
                "skorch does. For a loss of your own, pass a class of torch.nn.Module whose "
                "forward takes outputs and targets."
            ) from None

    def _check_output(self, criterion: Loss, y_pred: Tensor) -> None:
        """Refuse outputs of another size than the labels need; at first, of another kind too."""
        n_outputs = self._n_outputs()
        if n_outputs is None:
            self._state().output_shape = y_pred.shape[1:]
        elif y_pred.shape[1:].numel() != n_outputs:
            raise ValueError(
                f"y has {self._task.describe(self)}, which takes {n_outputs} output(s) for each "
                f"sample, but the module returned shape {tuple(y_pred.shape)} for a batch. Give "
                "the module's constructor an argument n_outputs, which is then set from y, or "
                "pass all classes to partial_fit."
            )
        state = self._state()
        if not state.output_checked:
            check_ending(criterion, y_pred)
            state.output_checked = True

    def _get_predict_nonlinearity(self) -> Any:
        """Return the function from outputs to predictions, mappings with logits included."""
        nonlinearity = self._choose_nonlinearity()
        required = isinstance(self.predict_nonlinearity, str | None)
        return lambda output: nonlinearity(for_prediction(output, required=required))

    def _choose_nonlinearity(self) -> Any:
        """Choose the function from logits to predictions, where skorch's own does not fit."""
        criterion = unwrap(self.criterion_)
        if self.predict_nonlinearity == "auto":
            if isinstance(criterion, nn.BCEWithLogitsLoss):
                return torch.sigmoid  # skorch's own makes two columns, and needs 1-d outputs
            if isinstance(criterion, nn.BCELoss):
                return _as_it_is
            if isinstance(criterion, nn.PoissonNLLLoss) and criterion.log_input:
                return torch.exp  # the expected count
        return super()._get_predict_nonlinearity()


def _check_ignored(ignored: int, classes: Any) -> None:
    """Refuse an index to ignore that the encoding of labels gives another meaning."""
    if np.array_equal(classes, np.arange(len(classes))):
        return  # the criterion sees the labels as they are
    if ignored != IGNORED or ignored in classes.tolist():
        raise ValueError(
            f"the criterion has ignore_index={ignored}, but the labels in y are not the numbers 0 "
            f"to {len(classes) - 1}: they are encoded as these, so that the criterion would not "
            "ignore the label that you mean. Leave the samples to be ignored out of X and y; or "
            "pass class indices in a Dataset, whose labels are not encoded."
        )


def _as_it_is(output: Tensor) -> Tensor:
    return output


class _PrintLog(PrintLog):
    """skorch's table of epochs, which is laid out only if somebody sees it."""

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        if net.verbose or self.sink is not print:
            super().on_epoch_end(net, **kwargs)


def _accuracy_of_targets(net: Any, X: Any, y: Any) -> float:
    """Compute the accuracy on the net's own data sets, which hold targets."""
    targets = y if isinstance(y, np.ndarray) else np.asarray([np.asarray(t) for t in y])
    return float(accuracy_score(targets, net.predict(X)))

"""What a net does with labels and outputs: the tasks that it may solve.

A task turns a user's labels into the targets that a criterion takes, determines the number of
outputs, and turns outputs into predictions. It stores what it learns from the labels on the net,
in fitted attributes such as `classes_`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.sparse import issparse
from sklearn.utils import assert_all_finite, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from torch import Tensor, nn

from relflat_sk._checks import warn
from relflat_sk._losses.loss import Loss, explain_ending
from relflat_sk._losses.table import ProbabilityNLLLoss
from relflat_sk._models.network_of import IGNORED
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._network.recording import find_ending

Array = npt.NDArray[Any]

# Numbers of more different values, with few samples of each, may be those of a regression.
# scikit-learn takes whole numbers for classes, floats too, and the default criterion is one of
# classes.
_MANY, _FEW_PER_CLASS = 20, 5


@dataclass(frozen=True)
class Link:
    """A function from a module's outputs to predictions, and one to their logarithm."""

    function: Callable[[Tensor], Tensor]
    logarithm: Callable[[Tensor], Tensor] | None = None


def _squeezed(outputs: Any) -> Any:
    """Return outputs without their axis if each sample has one."""
    return outputs.reshape(-1) if math.prod(outputs.shape[1:]) == 1 else outputs


def _log_sigmoid(outputs: Tensor) -> Tensor:
    """Return the logarithms for two classes with one logit, or for each of several labels."""
    z = _squeezed(outputs)
    return nn.functional.logsigmoid(z if z.ndim > 1 else torch.stack([-z, z], dim=1))


_IDENTITY = Link(lambda output: output)
_SOFTMAX = Link(partial(torch.softmax, dim=1), partial(torch.log_softmax, dim=1))
_SIGMOID = Link(torch.sigmoid, _log_sigmoid)
_SHARES = Link(lambda output: output / output.sum(dim=1, keepdim=True))
_EXP = Link(torch.exp)  # the expected count


class Task:
    """The task of a criterion that is not in the table of losses: labels are passed on as is."""

    # the name of the task in scikit-learn's tags; None if scikit-learn has no such task
    estimator_type: str | None = None
    # number of axes from which on labels are those of positions, such as pixels or tokens; 0: none
    n_axes = 0
    dtype: type = np.int64  # of targets
    # from the module's outputs to what `predict` takes, and to the logarithm of it
    link = _IDENTITY

    def learn(self, net: Any, y: Any, classes: Any = None) -> int | None:
        """Store on the net what encoding and decoding need; return the number of outputs."""
        return None

    def learn_from_outputs(self, net: Any, n_outputs: int) -> None:
        """Store on the net what is known without labels, which are targets in a Dataset."""

    def encode(self, net: Any, y: Any) -> Any:
        """Turn labels into targets."""
        return y

    def read_positions(self, y: Any) -> Array | None:
        """Return whole numbers for the positions of each sample as targets, if y has such axes."""
        array = np.asarray(to_array(y))
        several = self.n_axes and array.ndim >= self.n_axes and array[:1].size > 1
        if not several or array.dtype.kind not in "biuf":
            return None
        assert_all_finite(array, input_name="y")
        numbers = array.astype(np.int64)
        return numbers.astype(self.dtype) if np.array_equal(array, numbers) else None

    def probabilities(self, outputs: Array) -> Array:
        """Arrange the probabilities in one column per class."""
        return outputs

    def predict(self, outputs: Array) -> Array:
        """Turn outputs into predicted targets."""
        return outputs

    def decode(self, net: Any, predicted: Array) -> Array:
        """Turn predicted targets into labels as the user knows them."""
        return predicted


class _Classification(Task):
    """Labels of any type, with one output per class."""

    estimator_type = "classifier"
    n_axes = 2
    link = _SOFTMAX

    def learn(self, net: Any, y: Any, classes: Any = None) -> int | None:
        y = column_or_1d(_require(y), warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        if net.classes is not None:
            net.classes_ = _in_order(net.classes)
        else:
            net.classes_ = np.unique(y if classes is None else classes)
            if classes is None:
                _check_are_labels(net, y)
        if len(net.classes_) < 2:
            raise ValueError(
                "a classifier needs at least two classes in y, got one class: "
                f"{net.classes_.tolist()}."
            )
        return len(net.classes_)

    def learn_from_outputs(self, net: Any, n_outputs: int) -> None:
        net.classes_ = np.arange(n_outputs) if net.classes is None else _in_order(net.classes)
        if len(net.classes_) != n_outputs:
            raise ValueError(
                f"classes has {describe_labels(net)}, expected one for each of {n_outputs} outputs."
            )

    def encode(self, net: Any, y: Any) -> Any:
        y = column_or_1d(to_array(y), warn=True)
        unseen = np.setdiff1d(y, net.classes_)
        if len(unseen):
            raise ValueError(
                "y contains labels that were not seen when the net was fitted: "
                f"{_listed(unseen)}; known are {_listed(net.classes_)}."
            )
        order = np.argsort(net.classes_)
        return order[np.searchsorted(net.classes_, y, sorter=order)].astype(np.int64)

    def predict(self, outputs: Array) -> Array:
        indices: Array = outputs.argmax(axis=1)
        return indices

    def decode(self, net: Any, predicted: Array) -> Array:
        # a net that was trained on a Dataset knows class indices only
        return net.classes_[predicted] if hasattr(net, "classes_") else predicted


class _Binary(_Classification):
    """One logit for two classes, or one for each label of a multi-label task."""

    n_axes, dtype = 3, np.float32  # two axes are those of several labels
    link = _SIGMOID

    def learn(self, net: Any, y: Any, classes: Any = None) -> int | None:
        y = _require(y)
        net.multilabel_ = type_of_target(y, input_name="y") == "multilabel-indicator"
        if net.multilabel_:
            net.classes_ = np.arange(np.asarray(y).shape[1])
            return len(net.classes_)
        super().learn(net, y, classes)
        if len(net.classes_) > 2:
            raise ValueError(
                f"Only binary classification is supported with this criterion: y has "
                f"{len(net.classes_)} classes. Use CrossEntropyLoss, or one 0/1 column per label."
            )
        return 1

    def learn_from_outputs(self, net: Any, n_outputs: int) -> None:
        super().learn_from_outputs(net, max(n_outputs, 2))
        net.multilabel_ = n_outputs > 1

    def encode(self, net: Any, y: Any) -> Any:
        if net.multilabel_:
            return np.array(to_array(y), dtype=np.float32)
        return super().encode(net, y).astype(np.float32)[:, None]

    def probabilities(self, outputs: Array) -> Array:
        second = _squeezed(outputs)
        return second if second.ndim > 1 else np.stack([1 - second, second], axis=1)

    def predict(self, outputs: Array) -> Array:
        return (_squeezed(outputs) > 0.5).astype(np.int64)  # type: ignore[no-any-return]

    def decode(self, net: Any, predicted: Array) -> Array:
        return predicted if predicted.ndim > 1 else super().decode(net, predicted)


class _Regression(Task):
    """Numbers, with one output per column of y."""

    estimator_type = "regressor"

    def learn(self, net: Any, y: Any, classes: Any = None) -> int | None:
        y = _numbers(y)
        net.n_outputs_, net.flat_target_ = int(np.prod(y.shape[1:])), y.ndim == 1
        return net.n_outputs_  # type: ignore[no-any-return]

    def encode(self, net: Any, y: Any) -> Any:
        numbers = _numbers(y)
        return numbers if numbers.ndim > 2 else numbers.reshape(len(numbers), -1)

    def predict(self, outputs: Array) -> Array:
        return outputs.astype(np.float64)  # as scikit-learn's regressors do

    def decode(self, net: Any, predicted: Array) -> Array:
        flat = getattr(net, "flat_target_", False)
        return predicted.reshape(len(predicted)) if flat else predicted


# by the names of tasks in the table of losses
TASKS: dict[str | None, Task] = {
    "classification": _Classification(),
    "binary": _Binary(),
    "regression": _Regression(),
    None: Task(),
}


# -- labels -------------------------------------------------------------------------------


def to_array(y: Any) -> Any:
    """Convert tensors and sparse labels to arrays, and leave others as they are."""
    if issparse(y):
        return y.toarray()
    return y.detach().cpu().numpy() if hasattr(y, "detach") else y


def _in_order(classes: Any) -> Array:
    """Return the classes that a user lists, in this order."""
    labels = np.asarray(classes)
    ordered = np.unique(labels)
    if labels.ndim != 1 or len(ordered) < len(labels):
        raise ValueError(f"classes must be a list of different labels, got {classes!r}.")
    if not np.array_equal(labels, ordered):
        warn(
            f"classes={_listed(labels)} are not sorted, and neither are the columns of "
            "predict_proba, as scikit-learn takes them: its scores of probabilities, such as "
            "'neg_log_loss' and 'roc_auc', are those of other classes. Sort the classes, and the "
            "outputs of a module of your own with them."
        )
    return labels


def check_classes(net: Any, classes: Any) -> None:
    """Refuse classes of `partial_fit` that a net has not learned, as scikit-learn does."""
    if classes is None or not hasattr(net, "classes_") or getattr(net, "multilabel_", False):
        return
    if not np.array_equal(np.unique(classes), np.unique(net.classes_)):
        raise ValueError(
            f"`classes={classes!r}` is not the same as on last call to partial_fit, or as the "
            f"parameter classes: {net.classes_!r}. Call fit to learn other classes."
        )


def _require(y: Any) -> Any:
    """Return labels as an array; refuse missing ones."""
    if y is None:
        raise ValueError("this estimator requires y to be passed, but the target y is None.")
    return to_array(y)


def _numbers(y: Any) -> Array:
    """Copy the values of a regression with all their digits, checked to be finite numbers."""
    array: Array = check_array(
        _require(y),
        dtype=[np.float64, np.float32],  # other types become the first
        copy=True,
        ensure_2d=False,
        allow_nd=True,  # images, or several series
        ensure_min_samples=0,
        input_name="y",
    )
    return array


def describe_labels(net: Any) -> str:
    """Describe for error messages what a net has learned from labels."""
    if hasattr(net, "classes_"):
        return f"classes {_listed(net.classes_)}"
    return f"{net.n_outputs_} column(s)"


def _listed(labels: Array) -> str:
    more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
    return f"{labels[:20].tolist()}{more}"


def looks_like_values(y: Array) -> bool:
    """Return whether labels have as many different values as those of a regression."""
    n_classes = len(np.unique(y))
    return y.dtype.kind in "fiu" and n_classes > _MANY and len(y) < _FEW_PER_CLASS * n_classes


def _check_are_labels(net: Any, y: Array) -> None:
    """Refuse floats that look like the values of a regression; warn of integers that do."""
    if not looks_like_values(y):
        return
    instead = "use RelativeFlatnessRegularizedRegressor"
    if not net._fixed_task:
        instead = "pass a regression loss, such as criterion=torch.nn.MSELoss"
    text = (
        f"y has {len(net.classes_)} different values of {y.dtype} in {len(y)} samples, which look "
        "like the values of a regression, but the criterion is one of classes. If they are values, "
        f"{instead}."
    )
    if y.dtype.kind == "f":
        raise ValueError(f"{text} If they are class labels, pass them as integers: y.astype(int).")
    warn(f"{text} They are taken for classes.")


def check_ignored(net: Any) -> None:
    """Refuse an index to ignore that the encoding of labels gives another meaning."""
    if net._task is not TASKS["classification"] or net._n_outputs is None:
        return
    classes = net.classes_
    ignored = getattr(getattr(net, "criterion_", None), "ignore_index", IGNORED)
    if np.array_equal(classes, np.arange(len(classes))):
        return  # the criterion sees the labels as they are
    if ignored != IGNORED or ignored in classes.tolist():
        raise ValueError(
            f"the criterion has ignore_index={ignored}, but the labels in y are not the numbers 0 "
            f"to {len(classes) - 1}: they are encoded as these, and others ignored. Leave out the "
            "samples that you mean, or pass class indices in a Dataset, which stay as they are."
        )


# -- the weights of classes, which users of scikit-learn pass as arrays --------------------


def with_class_weights(
    criterion: type, arguments: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Any]:
    """Convert the weights of classes among the arguments of one of torch's criteria to tensors."""
    converted = dict(arguments)
    names = ("weight", "pos_weight") if criterion.__module__.startswith("torch.nn.") else ()
    for name in names:
        value = converted.get(name)
        if value is not None and not isinstance(value, Tensor):
            numbers = np.asarray(value, dtype=np.float64, order="C")
            converted[name] = torch.tensor(numbers, dtype=torch.promote_types(dtype, torch.float32))
    return converted


# -- outputs, which may be mappings with `logits` ------------------------------------------


UNSEEN = "unseen"  # the ending of a module that has made no outputs


def to_predictions(net: Any, ending: str | None, *, labels: bool = False) -> Link:
    """Return the functions from a net's outputs to its predictions, by criterion and task.

    With a criterion of the user's own, `ending` tells what the module ends in. The labels of a
    classifier are read as the criterion reads outputs also if `predict_nonlinearity` is None.
    """
    chosen = net.predict_nonlinearity
    if not callable(chosen) and chosen not in ("auto", None):
        raise TypeError(f"predict_nonlinearity must be a callable, 'auto' or None, got {chosen!r}.")
    if callable(chosen):
        return Link(chosen)
    if chosen is None and not (labels and net._task.estimator_type == "classifier"):
        return _IDENTITY
    return _link(unwrapped(net.criterion_), net._task, ending)


_OF_CRITERIA: dict[type, Link] = {
    nn.BCELoss: _IDENTITY,
    nn.NLLLoss: _IDENTITY,  # of probabilities
    nn.BCEWithLogitsLoss: _SIGMOID,
    nn.CrossEntropyLoss: _SOFTMAX,
}


def _link(criterion: Any, task: Task, ending: str | None) -> Link:
    if isinstance(criterion, nn.PoissonNLLLoss):
        return _EXP if criterion.log_input else _IDENTITY
    for kind, link in _OF_CRITERIA.items():
        if isinstance(criterion, kind):
            return link
    if ending == UNSEEN:  # of probabilities, the task's logarithm would be that of others
        return Link(task.link.function)
    if ending == "sigmoid" and task.link is _SOFTMAX:
        return _SHARES
    return _IDENTITY if ending in ("sigmoid", "softmax") else task.link


def movable(output: Any) -> Any:
    """Leave out entries of a mapping that skorch cannot move to a device, such as caches."""
    if not isinstance(output, Mapping) or all(map(_is_movable, output.values())):
        return output
    return {name: part for name, part in output.items() if _is_movable(part)}


def _is_movable(part: Any) -> bool:
    """Return whether there are only tensors in an output, possibly in containers."""
    if isinstance(part, tuple | list):
        return all(map(_is_movable, part))
    return isinstance(part, Tensor)


# -- whether a module ends in logits or in probabilities -----------------------------------

# what to pass for a module that is to keep its ending
_INSTEAD = {
    "softmax": "NLLLoss, which takes probabilities here, as in skorch's classifiers",
    "log_softmax": "CrossEntropyLoss, which takes them as they are",
    "sigmoid": "BCELoss, which takes probabilities",
}
_ROUNDING = 0.02  # of a sum of probabilities in bfloat16


def check_ending(loss: Loss, output: Tensor) -> str | None:
    """Refuse probabilities where the criterion takes logits, and the other way round.

    Return the function that the module ends in.
    """
    ending = find_ending(output)
    problem = explain_ending(loss.criterion, ending)
    if ending is not None and problem is not None:
        raise ValueError(
            f"{problem}. Remove it from the module, or pass criterion=torch.nn.{_INSTEAD[ending]}."
        )
    if type(loss.criterion) is ProbabilityNLLLoss:
        p = output.detach()
        # nan passes
        far = (p < 0).any() | ((p.sum(dim=1) - 1).abs() > _ROUNDING).any()
        if far:
            raise ValueError(
                "NLLLoss takes probabilities here, as in skorch's classifiers, with the sum 1. "
                f"The module returned values from {p.min():g} to {p.max():g}. End it with a "
                "softmax, or use CrossEntropyLoss, for logits or the output of LogSoftmax."
            )
    return ending

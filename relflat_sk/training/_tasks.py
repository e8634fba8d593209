"""What a net does with labels and outputs, by task: the difference between estimators.

Each task turns the labels that users have into the targets that a criterion takes, says
how many outputs that needs, and turns outputs back into predictions. What it learns from
the labels is kept on the net, as scikit-learn's fitted attributes.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import assert_all_finite, check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets, type_of_target

__all__ = ["TASKS", "Task"]

Array = npt.NDArray[Any]


class Task(Protocol):
    """One way of reading labels and outputs."""

    @property
    def estimator_type(self) -> str | None:
        """What scikit-learn calls it."""

    @property
    def learned(self) -> str:
        """Which attribute of the net is there once `learn` has run."""

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        """Keep on the net what encoding and decoding need."""

    def encode(self, net: Any, y: Any) -> Array:
        """Turn labels into targets."""

    def n_outputs(self, net: Any) -> int | None:
        """Count the outputs that the targets need, None if nobody knows."""

    def describe(self, net: Any) -> str:
        """Say what was learned from y, for error messages."""

    def probabilities(self, outputs: Array) -> Array:
        """Arrange the probabilities of the outputs one column per class."""

    def predict(self, outputs: Array) -> Array:
        """Turn outputs (after the link) into predicted targets."""

    def decode(self, net: Any, predicted: Array) -> Array:
        """Turn predicted targets into what users call them."""

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        """Judge predictions as scikit-learn does by default."""


def _numpy(y: Any) -> Any:
    return y.detach().cpu().numpy() if hasattr(y, "detach") else y


def _require(y: Any) -> Any:
    if y is None:
        raise ValueError(
            "this estimator requires y to be passed, but the target y is None. Pass y, or a "
            "torch Dataset that holds the labels."
        )
    return _numpy(y)


def _listed(labels: Array) -> str:
    more = f" and {len(labels) - 20} more" if len(labels) > 20 else ""
    return f"{labels[:20].tolist()}{more}"


def _class_indices(y: Any, classes: Array) -> Array:
    y = column_or_1d(_numpy(y), warn=True)
    unseen = np.setdiff1d(y, classes)
    if len(unseen):
        raise ValueError(
            f"y contains labels that were not seen when the net was fitted: "
            f"{_listed(unseen)}; known are {_listed(classes)}."
        )
    indices: Array = np.searchsorted(classes, y).astype(np.int64)
    return indices


class _Classification:
    estimator_type = "classifier"
    learned = "classes_"

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        y = column_or_1d(_require(y), warn=True)
        assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        net.classes_ = np.unique(y if classes is None else classes)
        if len(net.classes_) < 2:
            raise ValueError(
                f"a classifier needs at least two classes in y, got one class: "
                f"{net.classes_.tolist()}."
            )

    def encode(self, net: Any, y: Any) -> Array:
        return _class_indices(y, net.classes_)

    def n_outputs(self, net: Any) -> int | None:
        return len(net.classes_)

    def describe(self, net: Any) -> str:
        return f"classes {_listed(net.classes_)}"

    def probabilities(self, outputs: Array) -> Array:
        return outputs

    def predict(self, outputs: Array) -> Array:
        indices: Array = outputs.argmax(axis=1)
        return indices

    def decode(self, net: Any, predicted: Array) -> Array:
        # a Dataset's labels are class indices already
        return net.classes_[predicted] if hasattr(net, "classes_") else predicted

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        return float(accuracy_score(_numpy(y), predicted, sample_weight=sample_weight))


class _Binary(_Classification):
    """One logit for two classes, or one for each label of a multi-label task."""

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        y = _require(y)
        if type_of_target(y, input_name="y") == "multilabel-indicator":
            net.classes_ = np.arange(np.asarray(y).shape[1])
            net.multilabel_ = True
            return
        super().learn(net, y, classes)
        net.multilabel_ = False
        if len(net.classes_) > 2:
            raise ValueError(
                "Only binary classification is supported with this criterion: y has "
                f"{len(net.classes_)} classes, one logit tells two apart. Use "
                "torch.nn.CrossEntropyLoss for more, or one 0/1 column per label."
            )

    def encode(self, net: Any, y: Any) -> Array:
        if getattr(net, "multilabel_", False):
            return np.array(_numpy(y), dtype=np.float32)
        return _class_indices(y, net.classes_).astype(np.float32)[:, None]

    def n_outputs(self, net: Any) -> int | None:
        return len(net.classes_) if getattr(net, "multilabel_", False) else 1

    def probabilities(self, outputs: Array) -> Array:
        if outputs.ndim == 2 and outputs.shape[1] > 1:
            return outputs
        second = outputs.reshape(-1)
        return np.stack([1 - second, second], axis=1)

    def predict(self, outputs: Array) -> Array:
        rows = outputs if outputs.ndim == 2 and outputs.shape[1] > 1 else outputs.reshape(-1)
        return (rows > 0.5).astype(np.int64)

    def decode(self, net: Any, predicted: Array) -> Array:
        return predicted if predicted.ndim == 2 else super().decode(net, predicted)


class _Regression:
    estimator_type = "regressor"
    learned = "n_outputs_"

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        y = self._numbers(y)
        net.n_outputs_ = 1 if y.ndim == 1 else y.shape[1]
        net.flat_target_ = y.ndim == 1

    def _numbers(self, y: Any) -> Array:
        array: Array = check_array(
            _require(y),
            dtype=np.float32,
            copy=True,
            ensure_2d=False,
            ensure_min_samples=0,
            input_name="y",
        )
        return array

    def encode(self, net: Any, y: Any) -> Array:
        numbers = self._numbers(y)
        return numbers.reshape(len(numbers), -1)

    def n_outputs(self, net: Any) -> int | None:
        return int(net.n_outputs_)

    def describe(self, net: Any) -> str:
        return f"{net.n_outputs_} column(s)"

    def probabilities(self, outputs: Array) -> Array:
        return outputs

    def predict(self, outputs: Array) -> Array:
        return outputs.astype(np.float64)  # as scikit-learn's regressors do

    def decode(self, net: Any, predicted: Array) -> Array:
        flat = getattr(net, "flat_target_", False)
        return predicted.reshape(len(predicted)) if flat else predicted

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        return float(r2_score(_numpy(y), predicted, sample_weight=sample_weight))


class _Plain:
    """A criterion that is not in the table: targets are what the user says they are."""

    estimator_type = None
    learned = ""  # nothing

    def learn(self, net: Any, y: Any, classes: Any = None) -> None:
        pass

    def encode(self, net: Any, y: Any) -> Array:
        return y  # type: ignore[no-any-return]

    def n_outputs(self, net: Any) -> int | None:
        return None

    def describe(self, net: Any) -> str:
        return "of any kind"

    def probabilities(self, outputs: Array) -> Array:
        return outputs

    def predict(self, outputs: Array) -> Array:
        return outputs

    def decode(self, net: Any, predicted: Array) -> Array:
        return predicted

    def score(self, y: Any, predicted: Array, sample_weight: Any) -> float:
        raise AttributeError("a net whose criterion tells no task has no score")


TASKS: dict[str | None, Task] = {
    "classification": _Classification(),
    "binary": _Binary(),
    "regression": _Regression(),
    None: _Plain(),
}

"""Check that estimator and data of an objective fit together, before anything is trained."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from skorch import NeuralNet
from skorch.dataset import get_len

from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import check_weights
from relflat_sk.search._trial.weights import last_prefix
from relflat_sk.training import check_parameters

__all__ = ["check_data", "check_fit_params", "check_kind", "check_order"]


def check_order(estimator: Any, X: Any, y: Any, space: Any) -> None:
    """Refuse the arguments of an objective in another order."""
    given = (estimator, X, y, space)
    has_estimator_behind = any(hasattr(one, "get_params") for one in given[1:])
    has_space_before = isinstance(X, Mapping) and hasattr(space, "shape")
    if has_estimator_behind or has_space_before:
        kinds = ", ".join(type(one).__name__ for one in given)
        raise TypeError(
            "MinimaObjective takes its first arguments in the order estimator, X, y, space, got "
            f"{kinds}. Pass them in this order, or by name."
        )


def check_kind(estimator: Any, varied: Collection[str]) -> None:
    """Refuse an estimator of which no candidate can be trained and measured.

    Classes of the user's own are not refused: only their training shows what they are.
    """
    if isinstance(estimator, Pipeline):
        name, last = estimator.steps[-1]
        if not {name, "steps"} & set(varied):  # otherwise, candidates have another last step
            inside = f"{name}__"
            check_kind(last, [one.removeprefix(inside) for one in varied if inside in one])
        return
    package = type(estimator).__module__.partition(".")[0]
    if package == "sklearn":
        with suppress(NotFittedError):  # which is the only objection to a network
            to_network(clone(estimator), None, None, DataOptions())
    elif isinstance(estimator, NeuralNet) and package in {"skorch", "relflat_sk"}:
        check_parameters(estimator)


def check_data(X: Any, y: Any, X_test: Any, y_test: Any, *, classifier: bool) -> None:
    """Refuse data that do not fit together: samples and labels, training and held-out data.

    Shapes: `X_test`, `y_test` (n_test, ...).
    """
    if (X_test is None) != (y_test is None):
        raise ValueError("X_test and y_test go together: give both or neither.")
    for data, labels, names in ((X, y, ("X", "y")), (X_test, y_test, ("X_test", "y_test"))):
        _check_lengths(data, labels, names)
    if _length(X) == 1:
        raise ValueError(
            "X holds 1 sample, which a constant prediction fits, so that no network is better than "
            "that. Pass more samples."
        )
    if X_test is None:
        return
    for name, train, test in (("X", X, X_test), ("y", y, y_test)):
        one, other = _shape(train), _shape(test)
        if one is not None and other is not None and one[1:] != other[1:]:
            raise ValueError(
                f"{name}_test must have the shape of {name} but for the number of samples, got "
                f"{name} of shape {one} and {name}_test of shape {other}."
            )
    if classifier:
        _check_classes(y, y_test)


def check_fit_params(
    X: Any, y: Any, fit_params: Mapping[str, Any] | None, estimator: Any
) -> dict[str, Any]:
    """Check the arguments of `fit`, and find the weights of samples among them."""
    if fit_params is not None and not isinstance(fit_params, Mapping):
        raise TypeError(f"fit_params must be a dict or None, got {fit_params!r}.")
    given = {name: value for name, value in (fit_params or {}).items() if value is not None}
    names = (f"{last_prefix(estimator)}sample_weight", "sample_weight")
    weights = next((given[name] for name in names if name in given), None)
    if weights is not None:
        weights = check_weights(weights, get_len(X))
        if is_classifier(estimator) and _shape(y) == (len(weights),):
            classes = set(np.asarray(y)[weights > 0].tolist())
            if len(classes) < 2:
                raise ValueError(
                    f"sample_weight is positive for one class only, {sorted(classes)}, and a "
                    "constant prediction fits it. Give positive weights to samples of two classes."
                )
    return {"fit_params": given, "sample_weight": weights}


def _check_lengths(data: Any, labels: Any, names: tuple[str, str]) -> None:
    """Refuse samples and labels of unequal number, or none at all."""
    n, n_labels = _length(data), _length(labels)
    if n == 0:
        raise ValueError(f"{names[0]} holds no samples.")
    if n is not None and n_labels is not None and n != n_labels:
        raise ValueError(
            f"{names[0]} and {names[1]} must have as many samples as labels, got {n} samples in "
            f"{names[0]} and {n_labels} labels in {names[1]}."
        )


def _check_classes(y: Any, y_test: Any) -> None:
    """Refuse classes that are held out but not trained on."""
    if _shape(y) is None or _shape(y_test) is None:
        return
    known, held_out = (set(np.ravel(np.asarray(one)).tolist()) for one in (y, y_test))
    unknown = held_out - known
    if unknown:
        raise ValueError(
            f"y_test holds classes that are not in y: {sorted(unknown, key=str)[:10]}. The loss "
            "on them is not defined. Leave these samples out of X_test and y_test, or add "
            "samples of these classes to X and y."
        )


def _shape(data: Any) -> tuple[int, ...] | None:
    """Return the shape of an array, data frame, tensor or sparse matrix; None for all others."""
    shape = getattr(data, "shape", None)
    if shape is None and isinstance(data, list) and data and not hasattr(data[0], "__len__"):
        shape = (len(data),)
    return tuple(shape) if isinstance(shape, tuple) else None


def _length(data: Any) -> int | None:
    """Return the number of samples, None if it is not known without reading the data."""
    shape = _shape(data)
    if shape:
        return shape[0]
    return len(data) if isinstance(data, list) else None

"""Restore estimators from the weights of their networks, without training."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor

from relflat_sk._models import final_estimator
from relflat_sk._random import seeded
from relflat_sk.search._trial.training_data import TrainingData

__all__ = ["last_prefix", "last_step", "restore"]

_AROUND = ("regressor", "estimator")  # parameters of estimators around one other

Weights = Mapping[str, Tensor]


def restore(estimator: Any, weights: Weights, data: TrainingData, seed: int | None) -> Any:
    """Fit an estimator without training its network, which gets its weights from a file.

    The other steps of a pipeline are fitted, classes are learned and the network gets its size
    from the data, as they were when the network was trained.
    """
    inner = last_step(estimator)
    without_training = _skorch_loads if isinstance(inner, NeuralNet) else _sklearn_sizes_arrays
    with seeded(seed), without_training(inner, weights):
        estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    fitted = final_estimator(estimator)
    if isinstance(fitted, NeuralNet):
        fitted.max_epochs, fitted.callbacks = inner.max_epochs, inner.callbacks
        fitted.callbacks_ = [one for one in fitted.callbacks_ if not isinstance(one[1], _Load)]
    else:
        _set_coefficients(fitted, list(weights.values()))
        if hasattr(inner, "max_iter"):
            fitted.max_iter = inner.max_iter
    return estimator


def last_step(estimator: Any) -> Any:
    """Find the unfitted estimator that is going to hold the network."""
    if hasattr(estimator, "steps"):
        return last_step(estimator.steps[-1][1])
    for name in _AROUND:
        inner = getattr(estimator, name, None)
        if hasattr(inner, "fit"):
            return last_step(inner)
    return estimator


def last_prefix(estimator: Any) -> str:
    """Return what stands before the parameters of the estimator that holds the network."""
    if hasattr(estimator, "steps"):
        name, inner = estimator.steps[-1]
    else:
        names = (one for one in _AROUND if hasattr(getattr(estimator, one, None), "fit"))
        name = next(names, "")
        inner = getattr(estimator, name, None) if name else None
    return f"{name}__{last_prefix(inner)}" if name else ""


class _Load(Callback):
    """Load the weights of a net at the beginning of its training."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        getattr(net.module_, "_orig_mod", net.module_).load_state_dict(self.weights)


@contextmanager
def _skorch_loads(net: NeuralNet, weights: Weights) -> Iterator[None]:
    """Let a net load weights instead of training."""
    before = net.max_epochs, net.callbacks
    net.max_epochs, net.callbacks = 0, [_Load(weights)]
    try:
        yield
    finally:
        net.max_epochs, net.callbacks = before


@contextmanager
def _sklearn_sizes_arrays(estimator: Any, weights: Weights) -> Iterator[None]:
    """Let a solver of scikit-learn make one step, so that all its arrays have their sizes."""
    before = getattr(estimator, "max_iter", None)
    if before is not None:
        estimator.max_iter = 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            yield
    finally:
        if before is not None:
            estimator.max_iter = before


def _set_coefficients(estimator: Any, tensors: list[Tensor]) -> None:
    """Set coefficients from pairs of (weight, bias), one pair per layer; the inverse of to_torch.

    The weights of scikit-learn's MLPs are transposed.
    """
    arrays = [tensor.numpy() for tensor in tensors]
    if hasattr(estimator, "coefs_"):
        estimator.coefs_ = [
            weight.T.astype(old.dtype)
            for weight, old in zip(arrays[::2], estimator.coefs_, strict=True)
        ]
        estimator.intercepts_ = [
            bias.astype(old.dtype)
            for bias, old in zip(arrays[1::2], estimator.intercepts_, strict=True)
        ]
        return
    weight, bias = arrays
    estimator.coef_ = weight.astype(estimator.coef_.dtype).reshape(estimator.coef_.shape)
    if np.size(estimator.intercept_) == bias.size:
        old = np.asarray(estimator.intercept_)
        estimator.intercept_ = bias.reshape(old.shape).astype(old.dtype)[()]

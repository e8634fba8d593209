"""Weights of minima: kept as they are found, given back to an estimator without training.

Kept is a `state_dict` in a file that ``torch.load(..., weights_only=True)`` reads, which runs no
code, of the network as it is measured: for scikit-learn's estimators, of the module that
`relflat_sk._models.sklearn_estimators.to_torch` makes of them.
"""

import io
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import FrozenTrial
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import Tensor, nn

from relflat_sk._models import final_estimator
from relflat_sk.search._trial.fitting import seeded

__all__ = ["ARTIFACT", "as_store", "keep_weights", "load_weights", "restore"]

ARTIFACT = "artifact_id"  # the trial's attribute that says which file

Weights = Mapping[str, Tensor]


def as_store(store: Any) -> Any:
    """Take a folder for the artifact store in it.

    Parameters
    ----------
    store : str, path, optuna artifact store or None

    Returns
    -------
    optuna artifact store or None

    Raises
    ------
    TypeError
        If it is none of these.
    """
    if isinstance(store, str | Path):
        Path(store).mkdir(parents=True, exist_ok=True)
        return FileSystemArtifactStore(store)
    if store is None or (hasattr(store, "open_reader") and hasattr(store, "write")):
        return store
    raise TypeError(
        "artifact_store must be a folder, an optuna artifact store or None, got "
        f"{store!r}. For files in a folder: artifact_store='minima'."
    )


def keep_weights(store: Any, trial: optuna.Trial, module: nn.Module) -> None:
    """Write a network's weights to a store, and which they are to its trial."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"minimum_{trial.number}.pt"
        torch.save(module.state_dict(), path)
        artifact = upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
    trial.set_user_attr(ARTIFACT, artifact)


def load_weights(store: Any, trial: FrozenTrial) -> Weights:
    """Read the weights of a finished trial.

    Raises
    ------
    ValueError
        If none were kept, or not in this store.
    """
    artifact = trial.user_attrs.get(ARTIFACT)
    if store is None or artifact is None:
        raise ValueError(
            f"no weights of trial {trial.number} were kept. Give the search an artifact_store, a "
            "folder for instance, before it trains: FlatMinimaSearch(..., artifact_store='minima')."
        )
    try:
        with store.open_reader(artifact) as file:
            content = io.BytesIO(file.read())
    except ArtifactNotFound:
        raise ValueError(
            f"the weights of trial {trial.number}, artifact {artifact!r}, are not in {store!r}. "
            "Give the artifact_store that the search was run with."
        ) from None
    weights: Weights = torch.load(content, weights_only=True, map_location="cpu")
    return weights


def restore(estimator: Any, weights: Weights, X: Any, y: Any, seed: int | None) -> Any:
    """Fit everything but the network, which gets weights that are known.

    What stands before the network in a pipeline is fitted, classes are learned and the
    network is sized from the data, as when it was trained.

    Parameters
    ----------
    estimator : estimator
        Unfitted, set up for the candidate.
    weights : dict of str to tensor
    X, y : array-like
        The data it was trained on.
    seed : int or None
        The one it was trained with.

    Returns
    -------
    estimator
        The same, fitted. A net's history and scikit-learn's `n_iter_` tell of no training.
    """
    inner = _last_step(estimator)
    give = _into_skorch if isinstance(inner, NeuralNet) else _into_sklearn
    with seeded(seed), give(inner, weights):
        estimator.fit(X, y)
    fitted = final_estimator(estimator)
    if isinstance(fitted, NeuralNet):
        fitted.max_epochs, fitted.callbacks = inner.max_epochs, inner.callbacks
        fitted.callbacks_ = [one for one in fitted.callbacks_ if not isinstance(one[1], _Load)]
    else:
        _set_coefficients(fitted, list(weights.values()))
        if hasattr(inner, "max_iter"):
            fitted.max_iter = inner.max_iter
    return estimator


def _last_step(estimator: Any) -> Any:
    """Find the unfitted estimator that is to hold the network."""
    if hasattr(estimator, "steps"):
        return _last_step(estimator.steps[-1][1])
    for name in ("regressor", "estimator"):  # what wraps one estimator
        inner = getattr(estimator, name, None)
        if hasattr(inner, "fit"):
            return _last_step(inner)
    return estimator


class _Load(Callback):
    """Gives a net its weights where its training would begin."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def on_train_begin(self, net: NeuralNet, **kwargs: Any) -> None:
        getattr(net.module_, "_orig_mod", net.module_).load_state_dict(self.weights)


@contextmanager
def _into_skorch(net: NeuralNet, weights: Weights) -> Iterator[None]:
    before = net.max_epochs, net.callbacks
    net.max_epochs, net.callbacks = 0, [_Load(weights)]
    try:
        yield
    finally:
        net.max_epochs, net.callbacks = before


@contextmanager
def _into_sklearn(estimator: Any, weights: Weights) -> Iterator[None]:
    """Let scikit-learn's solvers make one step, which sizes all arrays."""
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
    """Undo what `_models.sklearn_estimators` does: layers of (weight, bias), transposed in MLPs."""
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
        estimator.intercept_ = bias.reshape(np.shape(estimator.intercept_))[()]

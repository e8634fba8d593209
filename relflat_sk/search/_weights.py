"""Save the weights of minima as files, and restore estimators from them without training.

A file holds the `state_dict` of the network that is measured. For an estimator of scikit-learn,
this is the module that `relflat_sk._models.sklearn_estimators.to_torch` makes of it.
``torch.load(..., weights_only=True)`` reads the file without running code. The trial has a
checksum of the weights, which tells of files that were truncated or overwritten.
"""

import io
import tempfile
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import joblib
import numpy as np
import optuna
import torch
from numpy.typing import NDArray
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import FrozenTrial
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNet
from torch import Tensor

from relflat_sk._models.network_of import final_estimator, last_step
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._random import seeded
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._data import TrainingData
from relflat_sk.search._failures import blame_call
from relflat_sk.search._task import Trained
from relflat_sk.training._after_fit import measured_later

Weights = Mapping[str, Tensor]


class DamagedWeightsError(ValueError):
    """A file of weights is gone, cannot be read, or holds other weights than were saved."""


class _Folder(FileSystemArtifactStore):
    """A folder of files, named in errors by its path."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.path = path

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        """Write a file, in a folder that is made if need be."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        super().write(artifact_id, content_body)

    def __repr__(self) -> str:
        return repr(str(self.path))


def as_store(store: Any) -> Any:
    """Make an artifact store of a folder; return a store as it is."""
    if isinstance(store, str | Path):
        return _Folder(store)
    if store is None or (hasattr(store, "open_reader") and hasattr(store, "write")):
        return store
    raise TypeError(
        "artifact_store must be a folder, an optuna artifact store or None, got "
        f"{store!r}. For files in a folder: artifact_store='minima'."
    )


def check_store(store: Any) -> None:
    """Write a file to a store and remove it, so that it fails before anything is trained."""
    if store is not None:
        name = f"probe-{uuid.uuid4().hex}"
        with blame_call(f"artifact_store={store!r} cannot be written to", "Give another."):
            store.write(name, io.BytesIO(b"probe"))
            store.remove(name)


def _open(store: Any, trial: FrozenTrial) -> BinaryIO:
    """Open the file with the weights of a trial."""
    artifact = trial.user_attrs["artifact_id"]
    try:
        file: BinaryIO = store.open_reader(artifact)
    except ArtifactNotFound:
        raise DamagedWeightsError(
            f"the weights of trial {trial.number}, artifact {artifact!r}, are not in "
            f"artifact_store={store!r}."
        ) from None
    return file


def save_weights(store: Any, trial: optuna.Trial, weights: Weights, minimum: Minimum) -> None:
    """Save the weights of a network to a store, and record the name of their file."""
    what = f"the weights of trial {trial.number} cannot be saved in {store!r}"
    advice = "Free space there, or give another artifact_store."
    with blame_call(what, advice), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"minimum_{trial.number}.pt"
        torch.save(weights, path)
        minimum.artifact_id = upload_artifact(
            artifact_store=store, file_path=str(path), study_or_trial=trial
        )
    minimum.weights_hash = _checksum(weights)


def _checksum(weights: Weights) -> str:
    """Return a text, so that the table of minima does not take it for a measure."""
    parts = {name: _as_numbers(tensor) for name, tensor in weights.items()}
    return str(joblib.hash(parts))


def _as_numbers(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as NumPy has it, which has no bfloat16."""
    tensor = tensor.detach().cpu()
    return (tensor if tensor.dtype != torch.bfloat16 else tensor.view(torch.int16)).numpy()


def load_weights(store: Any, trial: FrozenTrial) -> Weights:
    """Load the weights of a finished trial."""
    minimum = Minimum.from_trial(trial)
    with _open(store, trial) as file:
        content = io.BytesIO(file.read())
    damaged = DamagedWeightsError(
        f"the weights of trial {trial.number} are damaged: file {minimum.artifact_id!r} in "
        f"{store!r} was truncated or overwritten."
    )
    try:
        weights: Weights = torch.load(content, weights_only=True, map_location="cpu")
        checksum = _checksum(weights)
    except MemoryError:
        raise
    except Exception as error:  # whatever the damage makes of the file
        raise damaged from error
    if minimum.weights_hash not in (None, checksum):
        raise damaged
    return weights


def restore(estimator: Any, trained: Trained, data: TrainingData, seed: int) -> Any:
    """Fit an estimator without training its network, which gets the weights of a trained one.

    The other steps of a pipeline are fitted, classes are learned and the network gets its size
    from the data, as they were when the network was trained.
    """
    inner = last_step(estimator)
    settings: dict[str, Any] = {"max_epochs": 0, "callbacks": []}
    if not isinstance(inner, NeuralNet):  # one step of the solver gives all arrays their sizes
        settings = {"max_iter": 1} if getattr(inner, "max_iter", None) is not None else {}
    before = {name: getattr(inner, name) for name in settings}
    vars(inner).update(settings)
    with warnings.catch_warnings(), seeded(seed), measured_later() as later:
        warnings.simplefilter("ignore", ConvergenceWarning)
        estimator.fit(data.X_fit, data.y_fit, **data.fit_params)
    fitted = final_estimator(estimator)
    if isinstance(fitted, NeuralNet):
        unwrapped(fitted.module_).load_state_dict(trained.weights)
    else:
        _set_coefficients(fitted, [tensor.numpy() for tensor in trained.weights.values()])
    for net in (inner, fitted):  # a TransformedTargetRegressor fits a copy of its net
        vars(net).update(before)
    of_training = dict(trained.of_training)
    if isinstance(of_training.get("n_iter_"), list):  # of a file
        of_one_step, n_iter = fitted.n_iter_, of_training["n_iter_"]
        as_array = isinstance(of_one_step, np.ndarray)
        of_training["n_iter_"] = np.array(n_iter, of_one_step.dtype) if as_array else n_iter[0]
    vars(fitted).update(of_training)
    for measure in later if "_record" not in of_training else []:
        measure()
    return estimator


def from_file(store: Any, trial: FrozenTrial) -> Trained:
    """Return what a file holds of a trained network."""
    n_iter = Minimum.from_trial(trial).n_iter
    return Trained(None, load_weights(store, trial), {"n_iter_": n_iter} if n_iter else {})


def _set_coefficients(estimator: Any, arrays: list[NDArray[Any]]) -> None:
    """Set coefficients from pairs of (weight, bias), one pair per layer; the inverse of to_torch.

    The weights of scikit-learn's MLPs are transposed.
    """
    if hasattr(estimator, "coefs_"):
        held = [*estimator.coefs_, *estimator.intercepts_]
        for old, new in zip(
            held, [*(weight.T for weight in arrays[::2]), *arrays[1::2]], strict=True
        ):
            old[...] = new
        return
    weight, bias = arrays
    estimator.coef_ = weight.astype(estimator.coef_.dtype).reshape(estimator.coef_.shape)
    old = np.asarray(estimator.intercept_)
    if old.size == bias.size:
        estimator.intercept_ = bias.reshape(old.shape).astype(old.dtype)[()]

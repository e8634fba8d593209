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
from collections.abc import Mapping, Sequence
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
from torch import Tensor, nn

from relflat_sk._models.network_of import final_estimator
from relflat_sk._network.borrowing import unwrapped
from relflat_sk._random import seeded
from relflat_sk.minima._table import attributes_of
from relflat_sk.search._data import TrainingData
from relflat_sk.search._failures import blame_call, explain
from relflat_sk.search._provenance import digest
from relflat_sk.training._after_fit import measured_later

ARTIFACT = "artifact_id"  # the user attribute of a trial that identifies its file
CHECKSUM = "weights_hash"  # and the one with the checksum of the weights
N_ITER = "n_iter"  # and the one with the iterations of a solver, a list

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
    """Refuse a store that cannot be written to, by writing a file and removing it."""
    if store is None:
        return
    name = f"probe-{uuid.uuid4().hex}"
    try:
        store.write(name, io.BytesIO(b"probe"))
        store.remove(name)
    except Exception as error:
        raise ValueError(
            f"artifact_store={store!r} cannot be written to: {explain(error)} Nothing was trained."
        ) from error


def check_saved(store: Any, trials: Sequence[FrozenTrial]) -> None:
    """Refuse another store than that of a study: one without its first file and its last."""
    saved = [trial for trial in trials if ARTIFACT in trial.user_attrs]
    if store is None or not saved:
        return
    for trial in (saved[0], saved[-1]):
        try:
            _open(store, trial).close()
        except DamagedWeightsError as error:
            lost = error
        else:
            return
    raise ValueError(f"{lost} Give the artifact_store that the search was run with.") from None


def _open(store: Any, trial: FrozenTrial) -> BinaryIO:
    """Open the file with the weights of a trial."""
    artifact = trial.user_attrs[ARTIFACT]
    try:
        file: BinaryIO = store.open_reader(artifact)
    except ArtifactNotFound:
        raise DamagedWeightsError(
            f"the weights of trial {trial.number}, artifact {artifact!r}, are not in "
            f"artifact_store={store!r}."
        ) from None
    return file


def save_weights(
    store: Any, trial: optuna.Trial, estimator: Any, module: nn.Module, record: dict[str, Any]
) -> None:
    """Save the weights of a network to a store, and record the name of their file."""
    if store is None:
        return
    weights = module.state_dict()
    what = f"the weights of trial {trial.number} cannot be saved in {store!r}"
    advice = "Free space there, or give another artifact_store."
    with blame_call(what, advice), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"minimum_{trial.number}.pt"
        torch.save(weights, path)
        artifact = upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
    record[CHECKSUM] = _checksum(weights)
    record[ARTIFACT] = artifact
    n_iter: Any = getattr(final_estimator(estimator), "n_iter_", None)
    if n_iter is not None:
        record[N_ITER] = np.ravel(n_iter).tolist()


def replace_weights(store: Any, trial: FrozenTrial, module: nn.Module) -> None:
    """Write the weights of a finished trial again, if they are the same to the bit."""
    weights = module.state_dict()
    if store is not None and attributes_of(trial).get(CHECKSUM) == _checksum(weights):
        content = io.BytesIO()
        torch.save(weights, content)
        content.seek(0)
        store.write(trial.user_attrs[ARTIFACT], content)


def _checksum(weights: Weights) -> str:
    """Return a text, so that the table of minima does not take it for a measure."""
    parts = {name: digest(one) or repr(one) for name, one in weights.items()}
    return str(joblib.hash(parts))


def load_weights(store: Any, trial: FrozenTrial) -> Weights:
    """Load the weights of a finished trial."""
    if store is None or ARTIFACT not in trial.user_attrs:
        raise ValueError(
            f"no weights of trial {trial.number} were saved. Give the search an artifact_store, "
            "such as a folder, before it trains: FlatMinimaSearch(..., artifact_store='minima')."
        )
    with _open(store, trial) as file:
        content = io.BytesIO(file.read())
    damaged = DamagedWeightsError(
        f"the weights of trial {trial.number} are damaged: file {trial.user_attrs[ARTIFACT]!r} in "
        f"{store!r} was truncated or overwritten."
    )
    try:
        weights: Weights = torch.load(content, weights_only=True, map_location="cpu")
        checksum = _checksum(weights)
    except Exception as error:  # whatever the damage makes of the file
        raise damaged from error
    if attributes_of(trial).get(CHECKSUM, checksum) != checksum:
        raise damaged
    return weights


def restore(
    estimator: Any,
    weights: Weights,
    data: TrainingData,
    seed: int | None,
    n_iter: Sequence[int],
) -> Any:
    """Fit an estimator without training its network, which gets its weights from a file.

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
        unwrapped(fitted.module_).load_state_dict(weights)
    else:
        _set_coefficients(fitted, [tensor.numpy() for tensor in weights.values()])
        if n_iter:
            of_one_step = fitted.n_iter_
            as_array = isinstance(of_one_step, np.ndarray)
            fitted.n_iter_ = np.array(n_iter, of_one_step.dtype) if as_array else n_iter[0]
    for one in (inner, fitted):  # a TransformedTargetRegressor fits a copy of its net
        vars(one).update(before)
    for measure in later:
        measure()
    return estimator


def last_step(estimator: Any) -> Any:
    """Find the unfitted estimator that is going to hold the network."""
    return _descend(estimator)[1]


def last_prefix(estimator: Any) -> str:
    """Return what stands before the parameters of the estimator that holds the network."""
    return _descend(estimator)[0]


def _descend(estimator: Any, prefix: str = "") -> tuple[str, Any]:
    around = [(name, getattr(estimator, name, None)) for name in ("regressor", "estimator")]
    for name, inner in [*getattr(estimator, "steps", [])[-1:], *around]:
        if hasattr(inner, "fit"):
            return _descend(inner, f"{prefix}{name}__")
    return prefix, estimator


def _set_coefficients(estimator: Any, arrays: list[NDArray[Any]]) -> None:
    """Set coefficients from pairs of (weight, bias), one pair per layer; the inverse of to_torch.

    The weights of scikit-learn's MLPs are transposed.
    """
    if hasattr(estimator, "coefs_"):
        held = [*estimator.coefs_, *estimator.intercepts_]
        for old, new in zip(held, [*(one.T for one in arrays[::2]), *arrays[1::2]], strict=True):
            old[...] = new
        return
    weight, bias = arrays
    estimator.coef_ = weight.astype(estimator.coef_.dtype).reshape(estimator.coef_.shape)
    old = np.asarray(estimator.intercept_)
    if old.size == bias.size:
        estimator.intercept_ = bias.reshape(old.shape).astype(old.dtype)[()]

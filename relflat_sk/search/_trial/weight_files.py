"""Save the weights of minima as files, and read them again.

A file holds the `state_dict` of the network that is measured. For an estimator of scikit-learn,
this is the module that `relflat_sk._models.sklearn_estimators.to_torch` makes of it.
``torch.load(..., weights_only=True)`` reads the file without running code. The trial has a
checksum of the weights, which tells of files that were truncated or overwritten.
"""

import io
import tempfile
import uuid
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import optuna
import torch
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.artifacts.exceptions import ArtifactNotFound
from optuna.trial import FrozenTrial
from torch import Tensor, nn

from relflat_sk.search._trial.digests import digest
from relflat_sk.search._trial.failures import blame_call, explain

__all__ = [
    "ARTIFACT",
    "DamagedWeightsError",
    "as_store",
    "check_saved",
    "check_store",
    "load_weights",
    "replace_weights",
    "save_weights",
]

ARTIFACT = "artifact_id"  # the user attribute of a trial that identifies its file
CHECKSUM = "weights_checksum"  # and the one with the checksum of the weights

Weights = Mapping[str, Tensor]


class DamagedWeightsError(ValueError):
    """A file of weights cannot be read, or holds other weights than were saved."""


def as_store(store: Any) -> Any:
    """Make an artifact store of a folder; return a store as it is."""
    if isinstance(store, str | Path):
        with suppress(OSError):  # `check_store` tells what is wrong
            Path(store).mkdir(parents=True, exist_ok=True)
        return FileSystemArtifactStore(store)
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
            f"artifact_store={_place(store)} cannot be written to: {explain(error)} Nothing was "
            "trained."
        ) from error


def _place(store: Any) -> str:
    """Name the folder of a store, or the store."""
    return repr(str(getattr(store, "_base_path", store)))


def check_saved(store: Any, trials: Sequence[FrozenTrial]) -> None:
    """Refuse another store than that of a study, by opening its first file and its last."""
    saved = [trial for trial in trials if ARTIFACT in trial.user_attrs]
    if store is not None and saved:
        for trial in (saved[0], saved[-1]):
            _open(store, trial).close()


def _open(store: Any, trial: FrozenTrial) -> BinaryIO:
    """Open the file with the weights of a trial."""
    artifact = trial.user_attrs[ARTIFACT]
    try:
        file: BinaryIO = store.open_reader(artifact)
    except ArtifactNotFound:
        raise ValueError(
            f"the weights of trial {trial.number}, artifact {artifact!r}, are not in "
            f"artifact_store={_place(store)}. Give the artifact_store that the search was run with."
        ) from None
    return file


def save_weights(
    store: Any, trial: optuna.Trial, module: nn.Module, record: dict[str, Any]
) -> None:
    """Save the weights of a network to a store, and record the name of their file."""
    if store is None:
        return
    weights = module.state_dict()
    what = f"the weights of trial {trial.number} cannot be saved in {_place(store)}"
    advice = "Free space there, or give another artifact_store."
    with blame_call(what, advice), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"minimum_{trial.number}.pt"
        torch.save(weights, path)
        artifact = upload_artifact(artifact_store=store, file_path=str(path), study_or_trial=trial)
    record[CHECKSUM] = _checksum(weights)
    record[ARTIFACT] = artifact


def replace_weights(store: Any, trial: FrozenTrial, module: nn.Module) -> None:
    """Write the weights of a finished trial again, after its network was trained again."""
    weights = module.state_dict()
    if trial.user_attrs.get(CHECKSUM, _checksum(weights)) != _checksum(weights):
        raise DamagedWeightsError(
            f"training trial {trial.number} again gave another network: this machine or version "
            "of a library computes other bits. Its measures stay as they are."
        )
    if ARTIFACT in trial.user_attrs:
        content = io.BytesIO()
        torch.save(weights, content)
        content.seek(0)
        store.write(trial.user_attrs[ARTIFACT], content)


def _checksum(weights: Weights) -> str:
    """Return a text, so that the table of minima does not take it for a measure."""
    parts = {name: digest(one) or repr(one) for name, one in weights.items()}
    return f"{zlib.crc32(repr(parts).encode()):08x}"


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
        f"{_place(store)} was truncated or overwritten."
    )
    try:
        weights: Weights = torch.load(content, weights_only=True, map_location="cpu")
        checksum = _checksum(weights)
    except Exception as error:  # whatever the damage makes of the file
        raise damaged from error
    if trial.user_attrs.get(CHECKSUM, checksum) != checksum:
        raise damaged
    return weights

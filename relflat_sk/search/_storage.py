"""Where studies and weights are stored, and failures there, which are not the candidates'.

A candidate that cannot be trained fails again when it is trained again, so its failure is a
result. A full disk or a wrong test set is not: the next call may have mended it.

A file of weights holds the `state_dict` of the network that is measured. For an estimator of
scikit-learn, this is the module that `relflat_sk._models.sklearn_estimators.to_torch` makes of it.
``torch.load(..., weights_only=True)`` reads the file without running code. The trial has a
checksum of the weights, which tells of files that were truncated or overwritten.
"""

import io
import os
import re
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import joblib
import optuna
import torch
from optuna.artifacts import FileSystemArtifactStore, upload_artifact
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.trial import FrozenTrial
from torch import Tensor

from relflat_sk._checks import check_kind
from relflat_sk.minima._table import Minimum

Weights = Mapping[str, Tensor]

# -- failures ------------------------------------------------------------------------------------

# the end of an error of the call, for a search
KEPT = (
    " The candidate is not recorded, and those that were finished before are kept: call fit again "
    "with the same storage and study_name."
)


class CallError(RuntimeError):
    """Training or measuring failed for a reason that is not the candidate's."""


class StorageFailedError(CallError):
    """The storage of a study failed."""


class DamagedWeightsError(ValueError):
    """A file of weights is gone, cannot be read, or holds other weights than were saved."""


@contextmanager
def blame_call(what: str, advice: str, kind: type[CallError] = CallError) -> Iterator[None]:
    """Turn failures into errors of the call."""
    try:
        yield
    except (CallError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise kind(f"{what}: {root_of(error)} {advice}{KEPT}") from error


@contextmanager
def blame_storage(study: Any) -> Iterator[None]:
    """Explain failures in a block that only reads or writes a study, and let Ctrl-C wait for it."""
    what = f"the storage of study {study.study_name!r} failed"
    with _uninterrupted(), blame_call(what, "Mend it.", StorageFailedError):
        yield


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back until a block ends, so that a result is stored as a whole or not at all."""
    pressed: list[bool] = []
    try:
        with on_ctrl_c(lambda: pressed.append(True)):
            yield
    finally:
        if pressed:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def on_ctrl_c(call: Callable[[], None]) -> Iterator[None]:
    """Let Ctrl-C call a function until a block ends.

    Only the main thread gets signals, and only handlers of Python can be put back.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def root_of(error: BaseException) -> str:
    """Return the first line of the error that an error was raised from."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None and str(cause).strip("()"):
        root = cause
    first = (str(root).splitlines() or [repr(root)])[0]
    return f"{type(root).__name__}: {first}".rstrip(".") + "."


# -- studies -------------------------------------------------------------------------------------

_OF_DATABASES, _OF_JOURNALS = {".db", ".sqlite", ".sqlite3"}, {".log", ".journal"}  # endings
_LOG_LEVEL = threading.Lock()


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage: a URL, a file, a storage of Optuna, or the memory."""
    if storage is None:
        return InMemoryStorage()
    if isinstance(storage, BaseStorage):
        return storage
    kind = "the URL of a database, a file such as 'minima.db', an optuna storage or None"
    check_kind(isinstance(storage, str | Path), "storage", storage, kind)
    path = Path(storage).expanduser()
    if path.suffix in _OF_JOURNALS and "://" not in str(storage):
        _remove_half_line(path)
        return JournalStorage(JournalFileBackend(str(path)))
    is_file = isinstance(storage, Path) or (path.suffix in _OF_DATABASES and "://" not in storage)
    # a server may restart while a net trains
    settings = {"pool_pre_ping": True}
    return RDBStorage(f"sqlite:///{path}" if is_file else str(storage), engine_kwargs=settings)


def _remove_half_line(file: Path) -> None:
    """Remove half a line, which a killed process or a full disk leaves at a journal's end."""
    if not file.exists():
        return
    lock = JournalFileSymlinkLock(str(file))
    lock.acquire()
    try:
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    finally:
        lock.release()


@contextmanager
def quiet_log() -> Iterator[None]:
    """Keep Optuna from telling that it makes a study; for a moment, since its log level is global.

    Threads take turns, so that each finds the level of the user.
    """
    with _LOG_LEVEL:
        before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(max(before, optuna.logging.WARNING))
        try:
            yield
        finally:
            optuna.logging.set_verbosity(before)


def without_password(storage: Any) -> str:
    """Return the file or URL of a storage, with its password hidden, or the storage's class."""
    if not isinstance(storage, str | Path):
        return type(storage).__name__
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", str(storage))


# -- weights -------------------------------------------------------------------------------------


class _Folder(FileSystemArtifactStore):
    """A folder of files, made if need be, and named in errors by its path."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.path = path

    def write(self, artifact_id: str, content_body: BinaryIO) -> None:
        Path(self.path).mkdir(parents=True, exist_ok=True)
        super().write(artifact_id, content_body)

    def __repr__(self) -> str:
        return repr(str(self.path))


def as_store(store: Any) -> Any:
    """Make an artifact store of a folder; return a store as it is."""
    if isinstance(store, str | Path):
        return _Folder(Path(store).expanduser())
    is_store = store is None or (hasattr(store, "open_reader") and hasattr(store, "write"))
    kind = "a folder, such as 'minima', an optuna artifact store or None"
    check_kind(is_store, "artifact_store", store, kind)
    return store


def check_store(store: Any) -> None:
    """Write a file to a store and remove it, so that it fails before anything is trained."""
    if store is not None:
        name = f"probe-{uuid.uuid4().hex}"
        with blame_call(f"artifact_store={store!r} cannot be written to", "Give another."):
            store.write(name, io.BytesIO(b"probe"))
            store.remove(name)


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


def load_weights(store: Any, trial: FrozenTrial) -> Weights:
    """Load the weights of a finished trial."""
    minimum = Minimum.from_trial(trial)
    try:
        with store.open_reader(minimum.artifact_id) as file:
            content = io.BytesIO(file.read())
        weights: Weights = torch.load(content, weights_only=True, map_location="cpu")
        if minimum.weights_hash not in (None, _checksum(weights)):
            raise ValueError("it holds other weights than were saved")
    except MemoryError:
        raise
    except Exception as error:  # whatever the damage makes of the file
        raise DamagedWeightsError(
            f"the weights of trial {trial.number} cannot be read from file "
            f"{minimum.artifact_id!r} in artifact_store={store!r}: {root_of(error)}"
        ) from error
    return weights


def _checksum(weights: Weights) -> str:
    """Return a checksum as a text, so that the table of minima does not take it for a measure."""
    tensors = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    arrays = {  # NumPy has no bfloat16
        name: (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        for name, tensor in tensors.items()
    }
    return str(joblib.hash(arrays))

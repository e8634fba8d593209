"""Explain failures of a storage, and hold what was finished before."""

from types import TracebackType
from typing import Any

import optuna

from relflat_sk.search._optuna_internals import file_of, last_known
from relflat_sk.search._sharing.study import in_memory, is_file
from relflat_sk.search._trial import CallError, explain, is_of_storage

__all__ = ["StorageGuard", "without_password"]


class StorageGuard:
    """A context in which a search uses its storage."""

    def __init__(self, search: Any) -> None:
        self.search = search
        self.study: optuna.Study | None = None
        self._attributes: dict[str, Any] = {}

    def remember_attributes(self) -> None:
        """Read the attributes of the study, such as how its minima are made, before training."""
        if self.study is not None:
            self._attributes = self.study.user_attrs

    def __enter__(self) -> "StorageGuard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cause = error.__cause__ if isinstance(error, CallError) else error
        if cause is None or not is_of_storage(cause):
            return
        if self.study is None:
            storage = self.search.storage
            raise ValueError(
                f"storage={without_password(storage, unread=str(storage))!r} cannot be used: "
                f"{explain(cause)} Expected the URL of a database, a file whose name ends in .db, "
                ".sqlite or .log (a journal), a Path, or an optuna storage. Nothing was trained."
            ) from cause
        self.search.study_ = _rescue(self.study, self._attributes)
        file = file_of(self.study)
        reason = explain(cause)
        if file is not None and not file.exists():
            reason = f"{file} was deleted or moved. Put it back, or give another storage."
        raise RuntimeError(
            f"the storage of study {self.study.study_name!r} failed: {reason} Then call fit again "
            "with the same storage and study_name: candidates that the storage holds are not "
            "trained again. Those that this process knows are in `study_` of the search, in "
            "memory, for `rank_minima` or `optuna.copy_study`."
        ) from cause


def without_password(storage: Any, *, unread: str) -> str:
    """Return the URL of a storage with its password hidden, or the storage's class."""
    if is_file(storage):
        return str(storage)
    if not isinstance(storage, str):
        return type(storage).__name__
    # imported here: a tenth of the time that `import relflat_sk` would take
    from sqlalchemy import make_url  # noqa: PLC0415
    from sqlalchemy.exc import ArgumentError  # noqa: PLC0415

    try:
        return make_url(storage).render_as_string(hide_password=True)
    except ArgumentError:
        return unread


def _rescue(study: optuna.Study, known: dict[str, Any]) -> optuna.Study:
    """Copy a study into memory, or what this process has read of it."""
    try:
        return in_memory(study)
    except Exception:  # whatever a broken storage raises
        trials, attributes = last_known(study)
    copied = optuna.create_study(directions=study.directions, study_name=study.study_name)
    copied.add_trials(trials)
    for name, value in (known | attributes).items():
        copied.set_user_attr(name, value)
    return copied

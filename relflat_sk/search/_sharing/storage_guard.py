"""Explain failures of a storage, and hold what was finished before."""

from contextlib import suppress
from types import TracebackType
from typing import Any

import optuna

from relflat_sk.search._sharing.study import in_memory
from relflat_sk.search._trial import CallError, explain, is_of_storage

__all__ = ["StorageGuard"]


class StorageGuard:
    """A context in which a search uses its storage.

    Parameters
    ----------
    search : FlatMinimaSearch
        The search. If the storage fails, its `study_` becomes a copy in memory of the study, with
        the candidates that this process knows.

    Attributes
    ----------
    study : optuna.Study or None
        The study, once it is open.
    """

    def __init__(self, search: Any) -> None:
        self.search = search
        self.study: optuna.Study | None = None

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
            raise ValueError(
                f"storage={self.search.storage!r} cannot be used: {explain(cause)} Expected the "
                "URL of a database, such as 'sqlite:///minima.db', the Path of an SQLite file, or "
                "an optuna storage. Nothing was trained."
            ) from cause
        with suppress(Exception):
            self.search.study_ = in_memory(self.study)
        raise RuntimeError(
            f"the storage of study {self.study.study_name!r} failed: {explain(cause)} Then call "
            "fit again with the same storage and study_name: candidates that the storage holds "
            "are not trained again. Those that this process knows are in `study_` of the search, "
            "in memory; `rank_minima` takes it."
        ) from cause

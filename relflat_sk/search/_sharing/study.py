"""Open what a study is kept in, while other processes do the same."""

import time
from typing import Any

import optuna
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy.exc import SQLAlchemyError

__all__ = ["open_storage"]

PATIENCE = (0.1, 0.3, 1.0)  # seconds between attempts


def open_storage(storage: Any) -> BaseStorage:
    """Open a storage that several processes may open, for the first time, at once.

    Two processes that find a database empty both make its tables, and one of them fails; a
    moment later it finds them made.

    Parameters
    ----------
    storage : str or optuna storage
        The URL of a database, or a storage, which is handed back.

    Returns
    -------
    optuna.storages.BaseStorage

    Examples
    --------
    >>> open_storage("sqlite:///:memory:").get_all_studies()
    []
    """
    for seconds in PATIENCE:
        try:
            return _open(storage)
        except SQLAlchemyError:
            time.sleep(seconds)
    return _open(storage)


def _open(storage: Any) -> BaseStorage:
    if isinstance(storage, str) and storage.startswith("sqlite"):
        # seconds until SQLite says that the database is locked: 5 are few for a slow disk
        storage = RDBStorage(storage, engine_kwargs={"connect_args": {"timeout": 60}})
    return optuna.storages.get_storage(storage)

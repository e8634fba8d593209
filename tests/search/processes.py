"""Processes that begin with the imports done, and with nothing else of this one."""

from multiprocessing import get_context

PRELOADED = [
    "pytest",
    "relflat_sk",
    "alembic.command",
    "optuna.storages._rdb.models",
    "optuna.storages._rdb.storage",
]


def forkserver():
    """Return a context whose processes are forked by a server, which imports once for all."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context

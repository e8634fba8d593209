"""Processes that begin with the imports done, and with nothing else of this one.

A fresh interpreter takes seconds for the imports of torch, scikit-learn and Optuna; a process that
a server forks takes none of them.
"""

import os
import runpy
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.backend.context import set_start_method

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "pytest",
    "relflat_sk.search",  # and with it most of the library
    "sklearn.datasets",
    "sklearn.neural_network",
    "alembic.command",
    "distributed",
    "matplotlib.figure",
    "optuna.storages._rdb.models",
    "optuna.storages._rdb.storage",
    "torch._dynamo",  # by the first optimizer
]


def forkserver():
    """Return a context whose processes are forked by a server, which imports once for all."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def fork_workers_of_joblib():
    """Let the server fork joblib's workers, too; those of a script remain fresh interpreters."""
    forkserver()
    set_start_method("forkserver", force=True)


@dataclass(frozen=True)
class Done:
    """How a process ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_module(module, *arguments, **variables):
    """Do what ``python -m module arguments`` does, in the root of the repository."""
    return _run(partial(runpy.run_module, module, alter_sys=True), [module, *arguments], variables)


def run_script(path, *arguments, folder=ROOT):
    """Do what ``python path arguments`` does, in a folder."""
    return _run(partial(runpy.run_path, str(path)), [path, *arguments], {}, folder)


def _run(run, command, variables, at=ROOT, timeout=1500):
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = forkserver().Process(
            target=_execute, args=(run, list(map(str, command)), variables, at, outputs)
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        return Done(process.exitcode, *(path.read_text(encoding="utf-8") for path in outputs))


def _execute(run, command, variables, at, outputs):
    # the descriptors, not only `sys.stdout`: processes that this one starts write there, too
    for descriptor, path in zip((1, 2), outputs, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(variables)
    os.chdir(at)
    sys.path.insert(0, str(ROOT))
    sys.argv = command
    run(run_name="__main__")
    # at the end of an interpreter, joblib ends its workers; here, they would idle for five minutes
    get_reusable_executor(reuse=True).shutdown(kill_workers=True)

"""Optuna's messages stay away, and its log level is given back; storages, a cluster of dask."""

import logging
import signal
from functools import partial
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import optuna
import pytest

from relflat_sk.search import _task
from tests.processes import forkserver


def pytest_collection_modifyitems(items):
    """Let searches be resumed without weights: tests of what they predict with look at it."""
    mark = pytest.mark.filterwarnings("ignore:the search predicts with the mean of")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(mark, append=False)


@pytest.fixture(autouse=True)
def _log_level():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def stored(tmp_path):
    """Where a study is stored that can be resumed."""
    return {"storage": tmp_path / "minima.log", "study_name": "sweep"}


@pytest.fixture
def kept(stored, tmp_path):
    """A study that can be resumed, with saved weights."""
    return {**stored, "artifact_store": tmp_path / "minima"}


@pytest.fixture
def end_training(monkeypatch):
    """A function after whose call nothing can be trained."""
    return partial(monkeypatch.setattr, _task, "fit", None)


@pytest.fixture
def untrained(end_training):
    end_training()


@pytest.fixture
def trained(monkeypatch):
    trainings, fit = [], _task.fit
    monkeypatch.setattr(_task, "fit", lambda *args: trainings.append(1) or fit(*args))
    return trainings


@pytest.fixture(params=["minima.db", "minima.log"])
def make_storage(request, tmp_path):
    """A function that returns the same storage each time, also in another process."""
    return partial(Path, tmp_path / request.param)


@pytest.fixture
def ctrl_c():
    """A process that was started in the background may have been told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def dask_client():
    """The client of a cluster of two workers on this machine."""
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    config = pytest.importorskip("dask.config")
    forkserver()
    ensure_running()  # dask would let it import less
    with (
        config.set({"distributed.worker.multiprocessing-method": "forkserver"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client

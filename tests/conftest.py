"""Seeds, devices and nets that train together; no mathematics."""

import os
import threading

import matplotlib as mpl
import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

from relflat_sk._engine.epoch import ChainNets
from tests.engine import compare
from tests.processes import fork_workers_of_joblib

mpl.use("Agg")
if os.name == "posix":
    fork_workers_of_joblib()
# one unless asked otherwise: several test processes share few cores, threads of small kernels only
# wait for each other, and those of BLAS and OpenMP spin while they wait
N_THREADS = int(os.environ.get("TEST_THREADS", "1"))
os.environ["OMP_NUM_THREADS"] = str(N_THREADS)  # of libraries loaded later, and of child processes
torch.set_num_threads(N_THREADS)
threadpool_limits(N_THREADS)
torch.manual_seed(0)  # of layers that modules of tests build when they are imported


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


@pytest.fixture
def two_threads():
    """Torch, BLAS and OpenMP compute on two threads, as they do for a user with two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with threadpool_limits(2):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def same_threads():
    """Each thread that a test starts has ended, but for the one of progress bars."""

    def count():
        return sum(type(one).__name__ != "TMonitor" for one in threading.enumerate())

    before = count()
    yield
    assert count() == before


@pytest.fixture
def sizes(monkeypatch):
    """The numbers of nets that are trained together."""
    found, train = [], ChainNets.train

    def note(self, jobs, stack):
        found.append(len(jobs))
        return train(self, jobs, stack)

    monkeypatch.setattr(ChainNets, "train", note)
    return found


@pytest.fixture
def few_are_many(monkeypatch):
    """Return a function that lets heads of few classes be read in chunks of them, too."""

    def change():
        monkeypatch.setattr("relflat_sk._network.tail.MANY", 2)
        monkeypatch.setattr("relflat_sk._losses.curvature._ROWS", {False: 3, True: 3})

    return change


@pytest.fixture
def own_loop():
    """Nets train by skorch's loop and torch's autograd, and not by written out formulas."""
    with compare.own_loop():
        yield

"""A study that processes share loses nothing, though they are killed while they train."""

import os
import signal
import time

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from sklearn.datasets import load_iris

from relflat_sk import FlatMinimaSearch
from relflat_sk.search._claims import is_cut_short
from relflat_sk.search._study import open_storage
from tests.processes import forkserver
from tests.search.examples import Slow

N_PROCESSES, N_TRIALS = 3, 10
DUE = [2, 5]  # how many trials are finished when a process is killed; enough is left to do
SPACES = {
    "grid": {"C": np.geomspace(0.2, 1.0, N_TRIALS).tolist()},
    "draws": {"C": FloatDistribution(0.2, 1.0)},
}


def search(storage, space):
    return FlatMinimaSearch(
        Slow(max_iter=1000),
        SPACES[space],
        n_trials=N_TRIALS,
        storage=storage,
        study_name="sweep",
        refit=False,
        random_state=0,
    ).fit(*load_iris(return_X_y=True))


def work(start, make_storage, space):
    if start is not None:
        start.wait(600)
    # another process can hold what is left, and die of it: then this one comes again
    search(make_storage(), space)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_storage", "space"),
    [("sqlite", "grid"), ("journal", "draws"), ("postgresql", "draws")],
    indirect=["make_storage"],
)
def test_three_processes_two_of_which_are_killed(make_storage, space):
    """All begin at the same moment, with no study and no file before."""
    context = forkserver()

    def begin(start=None):
        worker = context.Process(target=work, args=(start, make_storage, space))
        worker.start()
        return worker

    start = context.Barrier(N_PROCESSES + 1)
    workers = [begin(start) for _ in range(N_PROCESSES)]
    start.wait(600)
    storage = open_storage(make_storage())
    study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True)

    def minima():
        return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    for turn, due in enumerate(DUE):
        while len(minima()) < due:
            assert any(worker.exitcode is None for worker in workers)
            time.sleep(0.05)
        os.kill(workers[turn].pid, signal.SIGKILL)
        workers[turn].join()
        assert workers[turn].exitcode == -signal.SIGKILL
        workers[turn] = begin()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * N_PROCESSES
    found = [trial.params["C"] for trial in minima()]
    assert len(found) == len(set(found)) == N_TRIALS
    # and they are the candidates that one process would have had
    assert space == "draws" or sorted(found) == SPACES["grid"]["C"]
    # all else is what was killed, or withdrawn
    others = [trial for trial in study.trials if trial.state != TrialState.COMPLETE]
    assert all(map(is_cut_short, others))
    assert len(search(make_storage(), space).minima_) == N_TRIALS

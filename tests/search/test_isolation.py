"""Tests that a candidate's result does not depend on what else is trained, and on where."""

import pickle
import threading

import numpy as np
import optuna
import pytest
import torch
from optuna.pruners import NopPruner
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_info
from torch import nn

from relflat_sk import FlatMinimaSearch, MinimaObjective, RelativeFlatnessRegularizedClassifier
from relflat_sk._random import alone
from relflat_sk.search._task import isolated
from tests.search.examples import attributes_of

X, Y = load_digits(return_X_y=True)
X, Y = (X[:300] / 16).astype(np.float32), Y[:300]


class Dropped(nn.Module):
    """A network whose weights, batches and dropout are random."""

    def __init__(self, n_features, n_outputs, width=32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(n_features, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, n_outputs)
        )

    def forward(self, x):
        return self.layers(x)


def make_net(module=Dropped, **parameters):
    return RelativeFlatnessRegularizedClassifier(module, verbose=0, max_epochs=3, **parameters)


def by_seed(study):
    """All results of each candidate, but for the time that it took, and the trial's own seed."""
    return {
        trial.params["random_state"]: {
            name: value
            for name, value in attributes_of(trial).items()
            if name not in {"seconds", "seed", "details", "owner"}
        }
        for trial in study.trials
    }


@pytest.mark.parametrize("random_state", [None, 0])
def test_jobs_of_a_study_give_the_same_table(random_state):
    tables = []
    for n_jobs in (1, 4):
        space = {"random_state": list(range(4))}
        objective = MinimaObjective(make_net(), X, Y, space, random_state=random_state)
        study = optuna.create_study(pruner=NopPruner())
        for seed in space["random_state"]:
            study.enqueue_trial({"random_state": seed})
        study.optimize(objective, n_trials=4, n_jobs=n_jobs)
        tables.append(by_seed(study))
    assert tables[0] == tables[1]


def n_threads():
    """The numbers of threads of torch, BLAS and OpenMP."""
    return {torch.get_num_threads(), *(one["num_threads"] for one in threadpool_info())}


@pytest.mark.usefixtures("two_threads")
def test_processes_give_the_same_bits():
    """And draw the same two of three candidates; networks are wide enough for two threads."""

    def fit(n_jobs):
        net, space = make_net(batch_size=150, module__width=2000), {"random_state": [0, 1, 2]}
        search = FlatMinimaSearch(
            net, space, n_trials=2, goal=0.7, n_jobs=n_jobs, random_state=0
        ).fit(X, Y, X[:50], Y[:50])
        minima = search.minima_.drop(columns=["seconds", "trial"])
        return search, minima.sort_values("param_random_state").to_dict("records")

    (alone, expected), (shared, found) = fit(1), fit(2)
    assert found == expected
    assert len(found) == 2
    assert shared.best_params_ == alone.best_params_
    np.testing.assert_array_equal(shared.predict_proba(X), alone.predict_proba(X))
    # its study does not live in a file that is gone
    pickle.loads(pickle.dumps(shared)).study_.get_trials()


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_is_a_candidates_own():
    seen = set()

    class Spy(Dropped):
        def forward(self, x):
            seen.update(n_threads())
            return super().forward(x)

    net = make_net(Spy).set_params(max_epochs=1)
    objective, study = MinimaObjective(net, X, Y, {"lr": [0.01]}), optuna.create_study()
    study.optimize(objective, 1)
    assert seen == {1}
    assert n_threads() == {2}
    seen.clear()
    objective.get_estimator(study.trials[0])  # trained again
    assert seen == {1}
    # in nested contexts, and after an error
    with pytest.raises(RuntimeError, match="in training"), isolated(1):  # noqa: PT012
        with isolated(2), isolated(None):
            assert torch.get_num_threads() == 2
        assert n_threads() == {1}
        raise RuntimeError("in training")
    assert n_threads() == {2}
    seen.clear()
    objective = MinimaObjective(net, X, Y, {"lr": [0.01]}, n_threads=None)
    objective(optuna.trial.FixedTrial({"lr": 0.01}))
    assert seen == {2}


def test_a_search_inside_of_a_fit_and_a_candidate_do_not_wait_for_each_other():
    """Each holds what the other one needs."""
    fits, trains = threading.Barrier(2, timeout=60), []

    def fit():
        with alone():
            fits.wait()
            with isolated(None):
                trains.append("the search")

    def candidate():
        with isolated(None):
            fits.wait()
            with alone():
                trains.append("the candidate")

    threads = [threading.Thread(target=one, daemon=True) for one in (fit, candidate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert trains == ["the search", "the candidate"]

"""A study of one's own has the same trials, whether their nets are trained together or not."""

import numpy as np
import optuna
import pandas as pd
import pytest
from joblib import Parallel, delayed
from optuna.samplers import GridSampler, RandomSampler
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import ParameterGrid
from skorch.callbacks import Callback

from relflat_sk import (
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    fleet_training,
    optimize_study,
    rank_minima,
)
from relflat_sk.minima._table import attributes_of

pytestmark = pytest.mark.usefixtures("same_threads")

RNG = np.random.RandomState(0)
X = RNG.randn(60, 5)
y = X[:, :3].argmax(axis=1)
SPACE = {"batch_size": [16, 32], "lr": [0.01, 0.03, 0.1], "flatness_weight": [0.0, 0.1]}
N = 12
GOAL = StopAtLoss(0.8)


def make_objective(space=SPACE, callbacks=(GOAL,), **arguments):
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(8,), max_epochs=12, callbacks=[*callbacks], verbose=0
    )
    arguments = {"random_state": 0, "X_test": X[:20], "y_test": y[:20]} | arguments
    return MinimaObjective(net, X, y, space, **arguments)


def make_study(sampler=None, pruner=None, **arguments):
    """A study without Optuna's usual pruner, whose decisions depend on the order of trials."""
    sampler = sampler or GridSampler(SPACE, seed=0)
    pruner = pruner or optuna.pruners.NopPruner()
    return optuna.create_study(sampler=sampler, pruner=pruner, **arguments)


def table(study):
    minima = rank_minima(study).drop(columns=["trial", "seconds", "rank"])
    names = [name for name in minima if name.startswith("param_")]
    minima = minima.drop(columns=[n for n in ("artifact_id", "in_fleet") if n in minima])
    return minima.sort_values(names).reset_index(drop=True)


def assert_same(one, other):
    pd.testing.assert_frame_equal(table(one), table(other), rtol=1e-8, atol=1e-8)


@pytest.fixture(scope="module")
def alone():
    study = make_study()
    study.optimize(make_objective(), n_trials=N)
    return study


def test_the_trials_are_the_same_and_weights_are_saved(tmp_path, alone, sizes):
    objective = make_objective(artifact_store=str(tmp_path / "weights"))
    study = make_study(storage=f"sqlite:///{tmp_path / 'minima.db'}")
    optimize_study(study, objective, n_trials=5, fleet=4)
    optimize_study(study, objective, n_trials=N - 5, fleet=4)
    assert max(sizes) > 1
    assert_same(study, alone)
    assert all(attributes_of(trial)["in_fleet"] for trial in study.trials)
    trial = study.best_trial
    restored = objective._restore(trial.params, trial)
    loss = -np.log(restored.predict_proba(X)[np.arange(len(y)), y]).mean()
    assert loss == pytest.approx(trial.user_attrs["train_loss"], rel=1e-6)


@pytest.mark.parametrize(("n_trials", "fleet"), [(None, 1), (N, None)])
def test_the_sampler_or_the_number_ends_the_study(n_trials, fleet, alone, sizes):
    study = make_study()
    optimize_study(study, make_objective(), n_trials, fleet=fleet)
    assert fleet or not sizes  # a net by itself is in no fleet
    assert_same(study, alone)


def test_ask_and_tell_in_turns(alone, sizes):
    """Functions of one's own run inside of fleet_training."""
    study, objective = make_study(RandomSampler(seed=0)), make_objective()
    for point in ParameterGrid(SPACE):
        study.enqueue_trial(point)

    def one():
        trial = study.ask()
        study.tell(trial, objective(trial))

    with fleet_training(4):
        Parallel()(delayed(one)() for _ in range(N))
    assert max(sizes) > 1
    assert_same(study, alone)


def test_a_timeout_and_callbacks_can_end_it():
    study, seen = make_study(RandomSampler(seed=0)), []

    def stop(view, trial):
        assert view.study_name == study.study_name
        seen.append(trial.number)
        if len(seen) == 3:
            view.stop()

    optimize_study(study, make_objective(), timeout=1e-9)
    assert not study.trials
    optimize_study(study, make_objective(), callbacks=[stop], fleet=2)
    assert len(study.trials) in (3, 4)  # one more may have been in training
    assert sorted(seen) == [trial.number for trial in study.trials]
    assert all(trial.state == TrialState.COMPLETE for trial in study.trials)


def test_a_pruner_stops_trials():
    pruner = optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=5)
    grid = {"lr": [1e-5, 0.03]}
    study = make_study(GridSampler(grid, seed=0), pruner=pruner)
    optimize_study(study, make_objective(grid), 2, fleet=2)
    assert {trial.state for trial in study.trials} == {TrialState.PRUNED, TrialState.COMPLETE}


class Fails(Callback):
    """Raises in the training of some nets."""

    def on_epoch_end(self, net, **kwargs):
        if net.lr == 0.03 and len(net.history) == 3:
            raise RuntimeError("no luck")


@pytest.mark.parametrize("error", [RuntimeError, (KeyError, RuntimeError)])
def test_exceptions_that_are_caught_fail_their_trial(error, alone):
    study = make_study()
    optimize_study(study, make_objective(callbacks=[Fails()]), N, catch=error, fleet=4)
    failed = study.get_trials(states=[TrialState.FAIL])
    assert [trial.params["lr"] for trial in failed] == [0.03] * 4
    assert {attributes_of(trial)["reason"] for trial in failed} == {"RuntimeError: no luck"}


def test_other_exceptions_end_it_and_no_trial_keeps_running():
    study = make_study()
    waiting = study.ask()  # of somebody else
    with pytest.raises(RuntimeError, match="no luck"):
        optimize_study(study, make_objective(callbacks=[Fails()]), N, fleet=4)
    running = study.get_trials(states=[TrialState.RUNNING])
    assert [trial.number for trial in running] == [waiting.number]


def test_what_cannot_be_stacked_is_trained_one_by_one(caplog):
    objective = MinimaObjective(LogisticRegression(), X, y, {"C": [0.1, 1.0]})
    study = make_study(GridSampler({"C": [0.1, 1.0]}, seed=0))
    optimize_study(study, objective, 2, fleet=2)
    assert len(rank_minima(study)) == 2
    assert "LogisticRegression holds no net of relflat_sk" in caplog.text

"""Searches and studies that train nets together find what those find that train one by one."""

import logging
import signal
from functools import partial

import numpy as np
import optuna
import pytest
import torch
from joblib import Parallel, delayed
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import ParameterGrid
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import (
    FlatMinimaSearch,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    fleet_training,
    relative_flatness,
)
from tests.search.examples import NO_MINIMA, assert_same_results, attributes_of, piped

pytestmark = NO_MINIMA

RNG = np.random.RandomState(0)
X = RNG.randn(60, 5)
y = X[:, :3].argmax(axis=1)
DATA = X, y, X[:20], y[:20]
SPACE = {"batch_size": [16, 32], "lr": [0.01, 0.03], "flatness_weight": [0.0, 0.1]}
N = 8


def make_net(**arguments):
    arguments = {"max_epochs": 12, "callbacks": [StopAtLoss(0.8)], "verbose": 0} | arguments
    return RelativeFlatnessRegularizedClassifier(module__hidden_layer_sizes=(8,), **arguments)


def make_search(estimator=None, space=SPACE, **arguments):
    arguments = {"random_state": 0, "fleet": 5} | arguments
    return FlatMinimaSearch(estimator or make_net(), space, **arguments)


assert_same = partial(assert_same_results, rtol=1e-8, atol=1e-8)


class Fails(Callback):
    """Raises in the training of one candidate."""

    def on_epoch_end(self, net, **kwargs):
        if net.lr == 0.03 and net.batch_size == 16:
            raise RuntimeError("no luck")


@pytest.fixture(scope="module")
def alone():
    return make_search(fleet=None).fit(*DATA)


@pytest.mark.usefixtures("two_threads", "same_threads")
def test_the_table_is_the_same(alone, capsys):
    before = torch.get_rng_state(), torch.get_num_threads()
    search = make_search(verbose=1).fit(*DATA)
    assert f"{N}/{N}" in capsys.readouterr().err
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.get_num_threads() == before[1]
    assert_same(search, alone)
    assert search.best_params_ == alone.best_params_
    np.testing.assert_array_equal(search.predict(X), alone.predict(X))


WEIGHTS = {"sample_weight": RNG.choice([0.0, 0.5, 3.0], len(X))}
SMALL = {"batch_size": [16, 32], "lr": [0.01, 0.03]}
OF_PIPELINES = {f"net__{name}": values for name, values in SMALL.items()}
LABELS = {"lr": [0.01, 0.03], "data__random_labels": [0.0, 0.2]}
DRAWS = {"lr": FloatDistribution(0.01, 0.1), "random_state": [0, 1]}
FAILING = make_net(callbacks=[StopAtLoss(0.8), Fails()])
PRUNER = optuna.pruners.ThresholdPruner(upper=0.9, n_warmup_steps=6)
ALIKE = {  # estimator, space, arguments of the search, arguments of fit
    "sample weights": (None, LABELS, {}, WEIGHTS),
    "pipelines": (piped(make_net()), OF_PIPELINES, {}, {}),
    "draws": (None, DRAWS, {"n_trials": 8}, {}),
    "failures": (FAILING, SMALL, {}, {}),
    "two processes": (None, SPACE, {"n_jobs": 2}, {}),
    "pruned": (None, {"lr": [1e-5, 0.01, 0.03]}, {"pruner": PRUNER}, {}),
}


@pytest.mark.parametrize("case", ALIKE)
def test_what_a_fleet_finds_is_what_one_by_one_finds(case, caplog):
    caplog.set_level(logging.INFO, logger="relflat_sk")
    estimator, space, arguments, fit_params = ALIKE[case]
    single, together = (
        make_search(estimator, space, fleet=fleet, **arguments).fit(*DATA, **fit_params)
        for fleet in (None, 3)
    )
    assert_same(together, single)
    assert not caplog.records
    failed = together.minima_["reason"] == "RuntimeError: no luck"
    assert failed.sum() == (case == "failures")
    states = {trial.state for trial in together.study_.trials}
    assert (TrialState.PRUNED in states) == (case == "pruned")


def test_weights_are_saved_and_a_study_is_resumed(kept, alone):
    assert len(make_search(n_trials=6, **kept).fit(*DATA).minima_) == 6
    assert_same(make_search(**kept).fit(*DATA), alone)
    again = make_search(**kept).fit(*DATA)  # from the saved weights
    np.testing.assert_array_equal(again.predict(X), alone.predict(X))
    assert again.remeasure(["hessian_trace"])["hessian_trace"].notna().all()


class Interrupts(Callback):
    """Sends a real SIGINT at the end of an epoch of one candidate."""

    def __init__(self, folder):
        self.folder = folder

    def on_epoch_end(self, net, **kwargs):
        flag = self.folder / "interrupted"
        if net.lr == 0.03 and len(net.history) == 3 and not flag.exists():
            flag.touch()
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("ctrl_c", "same_threads")
def test_ctrl_c_keeps_what_is_finished(tmp_path, stored, alone):
    handler = signal.getsignal(signal.SIGINT)
    net = make_net(callbacks=[StopAtLoss(0.8), Interrupts(tmp_path)])
    with pytest.warns(match="interrupted: the search ends with"):
        interrupted = make_search(net, **stored).fit(*DATA)
    assert 0 < len(interrupted.minima_) < N
    assert signal.getsignal(signal.SIGINT) is handler
    assert not interrupted.study_.get_trials(states=(TrialState.RUNNING,))
    assert_same(make_search(net, **stored).fit(*DATA), alone)


def test_what_cannot_be_stacked_is_trained_one_by_one(caplog):
    caplog.set_level(logging.INFO, logger="relflat_sk")
    search = make_search(LogisticRegression(), {"C": [0.1, 1.0]}).fit(X, y)
    assert len(search.minima_) == 2
    (message,) = (record.getMessage() for record in caplog.records)
    assert message == "trained one by one: LogisticRegression holds no net of relflat_sk"


def test_a_study_of_a_fleet_goes_on_without_one(stored):
    """Sums in another order change a net within rounding, which is no other net."""
    space = {"lr": [0.01, 0.02, 0.03, 0.04]}
    make_search(space=space, fleet=3, n_trials=3, **stored).fit(X, y)
    search = make_search(space=space, fleet=None, **stored).fit(X, y)
    in_fleet = [attributes_of(trial)["in_fleet"] for trial in search.study_.trials]
    assert in_fleet == [True] * 3 + [False]
    for number, loss in search.minima_[["trial", "train_loss"]].itertuples(index=False):
        found = search.get_estimator(number).predict_proba(X)
        again = -np.log(found[np.arange(len(y)), y]).mean()
        assert again == pytest.approx(loss, rel=1e-4)


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x):  # which makes it no chain, whose masks are the same alone
        return super().forward(x)


def test_a_net_with_dropout_is_trained_again_in_a_fleet():
    """Alone it would draw other masks, and the goal would hide it: the losses are alike."""
    net = RelativeFlatnessRegularizedClassifier(module=Dropping, max_epochs=60, verbose=0, lr=0.02)
    search = make_search(net, {"random_state": [0, 1, 2]}, goal=0.4, refit=False).fit(X, y)
    assert all(attributes_of(trial)["in_fleet"] for trial in search.study_.trials)
    table = search.minima_.set_index("trial")["relative_flatness"]
    assert table.nunique() == 3
    for number, before in table.items():
        found = relative_flatness(search.get_estimator(number), X, y)
        assert found == pytest.approx(before, rel=1e-4)


def test_ask_and_tell_in_turns(alone, sizes):
    """Functions of one's own run inside of fleet_training; optimize trains one by one."""
    studies = []
    for n_at_once in (1, 4):
        study = optuna.create_study(pruner=optuna.pruners.NopPruner())
        held_out = {"X_test": DATA[2], "y_test": DATA[3]}
        objective = MinimaObjective(make_net(), X, y, SPACE, random_state=0, **held_out)
        for point in ParameterGrid(SPACE):
            study.enqueue_trial(point)

        def train_next(study=study, objective=objective):
            trial = study.ask()
            study.tell(trial, objective(trial))

        if n_at_once == 1:
            study.optimize(objective, n_trials=N)
        else:
            with fleet_training(n_at_once):
                Parallel()(delayed(train_next)() for _ in range(N))
        studies.append(study)
    assert max(sizes) > 1
    assert_same(*studies)
    assert_same(studies[0], alone)

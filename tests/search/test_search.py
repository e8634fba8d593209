"""Tests of `FlatMinimaSearch` and `MinimaObjective`: what is trained, resumed and shown."""

import copy
import logging
import pickle
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_array_equal
from optuna.distributions import FloatDistribution
from optuna.samplers import GridSampler, NSGAIISampler, RandomSampler
from optuna.trial import TrialState
from pandas.testing import assert_frame_equal
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from skorch.dataset import ValidSplit

from relflat_sk import FlatnessWarning, MinimaObjective, StopAtLoss, rank_minima, relative_flatness
from relflat_sk.search import _search, _sweep
from tests.search.examples import (
    NO_MINIMA,
    TARGET,
    X_TEST,
    Y_TEST,
    Fails,
    Slow,
    X,
    Y,
    assert_same_results,
    attributes_of,
    logistic,
    make_net,
    make_regressor,
    make_search,
    plain_net,
    train_one,
)

DEAD = 1e10  # a learning rate that leaves nothing but dead units
DIVERGING = 1e37
EARLY = 1e-3  # one that is far from the goal when training ends


def run_objective(objective, sampler, n_trials=None, **study_parameters):
    study = optuna.create_study(sampler=sampler, **study_parameters)
    study.optimize(objective, n_trials)
    return study


def test_losses_and_scores_of_all_of_the_data_are_recorded():
    net = plain_net(max_epochs=30, callbacks=[StopAtLoss(0.5)])
    search, attrs, fitted = train_one(net, {"lr": [0.5]}, held_out=(X_TEST, Y_TEST))
    train_loss = log_loss(Y, fitted.predict_proba(X))
    test_loss = log_loss(Y_TEST, fitted.predict_proba(X_TEST))
    expected = {
        "relative_flatness": relative_flatness(fitted, X, Y),
        "train_loss": train_loss,
        "test_loss": test_loss,
        "generalization_gap": test_loss - train_loss,
        "train_score": fitted.score(X, Y),
        "test_score": fitted.score(X_TEST, Y_TEST),
    }
    assert {name: attrs[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert search.study_.best_value == attrs["relative_flatness"]
    assert (attrs["converged"], attrs["reason"]) == (True, "")
    assert attrs["seconds"] > 0


def test_an_objective_to_maximize_is_minus_the_measure():
    space = {"C": [0.01, 1.0]}
    objective = MinimaObjective(LogisticRegression(max_iter=500), X, Y, space, direction="maximize")
    study = run_objective(objective, GridSampler(space, seed=0), direction="maximize")
    assert all(t.value == -t.user_attrs["relative_flatness"] for t in study.trials)
    assert study.best_params == {"C": 0.01}


def test_choices_are_copied_for_each_candidate_and_given_seeds_stay():
    callback = StopAtLoss(0.4)
    fitted = train_one(make_net(), {"callbacks": [[callback]]})[2]
    assert hasattr(fitted.callbacks[0], "loss_")
    assert not hasattr(callback, "loss_")
    assert train_one(make_net(), {"random_state": [2]})[2].random_state == 2
    assert train_one(make_net(random_state=5), {"lr": [0.05]})[2].random_state == 5


@pytest.mark.filterwarnings("ignore:.*has diverged:relflat_sk.FlatnessWarning")
def test_networks_that_are_no_minima_never_win_a_study():
    """With tiny steps the weights stay small, and small is flat."""
    early = [EARLY] if hasattr(optuna.Trial, "set_constraint") else []  # from Optuna 5 on
    space = {"lr": [0.05, DEAD, DIVERGING, *early]}
    objective = MinimaObjective(make_net(), X, Y, space, random_state=0)
    study = run_objective(objective, GridSampler(space, seed=0))
    assert study.best_params == {"lr": 0.05}
    for trial in study.trials:
        assert (trial.state == TrialState.FAIL) == (trial.params["lr"] in (DEAD, DIVERGING))


def test_the_whole_grid_is_trained_once(trained):
    search = make_search().fit(X, Y, X_TEST, Y_TEST)
    assert len(trained) == 4
    combinations = search.minima_[["param_batch_size", "param_module__hidden_layer_sizes"]]
    assert len(combinations.drop_duplicates()) == 4
    assert search.minima_["converged"].all()
    assert search.minima_["relative_flatness"].is_monotonic_increasing
    assert search.minima_["rank"].tolist() == [1, 2, 3, 4]
    blind = make_search().fit(X, Y)  # held-out data do not choose
    assert search.best_params_ == blind.best_params_
    assert blind.minima_["test_loss"].isna().all()
    # the best is the first, and consistent throughout; the search is measured as its best
    best, params = search.minima_.iloc[0], search.best_params_
    flatness = best["relative_flatness"]
    for estimator in (search, search.best_estimator_):
        assert relative_flatness(estimator, X, Y) == -search.best_score_ == flatness
    sizes = params["module__hidden_layer_sizes"]
    assert sizes == search.best_estimator_.module__hidden_layer_sizes
    assert str(sizes) == best["param_module__hidden_layer_sizes"]
    assert search.cv_results_["params"][search.best_index_] == params
    assert search.study_.best_trial.number == best["trial"]


@pytest.mark.parametrize("n_trials", [7, 20])
def test_no_combination_is_trained_twice(n_trials):
    space = {"C": [0.4, 0.6, 0.8], "tol": [1e-3, 1e-4, 1e-5]}
    search = logistic(space, n_trials=n_trials).fit(X, Y)
    assert len(search.minima_) == min(n_trials, 9)
    assert not search.minima_.duplicated(["param_C", "param_tol"]).any()


def test_samplers_of_ones_own():
    space = {"C": FloatDistribution(0.3, 1.0)}
    search = logistic(space, sampler=RandomSampler(seed=3), n_trials=3).fit(X, Y)
    expected = optuna.create_study(sampler=RandomSampler(seed=3))
    expected.optimize(lambda trial: trial.suggest_float("C", 0.3, 1.0), 3)
    drawn, trials = search.study_.trials, expected.trials
    assert [trial.params for trial in drawn] == [trial.params for trial in trials]
    # a sampler of a grid ends the search
    space = {"C": [0.1, 1.0]}
    search = logistic(space, sampler=GridSampler(space, seed=0), n_trials=5).fit(X, Y)
    assert sorted(search.minima_["param_C"]) == [0.1, 1.0]


class LacksPackage(RandomSampler):
    def sample_independent(self, *args):
        raise ModuleNotFoundError("No module named 'cmaes'")


def test_a_sampler_without_its_package_is_no_failure_of_candidates(stored):
    search = logistic({"C": FloatDistribution(0.3, 1.0)}, n_trials=2, **stored)
    with pytest.raises(RuntimeError, match="the sampler cannot draw: .*'cmaes'"):
        search.set_params(sampler=LacksPackage()).fit(X, Y)
    assert len(search.set_params(sampler=RandomSampler(0)).fit(X, Y).minima_) == 2


@NO_MINIMA
@pytest.mark.parametrize("make_state", [int, np.random.RandomState], ids=["int", "RandomState"])
@pytest.mark.parametrize("make", [make_net, plain_net], ids=["ours", "skorch"])
def test_a_search_and_an_objective_with_one_random_state_train_the_same(make, make_state):
    net, space = make(callbacks=[StopAtLoss(0.9)]), {"lr": [0.03, 0.05]}
    search, other = (make_search(net, space, random_state=make_state(s)).fit(X, Y) for s in (3, 4))
    objective = MinimaObjective(net, X, Y, space, random_state=make_state(3))
    study = run_objective(objective, GridSampler(space))
    columns = ["param_lr", "relative_flatness", "train_loss"]
    assert_frame_equal(search.minima_[columns], rank_minima(study)[columns])
    trials = search.study_.trials + other.study_.trials
    assert len({attributes_of(trial)["seed"] for trial in trials}) == 4
    assert not set(search.minima_["train_loss"]) & set(other.minima_["train_loss"])


def test_finished_trials_are_kept_and_missing_ones_run(stored, trained):
    assert len(make_search(n_trials=2, **stored).fit(X, Y).minima_) == 2
    resumed = make_search(refit=True, **stored).fit(X, Y)
    # the best one of an earlier session is trained again to be refitted, the others are not
    assert len(trained) == 4 + int(resumed.minima_["trial"][0] < 2)
    assert -resumed.best_score_ == relative_flatness(resumed.best_estimator_, X, Y)
    assert_same_results(resumed, make_search().fit(X, Y))
    # nothing is left to do
    n_trained = len(trained)
    again = make_search(refit=False, **stored).fit(X, Y)
    assert len(trained) == n_trained
    assert_frame_equal(again.minima_, resumed.minima_)


def test_draws_go_on_as_they_would_have(stored):
    space = {"C": FloatDistribution(0.3, 1.0)}
    logistic(space, n_trials=4, **stored).fit(X, Y)
    resumed = logistic(space, n_trials=12, refit=False, **stored).fit(X, Y)
    assert_same_results(resumed, logistic(space, n_trials=12).fit(X, Y))
    assert resumed.minima_["param_C"].nunique() == 12


def test_the_measure_that_ranks_comes_first(make_storage, tmp_path):
    """A database returns attributes in the order of the alphabet."""
    measures = ["trace_flatness", "relative_flatness", "l2_norm"]
    shared = {"storage": make_storage(), "study_name": "sweep", "artifact_store": tmp_path}
    search = logistic(measure=measures, **shared).fit(X, Y)
    for table in (search.minima_, rank_minima(search.study_, "trace_flatness")):
        assert list(table.columns[:3]) == ["trial", "param_C", measures[0]]
        assert [name for name in table if name in measures] == measures
    others = ["spectral_product", "frobenius_product"]
    table = search.remeasure(others)
    assert [name for name in table if name in measures + others] == [*measures, *others]


@pytest.mark.filterwarnings("ignore:.*has diverged:relflat_sk.FlatnessWarning")
@NO_MINIMA
def test_failing_diverging_and_dead_candidates_come_last():
    rates = {"good": 0.1, "early": EARLY, "dead": DEAD, "nan": DIVERGING, "error": -1.0}

    def lr(trial):
        return rates[trial.suggest_categorical("kind", [*rates, "undrawn"])]

    sampler = GridSampler({"kind": [*rates, "undrawn"]}, seed=0)
    search = make_search(make_net(max_epochs=15), {"lr": lr}, sampler=sampler, n_trials=6)
    minima = search.fit(X, Y).minima_
    assert minima["param_kind"].tolist()[:2] == ["good", "early"]
    reasons = minima.set_index("param_kind")["reason"]
    assert reasons["early"] == "training stopped before its goal was reached, after 15 epochs"
    assert "constant prediction" in reasons["dead"]
    assert reasons["nan"] == "the training loss is not finite"
    assert "Invalid learning rate: -1.0" in reasons["error"]
    assert reasons["undrawn"] == "KeyError: 'undrawn'"
    assert minima["converged"].tolist() == [True] + [False] * 5
    assert search.best_params_ == {"lr": 0.1}
    scores = search.cv_results_["mean_test_score"]
    assert np.isfinite(scores).nonzero()[0] == [search.best_index_]
    assert np.ma.getmaskarray(search.cv_results_["param_lr"]).sum() == 1


class Forest(RandomForestClassifier):
    """Of which a search cannot know before training that it is no network."""


NONE_TRAINED = r"none of 2 candidates could be .*:\n  2 x RuntimeError: out of luck"
NO_NETWORK = "^a model of type Forest is not a network"


@pytest.mark.parametrize(
    ("estimator", "space", "error", "match"),
    [
        (Fails(), {"C": [1.0], "tol": [1e-4, 1e-5]}, ValueError, NONE_TRAINED),
        (Forest(2), {"max_depth": [1]}, TypeError, NO_NETWORK),
    ],
)
def test_all_fail(estimator, space, error, match):
    optuna.logging.set_verbosity(optuna.logging.DEBUG)
    search = make_search(estimator, space)
    with pytest.raises(error, match=match):
        search.fit(X, Y)
    assert search.study_.trials
    assert optuna.logging.get_verbosity() == optuna.logging.DEBUG  # given back


def test_all_are_useless():
    """As in GridSearchCV over poor estimators, the best of them predicts."""
    search = make_search(make_net(max_epochs=3), {"lr": [DEAD, DEAD / 2]})
    with pytest.warns(FlatnessWarning, match="(?s)no candidate converged: .*is no better"):
        search.fit(X, Y)
    minima = search.minima_
    assert minima["state"].eq("failed").all()
    assert minima["depth"].is_monotonic_decreasing
    assert search.best_params_ == {"lr": minima["param_lr"][0]}
    assert np.isnan(search.best_score_)
    assert search.predict(X).shape == Y.shape
    assert search.get_estimator(int(minima["trial"][0])) is search.best_estimator_


def test_the_pruner_stops_hopeless_nets():
    wrapped = TransformedTargetRegressor(make_regressor(max_epochs=50))
    pruner = optuna.pruners.ThresholdPruner(upper=1e3)
    space = {"regressor__lr": [0.01, 0.02, 1e4]}
    search = make_search(wrapped, space, goal=TARGET.var() / 20, pruner=pruner).fit(X, TARGET)
    assert search.minima_["state"].tolist() == ["complete", "complete", "pruned"]
    assert search.minima_["param_lr"][2] == 1e4
    # one epoch was enough to see that
    assert len(search.study_.trials[2].intermediate_values) == 1


def test_cv_results_are_those_of_scikit_learn():
    space = {"batch_size": [8, 16], "optimizer": [torch.optim.Adam, torch.optim.SGD]}
    search = make_search(make_net(lr=0.1), space).fit(X, Y)
    results = search.cv_results_
    assert set(results) == {
        *("mean_fit_time", "std_fit_time", "param_batch_size", "param_optimizer", "params"),
        *("split0_test_score", "mean_test_score", "std_test_score", "rank_test_score"),
    }
    assert isinstance(results["param_batch_size"], np.ma.MaskedArray)
    assert [params["optimizer"] for params in results["params"]] == [*results["param_optimizer"]]
    scores = results["mean_test_score"]
    assert results["rank_test_score"][search.best_index_] == 1
    assert scores[search.best_index_] == search.best_score_ == max(scores)


def test_a_fitted_search_is_its_best_estimator():
    search = logistic(refit=True)
    with pytest.raises(NotFittedError):
        search.predict(X)
    with pytest.raises(AttributeError, match="has no attribute .classes_"):
        _ = search.classes_
    best = search.fit(X, Y).best_estimator_
    for method in ("predict", "predict_proba", "predict_log_proba", "decision_function"):
        assert_array_equal(getattr(search, method)(X_TEST), getattr(best, method)(X_TEST))
        assert method == getattr(search, method).__name__
        assert "mean of " in getattr(search, method).__doc__
    assert search.score(X_TEST, Y_TEST) == best.score(X_TEST, Y_TEST)
    assert_array_equal(search.classes_, [0, 1, 2])
    assert search.n_features_in_ == 4
    assert not hasattr(clone(search), "minima_")
    for other in (pickle.loads(pickle.dumps(search)), copy.deepcopy(search)):
        assert_array_equal(other.predict_proba(X), search.predict_proba(X))
        assert_frame_equal(other.minima_, search.minima_)
        assert other.study_.best_params == search.study_.best_params
    # without a refit, nothing is left of it
    search.set_params(refit=False).fit(X, Y)
    for name in ("best_estimator_", "ensemble_", "classes_", "predict"):
        assert not hasattr(search, name)


def test_the_users_estimator_and_random_state_stay_as_they_are():
    net = make_net(train_split=ValidSplit(5))
    before = net.get_params()
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    make_search(net, {"lr": [0.05]}).fit(X, Y)
    assert not net.initialized_
    after = net.get_params()
    for name in ("train_split", "callbacks", "random_state"):
        assert after[name] is before[name]
    assert_array_equal(torch.get_rng_state(), state)
    assert_array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


@pytest.mark.parametrize(("verbose", "bar", "log"), [(0, 0, 0), (1, 1, 0), (2, 1, 1)])
def test_verbose(verbose, bar, log, capfd, caplog, monkeypatch):
    # Optuna's messages are for its own handler, unless another library asked for them
    monkeypatch.setattr(logging.getLogger("optuna"), "propagate", True)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    logistic(verbose=verbose).fit(X, Y)
    assert optuna.logging.get_verbosity() == optuna.logging.INFO
    shown = capfd.readouterr()
    assert shown.out == ""
    assert ("minima: 100%" in shown.err) == bool(bar)
    assert ("solver 3" in shown.err) == bool(bar)
    assert ("Trial 0 finished" in caplog.text) == bool(log)


@NO_MINIMA
def test_a_front_of_flatness_and_loss_is_of_networks_that_have_learned():
    """A net that never learned anything is perfectly flat."""
    names = ["relative_flatness", "train_loss"]
    space, sampler = {"lr": [0.02, 0.05, 0.1, DEAD]}, NSGAIISampler(population_size=4, seed=1)
    search = make_search(make_net(), space, measure=names, sampler=sampler, n_trials=8).fit(X, Y)
    dead = search.minima_["param_lr"] == DEAD
    assert 0 < dead.sum() < 6
    assert not search.minima_["pareto"][dead].any()
    table = search.minima_[~dead]
    points = table[names].to_numpy()
    beaten = [((points <= one).all(axis=1) & (points < one).any(axis=1)).any() for one in points]
    assert table["pareto"].tolist() == [not one for one in beaten]
    # the first objective ranks
    assert table["relative_flatness"].is_monotonic_increasing
    assert -search.best_score_ == table["relative_flatness"][0]


STOPPED = [0.5, 0.6, 0.7, 0.8]


def test_no_candidate_begins_after_the_timeout_and_a_later_search_goes_on(monkeypatch, stored):
    ticks = iter([0.0, 1.0, 5.0, 9.0])
    clock = SimpleNamespace(time=lambda: next(ticks, 11.0), perf_counter=float)
    monkeypatch.setattr(_sweep, "time", clock)
    monkeypatch.setattr(_search, "time", clock)
    assert len(logistic({"C": STOPPED}, **stored).fit(X, Y, timeout=10).minima_) == 3
    assert len(logistic({"C": STOPPED}, **stored).fit(X, Y).minima_) == len(STOPPED)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_nothing_was_trained_before_the_timeout(n_jobs):
    with pytest.raises(ValueError, match="no candidate was trained: the search was ended before"):
        logistic({"C": STOPPED}, n_jobs=n_jobs).fit(X, Y, timeout=1e-9)


def test_callbacks_get_study_and_trial_and_stop_the_search():
    seen = {}

    def remember(study, trial):
        assert len(study.trials) > len(seen)
        seen[trial.params["C"]] = trial.value
        if len(seen) == 3:
            study.stop()

    search = logistic({"C": STOPPED}).fit(X, Y, callbacks=[remember])
    assert search.minima_.set_index("param_C")["relative_flatness"].to_dict() == seen
    assert sorted(seen) == STOPPED[:3]


def test_a_callback_stops_all_processes_of_its_search_only(stored):
    many = logistic({"C": [0.5 + i / 50 for i in range(12)]}, Slow(max_iter=1000), **stored)
    # twice: the first word is enough
    search = many.set_params(n_jobs=2).fit(X, Y, callbacks=[lambda study, _: study.stop()] * 2)
    assert 1 <= len(search.minima_) < 12
    assert all(trial.state.is_finished() for trial in search.study_.trials)
    assert len(many.set_params(n_jobs=1).fit(X, Y).minima_) == 12


@pytest.mark.parametrize("fleet", [None, 2])
def test_errors_of_callbacks_are_the_users(fleet):
    def fails(study, trial):
        raise OSError("in the callback")

    search = make_search(make_net(max_epochs=2), {"batch_size": [32, 64]}, fleet=fleet)
    with pytest.raises(OSError, match="^in the callback"):
        search.fit(X, Y, callbacks=[fails])

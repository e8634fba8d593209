"""Tests of `FlatMinimaSearch.get_estimator`, `refit_time_` and the progress of a search."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier
from sklearn.neural_network import MLPClassifier

from relflat_sk import FlatnessWarning, StopAtLoss
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search import _sweep, _task
from relflat_sk.search._results import average, is_averaged
from relflat_sk.search._task import Task
from tests.search.examples import (
    LABELS,
    NO_MINIMA,
    TARGET,
    Fails,
    X,
    Y,
    logistic,
    make_net,
    make_search,
    piped,
)

SIZES = {"batch_size": [8, 16, 32]}
ESTIMATORS = {
    "net": (make_net(), SIZES),
    "pipeline": (piped(make_net()), {"net__batch_size": [8, 16, 32]}),
    "mlp": (MLPClassifier((6,), max_iter=3000, tol=1e-2), SIZES),
    "regression": (LogisticRegression(max_iter=1000), {"C": [0.8, 1.0, 1.2]}),
}


def fit_and_remember(search, monkeypatch):
    """Fit a search, and return what the estimators of its trials predict, by number."""
    predictions, train = [], _task.train

    def remember(*arguments):
        minimum, trained = train(*arguments)
        predictions.append(trained.estimator.predict_proba(X))
        return minimum, trained

    with monkeypatch.context() as patched:
        patched.setattr(_sweep, "train", remember)
        search.fit(X, Y)
    return dict(enumerate(predictions))


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_every_minimum_is_an_estimator_that_is_trained_again(kind, monkeypatch):
    estimator, space = ESTIMATORS[kind]
    search = make_search(estimator, space, refit=True)
    found = fit_and_remember(search, monkeypatch)
    assert len(found) == 3
    for number, expected in found.items():
        np.testing.assert_array_equal(search.get_estimator(number).predict_proba(X), expected)
    assert search.get_estimator(search.minima_["trial"][0]) is search.best_estimator_
    assert type(search.get_estimator(1)) is type(estimator)
    params = search.best_estimator_.get_params()
    assert None not in [one for name, one in params.items() if name.endswith("random_state")]


def unseeded(**parameters):
    # wide enough that any seed trains it
    wide = make_net(module__hidden_layer_sizes=(50,))
    # and no band of depths, which would leave out different minima for different seeds
    return make_search(wide, SIZES, random_state=None, **{"refit": True, **parameters})


@NO_MINIMA
def test_without_a_random_state_a_minimum_is_trained_again_as_it_was(monkeypatch):
    search = unseeded()
    found = fit_and_remember(search, monkeypatch)
    copied = pickle.loads(pickle.dumps(search))
    for number, expected in found.items():
        np.testing.assert_array_equal(search.get_estimator(number).predict_proba(X), expected)
        again = copied.get_estimator(number, X, Y)
        np.testing.assert_array_equal(again.predict_proba(X), expected)


@NO_MINIMA
def test_torchs_random_state_decides_where_there_is_no_other():
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(unseeded(refit=False).fit(X, Y).minima_["train_loss"].tolist())
    assert losses[0] == losses[1]
    assert not set(losses[0]) & set(losses[2])


def test_other_results_of_the_same_training_are_noticed(stored, monkeypatch):
    """Another version of a library, or another machine, may train another network."""
    search = make_search(make_net(), SIZES, refit=True, **stored).fit(X, Y)
    prepare = Task.prepare
    monkeypatch.setattr(Task, "prepare", lambda task, params, seed: prepare(task, params, seed + 1))
    number = int(search.minima_["trial"][1])
    with pytest.raises(ValueError, match=rf"minimum of trial {number} cannot be had again"):
        search.get_estimator(number)
    with pytest.warns(FlatnessWarning, match="minimum of trial 0 cannot be had again"):
        found = search.remeasure(["l2_norm"], retrain=True)
    assert found["l2_norm"].isna().all()
    again = make_search(make_net(), SIZES, refit=True, **stored)
    with pytest.warns(FlatnessWarning, match="best_estimator_ is not the network of the table"):
        again.fit(X, Y)


@NO_MINIMA
def test_trials_without_an_estimator():
    search = make_search(Fails(max_iter=1000), {"C": [0.5, 1.0]}).fit(X, Y)
    for number, reason in (
        (1, r"trial 1 has no estimator \(RuntimeError: out of luck\)"),
        (7, r"trial 7 has no estimator \(there is no such trial\)"),
        ("best", r"trial 'best' has no estimator"),
    ):
        with pytest.raises(ValueError, match=reason):
            search.get_estimator(number)


@pytest.mark.parametrize("labels", [Y, LABELS], ids=["numbers", "names"])
def test_an_ensemble_averages_the_probabilities_of_the_flattest(labels):
    """Also of a pickled search, which needs no data for the networks that it holds."""
    search = pickle.loads(pickle.dumps(logistic().fit(X, labels)))
    flattest = search.minima_["trial"].iloc[:2]
    expected = np.mean([search.get_estimator(n).predict_proba(X) for n in flattest], axis=0)
    ensemble = pickle.loads(pickle.dumps(search.get_ensemble(2)))
    np.testing.assert_allclose(ensemble.predict_proba(X), expected, rtol=1e-12)
    assert ensemble.predict(X).tolist() == search.classes_[expected.argmax(axis=1)].tolist()
    assert ensemble.score(X, labels) > 0.8
    with pytest.raises(ValueError, match="k=4 minima are asked for, and 3 candidates"):
        search.get_ensemble(4)


MEANS = {  # estimator, the parameter that regularises, targets, loss of the best constant
    "classifier": (LogisticRegression(), {"C": [1.0, 1.1, 1e-4]}, LABELS, np.log(3)),
    "regressor": (Ridge(), {"alpha": [1.0, 1.1, 1e5]}, TARGET, TARGET.var()),
}


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:lbfgs failed to converge", "ignore:.* left out of the ranking")
@pytest.mark.parametrize("kind", MEANS)
def test_a_search_predicts_with_the_mean_of_what_has_learned(kind, kept, end_training):
    estimator, space, targets, constant = MEANS[kind]
    method = "predict_proba" if kind == "classifier" else "predict"
    if kind == "classifier":
        space = space | {"max_iter": [1, 1000]}
    search = make_search(estimator, space, **kept).fit(X, targets)
    end_training()  # nothing is trained from here on
    gain = constant - search.minima_["train_loss"]
    learned = search.minima_[gain >= gain.max() / 2]
    # those that were stopped early count, and minima that have hardly learned do not
    assert len(learned) == (4 if kind == "classifier" else 2)
    assert learned["converged"].sum() == 2 < search.minima_["converged"].sum()
    members = [search.get_estimator(number) for number in learned["trial"]]
    expected = np.mean([getattr(one, method)(X) for one in members], axis=0)
    again = clone(search).fit(X, targets)
    for found in (search, pickle.loads(pickle.dumps(search)), search.get_ensemble(), again):
        np.testing.assert_allclose(getattr(found, method)(X), expected, rtol=1e-6)
    assert search.score(X, targets) == search.ensemble_.score(X, targets)
    # the flattest alone is there as well, and what does not average is not
    np.testing.assert_array_equal(search.best_estimator_.predict(X), members[0].predict(X))
    for one in (search, clone(search)):
        assert not hasattr(one, "decision_function")
    if kind == "classifier":
        logarithms = np.log(search.predict_proba(X))
        np.testing.assert_array_equal(search.predict_log_proba(X), logarithms)
    alone = search.set_params(refit=True).fit(X, targets)
    of_best = getattr(members[0], method)(X)
    np.testing.assert_allclose(getattr(alone, method)(X), of_best, rtol=1e-6)
    assert not hasattr(alone, "ensemble_")


NO_MEANS = {  # estimator, labels
    "labels": (MLPClassifier((6,), max_iter=3000, tol=1e-2), np.stack([Y == 0, Y == 1], axis=1)),
    "threshold": (FixedThresholdClassifier(LogisticRegression(), threshold=0.2), Y == 0),
}


@NO_MINIMA
@pytest.mark.parametrize("kind", NO_MEANS)
def test_a_search_predicts_with_the_flattest_where_predictions_have_no_mean(kind):
    estimator, labels = NO_MEANS[kind]
    name = next(n for n in estimator.get_params() if n.endswith(("alpha", "C")))
    search = make_search(estimator, {name: [0.1, 0.11]}).fit(X, labels)  # warnings are errors
    np.testing.assert_array_equal(search.predict(X), search.best_estimator_.predict(X))
    assert not hasattr(search, "ensemble_")
    with pytest.raises(ValueError, match="an ensemble averages probabilities of single labels"):
        search.get_ensemble(2)


def test_members_of_an_ensemble_have_the_same_classes():
    few = Y != 2
    two, three = LogisticRegression().fit(X[few], Y[few]), LogisticRegression().fit(X, Y)
    with pytest.raises(ValueError, match="lack a class"):
        average({"trial0": three, "trial1": two}, Y)


def members_of(search):
    return set(search.ensemble_.named_estimators_)


def test_a_resumed_search_averages_what_is_at_hand(stored, trained):
    assert members_of(logistic(n_trials=2, **stored).fit(X, Y)) == {"trial0", "trial1"}
    with pytest.warns(FlatnessWarning, match=r"mean of 2 of 3 networks: .*get_ensemble\(\)"):
        again = logistic(**stored).fit(X, Y)
    assert again.minima_["trial"][0] == 0  # trained again
    assert members_of(again) == {"trial0", "trial2"}
    before = len(trained)
    everything = again.get_ensemble()  # trains what is left out
    assert len(trained) == before + 1
    expected = logistic().fit(X, Y).predict_proba(X)
    np.testing.assert_allclose(everything.predict_proba(X), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("space", "best"),
    [
        ({"data__random_labels": [0.1, 0.0]}, 0.0),
        ({"data__confusion_size": [30, 0], "data__train_size": [0.5]}, 0),
        ({"data__train_size": [60, 1.0]}, 1.0),
    ],
)
def test_the_mean_is_of_minima_on_the_best_data(space, best):
    """Others would predict what random labels or few samples have taught them."""
    search = logistic({**space, "C": [0.3, 0.5]}).fit(X, Y)
    good = search.minima_[f"param_{next(iter(space))}"] == best
    assert members_of(search) == {f"trial{number}" for number in search.minima_["trial"][good]}
    assert good.sum() == 2


@NO_MINIMA
def test_members_are_held_without_what_only_training_needs():
    space = {"batch_size": [8, 16], "max_epochs": [1, 60]}
    net = make_net(callbacks=[StopAtLoss(0.4)], optimizer=torch.optim.Adam)
    search = make_search(piped(net), {f"net__{k}": v for k, v in space.items()}).fit(X, Y)
    assert len(members_of(search)) == 4
    for number in search.minima_["trial"]:
        member = search.get_estimator(number)[-1]
        assert all(weight.grad is None for weight in member.module_.parameters())
        assert member.optimizer_.state == {}
        assert not any(member.history[:, "batches"])
        before = member.history[-1, "train_loss"]
        assert member.partial_fit(X, Y).history[-1, "train_loss"] < before  # it trains on


@pytest.mark.parametrize(
    ("losses", "converged", "averaged"),
    [
        ([-5.0, -2.1, -1.9], [True] * 3, [True, True, False]),  # of counts
        ([np.nan] * 3, [True, False, True], [True, False, True]),
        ([np.nan] * 3, [False] * 3, [True, False, False]),
    ],
)
def test_a_mean_is_of_what_lowers_a_constant_s_loss_half_as_far_as_the_best(
    losses, converged, averaged
):
    table = pd.DataFrame({"train_loss": losses, "converged": converged, "state": "complete"})
    assert is_averaged(table, [Minimum(constant_loss=1.0)] * 3).tolist() == averaged

"""What searches predict with: the mean of networks, the nearest to it, the flattest, ensembles."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import FixedThresholdClassifier, TunedThresholdClassifierCV
from sklearn.neural_network import MLPClassifier

from relflat_sk import FlatnessWarning
from relflat_sk.minima._table import Minimum
from relflat_sk.search._results import average, is_averaged
from tests.search.examples import (
    LABELS,
    NO_MINIMA,
    TARGET,
    X,
    Y,
    logistic,
    make_net,
    make_regressor,
    make_search,
    piped,
)

SEED = 3
INPUTS = X * np.float32([1, 100, 0.01, 1])


def members_of(search):
    return set(search.ensemble_.named_estimators_)


MEANS = {  # estimator, space, targets, loss of the best constant, how many learn
    "predict_proba": (
        LogisticRegression(), {"C": [1.0, 1.1, 1e-4], "max_iter": [1, 1000]}, LABELS, np.log(3), 4,
    ),
    "predict": (Ridge(), {"alpha": [1.0, 1.1, 1e5]}, TARGET, TARGET.var(), 2),
}  # fmt: skip


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:lbfgs failed to converge", "ignore:.* left out of the ranking")
@pytest.mark.parametrize("method", MEANS)
def test_a_search_predicts_with_the_mean_of_what_has_learned(method, kept, end_training):
    estimator, space, targets, constant, n_learned = MEANS[method]
    search = make_search(estimator, space, **kept).fit(X, targets)
    end_training()  # nothing is trained from here on
    gain = constant - search.minima_["train_loss"]
    learned = search.minima_[gain >= gain.max() / 2]
    # those that were stopped early count, and minima that have hardly learned do not
    assert len(learned) == n_learned
    assert learned["converged"].sum() == 2 < search.minima_["converged"].sum()
    members = [search.get_estimator(number) for number in learned["trial"]]
    expected = np.mean([getattr(one, method)(X) for one in members], axis=0)
    resumed, pickled = clone(search).fit(X, targets), pickle.loads(pickle.dumps(search))
    for found in (search, pickled, search.get_ensemble(), resumed):
        np.testing.assert_allclose(getattr(found, method)(X), expected, rtol=1e-6)
    first, second = (search.get_estimator(n) for n in search.minima_["trial"].iloc[:2])
    of_two = (getattr(first, method)(X) + getattr(second, method)(X)) / 2
    ensemble = pickle.loads(pickle.dumps(pickled.get_ensemble(2)))
    np.testing.assert_allclose(getattr(ensemble, method)(X), of_two, rtol=1e-6)
    with pytest.raises(ValueError, match=r"k=9 minima are asked for, and \d candidates"):
        search.get_ensemble(9)
    assert search.score(X, targets) == search.ensemble_.score(X, targets)
    # the flattest alone is there as well, and what does not average is not
    np.testing.assert_array_equal(search.best_estimator_.predict(X), members[0].predict(X))
    for one in (search, clone(search)):
        assert not hasattr(one, "decision_function")
    if method == "predict_proba":
        logarithms = np.log(search.predict_proba(X))
        np.testing.assert_array_equal(search.predict_log_proba(X), logarithms)
        assert ensemble.predict(X).tolist() == search.classes_[of_two.argmax(axis=1)].tolist()
    flattest = search.set_params(refit=True).fit(X, targets)
    of_best = getattr(members[0], method)(X)
    np.testing.assert_allclose(getattr(flattest, method)(X), of_best, rtol=1e-6)
    assert not hasattr(flattest, "ensemble_")


NO_MEANS = {  # estimator, labels
    "labels": (MLPClassifier((6,), max_iter=3000, tol=1e-2), np.stack([Y == 0, Y == 1], axis=1)),
    "threshold": (FixedThresholdClassifier(LogisticRegression(), threshold=0.2), Y == 0),
    "tuned": (TunedThresholdClassifierCV(LogisticRegression(), cv=2), Y == 0),
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
    two, three = (LogisticRegression().fit(X[rows], Y[rows]) for rows in (Y != 2, Y < 3))
    with pytest.raises(ValueError, match="lack a class"):
        average({"trial0": three, "trial1": two}, Y)


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
    space = {"net__batch_size": [8, 16], "net__max_epochs": [1, 60]}
    search = make_search(piped(make_net(optimizer=torch.optim.Adam)), space).fit(X, Y)
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
def test_a_mean_is_of_what_gains_half_as_much_as_the_best(losses, converged, averaged):
    table = pd.DataFrame({"train_loss": losses, "converged": converged, "state": "complete"})
    assert is_averaged(table, [Minimum(constant_loss=1.0)] * 3).tolist() == averaged


@NO_MINIMA
def test_the_mean_has_networks_of_smoothed_losses_which_cannot_fall_as_far():
    smoothed = {"net__criterion__label_smoothing": [0.0, 0.4], "net__random_state": [0, 1]}
    with pytest.warns(FlatnessWarning, match="label_smoothing varies: .* different losses"):
        search = make_search(piped(make_net(callbacks=None, max_epochs=100)), smoothed).fit(X, Y)
    assert search.minima_["depth"].min() > 0.5 * search.minima_["depth"].max()
    assert len(members_of(search)) == 4


# -- the nearest ----------------------------------------------------------------------------------


def noisy(inputs, share=0.6):
    """The inputs on which networks are compared, by the rule that is documented."""
    rng = np.random.default_rng(np.random.RandomState(SEED).randint(2**31 - 1))
    rows = np.asarray(inputs)[rng.integers(len(inputs), size=2000)].astype(float)
    spread = np.sqrt(((rows - rows.mean(axis=0)) ** 2).mean(axis=0))
    return (rows + share * spread * rng.normal(size=rows.shape)).astype(np.float32)


def distances(nets, inputs):
    if hasattr(nets[0], "predict_proba"):
        outputs = np.array([net.predict_proba(inputs) for net in nets])
        classes = outputs.mean(axis=0).argmax(axis=1)
        return (outputs.argmax(axis=2) != classes).sum(axis=1)
    outputs = np.array([net.predict(inputs) for net in nets])
    return ((outputs - outputs.mean(axis=0)) ** 2).mean(axis=(1, 2))


NETS = {
    "names of classes": (make_net(), LABELS),
    "values": (make_regressor(), TARGET[:, None]),
    "two outputs": (make_regressor(), X[:, :2]),
}
SPACE = {"net__random_state": [0, 1, 2, 3, 4], "net__lr": [0.05, 1e-5]}  # the second learns nothing


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:no candidate converged", "ignore:.*left out of the ranking")
@pytest.mark.parametrize("kind", NETS)
def test_the_network_nearest_to_the_mean_predicts(kind, kept, end_training):
    estimator, targets = NETS[kind]
    search = make_search(piped(estimator), SPACE, refit="nearest", random_state=SEED, **kept)
    search.fit(INPUTS, targets)
    end_training()  # nothing is trained from here on
    trials = search.minima_["trial"][search.minima_["param_lr"] == 0.05].tolist()
    nets = [search.get_estimator(number) for number in trials]
    of_nets = distances(nets, noisy(INPUTS))
    nearest = trials[int(np.argmin(of_nets))]
    # another noise, all candidates, and flatness choose another one
    assert sorted(of_nets)[0] < sorted(of_nets)[1]
    assert nearest != search.minima_["trial"][0]
    row = search.minima_.set_index("trial").loc[nearest]
    expected = nets[trials.index(nearest)].predict(INPUTS)
    resumed = clone(search).fit(INPUTS, targets)  # from weights
    for found in (search, resumed, pickle.loads(pickle.dumps(search)), copy.deepcopy(search)):
        assert found.best_params_["net__random_state"] == row["param_random_state"]
        assert found.best_params_ == found.cv_results_["params"][found.best_index_]
        assert found.best_score_ == pytest.approx(-row["relative_flatness"], nan_ok=True)
        assert found.get_estimator(nearest) is found.best_estimator_
        assert not hasattr(found, "ensemble_")
        np.testing.assert_array_equal(found.predict(INPUTS), expected)
        assert found.score(INPUTS, targets) == found.best_estimator_.score(INPUTS, targets)
    assert f"The search predicts with trial {nearest}." in search.report()


def test_networks_of_earlier_sessions_need_weights(stored, trained):
    logistic(n_trials=2, **stored).fit(X, LABELS)
    for n_trained, match in (
        (3, "nearest to the mean of 1 of 3 networks"),
        (4, "the flattest minimum only: .*artifact_store"),
    ):
        with pytest.warns(FlatnessWarning, match=match):
            search = logistic(refit="nearest", **stored).fit(X, LABELS)
        assert len(trained) == n_trained
        best = 2 if n_trained == 3 else search.minima_["trial"][0]
        assert search.get_estimator(best) is search.best_estimator_


def as_memmap(values, folder):
    on_disk = np.memmap(folder / "X", dtype=values.dtype, mode="w+", shape=values.shape)
    on_disk[:] = values
    return on_disk


class Remembers(Ridge):
    def predict(self, X):
        Remembers.inputs = X
        return super().predict(X)


KINDS = {
    "array": lambda values, folder: values,
    "in float64": lambda values, folder: values.astype(float),
    "on disk": as_memmap,
    "frame": lambda values, folder: pd.DataFrame(values, columns=list("abcd")),
}


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_drawn_by_the_documented_rule_and_keeps_the_kind_of_inputs(kind, tmp_path):
    inputs = KINDS[kind](INPUTS, tmp_path)
    space = {"alpha": [1.0, 1.1, 1.2]}
    make_search(Remembers(), space, refit="nearest", random_state=SEED).fit(inputs, TARGET)
    np.testing.assert_allclose(Remembers.inputs, noisy(INPUTS), rtol=1e-4, atol=1e-4)
    both = Remembers.inputs, inputs
    types, expected = ([*x.dtypes] if kind == "frame" else x.dtype for x in both)
    assert types == expected


def test_tensors_and_images():
    space, inputs = {"random_state": [0, 1, 2]}, torch.as_tensor(X)
    found, *others = (
        make_search(make_net(), space, refit="nearest", random_state=SEED).fit(data, LABELS)
        for data in (X, inputs, inputs.reshape(-1, 1, 2, 2))
    )
    assert [other.best_params_ for other in others] == [found.best_params_] * 2

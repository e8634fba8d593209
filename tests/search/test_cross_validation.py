"""Choices by folds: a penalty, the flattest of a grid; scikit-learn's checks of estimators."""

import pickle
from contextlib import nullcontext

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone, is_regressor
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_wine
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold, cross_val_predict
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from sklearn.utils.estimator_checks import SkipTest, estimator_checks_generator

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessPenaltyCV,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtLoss,
    flattest_within,
)
from relflat_sk.training import _after_fit

X, y = load_wine(return_X_y=True)
X = scale(X).astype("float32")
NONE, ALL = {"flatness_weight": 0}, {"flatness_layer": "all", "flatness_weight": 3.0}


def make_net(kind=RelativeFlatnessRegularizedClassifier, **params):
    return kind(**({"max_epochs": 6, "lr": 0.01, "verbose": 0, "random_state": 0} | params))


@pytest.mark.filterwarnings("ignore:the penalty")
def test_it_chooses_what_a_grid_search_chooses():
    labels = np.where(np.random.default_rng(0).random(len(y)) < 0.3, (y + 1) % 3, y)
    net, light = make_net(max_epochs=40), ALL | {"flatness_weight": 1.0}
    search = RelativeFlatnessPenaltyCV(net, [light, NONE], cv=3).fit(X, labels)
    grid = [{name: [value] for name, value in setting.items()} for setting in (NONE, light)]
    by_hand = GridSearchCV(net, grid, cv=StratifiedKFold(3)).fit(X, labels)
    assert search.best_params_ == by_hand.best_params_ == light
    scores, expected = (one.cv_results_["mean_test_score"] for one in (search, by_hand))
    assert_allclose(scores, expected, atol=0.03)
    assert np.mean(search.predict(X) == by_hand.predict(X)) > 0.97
    assert search.best_estimator_.flatness_weight == 1.0


def test_ties_go_to_the_weaker_penalty():
    weights = [2.0, 0.5, 1.0]
    penalties = [{"flatness_layer": "all", "flatness_weight": weight} for weight in weights]
    scores = {0.5: [0.1, 0.2, 0.3], 1.0: [0.3, 0.2, 0.1], 2.0: [0.2, 0.3, 0.1]}  # means by rounding

    def score(net, *data):
        return scores[net.flatness_weight].pop()

    search = RelativeFlatnessPenaltyCV(make_net(), penalties, 3, score).fit(X, y)
    assert search.best_params_["flatness_weight"] == 0.5
    assert search.best_estimator_.flatness_weight == 0.5
    assert search.best_score_ == pytest.approx(0.2)


def test_the_mean_of_the_folds_needs_no_further_training():
    folds = KFold(3, shuffle=True, random_state=0)
    search = RelativeFlatnessPenaltyCV(make_net(), [NONE, ALL], cv=folds, refit="mean").fit(X, y)
    trained = [make_net(**search.best_params_).fit(X[at], y[at]) for at, _ in folds.split(X)]
    want = np.mean([net.predict_proba(X) for net in trained], axis=0)
    assert_allclose(search.predict_proba(X), want, atol=1e-3)
    assert search.score(X, y) == np.mean(search.predict(X) == y)
    assert_array_equal(search.classes_, [0, 1, 2])
    again = pickle.loads(pickle.dumps(search))
    assert_array_equal(again.predict_proba(X), search.predict_proba(X))


def test_the_mean_leaves_out_settings_that_contain_the_best():
    decayed = {"optimizer": torch.optim.AdamW, "optimizer__weight_decay": 90.0} | NONE
    search = RelativeFlatnessPenaltyCV(make_net(), [decayed, NONE], cv=3, refit="mean").fit(X, y)
    assert search.best_params_ == NONE
    assert len(search.best_estimator_.estimators_) == 3


@pytest.mark.parametrize(
    "further", [{"callbacks": [StopAtLoss(1e-9)]}, {"criterion__weight": torch.ones(3)}]
)
@pytest.mark.filterwarnings("ignore:.*has not reached")
def test_the_mean_is_of_settings_with_objects(further):
    settings = [NONE | further, ALL | further]
    search = RelativeFlatnessPenaltyCV(make_net(), settings, cv=3, refit="mean").fit(X, y)
    assert len(search.best_estimator_.estimators_) == 3


@pytest.mark.parametrize("refit", [True, "mean", np.True_])
def test_folds_have_weights_where_scikit_learn_has_them(refit):
    """Scores have them since version 1.9."""
    weights, scores = np.linspace(0.1, 3, len(y))[::-1], [f"split{i}_test_score" for i in range(3)]
    grid = GridSearchCV(make_net(), {"flatness_weight": [0]}, cv=3)
    grid.fit(X, y, sample_weight=weights)
    search = RelativeFlatnessPenaltyCV(make_net(), [NONE], cv=3, refit=refit)
    for data in (pd.DataFrame(X, columns=list("abcdefghijklm")), X.tolist()):
        search.fit(data, y, sample_weight=weights.tolist())
        found, expected = ([one.cv_results_[name] for name in scores] for one in (search, grid))
        assert_allclose(found, expected, atol=1e-6)
        assert search.refit_time_ >= 0
        assert_array_equal(search.feature_names_in_, list("abcdefghijklm"))


@pytest.mark.parametrize(
    ("params", "n_measured"),
    [({}, 1), ({"refit": False}, 0), ({"refit": "mean"}, 6), ({"scoring": "by flatness"}, 7)],
    ids=["refit", "no refit", "mean", "a scorer that reads it"],
)
def test_nets_are_measured_whose_flatness_anybody_sees(params, n_measured, monkeypatch):
    measured, measure = [], _after_fit.measure_layers
    monkeypatch.setattr(
        _after_fit,
        "measure_layers",
        lambda *args, **more: (measured.append(1), measure(*args, **more))[1],
    )
    if "scoring" in params:
        params = {"scoring": lambda net, X, y: -net.relative_flatness_}
    search = RelativeFlatnessPenaltyCV(make_net(), [NONE, ALL], cv=3, **params).fit(X, y)
    assert len(measured) == n_measured
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    if search.refit is True:
        assert search.best_estimator_.relative_flatness_ > 0
    if search.refit == "mean":
        assert all(net.relative_flatness_ > 0 for net in search.best_estimator_.estimators_)


def test_default_settings_suit_the_optimizer():
    adam, sgd = (
        RelativeFlatnessPenaltyCV(make_net(max_epochs=1, optimizer=optimizer), cv=2, refit=False)
        for optimizer in (torch.optim.Adam, torch.optim.SGD)
    )
    of_adam, of_sgd = (one.fit(X, y).cv_results_["params"] for one in (adam, sgd))
    decays = [params.get("optimizer__weight_decay") for params in of_adam]
    assert len(decays) <= 12
    assert any(decays)
    assert not any("optimizer" in params for params in of_sgd)
    assert of_adam[0] == {"flatness_weight": 0.0}
    assert not hasattr(adam, "best_estimator_")


def test_the_default_net_has_its_methods_before_it_is_fitted():
    """As cross_val_predict, pipelines and scikit-learn's wrappers ask for them."""
    names = ("predict", "predict_proba", "decision_function", "transform", "classes_", "nothing")
    for params in ({}, {"refit": False}):
        found, expected = (
            [hasattr(RelativeFlatnessPenaltyCV(net, **params), name) for name in names]
            for net in (None, make_net())
        )
        assert found == expected
    with pytest.raises(NotFittedError):
        RelativeFlatnessPenaltyCV().predict(X)
    with pytest.raises(AttributeError, match="nothing"):
        _ = RelativeFlatnessPenaltyCV().nothing
    search = RelativeFlatnessPenaltyCV(penalties=[NONE], cv=2)
    assert np.mean(cross_val_predict(search, X, y, cv=2) == y) > 0.9


def test_pipelines_targets_and_weights():
    data, target = load_diabetes(return_X_y=True)
    regressor = make_net(RelativeFlatnessRegularizedRegressor)
    estimator = TransformedTargetRegressor(
        make_pipeline(StandardScaler(), regressor), transformer=StandardScaler()
    )
    search = RelativeFlatnessPenaltyCV(estimator, [NONE, ALL], cv=3, refit="mean").fit(data, target)
    assert search.score(data, target) > 0.3
    prefix = "regressor__relativeflatnessregularizedregressor__flatness_"
    assert all(name.startswith(prefix) for name in search.best_params_)
    assert is_regressor(search)
    # samples without weight are left out
    weights = (y < 2).astype(float)
    search = RelativeFlatnessPenaltyCV(make_net(), [NONE, ALL], cv=3)
    assert set(search.fit(X, y, sample_weight=weights).predict(X)) == {0, 1}


OF_VALUES = "RelativeFlatnessRegularizedRegressor"
PIPELINE = Pipeline([("scaler", StandardScaler()), ("net", make_net())])
OF_LABELS = make_net(RelativeFlatnessRegularizedBinaryClassifier)


def fit(net=None, labels=y, penalties=(NONE,), refit=True, scoring=None, **params):
    net = net or make_net()
    search = RelativeFlatnessPenaltyCV(net, list(penalties), scoring=scoring, refit=refit)
    return lambda: search.fit(X, labels, **params)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (fit(LogisticRegression()), "flatness_weight"),
        (fit(refit="best"), "refit"),
        (fit(scoring=["accuracy"]), "scoring"),
        (fit(scoring=accuracy_score), "scoring .* metric"),
        (fit(OF_LABELS, labels=(X > 0).astype(int), refit="mean"), "'mean' needs .* single labels"),
        (fit(labels=np.arange(len(y)) / 7), OF_VALUES),
        (fit(labels=np.arange(len(y), dtype=float)), OF_VALUES),
        (fit(labels=np.arange(len(y))), OF_VALUES),
        (fit(sample_weight=np.ones(9)), r"sample_weight .* \(9,\)"),
        (fit(PIPELINE, net__sample_weight=-X[:, 0]), "sample_weight"),
    ],
)
def test_what_is_wrong_is_refused_once_before_the_folds(monkeypatch, call, match):
    monkeypatch.setattr(GridSearchCV, "fit", lambda *args, **kwargs: pytest.fail("folds"))
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize(
    ("penalties", "error", "match"),
    [
        (
            {"flatness_weight": [0, 1]},
            TypeError,
            "penalties must be a list of dicts.* got .*weight",
        ),
        ("all", TypeError, "penalties must be a list of dicts.* got .*all"),
        ([{"flatness_wight": 1}], ValueError, "flatness_wight"),
    ],
)
def test_settings_are_refused(penalties, error, match):
    with pytest.raises(error, match=match):
        RelativeFlatnessPenaltyCV(make_net(), penalties).fit(X, y)


def test_several_scores_are_refused_at_the_first_fold():
    nets = []
    scoring = lambda net, X, y: nets.append(net) or {"accuracy": 1.0}  # noqa: E731
    for refit in (True, False, "mean"):
        with pytest.raises(ValueError, match="must return a number, got {'accuracy': 1.0}"):
            fit(make_net(max_epochs=1), penalties=[NONE] * 30, scoring=scoring, refit=refit)()
    assert len(nets) <= 3 * 64  # those that were trained with the first one


@pytest.mark.filterwarnings("ignore:The least populated class")
def test_folds_without_a_class_have_no_mean(monkeypatch):
    rare, folds = np.where(np.arange(len(y)) == 3, 7, y), KFold(3)
    weights = np.where(y == 1, np.arange(len(y)) == 70, 1.0)
    search = RelativeFlatnessPenaltyCV(make_net(classes=[0, 1, 2, 7]), [NONE], 3, refit="mean")
    assert_array_equal(search.fit(X, rare).classes_, [0, 1, 2, 7])
    monkeypatch.setattr(type(search.estimator), "fit", lambda *args: pytest.fail("trained"))
    search.set_params(estimator__classes=None)
    for cv, labels, more, missing in (
        (3, rare, {}, 7),
        (iter([*folds.split(X)]), y, {}, 0),
        (3, y.tolist(), {"sample_weight": weights.tolist()}, 1),
    ):
        with pytest.raises(ValueError, match=rf"without \[{missing}\]"):
            search.set_params(cv=cv).fit(X, labels, **more)


@pytest.mark.parametrize("labels", [np.arange(len(y)) % 30, (X > 0).astype(int)])
def test_many_labels_and_several_are_no_values(monkeypatch, labels):
    """Listed classes, and tasks of several labels, are left to the net."""
    results = {"mean_test_score": [1.0], "params": [NONE]}
    monkeypatch.setattr(
        GridSearchCV, "fit", lambda self, *data: vars(self).update(cv_results_=results)
    )
    RelativeFlatnessPenaltyCV(make_net(classes=range(30)), [NONE], refit=False).fit(X, labels)


def test_weights_that_are_too_large_to_count_are_compared_in_silence():
    penalties = [NONE, {"flatness_layer": "all", "flatness_weight": 1e4}]
    net = make_net(RelativeFlatnessRegularizedRegressor, max_epochs=20)
    data = [scale(values).astype("float32") for values in load_diabetes(return_X_y=True)]
    with pytest.warns(FlatnessWarning, match="at its limit"):
        clone(net).set_params(**penalties[1]).fit(*data)
    RelativeFlatnessPenaltyCV(net, penalties, cv=3).fit(*data)


# -- the flattest within a tolerance of the best score --------------------------------------------


def results(scores, flatness, names):
    columns = zip(names, (scores, flatness), strict=True)
    return {f"mean_test_{name}": np.array(values) for name, values in columns}


def by_definition(scores, flatness, tolerance):
    """The flattest within the tolerance of the best score; whether there is none.

    Then it is the best score, of those with a flatness if there are any.
    """
    known = np.flatnonzero(np.isfinite(scores))
    best = max(scores[i] for i in known)
    measured = [i for i in known if np.isfinite(flatness[i])]
    good = [i for i in measured if scores[i] >= best - tolerance - 1e-9]
    if good:
        return max(good, key=lambda i: flatness[i]), False
    return max(measured or known, key=lambda i: scores[i]), True


# in floats, 0.98 - 0.96 > 0.02
numbers = st.sampled_from([np.nan, np.inf, -2.0, -1.0, -0.5, 0.0, 0.25, 0.96, 0.98, 1.0])


NAMES = [  # the names of both scorers, and those that the rule is told
    (("score", "flatness"), {}),
    (("accuracy", "flatness"), {"score": "accuracy"}),
    (("accuracy", "flatness"), {}),  # only one other score
    (("accuracy", "kappa"), {"score": "mean_test_accuracy", "flatness": "mean_test_kappa"}),
]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8),
    st.sampled_from([0, 0.02, 0.5, 2]),
    st.sampled_from(NAMES),
)
def test_agrees_with_the_definition(candidates, tolerance, names):
    scores, flatness = (list(values) for values in zip(*candidates, strict=True))
    rule, table = flattest_within(tolerance, **names[1]), results(scores, flatness, names[0])
    if not np.isfinite(scores).any():
        with pytest.raises(ValueError, match=f"'mean_test_{names[0][0]}'"):
            rule(table)
        return
    expected, falls_back = by_definition(scores, flatness, tolerance)
    match = f"within {tolerance} of the best .*Candidate {expected} "
    with pytest.warns(FlatnessWarning, match=match) if falls_back else nullcontext():
        assert rule(table) == expected


def grid_search(scoring, rule):
    model, space = LogisticRegression(max_iter=5000), {"C": [0.0001, 0.01, 1.0, 10.0]}
    return GridSearchCV(model, space, scoring=scoring, refit=rule)


def test_refits_a_search_on_what_it_chose():
    scoring = {"score": "accuracy", "flatness": FlatnessScorer()}
    fitted = grid_search(scoring, flattest_within(0.03)).fit(X, y)
    score, flatness = (fitted.cv_results_[f"mean_test_{name}"] for name in scoring)
    expected, _ = by_definition(score, flatness, 0.03)
    assert fitted.best_index_ == expected
    assert fitted.cv_results_["params"][expected]["C"] == fitted.best_estimator_.C
    # not the flattest of all, so that both columns were looked at
    assert expected != np.argmax(flatness)


SCORERS = {"flat": FlatnessScorer(), "acc": "accuracy"}


@pytest.mark.parametrize(
    ("scoring", "names", "missing"),
    [
        (SCORERS, {}, ["'mean_test_score'", "'mean_test_flatness'"]),
        (SCORERS, {"flatness": "flat", "score": "accuracy"}, ["'mean_test_accuracy'"]),
        ({"score": FlatnessScorer(), "acc": "accuracy"}, {}, ["'mean_test_flatness'"]),
        (SCORERS | {"flatness": FlatnessScorer()}, {}, ["'mean_test_score'"]),
        (FlatnessScorer(), {}, ["'mean_test_flatness'"]),
    ],
)
def test_columns_of_other_names_are_not_guessed(scoring, names, missing):
    """A guess could take the flatness for the score, and choose the worst candidate."""
    with pytest.raises(ValueError, match="and no column ".join(f"{name}.*" for name in missing)):
        grid_search(scoring, flattest_within(0.02, **names)).fit(X, y)


# -- scikit-learn's checks ------------------------------------------------------------------------

# the checks have data on which no network is a minimum
NET = RelativeFlatnessRegularizedClassifier(max_epochs=15, verbose=0)
OF_CLASSES = make_net(max_epochs=15, lr=0.03)
OF_REALS = make_net(RelativeFlatnessRegularizedRegressor, max_epochs=15, lr=0.03)
SEARCHES = {  # and whether its checks take minutes
    "classifier": (FlatMinimaSearch(LogisticRegression(max_iter=1000), {"C": [0.1, 1.0]}), False),
    "regressor": (FlatMinimaSearch(Ridge(), {"alpha": [1.0]}), False),
    "our classifier": (FlatMinimaSearch(NET, {"batch_size": [32]}, random_state=0), True),
    "penalty of a classifier": (RelativeFlatnessPenaltyCV(OF_CLASSES, [NONE], cv=2), False),
    "penalty of a regressor": (RelativeFlatnessPenaltyCV(OF_REALS, [NONE], cv=2), True),
}
CHECKS = [
    pytest.param(
        estimator,
        check,
        id=f"{name}-{check.func.__name__}",
        marks=[pytest.mark.scale] if is_long else [],
    )
    for name, (search, is_long) in SEARCHES.items()
    for estimator, check in estimator_checks_generator(search)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("search", "check"), CHECKS)
def test_check_of_scikit_learn(search, check):
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        check(search)
    except SkipTest as reason:
        pytest.skip(str(reason))

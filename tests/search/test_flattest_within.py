"""Tests for `_flattest_within`."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV

from relflat_sk import FlatnessScorer
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.search._flattest_within import flattest_within

nan = np.nan


def results(scores, flatness):
    return {"mean_test_score": np.array(scores), "mean_test_flatness": np.array(flatness)}


def by_definition(scores, flatness, tolerance):
    """The flattest within the tolerance of the best score, candidate by candidate."""
    best = max(s for s in scores if not np.isnan(s))
    chosen = None
    for i, (s, f) in enumerate(zip(scores, flatness, strict=True)):
        good = not np.isnan(s) and not np.isnan(f) and s >= best - tolerance
        if good and (chosen is None or f > flatness[chosen]):
            chosen = i
    return chosen


numbers = st.sampled_from([nan, -2.0, -1.0, -0.5, 0.0, 0.25, 1.0])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.sampled_from([0, 0.5, 2]))
def test_agrees_with_the_definition(candidates, tolerance):
    scores, flatness = (list(values) for values in zip(*candidates, strict=True))
    if not any(np.isfinite(s) for s in scores):
        return
    expected = by_definition(scores, flatness, tolerance)
    if expected is not None:
        assert flattest_within(tolerance)(results(scores, flatness)) == expected


def test_the_first_of_equally_flat_candidates_is_chosen():
    assert flattest_within(0.1)(results([0.8, 0.95, 0.9], [-1.0, -2.0, -2.0])) == 1


def test_a_candidate_exactly_at_the_tolerance_is_within():
    assert 0.98 - 0.96 > 0.02  # in floating point
    assert flattest_within(0.02)(results([0.98, 0.96, 0.9599], [-2.0, -1.0, -0.5])) == 1


def test_infinite_and_missing_values_never_win():
    table = results([nan, 0.9, 0.89, np.inf], [5.0, nan, -3.0, 9.0])
    assert flattest_within(0.05)(table) == 2


def test_falls_back_to_the_best_score_that_has_a_flatness():
    table = results([0.9, 0.5, 0.6], [nan, -1.0, -2.0])
    with pytest.warns(FlatnessWarning, match=r"within 0.05 of the best .*0.9, .*candidate 2"):
        assert flattest_within(0.05)(table) == 2


@pytest.fixture(scope="module")
def iris():
    return load_iris(return_X_y=True)


@pytest.mark.parametrize(
    ("scoring", "names"),
    [
        ({"score": "accuracy", "flatness": FlatnessScorer()}, {}),
        ({"accuracy": "accuracy", "flatness": FlatnessScorer()}, {"score": "mean_test_accuracy"}),
        ({"accuracy": "accuracy", "flatness": FlatnessScorer()}, {"score": "accuracy"}),
        ({"accuracy": "accuracy", "flatness": FlatnessScorer()}, {}),
        ({"score": "accuracy", "kappa": FlatnessScorer()}, {}),
        (
            {"accuracy": "accuracy", "kappa": FlatnessScorer()},
            {"score": "mean_test_accuracy", "flatness": "mean_test_kappa"},
        ),
    ],
    ids=[
        "usual names",
        "own score",
        "name of the scorer",
        "only one other score",
        "only one other flatness",
        "own names",
    ],
)
@pytest.mark.parametrize("kind", [GridSearchCV, RandomizedSearchCV])
def test_refits_a_search_on_what_it_chose(kind, scoring, names, iris):
    rule = flattest_within(0.03, **names)
    only = {"n_iter": 4, "random_state": 0} if kind is RandomizedSearchCV else {}
    search = kind(
        LogisticRegression(max_iter=5000),
        {"C": [0.001, 0.1, 1.0, 10.0]},
        scoring=scoring,
        refit=rule,
        **only,
    ).fit(*iris)
    table = search.cv_results_
    given = {"score": "mean_test_accuracy", "flatness": "mean_test_kappa"}
    usual = {"score": "mean_test_score", "flatness": "mean_test_flatness"}
    score, flatness = (
        table[usual[name] if usual[name] in table else given[name]] for name in usual
    )
    expected = by_definition(score, flatness, 0.03)
    assert search.best_index_ == expected
    assert table["params"][expected]["C"] == search.best_estimator_.C
    # not the flattest of all, so that both columns were looked at
    assert expected != np.argmax(flatness)


def test_is_cloned_copied_and_pickled():
    rule = flattest_within(0.01, score="mean_test_accuracy")
    search = clone(GridSearchCV(LogisticRegression(), {}, refit=rule))
    for other in (search.refit, copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert other == rule
    assert rule != flattest_within(0.02, score="mean_test_accuracy")
    assert "tolerance=0.01" in repr(rule)


def test_says_which_column_is_missing(iris):
    search = GridSearchCV(
        LogisticRegression(max_iter=5000),
        {"C": [1.0]},
        scoring={"accuracy": "accuracy", "f1": "f1_macro", "flatness": FlatnessScorer()},
        refit=flattest_within(0.01),
    )
    with pytest.raises(
        ValueError,
        match=r"no column 'mean_test_score'.*\['mean_test_accuracy', 'mean_test_f1', 'mean_test_fl",
    ):
        search.fit(*iris)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        ({}, "mean_test_score"),
        ({"score": "f1"}, "f1"),
        ({"score": "accuracy", "flatness": "flat"}, "flat"),
    ],
)
def test_other_columns_are_not_guessed(names, missing):
    table = {"mean_test_accuracy": [0.9], "mean_test_kappa": [-1.0]}
    with pytest.raises(ValueError, match=f"no column '{missing}'"):
        flattest_within(0.1, **names)(table)


def test_refuses_to_choose_where_nothing_is_known():
    with pytest.raises(ValueError, match=r"\(1 of 2 have\).*\(1 have\)"):
        flattest_within(0.1)(results([0.9, nan], [nan, -1.0]))

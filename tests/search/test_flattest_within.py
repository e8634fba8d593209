"""Tests for `flattest_within`."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from relflat_sk import FlatnessScorer, flattest_within
from relflat_sk.exceptions import FlatnessWarning
from tests.search.examples import X, Y

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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.sampled_from([0, 0.5, 2]))
def test_agrees_with_the_definition(candidates, tolerance):
    scores, flatness = (list(values) for values in zip(*candidates, strict=True))
    assume(np.isfinite(scores).any())
    expected = by_definition(scores, flatness, tolerance)
    assume(expected is not None)
    assert flattest_within(tolerance)(results(scores, flatness)) == expected


@pytest.mark.parametrize(
    ("scores", "flatness", "tolerance", "chosen"),
    [
        ([0.98, 0.96, 0.9599], [-2.0, -1.0, -0.5], 0.02, 1),  # in floats, 0.98 - 0.96 > 0.02
        ([nan, 0.9, 0.89, np.inf], [5.0, nan, -3.0, 9.0], 0.05, 2),  # infinite, missing: never
    ],
)
def test_chooses(scores, flatness, tolerance, chosen):
    assert flattest_within(tolerance)(results(scores, flatness)) == chosen


def test_falls_back_to_the_best_score_that_has_a_flatness():
    table = results([0.9, 0.5, 0.6], [nan, -1.0, -2.0])
    with pytest.warns(FlatnessWarning, match=r"within 0.05 of the best .*0.9, .*Candidate 2"):
        assert flattest_within(0.05)(table) == 2


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (("accuracy", "flatness"), {"score": "accuracy"}),
        (("accuracy", "flatness"), {}),  # only one other score
        (("accuracy", "kappa"), {"score": "mean_test_accuracy", "flatness": "mean_test_kappa"}),
    ],
)
def test_columns_are_found_by_name(names, given):
    values = ([0.9, 0.89, 0.5], [-2.0, -1.0, -0.5])
    table = {f"mean_test_{name}": one for name, one in zip(names, values, strict=True)}
    assert flattest_within(0.03, **given)(table) == 1


def test_refits_a_search_on_what_it_chose():
    search = GridSearchCV(
        LogisticRegression(max_iter=5000),
        {"C": [0.001, 0.1, 1.0, 10.0]},
        scoring={"score": "accuracy", "flatness": FlatnessScorer()},
        refit=flattest_within(0.03),
    ).fit(X, Y)
    table = search.cv_results_
    score, flatness = table["mean_test_score"], table["mean_test_flatness"]
    expected = by_definition(score, flatness, 0.03)
    assert search.best_index_ == expected
    assert table["params"][expected]["C"] == search.best_estimator_.C
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
    rule = flattest_within(0.02, **names)
    model = LogisticRegression(max_iter=500)
    search = GridSearchCV(model, {"C": [1e-3, 1.0]}, scoring=scoring, refit=rule, cv=2)
    with pytest.raises(ValueError, match="and no column ".join(f"{name}.*" for name in missing)):
        search.fit(X, Y)


def test_without_any_flatness_the_score_decides_and_without_any_score_nothing():
    with pytest.warns(FlatnessWarning, match="and 0 of all 3 have both. Candidate 1"):
        assert flattest_within(0.1)(results([0.8, 0.9, nan], [nan, nan, -1.0])) == 1
    with pytest.raises(ValueError, match="'mean_test_score'"):
        flattest_within(0.1)(results([nan, nan], [-1.0, -2.0]))

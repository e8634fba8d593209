"""Tests for `flattest_within`."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV

from relflat_sk import FlatnessScorer, FlatnessWarning, flattest_within
from tests.search.examples import X, Y

nan = np.nan


def results(scores, flatness, names=("score", "flatness")):
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
numbers = st.sampled_from([nan, np.inf, -2.0, -1.0, -0.5, 0.0, 0.25, 0.96, 0.98, 1.0])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8),
    st.sampled_from([0, 0.02, 0.5, 2]),
)
def test_agrees_with_the_definition(candidates, tolerance):
    scores, flatness = (list(values) for values in zip(*candidates, strict=True))
    rule, table = flattest_within(tolerance), results(scores, flatness)
    if not np.isfinite(scores).any():
        with pytest.raises(ValueError, match="'mean_test_score'"):
            rule(table)
        return
    expected, falls_back = by_definition(scores, flatness, tolerance)
    match = f"within {tolerance} of the best .*Candidate {expected} "
    with pytest.warns(FlatnessWarning, match=match) if falls_back else nullcontext():
        assert rule(table) == expected


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (("accuracy", "flatness"), {"score": "accuracy"}),
        (("accuracy", "flatness"), {}),  # only one other score
        (("accuracy", "kappa"), {"score": "mean_test_accuracy", "flatness": "mean_test_kappa"}),
    ],
)
def test_columns_are_found_by_name(names, given):
    table = results([0.9, 0.89, 0.5], [-2.0, -1.0, -0.5], names)
    assert flattest_within(0.03, **given)(table) == 1


def search(scoring, rule):
    model, space = LogisticRegression(max_iter=5000), {"C": [0.001, 0.1, 1.0, 10.0]}
    return GridSearchCV(model, space, scoring=scoring, refit=rule)


def test_refits_a_search_on_what_it_chose():
    scoring = {"score": "accuracy", "flatness": FlatnessScorer()}
    fitted = search(scoring, flattest_within(0.03)).fit(X, Y)
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
        search(scoring, flattest_within(0.02, **names)).fit(X, Y)

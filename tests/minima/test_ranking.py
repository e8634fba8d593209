"""Tests for the order of the minima."""

import matplotlib.pyplot as plt
import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessGapDisplay,
    HyperparameterDisplay,
    MinimaObjective,
    MinimaRankingDisplay,
    rank_minima,
)
from relflat_sk.minima._table import FIXED, minima_table

# (flatness, converged, state), with every reason for a place at the end
CASES = [
    (2.0, True, "complete"),
    (0.0, False, "complete"),  # a network that learned nothing is perfectly flat
    (np.nan, True, "complete"),
    (1.0, True, "complete"),
    (0.5, False, "complete"),
    (np.inf, True, "complete"),
    (0.1, True, "failed"),
    (2.0, True, "complete"),
]


def make_minima(cases=CASES):
    flatness, converged, state = zip(*cases, strict=True)
    return pd.DataFrame({
        "trial": range(len(cases)),
        "param_net__batch_size": 8,
        "param_optimizer": "SGD",
        "relative_flatness": flatness,
        "l2_norm": np.arange(len(cases)) / 2,
        "test_score": np.linspace(0.5, 0.9, len(cases)),
        "converged": converged,
        "state": state,
    })


def test_ranking_leaves_its_input_as_it_is_and_may_be_repeated():
    minima = make_minima()
    before = minima.copy(deep=True)
    ranked = rank_minima(minima)
    again = rank_minima(ranked, by="l2_norm")
    ranked.loc[0, "relative_flatness"] = -1.0
    assert_frame_equal(minima, before)
    assert again.columns.tolist().count("rank") == 1
    assert again["trial"].tolist() == [0, 2, 3, 5, 7, 1, 4, 6]


def test_scores_are_ranked_largest_first_and_without_status_every_row_is_a_minimum():
    minima = make_minima([(3.0, True, "complete"), (1.0, True, "complete")])
    assert rank_minima(minima, by="test_score")["trial"].tolist() == [1, 0]
    flatness = rank_minima(minima[["relative_flatness"]])["relative_flatness"]
    assert flatness.tolist() == [1.0, 3.0]


@settings(max_examples=50, deadline=None)
@example(CASES)
@given(
    st.lists(
        st.tuples(
            st.floats(allow_nan=True, allow_infinity=True),
            st.booleans(),
            st.sampled_from(["complete", "failed", "pruned"]),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_minima_come_first_then_unconverged_then_the_rest(cases):
    def key(trial):
        value, converged, state = cases[trial]
        if state != "complete" or not np.isfinite(value):
            return (2, 0.0, trial)
        return (0 if converged else 1, value, trial)

    ranked = rank_minima(make_minima(cases))
    assert ranked["trial"].tolist() == sorted(range(len(cases)), key=key)
    assert ranked["rank"].tolist() == list(range(1, len(cases) + 1))
    assert ranked.index.tolist() == list(range(len(cases)))


def test_an_empty_table_is_ranked_as_one():
    ranked = rank_minima(minima_table(optuna.create_study()), by="train_loss")
    assert ranked.columns.tolist() == list(FIXED)
    assert len(ranked) == 0


@pytest.mark.parametrize(
    ("measures", "first"),
    [
        (["hessian_trace"], "hessian_trace"),
        (["comparable_flatness", "relative_flatness"], "comparable_flatness"),
        (["train_loss", "l2_norm"], "l2_norm"),
    ],
)
def test_a_study_and_a_search_are_ranked_by_their_first_measure(measures, first):
    X, y = load_iris(return_X_y=True)
    space, model = {"C": [0.5, 1.0, 2.0]}, LogisticRegression(max_iter=1000)
    study = optuna.create_study(
        directions=["minimize"] * len(measures), sampler=optuna.samplers.GridSampler(space)
    )
    study.optimize(MinimaObjective(model, X, y, space, measures=measures, random_state=0), 3)
    search = FlatMinimaSearch(model, space, measure=measures, random_state=0).fit(X, y)
    for source in (study, search):
        assert_frame_equal(rank_minima(source), rank_minima(source, first))
        assert MinimaRankingDisplay.from_minima(source).by == first
        for display in (FlatnessGapDisplay, HyperparameterDisplay):
            target = {"target": "train_loss"} if display is FlatnessGapDisplay else {}
            assert display.from_minima(source, **target).measure == first
    plt.close("all")


def test_a_table_is_ranked_by_relative_flatness_or_its_only_measure():
    minima = make_minima()
    ranked = rank_minima(minima, "relative_flatness")
    assert_frame_equal(rank_minima(minima), ranked)
    assert_frame_equal(rank_minima(minima[[*minima][::-1]]), ranked[[*[*ranked][-2::-1], "rank"]])
    other = minima.rename(columns={"relative_flatness": "trace"}).drop(columns="l2_norm")
    assert_frame_equal(rank_minima(other), rank_minima(other, "trace"))


def study_of(objective=None):
    study = optuna.create_study()
    if objective is not None:
        study.optimize(objective, 2, catch=ZeroDivisionError)
    return study


UNFITTED = FlatMinimaSearch(LogisticRegression(), {"C": [1.0]})


@pytest.mark.parametrize(
    ("minima", "arguments", "error", "message"),
    [
        (make_minima(), {"by": "sharpness"}, ValueError,
         r"by='sharpness' is not a column.*\['relative_flatness', 'l2_norm'\]"),
        (make_minima(), {"by": "param_optimizer"}, ValueError, "is not numeric.*test_score"),
        (make_minima(), {"by": "converged"}, ValueError, "by='converged' is not numeric"),
        (make_minima(), {"by": ["l2_norm"]}, TypeError, "list"),
        (make_minima().drop(columns="relative_flatness").assign(trace=1.0), {}, ValueError,
         r"by='relative_flatness' is not a column.*\['l2_norm', 'trace'\]"),
        ([1.0, 2.0], {}, TypeError, r"must be a pandas.DataFrame.*got list"),
        (UNFITTED, {}, NotFittedError, "This FlatMinimaSearch instance is not fitted yet"),
        (study_of(), {}, ValueError, "no minima to rank: of 0 candidates, none"),
        (study_of(lambda trial: 1 / 0), {}, ValueError,
         r"of 2 candidates, none was trained and measured.*\n  2 x failed without"),
        (study_of(lambda trial: trial.suggest_float("x", 0, 1)), {}, ValueError,
         "none of these 2 trials recorded a minimum: .* another objective"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_refused(minima, arguments, error, message):
    with pytest.raises(error, match=message):
        rank_minima(minima, **arguments)


def test_candidates_that_are_not_compared_stand_in_the_order_of_their_depths():
    minima = pd.DataFrame({
        "relative_flatness": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, np.nan],
        "converged": [True, True, True, True, False, False, False],
        "depth": [20.0, 25.0, 100.0, 500.0, np.nan, 2.0, 1.5],
    })
    assert rank_minima(minima)["relative_flatness"].tolist()[:6] == [1, 2, 4, 3, 6, 5]
    every = rank_minima(minima, depth_band=None)["relative_flatness"].tolist()
    assert every[:6] == [1, 2, 3, 4, 6, 5]


def test_saturated_networks_do_not_win():
    """Their loss is zero, and so is their flatness, whatever the minimum."""
    minima = pd.DataFrame({
        "relative_flatness": [0.0, 0.0, 3.0],
        "converged": True,
        "depth": [1e6, 1e6, 25.0],
        "reason": "",
    })
    ranked = rank_minima(minima)
    assert ranked["relative_flatness"][0] == 3.0
    assert ranked["comparable"].tolist() == [True, False, False]
    assert rank_minima(minima[:2])["comparable"].all()  # there is nothing else to compare

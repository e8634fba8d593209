"""Tests for `_table`."""

import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial
from pandas.testing import assert_frame_equal

from relflat_sk.minima._table import (
    FIXED,
    is_complete,
    is_converged,
    measure_columns,
    minima_table,
    numeric_column,
    rank_minima,
)

# one row for each way of being last: (flatness, converged, state)
CASES = [
    (2.0, True, "complete"),
    (0.0, False, "complete"),  # a dead network is perfectly flat
    (np.nan, True, "complete"),
    (1.0, True, "complete"),
    (0.5, False, "complete"),
    (np.inf, True, "complete"),
    (0.1, True, "failed"),
    (2.0, True, "complete"),
]
IN_ORDER = [3, 0, 7, 1, 4, 2, 5, 6]


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


def make_study(directions=("minimize",)):
    """A study of one trial per state, as a search leaves it behind."""
    study = optuna.create_study(directions=directions)
    values = [1.5] * len(directions)
    distributions = {
        "net__lr": optuna.distributions.FloatDistribution(0.0, 1.0),
        "opt": optuna.distributions.CategoricalDistribution(["SGD", "Adam"]),
    }
    params = {"net__lr": 0.1, "opt": "SGD"}
    fine = {
        "relative_flatness": 1.5,
        "param_net__batch_size": "(8, 8)",
        "train_loss": 0.1,
        "test_loss": 0.3,
        "generalization_gap": 0.2,
        "converged": True,
        "seconds": 2,
        "reason": "",
        "seeds": {"net__random_state": 7},
        "artifact": "a1b2",
    }
    shared = {"params": params, "distributions": distributions}
    study.add_trial(create_trial(values=values, user_attrs=fine, **shared))
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"reason": "boom"}, **shared))
    study.add_trial(create_trial(state=TrialState.PRUNED, **shared))
    study.add_trial(create_trial(state=TrialState.FAIL, **shared))
    study.add_trial(create_trial(state=TrialState.RUNNING, **shared))
    study.add_trial(create_trial(state=TrialState.WAITING))
    return study


def test_minima_come_first_then_unconverged_then_the_rest():
    ranked = rank_minima(make_minima())
    assert ranked["trial"].tolist() == IN_ORDER
    assert ranked["rank"].tolist() == list(range(1, len(CASES) + 1))
    assert ranked.index.tolist() == list(range(len(CASES)))


def test_ranking_leaves_its_input_as_it_is():
    minima = make_minima()
    before = minima.copy(deep=True)
    ranked = rank_minima(minima)
    ranked.loc[0, "relative_flatness"] = -1.0
    assert_frame_equal(minima, before)


def test_ranking_again_by_another_column_replaces_the_rank():
    again = rank_minima(rank_minima(make_minima()), by="l2_norm")
    assert again.columns.tolist().count("rank") == 1
    assert again["trial"].tolist() == [0, 2, 3, 5, 7, 1, 4, 6]


def test_scores_are_ranked_largest_first():
    minima = make_minima([(1.0, True, "complete")] * 3)
    assert rank_minima(minima, by="test_score")["trial"].tolist() == [2, 1, 0]


def test_without_status_columns_every_row_is_a_minimum():
    minima = pd.DataFrame({"relative_flatness": [3.0, 1.0, 2.0]})
    assert rank_minima(minima)["relative_flatness"].tolist() == [1.0, 2.0, 3.0]


@settings(max_examples=50, deadline=None)
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
def test_ranking_agrees_with_sorting_by_definition(cases):
    def key(trial):
        value, converged, state = cases[trial]
        if state != "complete" or not np.isfinite(value):
            return (2, 0.0, trial)
        return (0 if converged else 1, value, trial)

    ranked = rank_minima(make_minima(cases))
    assert ranked["trial"].tolist() == sorted(range(len(cases)), key=key)


@pytest.mark.parametrize("directions", [("minimize",), ("minimize", "maximize")])
def test_study_becomes_a_table_of_its_finished_trials(directions):
    table = minima_table(make_study(directions))
    assert table["trial"].tolist() == [0, 1, 2, 3]
    assert table["state"].tolist() == ["complete", "failed", "pruned", "failed"]
    assert table["reason"].tolist() == [
        "",
        "boom",
        "stopped by the pruner",
        "failed without a recorded reason",
    ]
    assert table["converged"].tolist() == [True, False, False, False]
    assert table.columns.tolist() == [
        "trial",
        "param_net__lr",
        "param_opt",
        "param_net__batch_size",
        "relative_flatness",
        *FIXED[1:-1],
    ]
    first = table.iloc[0]
    assert first["param_net__batch_size"] == "(8, 8)"
    assert first["seconds"] == 2.0
    assert first["generalization_gap"] == 0.2
    assert table["train_score"].isna().all()


def test_study_without_trials_becomes_an_empty_table():
    table = minima_table(optuna.create_study())
    assert len(table) == 0
    assert table.columns.tolist() == list(FIXED[:-1])
    assert rank_minima(table, by="train_loss").columns.tolist() == list(FIXED)


def test_fitted_search_is_its_minima():
    class Search:
        minima_ = make_minima()

    assert minima_table(Search()) is Search.minima_
    assert rank_minima(Search())["trial"].tolist() == IN_ORDER


def test_measures_are_the_numeric_columns_without_another_meaning():
    assert measure_columns(make_minima()) == ["relative_flatness", "l2_norm"]


def test_missing_values_are_nan_and_missing_answers_are_no():
    table = pd.DataFrame({
        "rho": pd.array([1, None], dtype="Int64"),
        "converged": pd.array([True, None], dtype="boolean"),
    })
    np.testing.assert_array_equal(numeric_column(table, "rho", argument="by"), [1.0, np.nan])
    assert is_converged(table).tolist() == [True, False]
    assert is_complete(table).tolist() == [True, True]


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("sharpness", r"by='sharpness' is not a column.*\['relative_flatness', 'l2_norm'\]"),
        ("param_optimizer", r"by='param_optimizer' is not numeric.*test_score"),
        ("converged", r"by='converged' is not numeric"),
    ],
)
def test_says_which_measures_there_are(by, message):
    with pytest.raises(ValueError, match=message):
        rank_minima(make_minima(), by=by)


def test_says_what_can_be_ranked():
    with pytest.raises(TypeError, match=r"must be a pandas.DataFrame.*got list"):
        rank_minima([1.0, 2.0])

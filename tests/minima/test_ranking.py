"""The table of minima and its order: rows of trials, columns that are measures, depths."""

import math

import matplotlib.pyplot as plt
import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial
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
    correlate_measures,
    granulated_kendall,
    rank_minima,
)
from relflat_sk.minima._ranking import depth_of
from relflat_sk.minima._table import FIXED, remeasured_key, shorten_parameters

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


# -- the order ------------------------------------------------------------------------------------


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
    assert rank_minima(minima[:0]).empty


STATES = st.sampled_from(["complete", "failed", "pruned"])
FLOATS = st.floats(allow_nan=True, allow_infinity=True)


@settings(max_examples=50, deadline=None)
@example(CASES)
@given(st.lists(st.tuples(FLOATS, st.booleans(), STATES), min_size=1, max_size=12))
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


def study_of(objective):
    study = optuna.create_study()
    study.optimize(objective, 2, catch=ZeroDivisionError)
    return study


MINIMA, UNFITTED = make_minima(), FlatMinimaSearch(LogisticRegression(), {"C": [1.0]})
NO_FLATNESS = MINIMA.drop(columns="relative_flatness").assign(trace=1.0)
FAILED = study_of(lambda trial: 1 / 0)
FOREIGN = study_of(lambda trial: trial.suggest_float("x", 0, 1))


@pytest.mark.parametrize(
    ("minima", "by", "error", "match"),
    [
        (MINIMA, "sharp", ValueError, r"'sharp' is not a column.*\['relative_flatness', 'l2_norm'"),
        (MINIMA, "param_optimizer", ValueError, "is not numeric.*test_score"),
        (MINIMA, "converged", ValueError, "by='converged' is not numeric"),
        (MINIMA, ["l2_norm"], TypeError, "list"),
        (MINIMA, lambda model, X, y: 0.0, ValueError, "has no name for its column"),
        (NO_FLATNESS, None, ValueError, r"'relative_flatness' is not .*\['l2_norm', 'trace'\]"),
        ([1.0, 2.0], None, TypeError, r"must be a pandas.DataFrame.*got list"),
        (UNFITTED, None, NotFittedError, "This FlatMinimaSearch instance is not fitted yet"),
        (optuna.create_study(), None, ValueError, "no minima to rank: of 0 candidates, none"),
        (FAILED, None, ValueError, r"of 2 candidates, none was .*\n  2 x failed without"),
        (FOREIGN, None, ValueError, "none of these 2 trials recorded a minimum: .* another obj"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused(minima, by, error, match):
    with pytest.raises(error, match=match):
        rank_minima(minima, by)


# -- depths ---------------------------------------------------------------------------------------


def test_depths_are_ratios_of_losses():
    assert depth_of(0.1, (0.0, 2.0)) == pytest.approx(20)
    assert depth_of(0.0, (0.0, 2.0)) == depth_of(1e-30, (0.0, 1.0)) == pytest.approx(1e6)
    assert depth_of(0.6, (0.5, 2.5)) == pytest.approx(20)  # of smoothed labels
    for loss, best in [(-1.0, 2.0), (1.0, -2.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, 1), (1, 0)]:
        assert np.isnan(depth_of(loss, (0.0, best)))


def of_depths(depths, **columns):
    """Minima, of which later ones are flatter."""
    n = len(depths)
    table = {"trial": range(n), "relative_flatness": np.arange(n, 0.0, -1), "depth": depths}
    return pd.DataFrame({**table, "converged": True, "reason": "", **columns})


@pytest.mark.parametrize(
    ("depths", "ended_by", "compared"),
    [
        ([2.0, 20, 21, 30, 500], "", [20, 21, 30]),
        ([2.0, 20, 500], "", [500]),
        # those that reached their goal decide
        ([2.0, 2, 2, 20, 25], ["plateau"] * 3 + ["goal"] * 2, [20, 25]),
        ([math.nan, math.nan], "", [math.nan, math.nan]),
        # saturated networks, whose flatness is zero as is their loss, do not win
        ([25.0, 1e6, 1e6], "", [25.0]),
        ([1e6, 1e6], "", [1e6, 1e6]),  # there is nothing else to compare
    ],
)
def test_most_minima_decide_and_of_equally_many_the_deepest(depths, ended_by, compared):
    ranked = rank_minima(of_depths(depths, ended_by=ended_by))
    np.testing.assert_allclose(np.sort(ranked["depth"][ranked["comparable"]]), compared)


def test_minima_of_other_depths_rank_behind_in_the_order_of_their_depths():
    converged = [True] * 5 + [False] * 2
    table = of_depths([500.0, 25, 2, math.nan, 20, 30, 40], converged=converged)
    ranked = rank_minima(table)
    assert ranked["depth"].fillna(-1).tolist() == [20, -1, 25, 500, 2, 40, 30]
    assert ranked["comparable"].tolist() == [True] * 3 + [False] * 4
    reason = "its depth of 500 cannot be compared: 2 of 5 minima have 20 to 25"
    assert ranked["reason"][:4].tolist() == ["", "", "", reason]
    # ranked again, nothing changes
    assert_frame_equal(rank_minima(ranked), ranked)
    every = rank_minima(ranked, depth_band=None)
    assert every["comparable"].tolist() == [True] * 5 + [False] * 2
    assert every["relative_flatness"][:5].is_monotonic_increasing
    assert rank_minima(table, depth_band=100)["comparable"].sum() == 4


# -- columns --------------------------------------------------------------------------------------


def test_measures_are_the_numeric_columns_without_another_meaning():
    table = pd.DataFrame({
        "trial": range(4),
        "param_net__batch_size": 8,
        "relative_flatness": pd.array([2, None, 1, 3], dtype="Int64"),
        "l2_norm": [0.0, 0.5, 1.0, 1.5],
        "test_score": 0.9,
        "generalization_gap": [0.1, 0.2, 0.3, 0.4],
        "converged": pd.array([True, True, True, None], dtype="boolean"),
        "state": "complete",
    })
    assert rank_minima(table)["trial"].tolist() == [2, 0, 3, 1]
    found = correlate_measures(table, n_bootstrap=1).set_index("measure")
    assert found["n"].to_dict() == {"relative_flatness": 2, "l2_norm": 3}


def axes_of(table, axes=None):
    values = np.arange(len(table))
    table = table.assign(relative_flatness=values, generalization_gap=values)
    row = granulated_kendall(table, axes, n_bootstrap=1, random_state=0)
    names = row.filter(regex="^psi_").columns.str.removeprefix("psi_")
    return [name for name in names if not name.endswith(("low", "high"))]


VARIED = pd.DataFrame({"param_lr": [0.1, 0.1, 0.2, 0.2], "param_net__batch_size": [8, 16] * 2})


@pytest.mark.parametrize("name", ["batch_size", "net__batch_size", "param_net__batch_size"])
def test_axes_are_found_by_name(name):
    assert axes_of(VARIED, name) == ["net__batch_size"]
    both = VARIED.assign(param_other__batch_size=[1, 2, 3, 4])
    with pytest.raises(ValueError, match=r"axes: 'batch_size' is no parameter.*other__batch_size"):
        axes_of(both, "batch_size")
    assert axes_of(VARIED.assign(width=[1, 2, 1, 2]), "width") == ["width"]  # added by hand


def test_parameters_varied_together_are_one_axis_but_random_draws_are_not_merged():
    varied = pd.DataFrame({"param_a": [1, 2, 2], "param_b": ["x", "y", "y"], "param_c": 3})
    assert axes_of(varied) == ["a"]
    drawn = pd.DataFrame({"param_a": [0.1, 0.2, 0.3], "param_b": [5.0, 6.0, 7.0]})
    with pytest.raises(ValueError, match=r"one of \['param_a', 'param_b'\]"):
        axes_of(drawn)


@pytest.mark.parametrize("seed", ["random_state", "net__random_state", "seed"])
def test_seeds_are_no_axes_unless_they_are_named(seed):
    table = pd.DataFrame({"param_lr": [0.1, 0.1, 0.2], f"param_{seed}": [0, 1, 0]})
    assert axes_of(table) == ["lr"]
    assert axes_of(table, seed) == [seed]
    with pytest.raises(ValueError, match="was varied over these minima, but for random seeds"):
        axes_of(table.assign(param_lr=0.1))


def test_parameters_of_the_last_step_of_a_pipeline_lose_its_name_unless_two_become_one():
    names = ["net__lr", "scaled_net__lr", "pca__n", "net__pca__n", "net__depth"]
    table = pd.DataFrame([[0] * 5], columns=[f"param_{name}" for name in names])
    table["param_depth"] = 1
    short = shorten_parameters(table, "net__").columns.str.removeprefix("param_").tolist()
    assert short == ["lr", "scaled_lr", "pca__n", "net__pca__n", "net__depth", "depth"]


# -- which trials become rows, and what stands in them --------------------------------------------


@pytest.mark.parametrize("directions", [("minimize",), ("minimize", "maximize")])
def test_study_becomes_a_table_of_its_finished_trials(directions):
    study = optuna.create_study(directions=directions)
    drawn = {"params": {"net__lr": 0.1}, "distributions": {"net__lr": FloatDistribution(0, 1)}}
    fine = {"relative_flatness": 1.5, "param_net__batch_size": "(8, 8)", "seconds": 2,
            "generalization_gap": 0.2, "converged": True, "artifact": "a1b2"}  # fmt: skip
    study.add_trial(create_trial(values=[1.5] * len(directions), user_attrs=fine, **drawn))
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"reason": "boom"}, **drawn))
    for state in (TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING):
        study.add_trial(create_trial(state=state, **drawn))
    study.add_trial(create_trial(state=TrialState.WAITING))
    study.set_user_attr(remeasured_key(study.trials[0]), {"l2_norm": 4.0})
    table = rank_minima(study)
    assert table[["trial", "state", "reason", "converged"]].to_numpy().tolist() == [
        [0, "complete", "", True],
        [1, "failed", "boom", False],
        [2, "pruned", "stopped by the pruner", False],
        [3, "failed", "failed without a recorded reason", False],
    ]
    params = ["param_net__lr", "param_net__batch_size"]
    columns = ["trial", *params, "relative_flatness", *FIXED[1:]]
    columns.insert(columns.index("converged"), "l2_norm")
    assert table.columns.tolist() == columns
    recorded = [*params, "relative_flatness", "l2_norm", "seconds", "generalization_gap"]
    assert table.loc[0, recorded].tolist() == [0.1, "(8, 8)", 1.5, 4.0, 2.0, 0.2]
    assert table["train_score"].isna().all()

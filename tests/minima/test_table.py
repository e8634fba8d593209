"""The table of minima: rows of trials, columns that are measures, axes that are found by name."""

import numpy as np
import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState, create_trial

from relflat_sk.minima import correlate_measures
from relflat_sk.minima._ranking import depth_of
from relflat_sk.minima._table import (
    FIXED,
    column_of,
    curves_of,
    find_axes,
    find_axis,
    is_comparable,
    is_reserved,
    measure_columns,
    minima_table,
    numeric_column,
    remeasured_key,
    shorten_parameters,
)


def test_measures_are_the_numeric_columns_without_another_meaning():
    table = pd.DataFrame({
        "trial": [0, 1],
        "param_net__batch_size": 8,
        "relative_flatness": pd.array([1, None], dtype="Int64"),
        "l2_norm": [0.0, 0.5],
        "test_score": [0.5, 0.9],
        "converged": pd.array([True, None], dtype="boolean"),
        "state": "complete",
    })
    assert measure_columns(table) == ["relative_flatness", "l2_norm"]
    flatness = numeric_column(table, "relative_flatness", argument="by")
    np.testing.assert_array_equal(flatness, [1.0, np.nan])
    assert is_comparable(table).tolist() == [True, False]


def own_measure(model, X, y):
    """A function of the user's that is a measure."""


def test_a_column_is_named_or_is_that_of_a_function():
    assert [column_of(one) for one in ("l2_norm", own_measure)] == ["l2_norm", "own_measure"]
    with pytest.raises(ValueError, match="has no name for its column: define it by def"):
        column_of(lambda model, X, y: 0.0)
    with pytest.raises(ValueError, match="target=3 is not a column"):
        correlate_measures(pd.DataFrame(), 3)
    names = ("rank", "in_fleet", "param_lr", "own_measure")
    assert [is_reserved(name) for name in names] == [True, True, True, False]


def test_depths_are_ratios_of_losses():
    assert depth_of(0.1, (0.0, 2.0)) == pytest.approx(20)
    assert depth_of(0.0, (0.0, 2.0)) == depth_of(1e-30, (0.0, 1.0)) == pytest.approx(1e6)
    assert depth_of(0.6, (0.5, 2.5)) == pytest.approx(20)  # of smoothed labels
    for loss, best in [(-1.0, 2.0), (1.0, -2.0), (np.nan, 1.0), (1.0, np.nan), (np.inf, 1), (1, 0)]:
        assert np.isnan(depth_of(loss, (0.0, best)))


# the hyper-parameters

TABLE = pd.DataFrame({"param_lr": [0.1, 0.2], "param_net__batch_size": [8, 16], "depth": 2})


def test_columns_are_found_by_name():
    for name in ("batch_size", "net__batch_size", "param_net__batch_size"):
        assert find_axis(TABLE, name, argument="by") == "param_net__batch_size"
    assert find_axis(TABLE, "depth", argument="by") == "depth"
    both = TABLE.assign(param_other__batch_size=[1, 2])
    with pytest.raises(ValueError, match=r"by: 'batch_size' is no parameter.*other__batch_size"):
        find_axis(both, "batch_size", argument="by")


def test_parameters_varied_together_are_one_axis_but_random_draws_are_not_merged():
    varied = pd.DataFrame({"param_a": [1, 2, 2], "param_b": ["x", "y", "y"], "param_c": 3})
    assert find_axes(varied, None) == ["param_a"]
    drawn = pd.DataFrame({"param_a": [0.1, 0.2, 0.3], "param_b": [5.0, 6.0, 7.0]})
    assert find_axes(drawn, None) == ["param_a", "param_b"]


@pytest.mark.parametrize("seed", ["random_state", "net__random_state", "seed"])
def test_seeds_are_no_axes_unless_they_are_named(seed):
    table = pd.DataFrame({"param_lr": [0.1, 0.1, 0.2], f"param_{seed}": [0, 1, 0]})
    assert find_axes(table, None) == ["param_lr"]
    assert find_axes(table, seed) == [f"param_{seed}"]
    with pytest.raises(ValueError, match="was varied over these minima, but for random seeds"):
        find_axes(table.assign(param_lr=0.1), None)


def test_parameters_of_the_last_step_of_a_pipeline_lose_its_name_unless_two_become_one():
    names = ["net__lr", "scaled_net__lr", "pca__n", "net__pca__n", "net__depth"]
    table = pd.DataFrame([[0] * 5], columns=[f"param_{name}" for name in names])
    table["param_depth"] = 1
    short = shorten_parameters(table, "net__").columns.str.removeprefix("param_").tolist()
    assert short == ["lr", "scaled_lr", "pca__n", "net__pca__n", "net__depth", "depth"]


# -- which trials become rows, and what stands in them -------------------------------------------


def make_study(directions=("minimize",)):
    """A study as a search stores it, with a trial in every state."""
    study = optuna.create_study(directions=directions)
    shared = {
        "params": {"net__lr": 0.1},
        "distributions": {"net__lr": optuna.distributions.FloatDistribution(0.0, 1.0)},
    }
    fine = {"relative_flatness": 1.5, "param_net__batch_size": "(8, 8)", "seconds": 2,
            "generalization_gap": 0.2, "converged": True, "artifact": "a1b2"}  # fmt: skip
    study.add_trial(create_trial(values=[1.5] * len(directions), user_attrs=fine, **shared))
    study.add_trial(create_trial(state=TrialState.FAIL, user_attrs={"reason": "boom"}, **shared))
    for state in (TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING):
        study.add_trial(create_trial(state=state, **shared))
    study.add_trial(create_trial(state=TrialState.WAITING))
    return study


@pytest.mark.parametrize("directions", [("minimize",), ("minimize", "maximize")])
def test_study_becomes_a_table_of_its_finished_trials(directions):
    study = make_study(directions)
    study.set_user_attr(remeasured_key(study.trials[0]), {"l2_norm": 4.0})
    table = minima_table(study)
    columns = ["state", "reason", "converged"]
    assert table[["trial", *columns]].to_numpy().tolist() == [
        [0, "complete", "", True],
        [1, "failed", "boom", False],
        [2, "pruned", "stopped by the pruner", False],
        [3, "failed", "failed without a recorded reason", False],
    ]
    params = ["param_net__lr", "param_net__batch_size"]
    losses = [name for name in FIXED[1:] if name not in {"comparable", "rank"}]
    losses.insert(losses.index("converged"), "l2_norm")
    assert table.columns.tolist() == ["trial", *params, "relative_flatness", *losses]
    first = table.iloc[0]
    recorded = [*params, "relative_flatness", "l2_norm", "seconds", "generalization_gap"]
    assert first[recorded].tolist() == [0.1, "(8, 8)", 1.5, 4.0, 2.0, 0.2]
    assert table["train_score"].isna().all()


def test_curves_are_in_studies_and_fitted_searches():
    study = make_study()
    study.add_trial(create_trial(values=[1.0], user_attrs={"curves": {"epoch": [1.0]}}))
    search = type("Search", (), {"study_": study})
    assert curves_of(study) == curves_of(search) == {6: {"epoch": [1.0]}}
    with pytest.raises(TypeError, match="curves are in an optuna.Study .* got int"):
        curves_of(3)

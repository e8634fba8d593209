"""Tests for `hyperparameters`: how hyper-parameters are found by name."""

import pandas as pd
import pytest

from relflat_sk.minima._columns import find_axes, find_axis

TABLE = pd.DataFrame({
    "param_lr": [0.1, 0.2],
    "param_net__batch_size": [8, 16],
    "param_data__noise": 0.5,
    "depth": 2,
})


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("lr", "param_lr"),
        ("param_lr", "param_lr"),
        ("batch_size", "param_net__batch_size"),
        ("net__batch_size", "param_net__batch_size"),
        ("noise", "param_data__noise"),
        ("depth", "depth"),
    ],
)
def test_columns_are_found_by_name(name, column):
    assert find_axis(TABLE, name, argument="by") == column


def test_an_ambiguous_last_part_of_a_name_is_refused():
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

"""Tests for `columns`: which columns are measures, and what missing values mean."""

import numpy as np
import pandas as pd
import pytest

from relflat_sk.minima._columns import (
    is_complete,
    is_converged,
    is_score,
    measure_columns,
    numeric_column,
)


def test_measures_are_the_numeric_columns_without_another_meaning():
    table = pd.DataFrame({
        "trial": [0, 1],
        "param_net__batch_size": 8,
        "param_optimizer": "SGD",
        "relative_flatness": [2.0, 1.0],
        "l2_norm": [0.0, 0.5],
        "test_score": [0.5, 0.9],
        "converged": True,
        "state": "complete",
    })
    assert measure_columns(table) == ["relative_flatness", "l2_norm"]


def test_missing_numbers_are_nan_and_missing_booleans_are_false():
    table = pd.DataFrame({
        "rho": pd.array([1, None], dtype="Int64"),
        "converged": pd.array([True, None], dtype="boolean"),
    })
    np.testing.assert_array_equal(numeric_column(table, "rho", argument="by"), [1.0, np.nan])
    assert is_converged(table).tolist() == [True, False]
    assert is_complete(table).tolist() == [True, True]


def test_only_the_scores_are_better_when_larger():
    assert [is_score(name) for name in ("train_score", "test_score", "test_loss")] == [
        True,
        True,
        False,
    ]


def test_the_error_lists_the_numeric_columns():
    table = pd.DataFrame({"l2_norm": [1.0], "test_loss": [0.1], "state": ["complete"]})
    with pytest.raises(ValueError, match=r"by='state' is not numeric.*\['l2_norm'\].*test_loss"):
        numeric_column(table, "state", argument="by")

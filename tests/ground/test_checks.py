"""Checks of scalar arguments."""

import numpy as np
import pytest

from relflat_sk._checks import check_integer, check_number


@pytest.mark.parametrize("value", [1, np.int64(3), np.uint8(1)])
def test_integers_of_numpy_are_integers(value):
    check_integer("n", value, minimum=1)


@pytest.mark.parametrize("value", [0, 1.0, True, "1", None])
def test_refuses_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="n must be a positive integer, got .*: why"):
        check_integer("n", value, minimum=1, reason="why")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), np.int64(1)])
def test_numbers_of_numpy_are_numbers(value):
    check_number("t", value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", False])
def test_refuses_what_is_no_positive_number(value):
    with pytest.raises(ValueError, match="t must be a finite positive number or None, got"):
        check_number("t", value, optional=True)


def test_none_and_zero_are_allowed_where_said():
    check_integer("n", None, minimum=2, optional=True)
    check_number("t", None, optional=True)
    check_number("t", 0, positive=False)

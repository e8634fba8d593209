"""Checks of scalar arguments and devices."""

from functools import partial

import numpy as np
import pytest
import torch

from relflat_sk._checks import check_device, check_integer, check_number

POSITIVE = partial(check_integer, "n", minimum=1, reason="why")
OPTIONAL = partial(check_number, "t", optional=True)
ACCEPTED = [
    (POSITIVE, [1, np.int64(3), np.uint8(1)]),
    (OPTIONAL, [1, 0.5, np.float32(2), np.int64(1), None]),
    (check_device, [None, "cpu", torch.device("cpu")]),
]
REFUSED = [
    (POSITIVE, [0, 1.0, True, "1", None], "n must"),
    (OPTIONAL, [0, -1.0, float("nan"), float("inf"), "1", False], "t must"),
    (check_device, ["moon", 1.5, [], "cuda:x", "meta"], "device="),
]


@pytest.mark.parametrize(("check", "values"), ACCEPTED)
def test_accepts(check, values):
    for value in values:
        check(value)


@pytest.mark.parametrize(("check", "values", "name"), REFUSED)
def test_refuses(check, values, name):
    for value in values:
        with pytest.raises(ValueError, match=name):
            check(value)

"""Checks of scalar arguments and devices; warnings point at the user's code."""

import subprocess
from functools import partial

import numpy as np
import pytest
import torch

import relflat_sk
from relflat_sk import FlatnessWarning
from relflat_sk._checks import check_device, check_integer, check_number, warn

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


def inside(package, function):
    """Return a function of a package's file that calls another function."""

    def call():
        function()

    code = call.__code__.replace(co_filename=package.__file__)
    return type(call)(code, call.__globals__, closure=call.__closure__)


@pytest.mark.parametrize("category", [FlatnessWarning, DeprecationWarning])
@pytest.mark.parametrize(
    "packages", [[], [relflat_sk], [relflat_sk, subprocess, relflat_sk, pytest]], ids=len
)
def test_points_at_the_users_code_past_the_packages_in_between(packages, category):
    call = partial(warn, "doubtful", category)
    for package in packages:
        call = inside(package, call)
    with pytest.warns(category, match="doubtful") as caught:
        call()
    assert caught[0].filename == __file__

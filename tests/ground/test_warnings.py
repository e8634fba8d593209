"""Warnings point at the user's code."""

import subprocess
from functools import partial

import pytest

import relflat_sk
from relflat_sk import FlatnessWarning
from relflat_sk._checks import warn


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

"""Warnings point at the user's code."""

import warnings

import pytest

import relflat_sk
from relflat_sk import FlatnessWarning
from relflat_sk._warnings import warn


def test_points_at_the_code_that_called_the_package(monkeypatch):
    def public():
        warn("doubtful")

    code = public.__code__.replace(co_filename=relflat_sk.__file__)
    inside = type(public)(code, public.__globals__, "public")
    with pytest.warns(FlatnessWarning, match="doubtful") as caught:
        inside()
    assert caught[0].filename == __file__


def test_takes_other_categories():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("old", DeprecationWarning)
    assert caught[0].category is DeprecationWarning

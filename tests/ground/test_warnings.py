"""Warnings point at the user's code, and are shown once."""

import code
import subprocess
import warnings
from threading import Thread

import pytest

import relflat_sk
from relflat_sk import FlatnessWarning
from relflat_sk._warnings import warn


def inside(*packages):
    """A function of our package that warns, called through other packages."""

    def call(function, *arguments):
        function(*arguments)

    def placed(function, file):
        code = function.__code__.replace(co_filename=file)
        return type(function)(code, function.__globals__, closure=function.__closure__)

    ours = placed(call, relflat_sk.__file__)
    chain = [ours, *(placed(call, package.__file__) for package in packages)]

    def run(message, category=FlatnessWarning):
        chain[-1](*reversed(chain[:-1]), warn, message, category)

    return run


@pytest.mark.parametrize("between", [(), (pytest, subprocess)])
def test_points_at_the_users_code_past_the_packages_in_between(between):
    with pytest.warns(FlatnessWarning, match="doubtful") as caught:
        inside(*between)("doubtful")
    assert caught[0].filename == __file__


def test_takes_other_categories():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn("old", DeprecationWarning)
    assert caught[0].category is DeprecationWarning


def shown(*actions):
    """Show three warnings of two texts at one line, as scikit-learn would, and list them."""
    with warnings.catch_warnings(record=True) as caught:
        for action in actions:
            warnings.filterwarnings(**action)
        for text in ("one", "one", "other"):
            with warnings.catch_warnings():  # Python forgets what it has shown
                pass
            warn(text)
    return [str(warning.message) for warning in caught]


def test_identical_warnings_are_shown_once():
    default = {"action": "default"}
    assert shown(default) == ["one", "other"]
    assert shown(default) == ["one", "other"]  # to somebody else who collects them
    assert shown(default, {"action": "once", "message": "on"}) == ["one", "other"]


def test_filters_decide():
    always = {"action": "always"}
    assert shown(always) == ["one", "one", "other"]
    assert shown(always, {"action": "default", "message": "one"}) == ["one", "other"]
    assert shown(always, {"action": "default", "module": "elsewhere"}) == ["one", "one", "other"]
    assert shown(always, {"action": "default", "category": DeprecationWarning})[1] == "one"
    assert shown({"action": "ignore"}) == []
    with pytest.raises(FlatnessWarning, match="one"):
        shown({"action": "error"})


def test_a_cell_that_runs_again_warns_again():
    shell = code.InteractiveInterpreter({"warn": warn})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            shell.locals.pop("__warningregistry__", None)  # as notebooks do before each cell
            cell = Thread(target=shell.runsource, args=["for _ in range(3): warn('doubtful')\n"])
            cell.start()  # in a thread, whose first code of the user is the cell
            cell.join()
    assert [str(warning.message) for warning in caught] == ["doubtful"] * 2

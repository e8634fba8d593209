"""Optuna's messages stay away, and its log level is given back."""

import optuna
import pytest


@pytest.fixture(autouse=True)
def _log_level():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)

"""A search whose storage fails in the middle, for tests of faults."""

import subprocess
from contextlib import contextmanager

import pytest
from optuna.trial import TrialState
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from relflat_sk import FlatMinimaSearch, rank_minima

X, Y = load_iris(return_X_y=True)
CHOICES = [round(0.3 + 0.1 * i, 1) for i in range(6)]

FAULT = {"at": 0, "what": None}  # a function that is called after so many trainings
TRAINED = []


class Trains(LogisticRegression):
    """Counts its trainings, after one of which the fault happens."""

    def fit(self, X, y):
        fitted = super().fit(X, y)
        TRAINED.append(self.C)
        if len(TRAINED) == FAULT["at"]:
            FAULT["what"]()
        return fitted


def make_search(storage, study_name="sweep", **parameters):
    return FlatMinimaSearch(
        Trains(max_iter=1000),
        {"C": CHOICES},
        storage=storage,
        study_name=study_name,
        **{"random_state": 0, "depth_band": None, "refit": False, **parameters},
    )


def assert_goes_on(storage, n_kept):
    """The next call trains what is left, once; the table is that of a search without a fault."""
    FAULT.update(at=0)
    TRAINED.clear()
    search = make_search(storage).fit(X, Y)
    assert len(TRAINED) == len(set(TRAINED)) == len(CHOICES) - n_kept
    assert_complete(search)


def assert_complete(search):
    """Each candidate was found once, and the table is that of a search without a fault."""
    expected = make_search(None, None).fit(X, Y).minima_
    columns = ["param_C", "relative_flatness", "train_loss", "state"]
    assert search.minima_[columns].equals(expected[columns])
    complete = [t for t in search.study_.trials if t.state == TrialState.COMPLETE]
    assert sorted(trial.params["C"] for trial in complete) == CHOICES


def assert_at_hand(search, n_finished):
    """What was finished before the fault can be ranked."""
    table = rank_minima(search.study_, depth_band=None)
    assert (table["state"] == "complete").sum() == n_finished


@contextmanager
def mounted(folder, options):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    with open(folder / "fill", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(512))
        except OSError:
            return

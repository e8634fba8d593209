"""Tests of searches that end early: by a timeout, or by a callback."""

from functools import partial

import optuna
import pytest

from relflat_sk.search import _workers as stopping_module
from relflat_sk.search._study import SearchStudy
from tests.search.examples import X, Y, logistic

C = [0.5, 0.6, 0.7, 0.8]
make = partial(logistic, {"C": C})


class Clock:
    """A clock that a test moves."""

    def __init__(self, ticks):
        self.ticks = iter(ticks)
        self.now = 0.0

    def time(self):
        self.now = next(self.ticks, self.now)
        return self.now


def test_no_candidate_begins_after_the_timeout_and_a_later_search_goes_on(monkeypatch, stored):
    monkeypatch.setattr(stopping_module, "time", Clock([0.0, 1.0, 5.0, 9.0, 11.0]))
    assert len(make(**stored).fit(X, Y, timeout=10).minima_) == 3
    assert len(make(**stored).fit(X, Y).minima_) == len(C)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_nothing_was_trained_before_the_timeout(n_jobs):
    with pytest.raises(ValueError, match="no candidate was trained: the search was ended before"):
        make(n_jobs=n_jobs).fit(X, Y, timeout=1e-9)


def test_processes_of_a_sweep_end_together():
    study = optuna.create_study()
    first, second, other = (SearchStudy(study, sweep) for sweep in ("a", "a", "b"))
    first.stop()
    first.stop()
    assert study.user_attrs == {"stopped_sweeps": ["a"]}
    assert second.is_stopped()
    assert not other.is_stopped()


def test_callbacks_get_study_and_trial():
    seen = []

    def remember(study, trial):
        assert isinstance(study, optuna.Study)
        seen.append((trial.params["C"], trial.value, len(study.trials) > 0))

    search = make().fit(X, Y, callbacks=[remember])
    assert sorted(one[0] for one in seen) == C
    table = search.minima_.set_index("param_C")["relative_flatness"]
    assert all(value == table[c] and found for c, value, found in seen)


def test_a_callback_stops_the_search():
    def stop(study, trial):
        if trial.number == 1:
            study.stop()

    search = make().fit(X, Y, callbacks=[stop])
    assert len(search.minima_) == 2


def test_a_callback_stops_processes_and_a_later_search_goes_on(stored):
    def stop(study, trial):
        study.stop()

    # one candidate at a time is left to each worker when the first result arrives
    search = make(n_jobs=2, **stored).fit(X, Y, callbacks=[stop])
    assert 1 <= len(search.minima_) <= len(C)
    assert all(trial.state.is_finished() for trial in search.study_.trials)
    assert len(make(**stored).fit(X, Y).minima_) == len(C)


def test_errors_of_callbacks_are_the_users():
    def fails(study, trial):
        raise RuntimeError("in the callback")

    with pytest.raises(RuntimeError, match="in the callback"):
        make().fit(X, Y, callbacks=[fails])

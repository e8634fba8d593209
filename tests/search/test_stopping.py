"""Tests of searches that end early: by a timeout, or by a callback."""

from functools import partial
from types import SimpleNamespace

import optuna
import pytest

from relflat_sk import FlatMinimaSearch
from relflat_sk.search import _candidates, _search
from tests.search.examples import Slow, X, Y, logistic, make_net

C = [0.5, 0.6, 0.7, 0.8]
make = partial(logistic, {"C": C})


def test_no_candidate_begins_after_the_timeout_and_a_later_search_goes_on(monkeypatch, stored):
    ticks = iter([0.0, 1.0, 5.0, 9.0])
    clock = SimpleNamespace(time=lambda: next(ticks, 11.0), perf_counter=float)
    monkeypatch.setattr(_candidates, "time", clock)
    monkeypatch.setattr(_search, "time", clock)
    assert len(make(**stored).fit(X, Y, timeout=10).minima_) == 3
    assert len(make(**stored).fit(X, Y).minima_) == len(C)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_nothing_was_trained_before_the_timeout(n_jobs):
    with pytest.raises(ValueError, match="no candidate was trained: the search was ended before"):
        make(n_jobs=n_jobs).fit(X, Y, timeout=1e-9)


def test_callbacks_get_study_and_trial_and_stop_the_search():
    seen = []

    def remember(study, trial):
        assert isinstance(study, optuna.Study)
        seen.append((trial.params["C"], trial.value, len(study.trials) > 0))
        if len(seen) == 3:
            study.stop()

    search = make().fit(X, Y, callbacks=[remember])
    table = search.minima_.set_index("param_C")["relative_flatness"]
    assert sorted(table.index) == sorted(one[0] for one in seen) == C[:3]
    assert all(value == table[c] and found for c, value, found in seen)


def test_a_callback_stops_all_processes_of_its_search_only(stored):
    many = logistic({"C": [0.5 + i / 50 for i in range(12)]}, Slow(max_iter=1000), **stored)
    # twice: the first word is enough
    search = many.set_params(n_jobs=2).fit(X, Y, callbacks=[lambda study, _: study.stop()] * 2)
    assert 1 <= len(search.minima_) < 12
    assert all(trial.state.is_finished() for trial in search.study_.trials)
    assert len(many.set_params(n_jobs=1).fit(X, Y).minima_) == 12


@pytest.mark.parametrize("fleet", [None, 2])
def test_errors_of_callbacks_are_the_users(fleet):
    """A file of the user is not the storage's."""

    def fails(study, trial):
        raise OSError("in the callback")

    search = FlatMinimaSearch(make_net(max_epochs=2), {"batch_size": [32, 64]}, fleet=fleet)
    with pytest.raises(OSError, match="^in the callback"):
        search.fit(X, Y, callbacks=[fails])

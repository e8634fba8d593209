"""Tests of `_optuna_database`, for the oldest and the newest Optuna that is allowed.

See `tests/search/test_optuna_internals.py`.
"""

import copy
import pickle
from itertools import pairwise

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState, create_trial
from sklearn.linear_model import LogisticRegression
from sqlalchemy import event

from relflat_sk import FlatMinimaSearch
from relflat_sk.search._optuna_database import Database, holding_own_trials
from relflat_sk.search._optuna_internals import (
    TELL_ERRORS,
    add_trial,
    fail_trial,
    read_trial,
)
from relflat_sk.search._optuna_reading import read_trials
from relflat_sk.search._optuna_views import OneTrialStudy
from relflat_sk.search._study import open_storage


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql").url
    return f"sqlite:///{tmp_path / 'minima.db'}"


@pytest.fixture
def study(url):
    return optuna.create_study(storage=open_storage(url), study_name="sweep")


def in_another_process(study):
    return pickle.loads(pickle.dumps(study))


def add_running(study):
    template = create_trial(
        state=TrialState.RUNNING,
        params={"x": 0.5},
        distributions={"x": FloatDistribution(0.0, 1.0)},
        user_attrs={"a": [1, None]},
        system_attrs={"b": 2},
    )
    return add_trial(study, template)


def count_statements(study):
    found = []
    engine = study._storage._backend.engine
    event.listen(engine, "before_cursor_execute", lambda *arguments: found.append(arguments[2]))
    return found


def test_a_running_trial_is_known_without_a_read(study):
    """Whatever changes in it, the process that runs it knows what the database holds."""
    other, trial_id = in_another_process(study), add_running(study)
    trial = optuna.Trial(study, trial_id)
    changes = [
        lambda: trial.suggest_float("x", 0.0, 1.0),  # has its value
        lambda: trial.suggest_int("n", 1, 9),
        lambda: trial.report(0.25, step=3),
        lambda: trial.set_user_attr("c", {"d": 0.1}),
        lambda: study._storage.set_trial_system_attr(trial_id, "population", 4),
    ]
    if hasattr(trial, "set_constraint"):  # Optuna 5
        changes.append(lambda: trial.set_constraint("converged", 1.0))
    for change in changes:
        change()
        statements = count_statements(study)
        known = copy.deepcopy(study._storage.get_trial(trial_id))
        assert not statements
        assert known == read_trial(other, trial_id)
    study.tell(trial, 0.5)
    assert read_trial(study, trial_id) == read_trial(other, trial_id)
    assert read_trials(study) == other.trials


def test_a_finished_trial_is_read_once(study):
    trial_id = add_running(study)
    OneTrialStudy(study, trial_id).optimize(lambda trial: 0.5, n_trials=1)
    first = read_trial(study, trial_id)
    statements = count_statements(study)
    assert read_trial(study, trial_id) is first
    assert not statements
    assert read_trials(study) == [first]
    assert len(statements) == 1  # asks for others
    assert first.state == TrialState.COMPLETE
    assert first.value == 0.5


def test_a_trial_that_another_process_gave_up_is_read_again(study):
    other, trial_id = in_another_process(study), add_running(study)

    def sleeps(trial):
        assert fail_trial(other, trial_id, {"killed": True})
        return 0.5

    with pytest.raises(TELL_ERRORS):
        OneTrialStudy(study, trial_id).optimize(sleeps, n_trials=1)
    trial = read_trial(study, trial_id)
    assert (trial.state, trial.user_attrs["killed"]) == (TrialState.FAIL, True)


def test_another_process_reads_the_trials_of_this_one(study):
    trial_id = add_running(study)
    other = in_another_process(study)
    assert read_trial(other, trial_id).state == TrialState.RUNNING
    fail_trial(study, trial_id)
    assert read_trial(other, trial_id).state == TrialState.FAIL


def test_trials_that_wait_are_read(study):
    """They begin where Optuna takes them from the queue, in this process or in another."""
    study.enqueue_trial({"x": 0.25})
    other = in_another_process(study)
    taken = other.ask()
    taken.set_user_attr("a", 1)
    assert read_trial(study, taken._trial_id) == read_trial(other, taken._trial_id)


# -- searches ----------------------------------------------------------------------------------

SPACES = {  # with the statements of a minimum; Optuna 4.3 on PostgreSQL needs most
    "draws": ({"C": FloatDistribution(0.1, 10.0, log=True)}, 52),
    "grid": ({"C": [0.1 * (1 + n) for n in range(16)], "fit_intercept": [True]}, 55),
}


@pytest.mark.parametrize("kind", SPACES)
def test_statements_and_transactions_of_a_minimum(kind, url):
    """They do not grow with the study."""
    (space, n_statements), storage, seen = SPACES[kind], optuna.storages.RDBStorage(url), []
    statements, transactions = [], []
    event.listen(
        storage.engine, "before_cursor_execute", lambda *given: statements.append(given[2])
    )
    event.listen(storage.engine, "commit", transactions.append)
    FlatMinimaSearch(
        LogisticRegression(),
        space,
        n_trials=16,
        storage=storage,
        study_name="sweep",
        random_state=0,
        callbacks=[lambda study, trial: seen.append((len(statements), len(transactions)))],
    ).fit([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1])
    each = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen)]
    assert len(each) == 15
    assert max(n for n, _ in each) <= n_statements, each
    assert max(n for _, n in each) <= 17, each


# -- storages ----------------------------------------------------------------------------------


def test_other_storages_stay_as_they_are():
    storage = optuna.storages.InMemoryStorage()
    assert holding_own_trials(storage) is storage


def test_a_storage_that_a_user_opened_stays_as_it_is(url):
    """The search reads through an object of its own, of the same connections."""
    given = optuna.storages.get_storage(url)
    before = type(given), dict(vars(given))
    opened = open_storage(given)
    assert isinstance(opened, Database)
    assert opened._backend is given._backend
    assert (type(given), vars(given)) == before
    assert open_storage(opened) is opened
    study = optuna.create_study(storage=opened, study_name="sweep")
    add_running(study)
    assert optuna.load_study(study_name="sweep", storage=given).trials == study.trials

"""Tests of `_optuna_internals`, for the oldest and the newest Optuna that is allowed.

With another version: ``pip install --target FOLDER --no-deps optuna==4.3.0``, then
``PYTHONPATH=FOLDER python -m pytest tests/search``.
"""

import ast
import pickle
import threading
from pathlib import Path

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.samplers import GridSampler
from optuna.storages import InMemoryStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState, create_trial

import relflat_sk
from relflat_sk.search import _optuna_reading
from relflat_sk.search._optuna_internals import (
    FIXED_VALUES,
    TELL_ERRORS,
    add_trial,
    fail_trial,
    is_journal,
    read_trial,
    trial_id_of,
    widen_choices,
)
from relflat_sk.search._optuna_reading import read_trials, trials_between
from relflat_sk.search._optuna_views import OneTrialStudy, with_trials

STORAGES = {
    "memory": lambda folder: InMemoryStorage(),
    "sqlite": lambda folder: f"sqlite:///{folder / 'minima.db'}",
    "journal": lambda folder: JournalStorage(JournalFileBackend(str(folder / "minima.log"))),
}


@pytest.fixture(params=[*STORAGES, "postgresql"])
def study(request, tmp_path):
    if request.param == "postgresql":
        storage = request.getfixturevalue("postgresql").url
    else:
        storage = STORAGES[request.param](tmp_path)
    return optuna.create_study(storage=storage, study_name="sweep")


def running(**system_attrs):
    return create_trial(state=TrialState.RUNNING, system_attrs=system_attrs)


def draw(trial):
    return trial.suggest_float("x", 0.0, 1.0)


def test_a_trial_that_was_added_is_run(study):
    waiting = optuna.trial.create_trial(state=TrialState.WAITING)
    study.add_trial(waiting)  # Optuna itself would run this one
    trial_id = add_trial(study, running(**{FIXED_VALUES: {"x": 0.25}}))
    added = read_trial(study, trial_id)
    assert (added.number, added.state) == (1, TrialState.RUNNING)
    OneTrialStudy(study, trial_id).optimize(draw, n_trials=1)
    assert [trial.state.name for trial in study.trials] == ["WAITING", "COMPLETE"]
    assert study.trials[1].value == 0.25
    assert trial_id_of(study.trials[1]) == trial_id


def test_ids_are_found_among_several_studies(study):
    add_trial(study, running())
    other = optuna.create_study(storage=OneTrialStudy(study, -1)._storage, study_name="other")
    trial_id = add_trial(other, running())
    assert read_trial(other, trial_id).number == 0
    assert fail_trial(other, trial_id)
    assert [one.trials[0].state.name for one in (study, other)] == ["RUNNING", "FAIL"]


def test_a_running_trial_can_be_failed_once(study):
    trial_id = add_trial(study, running())
    assert fail_trial(study, trial_id, {"killed": True})
    assert not fail_trial(study, trial_id, {"killed": False})
    trial = read_trial(study, trial_id)
    assert (trial.state, trial.user_attrs) == (TrialState.FAIL, {"killed": True})


def test_a_trial_that_another_process_failed_ends_in_one_of_the_errors(study):
    trial_id = add_trial(study, running())

    def fails_meanwhile(trial):
        fail_trial(study, trial_id)
        return 0.5

    with pytest.raises(TELL_ERRORS):
        OneTrialStudy(study, trial_id).optimize(fails_meanwhile, n_trials=1)
    assert read_trial(study, trial_id).state == TrialState.FAIL


def test_the_sampler_can_stop():
    study = optuna.create_study(sampler=GridSampler({"x": [0.0, 1.0]}, seed=0))
    stopped = []
    for _ in range(2):
        one = OneTrialStudy(study, add_trial(study, running()))
        one.optimize(draw, n_trials=1)
        stopped.append(one.stopped)
    assert stopped == [False, True]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_a_first_heartbeat_is_recorded(tmp_path):
    url = f"sqlite:///{tmp_path / 'minima.db'}"
    storage = RDBStorage(url, heartbeat_interval=1, grace_period=1)
    study = optuna.create_study(storage=storage)
    add_trial(study, running())
    unseen = storage.create_new_trial(study._study_id, running())
    while not storage._get_stale_trial_ids(study._study_id):
        threading.Event().wait(0.1)
    stale = storage._get_stale_trial_ids(study._study_id)
    assert stale == [1]
    assert unseen not in stale


def test_samplers_can_see_trials_that_were_read_later(study):
    """During a trial, a study shows its sampler the trials it held when the trial began."""
    counts = []

    def objective(trial):
        add_trial(study, running())
        cached = trial.study._get_trials(deepcopy=False, use_cache=True)
        now = with_trials(trial.study, trial.study.get_trials(deepcopy=False))
        fresh = now._get_trials(deepcopy=False, use_cache=True)
        counts.append((len(cached), len(fresh)))
        return 0.0

    study.sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=0)
    study.optimize(lambda trial: [draw(trial), objective(trial)][1], n_trials=1)
    study.optimize(lambda trial: [draw(trial), objective(trial)][1], n_trials=1)
    assert all(fresh == cached + 1 for cached, fresh in counts)


def test_trials_between_others_are_read(study):
    """Another process adds them, and nothing else is read again from a database."""
    other = pickle.loads(pickle.dumps(study))
    if isinstance(study._storage, InMemoryStorage):
        other = study
    known = []
    for n_added in (0, 2, 1):
        for _ in range(n_added):
            add_trial(other, running(candidate=len(study.get_trials())))
        trial_id = add_trial(study, running())
        add_trial(other, running())
        found = trials_between(study, known, trial_id)
        numbers = range(len(known), len(known) + n_added)
        assert [trial.number for trial in found] == list(numbers)
        assert [trial.system_attrs["candidate"] for trial in found] == list(numbers)
        known = study.get_trials(deepcopy=False)


def test_running_trials_are_read_once(study, monkeypatch):
    """Of a database, which many processes may share; what others change is seen at once."""
    other, ids = pickle.loads(pickle.dumps(study)), []
    if isinstance(study._storage, InMemoryStorage):
        other = study
    if is_in_database(study):
        backend, read = study._storage._backend, RDBStorage._get_trials

        def note(*arguments, **named):
            found = read(backend, *arguments, **named)
            ids.append([trial._trial_id for trial in found])
            return found

        monkeypatch.setattr(backend, "_get_trials", note)
    others = [add_trial(other, running(candidate=n)) for n in range(3)]
    own = add_trial(study, running(candidate=3))
    waiting = add_trial(other, create_trial(state=TrialState.WAITING))
    read_trials(study)
    steps = {
        "nothing": lambda: None,
        "finished": lambda: other._storage.set_trial_state_values(
            others[1], TrialState.COMPLETE, [0.5]
        ),
        "failed": lambda: [fail_trial(other, one, {"failed": True}) for one in (others[0], own)],
        "begun": lambda: other._storage.set_trial_state_values(waiting, TrialState.RUNNING),
        "added": lambda: others.append(add_trial(other, running(candidate=4))),
    }
    for change in steps.values():
        change()
        assert read_trials(study) == other.trials
    changed = [[others[1]], [others[0], own], [waiting], [others[3]]]  # and not for nothing
    assert ids[1:] == changed * is_in_database(study)
    # afterwards, Optuna's own reads see what happens as before
    study._storage.set_trial_user_attr(others[3], "a", 1)
    fail_trial(other, others[2])
    assert study.trials == other.trials


def test_trials_that_others_add_during_a_read_are_not_skipped(study, monkeypatch):
    """Another thread of this process then adds one, which is held before those of others."""
    if not is_in_database(study):
        pytest.skip("others are read at once")
    other, read = pickle.loads(pickle.dumps(study)), _optuna_reading._read_states

    def read_early(*arguments):
        found = read(*arguments)
        add_trial(other, running())
        study.add_trial(create_trial(value=0.5))
        return found

    add_trial(study, running())
    read_trials(study)
    with monkeypatch.context() as patched:
        patched.setattr(_optuna_reading, "_read_states", read_early)
        assert [trial.number for trial in read_trials(study)] == [0]
    assert study.trials == other.trials
    assert read_trials(study) == other.trials
    assert len(other.trials) == 3


def is_in_database(study):
    return isinstance(getattr(study._storage, "_backend", None), RDBStorage)


def test_choices_can_be_added(study):
    """Optuna itself refuses further choices."""

    def objective(trial, choices=("a", "b", "c")):
        return len(trial.suggest_categorical("x", choices))

    study.optimize(lambda trial: objective(trial, ("a", "b")), n_trials=2)
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        study.optimize(objective, n_trials=1)
    wider = {"x": CategoricalDistribution(("a", "b", "c"))}
    widen_choices(study, wider)
    before = [trial.params for trial in study.get_trials()][:2]
    template = create_trial(state=TrialState.RUNNING, params={"x": "c"}, distributions=wider)
    OneTrialStudy(study, add_trial(study, template)).optimize(objective, n_trials=1)
    if not is_journal(study):
        study.optimize(objective, n_trials=1)
    assert [trial.params for trial in study.get_trials()][:2] == before
    assert study.get_trials()[3].params == {"x": "c"}


def test_trials_share_their_choices(study):
    """Optuna reads a list of choices for each trial, and thousands of seeds are a long one."""
    for names in ("ab", "ab", "abc"):
        choices = {"x": CategoricalDistribution(tuple(names)), "lr": FloatDistribution(0, 1)}
        widen_choices(study, choices)
        params = {"x": "a", "lr": 0.5}
        for _ in range(2):
            study.add_trial(create_trial(value=0.0, params=params, distributions=choices))
    other = pickle.loads(pickle.dumps(study))  # as another process reads it
    before = other.trials
    trials = read_trials(other)
    assert trials == before
    for held in (trials, other.get_trials(deepcopy=False)):
        lists = [trial.distributions["x"].choices for trial in held]
        assert len(set(map(id, lists))) == len(set(lists))


def private_names_used(path):
    """Yield the private names that a module takes from other objects."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            owner = ast.unparse(node.value)
            if not node.attr.startswith("__") and owner not in {"self", "cls", "os", "super()"}:
                yield f"{owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("optuna"):
            parts = [*node.module.split("."), *(name.name for name in node.names)]
            yield from (f"{node.module}: {part}" for part in parts if part.startswith("_"))


def test_private_attributes_of_optuna_are_used_in_the_adapters_only():
    folder = Path(relflat_sk.__file__).parent
    users = {
        path.relative_to(folder).as_posix(): sorted(set(found))
        for path in [*folder.glob("search/**/*.py"), *folder.glob("minima/**/*.py")]
        if (found := list(private_names_used(path)))
    }
    adapters = [
        "search/_optuna_database.py",
        "search/_optuna_internals.py",
        "search/_optuna_journal.py",
        "search/_optuna_reading.py",
    ]
    assert sorted(users) == adapters, users

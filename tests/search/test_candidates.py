"""What is left of many candidates, and which values are drawn."""

import copy
import zlib
from unittest import mock

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import TPESampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from relflat_sk.search import _claims as claims_module
from relflat_sk.search._claims import CandidateSampler, Draws, Grid, claim
from relflat_sk.search._optuna_reading import read_trials
from relflat_sk.search._optuna_views import with_trials
from relflat_sk.search._space import Space

N = 200


class Counting(int):
    """A number that counts how often numbers are compared."""

    n_compared = 0

    def __eq__(self, other):
        Counting.n_compared += 1
        return int(self) == other

    __hash__ = int.__hash__


PLANS = {
    "grid": (Grid, "fixed_params", lambda n: {"C": Counting(n)}),
    "draws": (Draws, "candidate", Counting),
}


@pytest.mark.parametrize("kind", PLANS)
def test_the_work_does_not_grow_with_the_square_of_the_number_of_candidates(kind):
    make, attribute, candidate = PLANS[kind]
    done = [
        create_trial(state=TrialState.RUNNING, system_attrs={attribute: candidate(n)})
        for n in range(N - 1)
    ]
    plan = make([candidate(n) for n in range(N)] if kind == "grid" else N)
    Counting.n_compared = 0
    assert plan.n_left(done) == 1
    assert plan.next_candidate(optuna.create_study(), done) == {attribute: candidate(N - 1)}
    assert Counting.n_compared < 10 * N


SPACES = {
    "ranges": {
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "n": IntDistribution(2, 64, step=2),
        "decay": FloatDistribution(0.0, 1.0, step=0.25),
    },
    "mixed": {
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "module": ["a", "b", "c"],
        "fixed": [0.5],
    },
    "function": {
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "twice": lambda trial: 2 * trial.suggest_int("half", 1, 9),
    },
}


def loss(params):
    return abs(params["lr"] - 0.1) + 0.01 * params.get("n", 0) + 0.1 * (params.get("module") == "a")


def searched(space, n_draws, n_at_once):
    """Draw as searches do, several at a time."""
    study = optuna.create_study(sampler=CandidateSampler(0, space))
    elsewhere = mock.patch.object(
        claims_module, "this_process", return_value=["elsewhere", 1, "1", 1]
    )
    for _ in range(n_draws // n_at_once):
        with elsewhere:
            claimed = [
                claim(study, Draws(n_draws, space.distributions()), "a") for _ in range(n_at_once)
            ]
        trials = [one.ask() for one in claimed]
        for trial in trials:
            space.suggest(trial)
        for trial in trials:
            study.tell(trial, loss(trial.params))
    return [trial.params for trial in study.trials]


def drawn_by_optuna(space, n_draws, n_at_once):
    """Draw in the trials themselves, by a sampler for each draw."""
    study = optuna.create_study()
    for begin in range(0, n_draws, n_at_once):
        trials = []
        for number in range(begin, begin + n_at_once):
            study.sampler = TPESampler(seed=zlib.crc32(b"%d" % number, 0), n_startup_trials=10)
            trials.append(study.ask())
            space.suggest(trials[-1])
        for trial in trials:
            study.tell(trial, loss(trial.params))
    return [trial.params for trial in study.trials]


@pytest.mark.parametrize(
    ("kind", "n_at_once"), [("ranges", 1), ("ranges", 3), ("mixed", 3), ("function", 1)]
)
def test_candidates_are_drawn_as_optuna_draws(kind, n_at_once):
    """Whether a draw is made at the claim or in the trial."""
    space = Space(SPACES[kind])
    assert searched(space, 30, n_at_once) == drawn_by_optuna(space, 30, n_at_once)


def test_a_draw_looks_at_the_ranges_of_new_trials_only(monkeypatch):
    """The first draw of a search looks at all trials to learn which parameters they share."""
    space, study = Space(SPACES["ranges"]), optuna.create_study()
    sampler = CandidateSampler(0, space)

    def add(n, choices):
        for number in range(n):
            params = {"lr": 0.01 * (1 + number), "n": 2 * (1 + number), "decay": 0.5}
            study.add_trial(create_trial(value=number, params=params, distributions=choices))

    def draw(sampler):
        return sampler.draw(with_trials(study, study.trials), 20)

    looks, own = [], FrozenTrial.distributions

    def look(trial):
        looks.append(trial.number)
        return own.fget(trial)

    add(20, space.distributions())
    if not TPESampler().infer_relative_search_space(study, None):
        pytest.skip("this version of Optuna draws each parameter by itself")
    assert draw(sampler) == draw(CandidateSampler(0, space))
    add(1, space.distributions())
    with monkeypatch.context() as patched:
        patched.setattr(FrozenTrial, "distributions", property(look, own.fset))
        found = draw(sampler)
    assert set(looks) <= {20, -1}  # and at the trial to come
    assert found == draw(CandidateSampler(0, space))
    # another process adds trials with another range, and they are seen
    add(1, space.distributions() | {"lr": FloatDistribution(1e-3, 2.0, log=True)})
    add(1, space.distributions())
    assert draw(sampler) == draw(CandidateSampler(0, space))


def test_others_see_the_values_of_a_candidate_that_is_in_training():
    """A sampler keeps away from them; they are drawn once, and written with the claim."""
    space = Space(SPACES["mixed"])
    study = optuna.create_study(sampler=CandidateSampler(0, space))
    claimed = claim(study, Draws(1, space.distributions()), "a")
    (seen,) = copy.deepcopy(read_trials(study))
    assert seen.state == TrialState.RUNNING
    trial = claimed.ask()
    space.suggest(trial)
    assert {**seen.params, "fixed": 0.5} == trial.params
    assert set(seen.params) == {"lr", "module"}

"""Tests for `space`: forms of a space, labels, what is enqueued."""

import functools

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial, TrialState
from skorch.callbacks import EarlyStopping, EpochScoring
from torch import nn

from relflat_sk import MinimaObjective, StopAtLoss, relative_flatness
from relflat_sk.minima._minimum import Minimum
from relflat_sk.search._space import Space
from relflat_sk.search._storage import open_storage
from tests.search.examples import FILES, X, Y, make_net, make_search

SGD, Adam = torch.optim.SGD, torch.optim.Adam


def study_of(space, n_trials=1):
    """A study whose trials drew from a space."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    def objective(trial):
        params = space.suggest(trial)
        Minimum(params=space.computed(trial, params), reason="").write(trial)
        return 1.0

    study.optimize(objective, n_trials)
    return study


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.1, None, "a", None), [0.1, None, "a"]),
        (range(1, 3), [1, 2]),
        ([np.int64(3), 3, np.float32(0.5)], [3, 0.5]),
        (pd.Series([8, 16]), [8, 16]),
        (torch.tensor([8, 16]), [8, 16]),
        (CategoricalDistribution((1, 2)), [1, 2]),
        ([None, SGD, (8, 8)], [None, "SGD", "(8, 8)"]),
        ([1, True], ["0: 1", "1: True"]),
        ([8, 8.0, 8], ["0: 8", "1: 8.0"]),
        ([(8,), (8,)], ["0: (8,)", "1: (8,)"]),  # objects, which may be two
        ([float("nan"), 1.0], ["nan", 1.0]),
    ],
    ids=str,
)
def test_choices_have_labels_that_optuna_can_store(values, labels):
    drawn = [point["p"] for point in Space({"p": values}).grid()]
    assert drawn == labels
    assert all(isinstance(*pair) for pair in zip(drawn, map(type, labels), strict=True))


def test_a_label_stands_for_its_value():
    first, second = EarlyStopping(), EarlyStopping()
    space = Space({"optimizer": [SGD, Adam], "flag": [1, True], "stop": [first, second]})
    points = space.grid()
    # addresses in a repr are not the same in another process: a study could not be resumed
    assert " at 0x" in repr(first)
    assert "0x" not in str(points + Space({"p": [functools.partial(study_of)]}).grid())
    # two objects that look alike stay two choices
    labels = list(dict.fromkeys(point["stop"] for point in points))
    assert len(labels) == 2
    params = {"optimizer": "Adam", "flag": "1: True", "stop": labels[1]}
    drawn = space.suggest(FixedTrial(params))
    assert drawn["optimizer"] is Adam
    assert drawn["flag"] is True
    assert drawn["stop"] is second
    with pytest.warns(UserWarning, match="Choices for a categorical distribution"):
        distribution = CategoricalDistribution(((8,), (16,)))
    assert Space({"p": distribution}).grid() == [{"p": "(8,)"}, {"p": "(16,)"}]


def test_distributions_and_functions_draw_from_the_trial():
    space = Space({
        "lr": FloatDistribution(1e-3, 1.0, log=True),
        "n": IntDistribution(1, 5),
        "batch_size": lambda trial: 2 ** trial.suggest_int("exponent", 3, 6),
        "sizes": lambda trial: (trial.params["n"],) * 2,
    })
    assert space.grid() is None
    for trial in study_of(space, 5).trials:
        drawn = dict(trial.params)
        computed = {"batch_size": 2 ** drawn.pop("exponent"), "sizes": (drawn["n"],) * 2}
        assert space.values(trial) == drawn | computed
        assert {name: trial.distributions[name] for name in drawn} == space.distributions()
        # the table shows what a function returned, not only what it drew
        assert trial.user_attrs["param_batch_size"] == computed["batch_size"]
        assert trial.user_attrs["param_sizes"] == str(computed["sizes"])


@pytest.mark.parametrize(
    ("function", "is_grid"),
    [
        (lambda trial: trial.suggest_int("tenths", 1, 9) / 10, False),
        (lambda trial: trial.suggest_float("lr", 0, 1) if trial.params["n"] == 2 else 0.1, False),
        (lambda trial: trial.params["n"], True),
        (lambda trial: trial.suggest_categorical("n", [1]), True),
        (lambda trial: 1 / 0, True),
    ],
)
def test_choices_are_a_grid_unless_a_function_draws_something_else(function, is_grid):
    grid = Space({"n": [1, 2], "lr": function}).grid()
    assert grid == ([{"n": 1}, {"n": 2}] if is_grid else None)


def of_trial(trial):
    size = trial.suggest_categorical("batch_size", [8, 16])
    return {"batch_size": size, "lr": 0.01 * size}


def test_one_function_of_the_trial_is_a_space():
    space = Space(of_trial)
    (trial,) = study_of(space).trials
    size = trial.params["batch_size"]
    assert space.values(trial) == {"batch_size": size, "lr": 0.01 * size}
    assert trial.user_attrs["param_lr"] == 0.01 * size
    assert space.grid() is None
    with pytest.raises(TypeError, match="space returns must be a dict of parameters, got None"):
        study_of(Space(lambda trial: None))


@pytest.mark.parametrize("whole", [False, True], ids=["of a parameter", "of the space"])
def test_a_function_that_cannot_be_called_again_is_refused(whole):
    def draw_lr(trial):
        return 0.1 * len(trial.study.trials)

    space = Space((lambda trial: {"lr": draw_lr(trial)}) if whole else {"lr": draw_lr})
    with pytest.raises(ValueError, match="AttributeError.*has no attribute 'study'"):
        study_of(space)


# -- enqueued -------------------------------------------------------------------------------------

STORABLE = [[(4,), (8, 4)], [1, True], ["adam", "lbfgs"]]
OBJECTS = [
    [[("stop", StopAtLoss(0.1))], [("stop", EpochScoring(lambda net, X, y: 1.0))]],
    [None, [StopAtLoss(0.3), EarlyStopping()]],
    [nn.Linear(2, 2), nn.Linear(2, 2)],
    [None, nn.CrossEntropyLoss(torch.tensor([1.0, 0.0]))],
    [((8,), None), ((8, 4), None)],
    [{"a": np.zeros(2)}, {"a": np.ones(2)}],
    [functools.partial(max, 1), functools.partial(max, 2)],
]


@pytest.mark.parametrize(
    ("storage", "choices"),
    [
        *(("memory", choices) for choices in STORABLE + OBJECTS),  # which copies objects
        *((storage, choices) for choices in STORABLE for storage in FILES),
    ],
)
def test_choices_are_enqueued_as_they_are_in_the_space_or_by_label(storage, choices, tmp_path):
    place = None if storage == "memory" else open_storage(tmp_path / FILES[storage])
    study, space = optuna.create_study(storage=place), Space({"choice": choices})
    for choice, point in zip(choices, space.grid(), strict=True):
        for enqueued in ({"choice": choice}, point):
            study.enqueue_trial(enqueued)
            trial = study.ask()
            assert space.suggest(trial)["choice"] is choice
            study.tell(trial, 1.0)
            assert study.trials[-1].params == point
            assert space.values(study.trials[-1])["choice"] is choice
    study.enqueue_trial({"choice": (5,)})
    with pytest.raises(ValueError, match="5.*not in"):
        space.suggest(study.ask())


def test_an_enqueued_candidate_is_trained_as_it_would_have_been(tmp_path):
    """By an objective, with the seed of its labels, and by a search, which trains it first."""
    net, sizes = make_net(callbacks=[StopAtLoss(0.6)]), "module__hidden_layer_sizes"
    space, params = {sizes: [(4,), (8,)], "lr": [0.05]}, {sizes: (8,), "lr": 0.05}
    table = make_search(net, space).fit(X, Y).minima_.set_index(f"param_{sizes}")
    objective = MinimaObjective(net, X, Y, space, random_state=0)
    study = optuna.create_study(study_name="sweep", storage=open_storage(tmp_path / "minima.db"))
    study.enqueue_trial(params)
    study.optimize(objective, n_trials=1)
    (trial,) = study.trials
    assert objective.get_parameters(trial) == params
    fitted = objective.get_estimator(trial)
    assert trial.value == table["relative_flatness"]["(8,)"] == relative_flatness(fitted, X, Y)
    study.ask()
    with pytest.raises(ValueError, match="trial 1 has no estimator"):
        objective.get_estimator(study.trials[1])
    study.tell(1, state=TrialState.FAIL)
    study.enqueue_trial({sizes: (4,), "lr": 0.05})
    resumed = make_search(net, space, storage=tmp_path / "minima.db", study_name="sweep")
    assert resumed.fit(X, Y).minima_["state"].eq("complete").tolist() == [True, True]

"""What candidates differ in: forms of a space and its labels, the data, learning rates."""

import functools

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FixedTrial, TrialState
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from skorch.callbacks import Callback, EarlyStopping, EpochScoring
from torch import nn

from relflat_sk import MinimaObjective, StopAtLoss, relative_flatness
from relflat_sk.minima._table import Minimum
from relflat_sk.search._space import Space
from relflat_sk.search._storage import open_storage
from relflat_sk.search._task import scale_lr
from tests.data_kinds import Pairs
from tests.search.examples import (
    FILES,
    WEIGHTS,
    X,
    Y,
    logistic,
    make_net,
    make_search,
    piped,
    plain_net,
    vary,
)

SGD, Adam = torch.optim.SGD, torch.optim.Adam
N = 40
ROWS = np.arange(N)


def study_of(space, n_trials=1):
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


# -- the data -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    size=st.one_of(st.none(), st.integers(1, N - 1), st.floats(0.05, 0.95)),
    share=st.floats(0, 1),
    confusion=st.integers(0, N),
    seed=st.integers(0, 3),
)
def test_what_is_chosen(size, share, confusion, seed):
    left = 0 if size is None else N - (size if isinstance(size, int) else int(size * N))
    confusion = min(confusion, left)
    sizes = {"train_size": size, "confusion_size": confusion}
    per_sample = {"fit_params": {"sample_weight": ROWS}, "sample_weight": ROWS}
    amounts = {**sizes, **per_sample, "random_labels": share, "random_state": seed}
    data, again = (vary(ROWS, ROWS, **amounts) for _ in range(2))
    n = len(data.X)
    assert n == N - left
    # the confusion set comes last, of samples that are not in the other part
    assert_array_equal(data.X_fit[:n], data.X)
    assert_array_equal(data.y_fit[:n], data.y)
    assert len(data.X_fit) == n + confusion
    assert len(set(data.X_fit)) == len(data.X_fit)
    # weights belong to their samples
    assert_array_equal(data.sample_weight, data.X)
    assert_array_equal(data.fit_params["sample_weight"], data.X_fit)
    # labels are shuffled within each part, and no more than the share of them
    assert sorted(data.y) == sorted(data.X)
    assert sorted(data.y_fit[n:]) == sorted(data.X_fit[n:])
    assert (data.y != data.X).sum() <= round(share * n)
    assert_array_equal(again.X_fit, data.X_fit)
    assert_array_equal(again.y_fit, data.y_fit)


def test_a_share_of_one_leaves_labels_by_chance_alone():
    drawn = [vary(ROWS, ROWS, random_labels=1.0, random_state=i).y for i in range(200)]
    assert (
        abs((np.array(drawn) == ROWS).sum(axis=1).mean() - 1) < 0.3
    )  # a random permutation keeps one, in the mean


def test_classes_keep_their_shares():
    y = np.repeat(["a", "b"], [30, 10])
    data = vary(ROWS, y, train_size=8, stratify=True)
    assert sorted(data.y) == ["a"] * 6 + ["b"] * 2


@pytest.mark.parametrize("make", [torch.from_numpy, csr_matrix, pd.DataFrame, np.ndarray.tolist])
def test_containers(make):
    arguments = {"train_size": 50, "random_labels": 0.2, "confusion_size": 10}
    expected = vary(X, Y, **arguments)
    found = vary(make(X), Y.tolist() if make is np.ndarray.tolist else Y, **arguments)
    assert type(found.X_fit) is type(make(X))
    rows = found.X_fit.toarray() if make is csr_matrix else np.asarray(found.X_fit)
    assert_array_equal(rows, expected.X_fit)
    assert_array_equal(found.y_fit, expected.y_fit)


VARIED = [
    {"random_labels": 0.5},
    {"train_size": 40, "confusion_size": 30},
    {"train_size": 0.4, "confusion_size": 15, "random_labels": 0.2, "random_state": 3},
]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("amounts", VARIED, ids=str)
def test_a_candidate_on_varied_data_is_trained_and_measured_as_by_hand(amounts, weights):
    per_sample = {} if weights is None else {"sample_weight": weights}
    space = {f"data__{name}": [value] for name, value in amounts.items()}
    search = logistic({"C": [1.0], **space}).fit(X, Y, **per_sample)
    options = {"fit_params": per_sample, "sample_weight": weights, "stratify": True}
    data = vary(X, Y, **amounts, **options)
    fitted = LogisticRegression(max_iter=1000).fit(data.X_fit, data.y_fit, **data.fit_params)
    weights = {"sample_weight": data.sample_weight}
    expected = {
        "train_loss": log_loss(data.y, fitted.predict_proba(data.X), **weights),
        "relative_flatness": relative_flatness(fitted, data.X, data.y, **weights),
        "train_score": fitted.score(data.X, data.y, **weights),
    }
    assert search.minima_.loc[0, list(expected)].to_dict() == pytest.approx(expected)
    assert not set(amounts) - {"random_state"} & search.best_estimator_.get_params().keys()


def net(**parameters):
    settings = {"lr": 0.01, "batch_size": 16, "max_epochs": 2, "callbacks": None}
    return make_net(**{**settings, **parameters})


PERCEPTRON = MLPClassifier(batch_size=10, learning_rate_init=0.1)


@pytest.mark.parametrize(
    ("estimator", "params", "factor", "expected"),
    [
        (net(), {"batch_size": 64}, 4, {"lr": 0.01}),
        (net(), {"batch_size": 8, "lr": 0.1}, 1 / 2, {"lr": 0.1}),
        (net(), {"lr": 0.1}, 1, {}),
        (piped(net()), {"net__batch_size": 32}, 2, {"net__lr": 0.01}),
        (PERCEPTRON, {"batch_size": 5}, 1 / 2, {"learning_rate_init": 0.1}),
        (net(), {"my_batch_size": 32, "batch_size_": 8}, 1, {}),
    ],
)
@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("sqrt", 0.5)])
def test_the_learning_rate_follows_the_batch_size(estimator, params, factor, expected, rule, power):
    scaled = scale_lr(estimator, {**params, "lr_scaling": rule})
    assert scaled == pytest.approx({name: lr * factor**power for name, lr in expected.items()})
    assert scale_lr(estimator, params) == {}


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_scaling_in_a_search():
    space = {"batch_size": [8, 32], "module__init": ["xavier_uniform", "kaiming_normal"]}
    search = make_search(net(), {**space, "lr_scaling": ["linear"]}).fit(X, Y)
    table = search.minima_
    assert_allclose(table["param_scaled_lr"], 0.01 / 16 * table["param_batch_size"])
    assert search.best_estimator_.lr == table["param_scaled_lr"][0]
    assert net().lr == 0.01


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_the_default_of_skorch_is_dropped():
    fitted = make_search(plain_net(), {"lr": [0.05]}, refit=True).fit(X, Y).best_estimator_
    assert fitted.train_split is None
    assert "valid_loss" not in fitted.history[-1]


class Reads(Callback):
    """Reads what is there only with validation data, or never, without a word about it."""

    def __init__(self, name="valid_loss"):
        self.name = name

    def on_epoch_end(self, net, **kwargs):
        return net.history[-1, self.name]


MISSING = "'valid_\\w*' is missing: .*EarlyStopping"


@pytest.mark.parametrize(
    ("callback", "match"),
    [
        (Reads(), MISSING),
        (EarlyStopping(), MISSING),
        (Reads("something else"), "KeyError: .*something else"),
    ],
)
def test_explains_a_callback_that_finds_no_validation_loss(callback, match):
    with pytest.raises(ValueError, match=match):
        make_search(plain_net(callbacks=[callback]), {"lr": [0.05]}).fit(X, Y)


def test_held_out_data_set_has_its_labels_inside():
    net, pairs = make_net(module__n_features=4, module__n_outputs=3), Pairs(X, Y)
    search = make_search(net, {"lr": [0.05]}).fit(pairs, None, pairs)
    assert search.minima_["generalization_gap"].abs().item() < 1e-5

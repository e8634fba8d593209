"""Nets with sample weights are stacked, and train as they do one by one."""

import logging

import numpy as np
import pytest
import torch
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtGradientNorm,
    StopAtLoss,
)
from relflat_sk.fleet._group import Group
from tests.fleet.compare import assert_same, compare, curve, data, own_loop
from tests.fleet.test_trainer import STEPS, BatchNorm, Convolution, Squared, classifiers

SGD = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "optimizer__weight_decay": 0.01}


@pytest.fixture(autouse=True)
def stacked(caplog):
    """Fail if nets are trained one by one."""
    caplog.set_level(logging.INFO, logger="relflat_sk")
    yield
    assert not caplog.get_records("call")


def weights(seed, n=50):
    """Weights of which a third is zero, and that differ widely."""
    rng = np.random.RandomState(seed)
    return rng.choice([0.0, 0.3, 7.0], n) * rng.rand(n)


def weighted(n=3, X=None, y=None):
    """The same data for several nets, with weights of their own; the last one has none."""
    X, y = (X, y) if X is not None else data()
    return [(X, y, None if k == n - 1 else weights(k)) for k in range(n)]


@pytest.mark.parametrize("optimizer", [SGD, {}], ids=["SGD", "Adam"])
@pytest.mark.parametrize(
    "penalty",
    [
        {"flatness_weight": 0},
        {"flatness_weight": 10.0},
        {"flatness_clip": None},
        {"flatness_layer": [1, 0], "module__hidden_layer_sizes": (70, 5)},
        {"flatness_layer": "all", "module__activation": "tanh"},
    ],
    ids=["none", "last layer", "no limit", "earlier layers", "curved"],
)
def test_every_step_is_that_of_a_single_net(penalty, optimizer):
    compare(classifiers(3, **penalty, **optimizer), each=weighted())


@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_batches_without_any_weight(layer):
    """Such a batch has no loss and no penalty: a step without momentum changes nothing."""
    some = np.r_[weights(0, 16), np.zeros(16), weights(1, 18)]
    each = [(*data(), one) for one in (some, some[::-1], weights(2))]
    settings = {"iterator_train__shuffle": False, "flatness_layer": layer}
    nets = compare(classifiers(3, **settings), each=each)
    for name in ("train_loss", "flatness_penalty", "flatness_clipped"):
        assert np.array(curve(nets[0], name))[1::4].tolist() == [0.0] * STEPS["max_epochs"]
    assert min(curve(nets[0], "flatness_penalty")[::4]) > 0


@pytest.mark.parametrize("settings", [{}, {"flatness_layer": 0}, {"flatness_normalize": True}])
def test_a_batch_without_any_weight_leaves_a_single_net_as_it_is(settings):
    nets = classifiers(1, batch_size=25, max_epochs=1, optimizer=torch.optim.SGD, lr=0.1)
    half = nets[0].set_params(iterator_train__shuffle=False, **settings)
    X, y = data()
    with own_loop():
        half.fit(X, y, np.r_[np.ones(25), np.zeros(25)])
        before = {name: one.clone() for name, one in half.module_.state_dict().items()}
        other = half.fit(X[:25], y[:25])
    torch.testing.assert_close(other.module_.state_dict(), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weight", [0, 10.0])
@pytest.mark.parametrize("task", ["numbers", "two classes"])
def test_other_tasks(task, weight):
    X, y = data(n_classes=2)
    make, target = {
        "numbers": (RelativeFlatnessRegularizedRegressor, X[:, :2] ** 2),
        "two classes": (RelativeFlatnessRegularizedBinaryClassifier, y),
    }[task]
    nets = [make(flatness_weight=weight, random_state=seed, **STEPS) for seed in range(3)]
    compare(nets, each=weighted(3, X, target))


@pytest.mark.parametrize(
    "criterion",
    [
        {"criterion__label_smoothing": 0.1},
        {"criterion__weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)},
        {"criterion__reduction": "sum", "lr": 1e-4},
        {"criterion": Squared},
    ],
    ids=["smoothing", "class weights", "sum", "own"],
)
@pytest.mark.filterwarnings("ignore:Squared is no mean of losses of single samples")
def test_any_criterion_that_vmap_takes(criterion):
    compare(classifiers(3, flatness_weight=0, max_epochs=4, **criterion), each=weighted())


def test_networks_that_are_no_chain():
    compare(classifiers(3, module=BatchNorm, max_epochs=4), each=weighted())
    X, y = data(n_features=36)
    nets = classifiers(3, module=Convolution, flatness_weight=10.0, max_epochs=4)
    compare(nets, each=weighted(3, X.reshape(-1, 1, 6, 6), y))


def test_validation_data_that_are_split_off():
    nets = classifiers(3, train_split=ValidSplit(5), max_epochs=3)
    trained = compare(nets, each=weighted())
    assert "valid_loss" in trained[0].history[-1]


@pytest.mark.parametrize("goal", ["loss", "gradient_norm"])
def test_goals_are_checked_in_the_stack(goal, monkeypatch):
    """Both goals are those of the weighted data; with 600 samples, proofs are tried as well."""
    asked, name = [], {"loss": "losses", "gradient_norm": "gradient_norms"}[goal]
    compute = getattr(Group, name)

    def note(group, members, *goals):
        asked.append(len(members))
        return compute(group, members, *goals)

    monkeypatch.setattr(Group, name, note)
    X, _ = data(600)
    y = X[:, :3].argmax(1)
    stop = {"loss": StopAtLoss(0.2), "gradient_norm": StopAtGradientNorm(0.1)}[goal]
    nets = classifiers(3, batch_size=64, max_epochs=30, callbacks=[("stop", stop)])
    trained = compare(nets, each=[(X, y, weights(k, 600)) for k in range(3)])
    assert 3 in asked
    for k, net in enumerate(trained):
        assert net.converged_
        assert 1 < len(net.history) < 30
        if goal == "loss":
            losses = -np.log(net.predict_proba(X)[np.arange(600), y])
            expected = np.average(losses, weights=weights(k, 600))
            found = dict(net.callbacks_)["stop"].loss_
            np.testing.assert_allclose(found, expected, rtol=1e-9)
            assert expected <= 0.2


def test_weights_of_one_change_nothing():
    (plain,) = compare(classifiers(1))
    (ones,) = compare(classifiers(1), each=[(*data(), np.ones(50))])
    assert_same(plain, ones)


def test_networks_of_other_types_have_weights_of_their_own_type():
    net = classifiers(1, module=nn.Linear, module__in_features=6, module__out_features=3)[0]
    X, y = data()
    (trained,) = compare([net], each=[(X.astype(np.float32), y, weights(0))], atol=1e-5)
    assert trained.module_.weight.dtype is torch.float32

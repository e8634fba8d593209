"""Gradient norms of nets that train together are computed near their goals, in one stacked pass."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtGradientNorm,
)
from relflat_sk.fleet import _group
from relflat_sk.training import _convergence
from tests.fleet.compare import data, own_loop

X, _ = data(90)
y = X[:, :3].argmax(1)


class Checks(Callback):
    """Compares the norm that the goal has found with that of the net alone."""

    def on_train_begin(self, net, **kwargs):
        self.found_ = []

    def on_epoch_end(self, net, dataset_train=None, **kwargs):
        goal = next(one for _, one in net.callbacks_ if isinstance(one, StopAtGradientNorm))
        if np.isfinite(goal.gradient_norm_):
            self.found_.append((goal.gradient_norm_, gradient_norm(net, dataset_train)))


gradient_norm = _convergence.gradient_norm


@pytest.fixture
def alone(monkeypatch):
    """Counts the passes over all data of a net alone."""
    found = []

    def note(*args):
        found.append(1)
        return gradient_norm(*args)

    monkeypatch.setattr(_convergence, "gradient_norm", note)
    return found


@pytest.fixture
def together(monkeypatch):
    """Lists the numbers of nets whose gradients are computed together."""
    found, compute = [], _group.Group.gradient_norms

    def note(group, members):
        found.append(len(members))
        return compute(group, members)

    monkeypatch.setattr(_group.Group, "gradient_norms", note)
    return found


class Switching(nn.Sequential):
    """Cannot be written out as a chain, but stacked."""

    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, 9), nn.Tanh(), nn.Linear(9, n_outputs))
        self.double()

    def forward(self, x):
        return super().forward(x)


KINDS = {
    "classes": (RelativeFlatnessRegularizedClassifier, {}, y),
    "no chain": (RelativeFlatnessRegularizedClassifier, {"module": Switching}, y),
    "other batches": (
        RelativeFlatnessRegularizedClassifier,
        {"iterator_valid__batch_size": 50, "flatness_clip": 0.1},
        y,
    ),
    "two outputs": (RelativeFlatnessRegularizedRegressor, {}, X[:, :2] ** 2),
    "labels 0 and 1": (
        RelativeFlatnessRegularizedBinaryClassifier,
        {"iterator_valid__batch_size": -1},
        y > 0,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.0, 10.0])
def test_norms_are_those_of_each_net_alone(kind, weight, alone, together):
    make, settings, target = KINDS[kind]
    nets = [
        make(
            batch_size=32, max_epochs=2, verbose=0, random_state=seed, flatness_weight=weight,
            callbacks=[StopAtGradientNorm(0.05), ("checks", Checks())], **settings,
        )
        for seed in range(3)
    ]  # fmt: skip
    flip = slice(None, None, -1)
    each = [(X, target), (X[flip].copy(), target), (X, target[flip].copy())]
    for net in FleetTrainer(nets, fleet=3).fit_each(each).estimators_:
        found = dict(net.callbacks_)["checks"].found_
        assert len(found) == len(net.history)
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=0, atol=1e-10)
    assert together == [3] * 2
    assert not alone


STOPPING = {
    "all data": {"batch_size": -1, "optimizer__momentum": 0.5},
    "batches": {"batch_size": 10, "optimizer__momentum": 0.0},
    "penalty": {"batch_size": -1, "flatness_weight": 0.01, "flatness_clip": None},
    "random penalty": {"batch_size": -1, "flatness_weight": 1e-7, "flatness_layer": 0},
}


@pytest.mark.parametrize("kind", STOPPING)
def test_nets_stop_where_checks_of_all_epochs_stop_them(kind, monkeypatch, alone):
    """Without noise, gradients fall by the same factor in each epoch, as far as goals are low."""
    checked, compute = [], _group.gradient_norms

    def note(gradients, *args):
        checked.extend([1] * len(gradients[0]))
        return compute(gradients, *args)

    monkeypatch.setattr(_group, "gradient_norms", note)
    some, target = X[:30], X[:30, :2] @ [[1.0], [-1.0]]
    hidden = (3,) if kind == "random penalty" else ()
    nets = [
        RelativeFlatnessRegularizedRegressor(**{
            "module__hidden_layer_sizes": hidden, "module__activation": "identity", "lr": lr,
            "optimizer": torch.optim.SGD, "max_epochs": 60, "random_state": 0,
            "verbose": 0, "flatness_weight": 0.0, "callbacks": [StopAtGradientNorm(tol)],
            **STOPPING[kind],
        })
        for lr, tol in [(0.2, 1e-3), (0.3, 1e-4), (0.1, 1e-2)]
    ]  # fmt: skip
    with own_loop():  # which computes the gradient on all data after each epoch
        singles = [clone(net).fit(some, target) for net in nets]
    n_epochs = sum(len(net.history) for net in singles)
    assert len(alone) == n_epochs
    del alone[:]
    stacked = FleetTrainer(nets, fleet=2).fit(some, target).estimators_
    assert any(net.converged_ for net in stacked)
    assert 0 < len(checked) + len(alone) < n_epochs
    formulas = clone(nets[0]).fit(some, target)
    for one, other in zip([*singles, singles[0]], [*stacked, formulas], strict=True):
        assert one.converged_ == other.converged_
        assert len(one.history) == len(other.history)


class Dropping(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, 9), nn.Dropout(0.3), nn.Linear(9, n_outputs))
        self.double()


def _classifiers(*callbacks, **settings):
    return [
        RelativeFlatnessRegularizedClassifier(
            batch_size=32, max_epochs=2, verbose=0, random_state=seed, flatness_weight=0,
            callbacks=[*callbacks, StopAtGradientNorm(1e-9), ("checks", Checks())], **settings,
        )
        for seed in range(2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "n_alone"),
    [
        ({}, 0),
        ({"module": Dropping}, 4),
        ({"criterion__weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}, 4),
        ({"iterator_train__drop_last": True}, 0),
        ({"iterator_train__drop_last": True, "iterator_valid__num_workers": 0}, 4),
    ],
    ids=["far", "dropout", "class weights", "dropped samples", "own loader"],
)
def test_steps_count_only_if_their_gradients_are_those_of_the_data(
    settings, n_alone, alone, together
):
    trained = FleetTrainer(_classifiers(**settings), fleet=2).fit(X, y).estimators_
    found = [dict(net.callbacks_)["checks"].found_ for net in trained]
    assert len(alone) == n_alone
    stacked = "iterator_train__drop_last" in settings and not n_alone
    assert together == ([2, 2] if stacked else [])
    assert [len(one) for one in found] == ([2, 2] if settings else [0, 0])


class Hooks(Callback):
    """Lets a net train its second epoch by itself."""

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == 2:
            net.module_.register_forward_hook(lambda *args: None)


def test_gradients_of_an_earlier_epoch_do_not_count():
    nets = FleetTrainer(_classifiers(("hooks", Hooks())), fleet=2).fit(X, y).estimators_
    for net in nets:
        found = dict(net.callbacks_)["checks"].found_
        assert len(found) == 1
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=0, atol=1e-10)

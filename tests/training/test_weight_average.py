"""Averages of weights, next to means of the weights that a training went through."""

import copy

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.preprocessing import scale
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedClassifier,
    relative_flatness,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.training import StopAtLoss, WeightAverage

X, y = load_iris(return_X_y=True)
X, y = scale(X).astype("float32"), y.astype("int64")


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.first(x))))


class Record(Callback):
    """The weights after every epoch and step."""

    def on_train_begin(self, net, **kwargs):
        self.epochs, self.steps = [], []

    def on_batch_end(self, net, training=False, **kwargs):
        if training:
            self.steps.append(weights(net))

    def on_epoch_end(self, net, **kwargs):
        self.epochs.append(weights(net))


def weights(net):
    return np.concatenate([p.detach().double().numpy().ravel() for p in net.module_.parameters()])


def make_net(*callbacks, stock=False, **params):
    params = {"max_epochs": 8, "batch_size": 50, "verbose": 0, "lr": 0.03} | params
    callbacks = [(f"callback{i}", callback) for i, callback in enumerate(callbacks)]
    if stock:
        torch.manual_seed(0)
        params = {"criterion": nn.CrossEntropyLoss, "train_split": None} | params
        return NeuralNetClassifier(callbacks=callbacks, **params)
    params = {"random_state": 0} | params
    return RelativeFlatnessRegularizedClassifier(callbacks=callbacks, **params)


@pytest.mark.parametrize("stock", [True, False], ids=["skorch's net", "penalised net"])
@pytest.mark.parametrize(("start", "first"), [(0.5, 4), (0, 0), (6, 6)])
def test_all_epochs_count_alike(stock, start, first):
    net = make_net(WeightAverage(start), Record(), stock=stock, module=Normed).fit(X, y)
    average, record = dict(net.callbacks_)["callback0"], dict(net.callbacks_)["callback1"]
    assert average.n_averaged_ == 8 - first
    assert_allclose(weights(net), np.mean(record.epochs[first:], axis=0), rtol=1e-4, atol=1e-6)


def test_older_steps_count_less():
    net = make_net(WeightAverage(start=2, decay=0.9), Record()).fit(X, y)

    average, record = dict(net.callbacks_)["callback0"], dict(net.callbacks_)["callback1"]
    want, *later = record.steps[6:]  # three steps an epoch
    for step in later:
        want = 0.9 * want + 0.1 * step
    assert average.n_averaged_ == 18
    assert_allclose(weights(net), want, rtol=1e-4, atol=1e-6)


def test_batch_norms_have_the_statistics_of_the_average():
    net = make_net(WeightAverage(), module=Normed, batch_size=-1).fit(X, y)
    module = copy.deepcopy(net.module_).double()
    inputs = module.first(torch.as_tensor(X).double())
    assert_allclose(net.module_.norm.running_mean, inputs.mean(0).detach(), rtol=1e-4, atol=1e-5)
    assert_allclose(net.module_.norm.running_var, inputs.var(0).detach(), rtol=1e-4)
    assert net.module_.norm.momentum == 0.1


def test_flatness_is_that_of_the_average():
    plain, averaged = make_net().fit(X, y), make_net(WeightAverage()).fit(X, y)
    assert averaged.relative_flatness_ == pytest.approx(relative_flatness(averaged, X, y))
    assert averaged.relative_flatness_ != pytest.approx(plain.relative_flatness_, rel=1e-3)
    # the training is the same
    assert averaged.history[-1, "train_loss"] == pytest.approx(plain.history[-1, "train_loss"])


def test_a_fleet_averages_as_each_net_by_itself():
    nets = [make_net(WeightAverage(), random_state=seed) for seed in range(3)]
    nets.append(make_net(WeightAverage(decay=0.8), random_state=3))
    for net, stacked in zip(nets, FleetTrainer(nets, fleet=4).fit(X, y).estimators_, strict=True):
        assert_allclose(weights(stacked), weights(net.fit(X, y)), rtol=1e-3, atol=1e-4)


def test_further_training_begins_at_the_average():
    net = make_net(WeightAverage(start=0, decay=0.5), Record(), max_epochs=2).fit(X, y)
    first = weights(net)
    net.set_params(lr=1e-9).partial_fit(X, y)
    assert_allclose(weights(net), first, atol=1e-5)


def test_a_training_that_ends_before_the_start_keeps_its_weights():
    net = make_net(WeightAverage(start=0.9), StopAtLoss(1.0), Record())
    with pytest.warns(FlatnessWarning, match="start"):
        net.fit(X, y)
    assert len(net.history) < 8
    assert dict(net.callbacks_)["callback0"].n_averaged_ == 0
    assert_allclose(weights(net), dict(net.callbacks_)["callback2"].steps[-1])


@pytest.mark.parametrize(("name", "value"), [("start", 1.5), ("start", "1"), ("decay", 1.0)])
def test_wrong_parameters(name, value):
    with pytest.raises(ValueError, match=name):
        make_net(WeightAverage(**{name: value})).fit(X, y)

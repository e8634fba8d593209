"""A small network is trained with NumPy, and as by autograd in its own loop."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from threadpoolctl import threadpool_info
from torch import nn

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
)
from relflat_sk.fleet._small import SmallStep
from tests.fleet.compare import assert_same, curve, data, own_loop

SETTINGS = {"batch_size": 16, "max_epochs": 4, "lr": 0.05, "random_state": 0, "verbose": 0}
X, CLASSES = data(n_classes=4)
RNG = np.random.default_rng(0)
TASKS = {
    "cross-entropy": (RelativeFlatnessRegularizedClassifier, 4, CLASSES),
    "squared error": (RelativeFlatnessRegularizedRegressor, 2, RNG.normal(size=(50, 2))),
    "logistic": (RelativeFlatnessRegularizedBinaryClassifier, 1, (X[:, 0] > 0).astype(int)),
}


@pytest.fixture
def steps(monkeypatch):
    """A list with an entry for each step of NumPy's."""
    found, call = [], SmallStep.__call__

    def counted(self, *args, **kwargs):
        found.append(call(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(SmallStep, "__call__", counted)
    return found


class Network(nn.Sequential):
    """A chain of layers."""

    def __init__(self, *layers, dtype=torch.float64):
        super().__init__(*layers)
        self.to(dtype)


def network(activation=nn.ReLU, n_outputs=4):
    return [nn.Linear(6, 7), activation(), nn.Linear(7, 5), activation(), nn.Linear(5, n_outputs)]


class Make:
    """Makes the network anew for each net, from a function of no arguments."""

    def __init__(self, layers, **settings):
        self.layers, self.settings = layers, settings

    def __call__(self):
        return Network(*self.layers(), **self.settings)


def assert_same_as_own_loop(net, X, y, sample_weight=None, **tolerance):
    with own_loop():
        own = clone(net).fit(X, y, sample_weight=sample_weight)
    found = clone(net).fit(X, y, sample_weight=sample_weight)
    assert_same(own, found, **tolerance)
    gradients = [[p.grad for p in one.module_.parameters()] for one in (own, found)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("activation", "weight", "clip"),
    [(nn.ReLU, 0.0, 0.5), (nn.ReLU, 1.0, None), (nn.Tanh, 3.0, 0.5), (nn.Sigmoid, 100.0, 0.05)],
    ids=["no penalty", "no limit", "limit", "strict limit"],
)
def test_steps_are_those_of_autograd(task, activation, weight, clip, steps):
    kind, n_outputs, y = TASKS[task]
    layers = Make(lambda: network(activation, n_outputs))
    net = kind(module=layers, flatness_weight=weight, flatness_clip=clip, **SETTINGS)
    net = assert_same_as_own_loop(net, X, y)
    assert len(steps) == 16
    assert (len(steps[0]) == 3) == (weight > 0)
    if (weight, clip) == (100.0, 0.05):
        assert min(curve(net, "flatness_clipped")) == 1  # the limit was at work in each step


@pytest.mark.parametrize("task", TASKS)
def test_samples_with_weights(task, steps):
    kind, n_outputs, y = TASKS[task]
    weights = np.where(np.arange(50) < 20, 0, np.linspace(0, 3, 50))
    settings = SETTINGS | {"iterator_train__shuffle": False}  # the first batch has no weight
    net = kind(module=Make(lambda: network(n_outputs=n_outputs)), flatness_weight=3, **settings)
    assert_same_as_own_loop(net, X, y, sample_weight=weights)
    assert len(steps) == 16
    assert steps[0][:2] == (0, 0)


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(6, 4)],
        lambda: [nn.Tanh(), nn.Linear(6, 4, bias=False)],
        lambda: [nn.Identity(), nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4)],
        lambda: [nn.Sequential(nn.Linear(6, 5)), nn.Flatten(), nn.Sequential(nn.Linear(5, 4))],
    ],
    ids=["one layer", "one layer behind an activation", "no bias", "nested"],
)
def test_chains_of_all_kinds(layers, steps):
    net = RelativeFlatnessRegularizedClassifier(module=Make(layers), **SETTINGS)
    assert_same_as_own_loop(net, X, CLASSES)
    assert len(steps) == 16


def test_images_are_flattened(steps):
    layers = Make(lambda: [nn.ReLU(), nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)])
    net = RelativeFlatnessRegularizedClassifier(module=layers, **SETTINGS)
    assert_same_as_own_loop(net, X.reshape(50, 1, 2, 3), CLASSES)
    assert len(steps) == 16


def test_a_batch_of_a_single_sample(steps):
    settings = SETTINGS | {"batch_size": 7}
    net = RelativeFlatnessRegularizedClassifier(module=Make(network), **settings)
    assert_same_as_own_loop(net, X, CLASSES)
    assert len(steps) == 32  # 50 samples in batches of 7: the last one has one


def test_float32(steps):
    layers = Make(network, dtype=torch.float32)
    net = RelativeFlatnessRegularizedClassifier(module=layers, **SETTINGS)
    assert_same_as_own_loop(net, X.astype(np.float32), CLASSES, atol=1e-4)
    assert len(steps) == 16


@pytest.mark.filterwarnings("ignore")  # of dead and diverged networks
@pytest.mark.parametrize("factor", [1e-30, 1e30, np.inf, np.nan], ids=str)
def test_extreme_weights_give_what_autograd_gives(factor, steps):
    def layers():
        made = network()
        with torch.no_grad():
            made[-1].weight.mul_(factor)
        return made

    settings = SETTINGS | {"max_epochs": 1}
    net = RelativeFlatnessRegularizedClassifier(module=Make(layers), **settings)
    with own_loop():
        own = clone(net).fit(X, CLASSES)
    found = clone(net).fit(X, CLASSES)
    np.testing.assert_allclose(curve(found), curve(own), equal_nan=True)
    assert len(steps) == 4


@pytest.mark.parametrize(
    "layers",
    [
        lambda: [nn.Linear(6, 2000), nn.ReLU(), nn.Linear(2000, 200), nn.Linear(200, 4)],
        lambda: [nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 4)],
        lambda: [nn.Linear(6, 5), nn.Dropout(), nn.Linear(5, 4)],
        lambda: [nn.Linear(6, 5000), nn.ReLU(), nn.Linear(5000, 4)],
    ],
    ids=["large", "GELU", "dropout", "wide last layer"],
)
def test_other_networks_are_left_to_torch(layers, steps):
    settings = SETTINGS | {"max_epochs": 1}
    RelativeFlatnessRegularizedClassifier(module=Make(layers), **settings).fit(X, CLASSES)
    assert not steps


@pytest.mark.usefixtures("two_threads")
def test_threads_are_given_back_after_an_exception(monkeypatch):
    before = [(one["filepath"], one["num_threads"]) for one in threadpool_info()]

    def fail(self, *args, **kwargs):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(SmallStep, "__call__", fail)
    net = RelativeFlatnessRegularizedClassifier(module=Make(network), **SETTINGS)
    with pytest.raises(RuntimeError, match="in the middle"), np.errstate(divide="raise"):
        net.fit(X, CLASSES)
    assert [(one["filepath"], one["num_threads"]) for one in threadpool_info()] == before
    assert np.geterr()["divide"] == "warn"

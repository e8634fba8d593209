"""A net that is fitted by itself takes written-out gradients where they are known."""

import copy
import gc
import pickle
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from joblib import Parallel, delayed
from sklearn.base import clone
from threadpoolctl import threadpool_info
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from relflat_sk import StopAtLoss, WeightAverage, fleet_training
from relflat_sk._engine import epoch
from relflat_sk._engine.step import Step
from tests.engine.compare import AtEpoch, assert_same, compare, curve, data, own_loop
from tests.training.common import Binary, Classifier, Regressor, make


@pytest.fixture
def steps(monkeypatch):
    """A list with the kind of arrays of each step by formulas."""
    found, call = [], Step.__call__

    def counted(self, batch, settings):
        found.append(type(batch.inputs))
        return call(self, batch, settings)

    monkeypatch.setattr(Step, "__call__", counted)
    return found


def classifier(**arguments):
    settings = {"batch_size": 16, "max_epochs": 4, "random_state": 0, "verbose": 0}
    return Classifier(**(settings | arguments))


def network(layers, dtype=torch.float64):
    return nn.Sequential(*layers()).to(dtype)


def by_own_loop(net, *args):
    with own_loop():
        return clone(net).fit(*args)


def assert_same_by_both(net, *args, **kwargs):
    """Fit a net in both ways and compare them."""
    args = args or data()
    found, own = clone(net).fit(*args), by_own_loop(net, *args)
    assert_same(own, found, **kwargs)
    gradients = [[p.grad for p in net.module_.parameters()] for net in (own, found)]
    torch.testing.assert_close(*gradients)  # of the last step


# what the chains of `test_any_engine` do not have, or seldom
CHAINS = {
    "nested": lambda: [nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Identity(), nn.Linear(5, 3)],
    "activation first": lambda: [nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)],
    "flat already": lambda: [nn.Linear(6, 4), nn.Flatten(), nn.SiLU(), nn.Linear(4, 3)],
    "dropout of nothing": lambda: [nn.Linear(6, 4), nn.Dropout(0.0), nn.Linear(4, 3)],
    "images": lambda: [nn.ReLU(), nn.Flatten(), nn.Linear(6, 4), nn.SiLU(), nn.Linear(4, 3)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_of_all_kinds(name, steps):
    X, y = data()
    X = X.reshape(-1, 1, 2, 3) if name == "images" else X
    assert_same_by_both(classifier(module=partial(network, CHAINS[name])), X, y)
    assert steps == [np.ndarray] * 16


def wide(n_outputs, activation):
    layers = [nn.Linear(100, 70), activation(), nn.Linear(70, 5), activation()]
    return nn.Sequential(*layers, nn.Dropout(0.0), nn.Linear(5, n_outputs)).double()


@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
@pytest.mark.parametrize("layer", [0, 1, [1, 0], "all"])
@pytest.mark.parametrize("kind", [Classifier, Binary, Regressor])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.LeakyReLU])
def test_penalties_at_earlier_layers(kind, layer, activation, steps):
    X, y = data(220, n_classes=2, n_features=100)
    # the signs of the last batch, which are fewer, come from two blocks of the stream
    params = {"flatness_layer": layer, "flatness_weight": 1.0, "flatness_probes": 5}
    params |= {"batch_size": 70, "max_epochs": 2}
    module = partial(wide, 1 + (kind is Classifier), activation)
    nets = [make(kind, module=module, lr=lr, **params) for lr in (0.001, 0.01)]
    compare(nets, X=X, y=y if kind is Classifier else y.astype(float))
    assert steps == [np.ndarray] * 16  # of the stack, and of one net


def test_float32_and_large_layers(steps):
    module = partial(network, lambda: [nn.Linear(6, 3)], dtype=torch.float32)
    assert_same_by_both(classifier(module=module), atol=1e-4)
    X = np.random.default_rng(0).normal(size=(32, 4096))
    module = partial(network, lambda: [nn.Linear(4096, 80), nn.ReLU(), nn.Linear(80, 3)])
    net = classifier(module=module, batch_size=16, max_epochs=1, lr=1e-4)
    assert_same_by_both(net, X, np.arange(32) % 3, atol=1e-7)
    assert steps == [np.ndarray] * 16 + [torch.Tensor] * 2


@pytest.mark.filterwarnings("ignore::relflat_sk.exceptions.FlatnessWarning")
@pytest.mark.parametrize("factor", [1e-30, 1e30, np.inf, np.nan], ids=str)
def test_extreme_weights_give_what_autograd_gives(factor, steps):
    def extreme():
        net = network(lambda: [nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)])
        net[2].weight.data.mul_(factor)
        return net

    net = classifier(module=extreme, max_epochs=1, batch_size=50, optimizer=torch.optim.SGD)
    found, own = clone(net).fit(*data()), by_own_loop(net, *data())
    np.testing.assert_allclose(curve(found), curve(own), rtol=1e-6)
    assert steps == [np.ndarray]


# -- what needs the net's own loop, see also `REASONS` in tests/fleet/test_trainer.py ---------


def test_hooks_of_all_modules_and_of_the_optimizer_are_called(steps):
    calls = []
    with nn.modules.module.register_module_forward_hook(lambda *args: calls.append("module")):
        classifier().fit(*data())
    assert calls
    assert not steps

    def hooked(parameters, **arguments):
        optimizer = torch.optim.Adam(parameters, **arguments)
        optimizer.register_step_post_hook(lambda *args: calls.append("after"))
        return optimizer

    with register_optimizer_step_pre_hook(lambda *args: calls.append("before")):
        classifier(optimizer=hooked).fit(*data())
    assert calls.count("before") == calls.count("after") == 16


def test_mixed_precision_is_left_to_the_nets_loop(steps):
    X, y = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        classifier().fit(X.astype(np.float32), y)
    assert not steps


# -- what callbacks may do -------------------------------------------------------------------


def _replace(net):
    for parameter in net.module_.parameters():
        parameter.data = 0.5 * parameter.data


def _replace_the_module(net):
    net._initialize_module(reason="a new start")
    net._initialize_optimizer(reason="of its parameters")


def _clip(net):
    for parameter in net.module_.parameters():
        parameter.data.clamp_(-0.1, 0.1)


CHANGES = {
    "replace": _replace,
    "replace the module": _replace_the_module,
    "clip": _clip,
    "freeze": lambda net: net.module_[0].requires_grad_(False),
    "penalise more": lambda net: setattr(net, "flatness_weight", 3.0),
    "penalise nothing": lambda net: setattr(net, "flatness_weight", 0.0),
    "penalise the first": lambda net: setattr(net, "flatness_layer", 0),
    "a new optimizer": lambda net: net._initialize_optimizer(reason="a new learning rate"),
    "faster": lambda net: net.optimizer_.param_groups[0].update(lr=0.05),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_callback_may_change_the_net(change):
    callbacks = [AtEpoch(3, lambda net, _: CHANGES[change](net)), StopAtLoss(0.9)]
    compare([classifier(callbacks=callbacks, random_state=seed) for seed in range(2)])


def test_nets_are_trained_further():
    X, y = data()
    with own_loop():
        own = classifier().fit(X, y).partial_fit(X, y)
        warm = classifier(warm_start=True).fit(X, y).fit(X[:40], y[:40])
    assert_same(own, classifier().fit(X, y).partial_fit(X, y))
    assert_same(warm, classifier(warm_start=True).fit(X, y).fit(X[:40], y[:40]))


def test_nets_whose_penalties_rest_in_different_steps_are_trained_further_together():
    X, y = data()
    nets = [classifier(flatness_every=3, max_epochs=n).fit(X, y) for n in (1, 2)]
    with own_loop():
        own = [copy.deepcopy(net).partial_fit(X, y) for net in nets]
    with fleet_training(2):
        together = Parallel()(delayed(net.partial_fit)(X, y) for net in nets)
    for one, other in zip(own, together, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("start", [0, 1.0])
@pytest.mark.filterwarnings("ignore:WeightAverage")
def test_no_data_are_held_after_training(start):
    X, y = data()
    net = classifier(train_split=None, callbacks=[("average", WeightAverage(start))])
    rows = torch.from_numpy(X)
    known = weakref.ref(rows)
    net.fit(rows, y)
    assert len(pickle.dumps(net)) < 1.01 * len(pickle.dumps(by_own_loop(net, X, y)))
    del rows
    gc.collect()
    assert known() is None


def test_an_interrupted_epoch_leaves_a_net_that_can_go_on(monkeypatch):
    net, call, made = classifier(max_epochs=3), Step.__call__, []

    def step(self, *args):
        made.append(1)
        if len(made) == 6:
            assert {library["num_threads"] for library in _blas()} <= {1}
            raise KeyboardInterrupt
        return call(self, *args)

    threads = _blas()
    with monkeypatch.context() as patch:
        patch.setattr(Step, "__call__", step)
        net.fit(*data())
    assert len(made) == 6
    assert _blas() == threads
    whole = classifier(max_epochs=1).fit(*data())
    assert not torch.equal(net.module_.output.weight, whole.module_.output.weight)
    net.partial_fit(*data())
    assert np.isfinite(curve(net)).all()
    assert net.relative_flatness_ > 0


def _blas():
    return [one for one in threadpool_info() if one["user_api"] == "blas"]


def test_data_are_converted_batch_by_batch(monkeypatch):
    """No copy of all data is made, of which networks of another dtype need one."""
    sizes, cast = [], epoch.cast_inputs
    monkeypatch.setattr(epoch, "_NUMBERS", 100)
    note = lambda x, *args: sizes.append(x.numel()) or cast(x, *args)  # noqa: E731
    monkeypatch.setattr(epoch, "cast_inputs", note)
    X, y = data()
    single = {"module": nn.Linear, "module__in_features": 6, "module__out_features": 3}
    found = classifier(**single).fit(X, y)  # from float64 to float32
    assert max(sizes) == 16 * 6
    assert_same(by_own_loop(classifier(**single), X, y), found, atol=1e-4)

"""A net that is fitted by itself trains by formulas, and as by autograd in its own loop."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch.callbacks import Callback, Freezer, PassthroughScoring
from torch import nn
from torch.utils.data import TensorDataset

from relflat_sk import (
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    StopAtLoss,
)
from relflat_sk.fleet._single import Single
from tests.fleet.compare import assert_same, compare, curve, data, own_loop


@pytest.fixture
def epochs(monkeypatch):
    """A list with an entry for each epoch: whether it was trained by formulas."""
    found, train = [], Single.train_epoch

    def train_epoch(self, *args):
        found.append(train(self, *args))
        return found[-1]

    monkeypatch.setattr(Single, "train_epoch", train_epoch)
    return found


def classifier(**arguments):
    return RelativeFlatnessRegularizedClassifier(**{
        "batch_size": 16,
        "max_epochs": 4,
        "random_state": 0,
        "verbose": 0,
        **arguments,
    })


def by_own_loop(net, *args):
    with own_loop():
        return clone(net).fit(*args)


def assert_same_by_both(net, *args):
    """Fit a net in both ways, compare them, and return the one that took the formulas."""
    found = clone(net).fit(*args or data())
    assert_same(by_own_loop(net, *args or data()), found)
    return found


@pytest.mark.parametrize("layer", [-1, 0, "all"])
def test_formulas_take_the_place_of_autograd(layer, epochs):
    net = assert_same_by_both(classifier(flatness_layer=layer))
    assert epochs == [True] * 4
    own = by_own_loop(net, *data())
    for one, other in zip(own.module_.parameters(), net.module_.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)  # of the last step


def test_weight_decay_of_adam_may_be_decoupled(epochs):
    adam = {"optimizer__weight_decay": 0.1, "optimizer__decoupled_weight_decay": True}
    try:
        torch.optim.Adam([torch.zeros(1)], decoupled_weight_decay=True)
    except TypeError:
        pytest.skip("this version of torch has AdamW only")
    assert_same_by_both(classifier(optimizer=torch.optim.Adam, **adam))
    assert epochs[:4] == [True] * 4


class Tied(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        layer = nn.Linear(n_features, n_features)
        super().__init__(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(n_features, n_outputs))
        self.double()


class Hooked(nn.Sequential):
    """A network whose first layer doubles its output, or does something else of its own."""

    def __init__(self, n_features, n_outputs, kind="module"):
        super().__init__(nn.Linear(n_features, 5), nn.ReLU(), nn.Linear(5, n_outputs))
        self.double()
        first = self[0]
        if kind == "module":
            first.register_forward_hook(_double)
        elif kind == "parameter":
            first.weight.register_hook(_doubled)
        elif kind == "forward":
            first.forward = _Doubled(first)


class Half(Hooked):
    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs, kind="none")
        self.bfloat16()


def _double(module, inputs, output):
    return 2 * output


def _doubled(gradient):
    return 2 * gradient


class _Doubled:
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return 2 * nn.functional.linear(x, self.layer.weight, self.layer.bias)


@pytest.mark.parametrize(
    "settings",
    [
        {"module": Tied},
        {"module": Hooked},
        {"module": Hooked, "module__kind": "parameter"},
        {"module": Hooked, "module__kind": "forward"},
        {"callbacks": [("batches", PassthroughScoring("train_loss", on_train=True))]},
    ],
    ids=["shared layer", "hook", "hook of a parameter", "own forward", "callback of batches"],
)
def test_what_formulas_do_not_know_is_left_to_the_nets_loop(settings, epochs):
    net = classifier(**settings)
    assert_same_by_both(net)
    assert not any(epochs[:4]) or "callbacks" in settings


def test_hooks_of_all_modules_and_of_the_optimizer_are_called(epochs):
    seen = []
    with nn.modules.module.register_module_forward_hook(lambda *args: seen.append(1)):
        classifier().fit(*data())
    assert seen
    assert epochs == [False] * 4

    class Counted(torch.optim.Adam):
        pass

    def hooked(parameters, **arguments):
        optimizer = torch.optim.Adam(parameters, **arguments)
        optimizer.register_step_post_hook(lambda *args: seen.append(2))
        return optimizer

    classifier(optimizer=hooked).fit(*data())
    assert seen.count(2) == 16


def test_mixed_precision_and_half_precision_are_left_to_the_nets_loop(epochs):
    X, y = data()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        classifier().fit(X.astype(np.float32), y)
    classifier(module=Half).fit(X.astype(np.float32), y)
    assert epochs == [False] * 8


class Changes(Callback):
    """Change a net in the middle of its training."""

    def __init__(self, change):
        self.change = change

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == 2:
            self.change(net)


def _replace(net):
    for parameter in net.module_.parameters():
        parameter.data = 0.5 * parameter.data


def _replace_the_module(net):
    net._initialize_module(reason="a new start")
    net._initialize_optimizer(reason="of its parameters")


def _clip(net):
    for parameter in net.module_.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def _halve(net):
    with torch.no_grad():
        for parameter in net.module_.parameters():
            parameter.mul_(0.5)


def _freeze(net):
    net.module_[0].requires_grad_(False)


def _penalise_more(net):
    net.flatness_weight = 3.0


def _penalise_nothing(net):
    net.flatness_weight = 0.0


def _penalise_the_first(net):
    net.flatness_layer = 0


def _new_optimizer(net):
    net._initialize_optimizer(reason="a new learning rate")


def _faster(net):
    net.optimizer_.param_groups[0]["lr"] = 0.05


@pytest.mark.parametrize(
    "change",
    [
        _replace,
        _replace_the_module,
        _clip,
        _halve,
        _freeze,
        _penalise_more,
        _penalise_nothing,
        _penalise_the_first,
        _new_optimizer,
        _faster,
    ],
)
def test_a_callback_may_change_the_net(change):
    callbacks = [("change", Changes(change)), StopAtLoss(0.9)]
    compare([classifier(callbacks=callbacks, random_state=seed) for seed in range(2)])


def test_layers_may_be_frozen():
    net = assert_same_by_both(classifier(callbacks=[Freezer("hidden*")]))
    assert not net.module_.hidden0.weight.requires_grad


def test_nets_are_trained_further():
    X, y = data()
    with own_loop():
        own = classifier().fit(X, y).partial_fit(X, y)
    assert_same(own, classifier().fit(X, y).partial_fit(X, y))
    with own_loop():
        own = classifier(warm_start=True).fit(X, y).fit(X[:40], y[:40])
    assert_same(own, classifier(warm_start=True).fit(X, y).fit(X[:40], y[:40]))


def test_goals_are_reached_in_the_same_epoch():
    net = classifier(max_epochs=300, lr=0.03, flatness_weight=0, callbacks=[StopAtLoss(0.05)])
    found = assert_same_by_both(net)
    assert len(found.history) < 300


class Copies(Callback):
    """Copy the net in each epoch, as `Checkpoint` does."""

    def on_epoch_end(self, net, **kwargs):
        self.copy_ = self.pickled_ = None  # copies hold no copies
        self.copy_, self.pickled_ = copy.deepcopy(net), pickle.loads(pickle.dumps(net))


def test_copies_in_training_have_weights_of_their_own():
    net = classifier(callbacks=[("copies", Copies())]).fit(*data())
    copies = dict(net.callbacks_)["copies"]
    for other in (copies.copy_, copies.pickled_):
        torch.testing.assert_close(other.module_.state_dict(), net.module_.state_dict())
        before = copy.deepcopy(net.module_.state_dict())
        other.partial_fit(*data(), epochs=1)
        torch.testing.assert_close(before, net.module_.state_dict(), rtol=0, atol=0)


def test_no_data_are_held_after_training():
    X, y = data()
    net = classifier(train_split=None)
    rows = torch.from_numpy(X)
    known = weakref.ref(rows)
    net.fit(rows, y)
    assert len(pickle.dumps(net)) < 1.01 * len(pickle.dumps(by_own_loop(net, X, y)))
    held = dict(vars(net)["_single_trainer"]._groups)
    assert all(group._stack is None and group._data is None for group in held.values())
    del rows
    gc.collect()
    assert known() is None or not held


def test_an_interrupted_epoch_leaves_a_net_that_can_go_on(monkeypatch):
    from relflat_sk.fleet._updates import Update

    net, steps, made = classifier(max_epochs=3), Update.step, []

    def step(self):
        made.append(1)
        if len(made) == 6:
            raise KeyboardInterrupt
        steps(self)

    monkeypatch.setattr(Update, "step", step)
    net.fit(*data())
    monkeypatch.undo()
    assert len(made) == 6
    interrupted = copy.deepcopy(net.module_.state_dict())
    with own_loop():
        whole = classifier(max_epochs=1).fit(*data())
    assert not torch.equal(interrupted["output.weight"], whole.module_.output.weight)
    net.partial_fit(*data())
    assert np.isfinite(curve(net)).all()
    assert net.relative_flatness_ > 0


def test_large_data_are_not_copied(monkeypatch, epochs):
    X, y = data()
    monkeypatch.setattr("relflat_sk.fleet._single._LARGE", X.size * 4 - 1)
    single = {"module": nn.Linear, "module__in_features": 6, "module__out_features": 3}
    classifier(**single).fit(X, y)  # from float64 to float32
    assert epochs == [False] * 4
    classifier(**single).fit(X.astype(np.float32), y)
    assert epochs[4:] == [True] * 4


def test_labels_are_checked_as_in_the_nets_loop():
    X, y = data()
    net = RelativeFlatnessRegularizedNet(
        nn.Linear(6, 3).double(), criterion=nn.CrossEntropyLoss, max_epochs=1, verbose=0
    )
    messages = []
    for fit in (net.fit, lambda *args: by_own_loop(net, *args)):
        with pytest.raises(ValueError, match="5") as error:
            fit(TensorDataset(torch.from_numpy(X), torch.from_numpy(y + 3)), None)
        messages.append(str(error.value))
    assert messages[0] == messages[1]

"""Nets whose class replaces parts of skorch's training step: penalty, history and measures."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.utils import to_tensor
from torch import nn
from torch.nn import functional as F

from relflat_sk import StopAtLoss, relative_flatness
from relflat_sk.exceptions import FlatnessWarning
from tests import oracles
from tests.training.common import INDEX, NAMES, Classifier, Double, X, make, same, weights_of

FLOAT32 = 1e-5
SGD = {"optimizer": torch.optim.SGD, "lr": 0.1, "module": Double}
# one step of no length, whose history has the terms of the initial network
AT_START = {"optimizer": torch.optim.SGD, "lr": 1e-30, "module": Double, "max_epochs": 1,
            "batch_size": -1, "flatness_clip": None, "flatness_weight": 1.0}  # fmt: skip
X64, Y = torch.tensor(X).double(), torch.tensor(INDEX)


def focal(z, y):
    log_p = torch.log_softmax(z, 1).gather(1, y[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def robust(z, y):
    p = torch.softmax(z, 1).gather(1, y[:, None])
    return ((1 - p**0.7) / 0.7).mean()


def own_loss(function, base=Classifier):
    """A class of nets whose get_loss is a function, which it computes without super()."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        return function(y_pred, y_true)

    return type("OwnLoss", (base,), {"get_loss": get_loss})


def around(change, base=Classifier):
    """A class of nets whose get_loss changes what super() returns."""

    def get_loss(self, *args, **kwargs):
        return change(self, base.get_loss(self, *args, **kwargs))

    return type("Around", (base,), {"get_loss": get_loss})


def decay(net):
    return 0.3 * sum(p.square().sum() for p in net.module_.parameters())


@pytest.mark.filterwarnings("ignore:relative_flatness at layer")  # of a loss that is not convex
@pytest.mark.parametrize("function", [focal, robust])
@pytest.mark.parametrize("layer", ["output", "hidden0"])
def test_the_penalty_is_that_of_the_loss_that_get_loss_returns(function, layer):
    kind = own_loss(function)
    net = make(kind, **AT_START, flatness_layer=layer, flatness_probes=1500).fit(X, NAMES)
    expected = oracles.penalty(net.module_, layer, function, X64, Y)
    assert net.history[-1, "flatness_penalty"] == pytest.approx(expected, rel=0.1)
    assert net.history[-1, "train_loss"] == pytest.approx(function(net.module_(X64), Y).item())


def test_two_losses_of_a_batch_are_penalised_together():
    class Mixed(Classifier):
        def get_loss(self, y_pred, y_true, *args, **kwargs):
            first = super().get_loss(y_pred, y_true, *args, **kwargs)
            return 0.3 * first + 0.7 * super().get_loss(y_pred, y_true.flip(0), *args, **kwargs)

    def loss(z, y):
        return 0.3 * F.cross_entropy(z, y) + 0.7 * F.cross_entropy(z, y.flip(0))

    net = make(Mixed, **AT_START, flatness_probes=1500)
    with pytest.warns(FlatnessWarning, match="no mean of losses of single samples"):
        net.fit(X, NAMES)
    expected = oracles.penalty(net.module_, "output", loss, X64, Y)
    assert net.history[-1, "flatness_penalty"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize(
    "kind",
    [own_loss(lambda z, y: F.cross_entropy(z, y) / 4), around(lambda net, loss: loss / 4)],
    ids=["without super", "with super"],
)
def test_a_loss_that_is_divided_is_penalised_as_much(kind, layer, clip):
    params = {**SGD, "flatness_clip": clip, "flatness_layer": layer, "flatness_weight": 1.0}
    plain = make(**params).fit(X, NAMES)
    net = make(kind, **{**params, "lr": 0.4}).fit(X, NAMES)
    same(net, plain, rtol=1e-5, atol=1e-7)
    for name in ("train_loss", "flatness_penalty"):
        assert net.history[:, name] == pytest.approx(plain.history[:, name], rel=1e-5)


def infer_alone(self, x, **fit_params):
    return self.module_(to_tensor(x, device=self.device))


def infer_around(self, x, **fit_params):
    return Classifier.infer(self, x, **fit_params)


CLIPLESS = {"optimizer": torch.optim.SGD, "lr": 0.1, "flatness_weight": 3.0, "flatness_clip": None}


@pytest.mark.parametrize("infer", [infer_alone, infer_around])
@pytest.mark.parametrize("module", [None, nn.Linear(4, 3)], ids=["layers", "one layer"])
def test_an_infer_of_the_user_s_own_keeps_the_penalty(infer, module):
    params = CLIPLESS if module is None else {"module": module, **CLIPLESS}
    net, plain = make(type("Own", (Classifier,), {"infer": infer}), **params), make(**params)
    same(net.fit(X, NAMES), plain.fit(X, NAMES), rtol=FLOAT32, atol=FLOAT32)
    without = make(**{**params, "flatness_weight": 0.0}).fit(X, NAMES)
    assert (weights_of(net) - weights_of(without)).abs().max() > 1e-4


class Mixin:
    def get_loss(self, y_pred, y_true, X=None, training=False):
        return F.cross_entropy(y_pred, y_true)


class Mixed(Mixin, Classifier):
    pass


def test_a_mixin_before_the_net_and_a_class_of_such_a_class_keep_it():
    plain = make(**SGD, flatness_weight=1.0).fit(X, NAMES)
    for kind, lr in ((Mixed, 0.1), (around(lambda net, loss: loss / 2, Mixed), 0.2)):
        net = make(kind, **{**SGD, "lr": lr}, flatness_weight=1.0).fit(X, NAMES)
        same(net, plain, rtol=1e-5, atol=1e-7)


# measures know one tensor of the output
@pytest.mark.filterwarnings("ignore:relative_flatness_ could not be measured")
def test_a_part_of_the_output_and_a_term_of_the_rest():
    class Coded(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.output = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()

        def forward(self, x):
            code = self.code(x)
            return self.output(code), code

    class Regularised(Classifier):
        def get_loss(self, y_pred, y_true, *args, **kwargs):
            logits, code = y_pred
            return super().get_loss(logits, y_true, *args, **kwargs) + code.square().mean()

    net = make(Regularised, **{**AT_START, "module": Coded}).fit(X, NAMES)
    logits, code = net.module_(X64)
    chained = nn.Sequential(net.module_.code, net.module_.output)
    expected = oracles.penalty(chained, "1", F.cross_entropy, X64, Y)
    assert net.history[-1, "flatness_penalty"] == pytest.approx(expected, rel=1e-6)
    loss = F.cross_entropy(logits, Y) + code.square().mean()
    assert net.history[-1, "train_loss"] == pytest.approx(loss.item(), rel=1e-6)


def step_alone(self, batch, **fit_params):
    self._set_training(True)
    inputs, target = batch
    y_pred = self.module_(to_tensor(inputs, device=self.device))
    loss = F.cross_entropy(y_pred, target)
    loss.backward()
    return {"loss": loss, "y_pred": y_pred}


def step_of_half(self, batch, **fit_params):
    self._set_training(True)
    y_pred = self.infer(batch[0])
    loss = self.criterion_(y_pred, batch[1])
    loss.backward()
    return {"loss": loss, "y_pred": y_pred}


def whole_step(self, batch, **fit_params):
    self.optimizer_.zero_grad()
    step = step_alone(self, batch)
    self.optimizer_.step()
    return step


def epoch(self, iterator, training, prefix, step_fn, **fit_params):
    for batch in iterator if training else ():
        self.history.record_batch("train_loss", whole_step(self, batch)["loss"].item())


UNPENALISED = {
    "train_step_single": {"train_step_single": step_alone},
    "get_loss is not called": {"train_step_single": step_of_half},
    "train_step": {"train_step": whole_step},
    "on_epoch_end as well": {
        "train_step": whole_step,
        "on_epoch_end": lambda self, *args, **kwargs: None,
    },
}


@pytest.mark.parametrize("changed", UNPENALISED)
def test_steps_that_compute_no_penalty_are_said_unless_its_weight_is_0(changed):
    kind = type("Own", (Classifier,), UNPENALISED[changed])
    make(kind, flatness_weight=0.0).fit(X, NAMES)  # warnings are errors
    with pytest.warns(FlatnessWarning, match="flatness_weight=100.0 had no effect") as caught:
        make(kind, flatness_weight=100.0).fit(X, NAMES)
    assert len(caught) == 1


class Consistent(Classifier):
    """Runs the network once more in its loss; without dropout, the output is the same."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = F.cross_entropy(y_pred, y_true)
        return loss + F.mse_loss(self.infer(X), y_pred) if training else loss


def test_a_pass_within_the_loss_is_not_penalised():
    """Without dropout, both passes have the same output."""
    by_hand = own_loss(lambda z, y: F.cross_entropy(z, y) + F.mse_loss(z.detach(), z))
    expected, net = (make(kind, **AT_START).fit(X, NAMES) for kind in (by_hand, Consistent))
    for column in ("flatness_penalty", "train_loss"):
        assert net.history[:, column] == pytest.approx(expected.history[:, column], rel=1e-6)


def warns_of_weights(change):
    """Expect a warning of a norm of the weights, which no curvature counts."""
    decays = "decay" in change.__code__.co_names
    what = "the get_loss of Around reads weights"
    return pytest.warns(FlatnessWarning, match=what) if decays else nullcontext()


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda net, loss: loss + decay(net),
        lambda net, loss: (loss + decay(net)) / 4,
        lambda net, loss: loss / 4,
    ],
    ids=["decay", "decay, divided", "divided"],
)
def test_the_history_has_the_loss_that_is_measured(change, weight):
    stop = StopAtLoss(1e-9)
    params = {**AT_START, "flatness_weight": weight, "callbacks": [stop]}
    with pytest.warns(match="has not reached a training loss"), warns_of_weights(change):
        net = make(around(change), **params).fit(X, NAMES)
    loss = 4 * change(net, F.cross_entropy(net.module_(X64), Y)).item()
    if "decay" in change.__code__.co_names and change(net, torch.zeros(())) == decay(net):
        loss /= 4
    assert net.history[-1, "train_loss"] == pytest.approx(loss, rel=1e-6)
    assert stop.loss_ == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [lambda net, loss: 3 * loss, lambda net, loss: (loss + decay(net)) / 4],
    ids=["multiplied", "decay, divided"],
)
@pytest.mark.parametrize("base", [Classifier, NeuralNetClassifier])
@pytest.mark.parametrize("layer", ["output", "hidden0"])
def test_a_factor_of_the_loss_changes_no_measure(base, change, layer):
    params = {"criterion": nn.CrossEntropyLoss, "module": Double, "max_epochs": 2, "verbose": 0}
    if base is NeuralNetClassifier:
        params |= {"train_split": None, "module__n_features": 4, "module__n_outputs": 3}
    with warns_of_weights(change):
        net = around(change, base)(**params).fit(X64.numpy(), INDEX)
        measured = relative_flatness(net, X64.numpy(), INDEX, layer=layer)
    expected = oracles.relative_flatness(net.module_, layer, F.cross_entropy, X64, Y)
    assert measured == pytest.approx(expected, rel=1e-6 if layer == "output" else 0.02)


@pytest.mark.filterwarnings("ignore:relative_flatness at layer")  # of a loss that is not convex
@pytest.mark.parametrize("function", [focal, robust, lambda z, y: F.cross_entropy(z, y) * 3])
@pytest.mark.parametrize("rows", [slice(None), INDEX == 1], ids=["all classes", "one class"])
def test_a_loss_without_super_is_measured_without_its_factor(function, rows):
    net = make(own_loss(function), module=Double, flatness_weight=0.0).fit(X64.numpy(), INDEX)
    factor = 3 if function(X64[:, :3], Y) == 3 * F.cross_entropy(X64[:, :3], Y) else 1
    expected = oracles.relative_flatness(net.module_, "output", function, X64[rows], Y[rows])
    measured = relative_flatness(net, X64.numpy()[rows], INDEX[rows])
    assert measured == pytest.approx(expected / factor, rel=1e-6)


class WithWeights(NeuralNetClassifier):
    """skorch's recipe for sample weights: they are in X."""

    def get_loss(self, y_pred, y_true, X=None, *args, **kwargs):
        losses = super().get_loss(y_pred, y_true, X, *args, **kwargs)
        return (X["weight"] * losses).mean()


class Ignoring(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(4, 3)

    def forward(self, inputs, weight):
        return self.output(inputs)


def test_a_get_loss_that_reads_x_is_named():
    data = {"inputs": X, "weight": np.linspace(0.1, 2, 42, dtype=np.float32)}
    params = {"criterion": nn.CrossEntropyLoss, "train_split": None, "verbose": 0}
    net = WithWeights(Ignoring, **params, criterion__reduction="none").fit(data, INDEX)
    with pytest.raises(ValueError, match="WithWeights raised TypeError: .*sample_weight") as info:
        relative_flatness(net, data, INDEX)
    assert "cannot take" not in str(info.value)
    weighted = relative_flatness(
        net, data, INDEX, criterion=nn.CrossEntropyLoss(), sample_weight=data["weight"]
    )

    def loss(z, y):
        each = F.cross_entropy(z, y, reduction="none")
        return (torch.tensor(data["weight"]) * each).sum() / data["weight"].sum()

    module = nn.Sequential(net.module_.output).double()
    expected = oracles.relative_flatness(module, "0", loss, X64, Y)
    assert weighted == pytest.approx(expected, rel=FLOAT32)

"""Nets whose class replaces parts of skorch's training step: penalty, history and measures."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.utils import to_tensor
from torch import nn
from torch.nn import functional as F

from relflat_sk import FlatnessWarning, StopAtLoss, relative_flatness
from tests import oracles
from tests.cases import Net
from tests.rounding import FLOAT32
from tests.training.common import INDEX, NAMES, Classifier, Double, X, make, same, weights_of

SGD = {"optimizer": torch.optim.SGD, "lr": 0.1, "module": Double}
# one step of no length, whose history has the terms of the initial network
AT_START = {"optimizer": torch.optim.SGD, "lr": 1e-30, "module": Double, "max_epochs": 1}
AT_START |= {"batch_size": -1, "flatness_clip": None, "flatness_weight": 1.0}
AT_START |= {"iterator_train__shuffle": False}
X64, Y = torch.tensor(X).double(), torch.tensor(INDEX)


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


def focal(z, y):
    log_p = torch.log_softmax(z, 1).gather(1, y[:, None])
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def robust(z, y):
    p = torch.softmax(z, 1).gather(1, y[:, None])
    return ((1 - p**0.7) / 0.7).mean()


def mixed(z, y):
    return 0.3 * F.cross_entropy(z, y) + 0.7 * F.cross_entropy(z, y.flip(0))


class Mixed(Classifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        first = super().get_loss(y_pred, y_true, *args, **kwargs)
        return 0.3 * first + 0.7 * super().get_loss(y_pred, y_true.flip(0), *args, **kwargs)


class Consistent(Classifier):
    """Runs the network once more in its loss; without dropout, this adds zero at all weights."""

    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = F.cross_entropy(y_pred, y_true)
        return loss + F.mse_loss(self.infer(X), y_pred) if training else loss


# classes of nets, and their losses of outputs and targets
LOSSES = {
    "focal": (own_loss(focal), focal),
    "robust": (own_loss(robust), robust),
    "two losses of a batch": (Mixed, mixed),
    "a pass within the loss": (Consistent, F.cross_entropy),
}


@pytest.mark.filterwarnings("ignore:relative_flatness at layer")  # of a loss that is not convex
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("layer", ["output", "hidden0"])
def test_the_penalty_is_that_of_the_loss_that_get_loss_returns(name, layer):
    kind, loss = LOSSES[name]
    net = make(kind, **AT_START, flatness_layer=layer, flatness_probes=1500)
    no_mean = pytest.warns(FlatnessWarning, match="no mean of losses of single samples")
    with no_mean if kind is Mixed else nullcontext():
        net.fit(X, NAMES)
    expected = oracles.penalty(net.module_, layer, loss, X64, Y)
    assert net.history[-1, "flatness_penalty"] == pytest.approx(expected, rel=0.1)
    assert net.history[-1, "train_loss"] == pytest.approx(loss(net.module_(X64), Y).item())


class CrossEntropy:
    def get_loss(self, y_pred, y_true, X=None, training=False):
        return F.cross_entropy(y_pred, y_true)


class WithMixin(CrossEntropy, Classifier):
    pass


DIVIDED = {
    "without super": own_loss(lambda z, y: F.cross_entropy(z, y) / 4),
    "with super": around(lambda net, loss: loss / 4),
    "a mixin's": around(lambda net, loss: loss / 4, WithMixin),
}


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", DIVIDED)
def test_a_loss_that_is_divided_is_penalised_as_much(name, layer, clip):
    params = {**SGD, "flatness_clip": clip, "flatness_layer": layer, "flatness_weight": 1.0}
    plain = make(**params).fit(X, NAMES)
    net = make(DIVIDED[name], **{**params, "lr": 0.4}).fit(X, NAMES)
    same(net, plain, rtol=1e-5, atol=1e-7)
    for column in ("train_loss", "flatness_penalty"):
        assert net.history[:, column] == pytest.approx(plain.history[:, column], rel=1e-5)


def infer_alone(self, x, **fit_params):
    return self.module_(to_tensor(x, device=self.device))


def infer_around(self, x, **fit_params):
    return Classifier.infer(self, x, **fit_params)


@pytest.mark.parametrize("infer", [infer_alone, infer_around])
@pytest.mark.parametrize("module", [{}, {"module": nn.Linear(4, 3)}], ids=["layers", "one layer"])
def test_an_infer_of_the_user_s_own_keeps_the_penalty(infer, module):
    params = {"optimizer": torch.optim.SGD, "lr": 0.1, "flatness_clip": None, **module}
    net = make(type("Own", (Classifier,), {"infer": infer}), **params, flatness_weight=3.0)
    plain = make(**params, flatness_weight=3.0)
    same(net.fit(X, NAMES), plain.fit(X, NAMES), rtol=FLOAT32, atol=FLOAT32)
    without = make(**params, flatness_weight=0.0).fit(X, NAMES)
    assert (weights_of(net) - weights_of(without)).abs().max() > 1e-4


# measures know one tensor of the output
@pytest.mark.filterwarnings("ignore:relative_flatness_ could not be measured")
def test_a_part_of_the_output_and_a_term_of_the_rest():
    class Regularised(Classifier):
        def get_loss(self, y_pred, y_true, *args, **kwargs):
            logits, code = y_pred
            return super().get_loss(logits, y_true, *args, **kwargs) + code.square().mean()

    def run(net, x):
        code = net.code(x)
        return net.output(code), code

    coded = Net(run, code=nn.Linear(4, 6), output=nn.Linear(6, 3)).double()
    net = make(Regularised, **{**AT_START, "module": coded}).fit(X, NAMES)
    logits, code = net.module_(X64)
    chained = nn.Sequential(net.module_.code, net.module_.output)
    expected = oracles.penalty(chained, "1", F.cross_entropy, X64, Y)
    assert net.history[-1, "flatness_penalty"] == pytest.approx(expected, rel=1e-6)
    loss = F.cross_entropy(logits, Y) + code.square().mean()
    assert net.history[-1, "train_loss"] == pytest.approx(loss.item(), rel=1e-6)


# -- steps without a penalty -------------------------------------------------------------


def step_with(loss_of):
    def step(self, batch, **fit_params):
        self._set_training(True)
        y_pred = self.infer(batch[0])
        loss = loss_of(self, y_pred, batch[1])
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}

    return step


def whole_step(self, batch, **fit_params):
    self.optimizer_.zero_grad()
    step = step_with(lambda net, z, y: F.cross_entropy(z, y))(self, batch)
    self.optimizer_.step()
    return step


UNPENALISED = {
    "train_step_single": {
        "train_step_single": step_with(lambda net, z, y: F.cross_entropy(z, y)),
        "infer": infer_alone,
    },
    "no get_loss": {"train_step_single": step_with(lambda net, z, y: net.criterion_(z, y))},
    "train_step": {"train_step": whole_step, "infer": infer_alone},
    "on_epoch_end as well": {
        "train_step": whole_step,
        "on_epoch_end": lambda self, *args, **kwargs: None,
    },
}


@pytest.mark.parametrize("name", UNPENALISED)
def test_steps_that_compute_no_penalty_are_said_unless_its_weight_is_0(name):
    kind = type("Own", (Classifier,), UNPENALISED[name])
    make(kind, flatness_weight=0.0).fit(X, NAMES)  # warnings are errors
    with pytest.warns(FlatnessWarning, match="flatness_weight=100.0 had no effect") as caught:
        make(kind, flatness_weight=100.0).fit(X, NAMES)
    assert len(caught) == 1


# -- factors and norms of the weights, which no curvature counts -------------------------


def decay(net):
    return 0.3 * sum(p.square().sum() for p in net.module_.parameters())


# changes of the loss, and their factors
CHANGES = {
    "decay": (lambda net, loss: loss + decay(net), 1),
    "decay, divided": (lambda net, loss: (loss + decay(net)) / 4, 1 / 4),
    "divided": (lambda net, loss: loss / 4, 1 / 4),
    "multiplied": (lambda net, loss: 3 * loss, 3),
}


def warns_of_weights(name):
    what = "the get_loss of Around reads weights"
    return pytest.warns(FlatnessWarning, match=what) if "decay" in name else nullcontext()


@pytest.mark.parametrize("weight", [0.0, 1.0])
@pytest.mark.parametrize("name", CHANGES)
def test_the_history_has_the_loss_that_is_measured(name, weight):
    (change, factor), stop = CHANGES[name], StopAtLoss(1e-9)
    params = {**AT_START, "flatness_weight": weight, "callbacks": [stop]}
    with pytest.warns(match="has not reached a training loss"), warns_of_weights(name):
        net = make(around(change), **params).fit(X, NAMES)
    loss = change(net, F.cross_entropy(net.module_(X64), Y)).item() / factor
    assert net.history[-1, "train_loss"] == pytest.approx(loss, rel=1e-6)
    assert stop.loss_ == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("name", ["multiplied", "decay, divided"])
@pytest.mark.parametrize("base", [Classifier, NeuralNetClassifier])
@pytest.mark.parametrize("layer", ["output", "hidden0"])
def test_a_factor_of_the_loss_changes_no_measure(base, name, layer):
    params = {"criterion": nn.CrossEntropyLoss, "module": Double, "max_epochs": 2, "verbose": 0}
    if base is NeuralNetClassifier:
        params |= {"train_split": None, "module__n_features": 4, "module__n_outputs": 3}
    with warns_of_weights(name):
        net = around(CHANGES[name][0], base)(**params).fit(X64.numpy(), INDEX)
        measured = relative_flatness(net, X64.numpy(), INDEX, layer=layer)
    expected = oracles.relative_flatness(net.module_, layer, F.cross_entropy, X64, Y)
    assert measured == pytest.approx(expected, rel=1e-6 if layer == "output" else 0.02)


@pytest.mark.filterwarnings("ignore:relative_flatness at layer")  # of a loss that is not convex
@pytest.mark.parametrize(
    ("function", "factor"), [(focal, 1), (robust, 1), (lambda z, y: F.cross_entropy(z, y) * 3, 3)]
)
@pytest.mark.parametrize("rows", [slice(None), INDEX == 1], ids=["all classes", "one class"])
def test_a_loss_without_super_is_measured_without_its_factor(function, factor, rows):
    net = make(own_loss(function), module=Double, flatness_weight=0.0).fit(X64.numpy(), INDEX)
    expected = oracles.relative_flatness(net.module_, "output", function, X64[rows], Y[rows])
    measured = relative_flatness(net, X64.numpy()[rows], INDEX[rows])
    assert measured == pytest.approx(expected / factor, rel=1e-6)


class WithWeights(NeuralNetClassifier):
    """skorch's recipe for sample weights: they are in X."""

    def get_loss(self, y_pred, y_true, X=None, *args, **kwargs):
        losses = super().get_loss(y_pred, y_true, X, *args, **kwargs)
        return (X["weight"] * losses).mean()


def test_a_get_loss_that_reads_x_is_named():
    data = {"inputs": X, "weight": np.linspace(0.1, 2, 42, dtype=np.float32)}
    params = {"criterion": nn.CrossEntropyLoss, "train_split": None, "verbose": 0}
    module = Net(lambda net, inputs, weight: net.output(inputs), output=nn.Linear(4, 3))
    net = WithWeights(module, **params, criterion__reduction="none").fit(data, INDEX)
    with pytest.raises(ValueError, match="WithWeights raised TypeError: .*sample_weight") as info:
        relative_flatness(net, data, INDEX)
    assert "cannot take" not in str(info.value)
    options = {"criterion": nn.CrossEntropyLoss(), "sample_weight": data["weight"]}
    shares = torch.tensor(data["weight"] / data["weight"].sum()).double()

    def loss(z, y):
        return shares @ F.cross_entropy(z, y, reduction="none")

    chained = nn.Sequential(net.module_.output).double()
    expected = oracles.relative_flatness(chained, "0", loss, X64, Y)
    assert relative_flatness(net, data, INDEX, **options) == pytest.approx(expected, rel=FLOAT32)

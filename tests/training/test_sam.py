"""SAM and ASAM in skorch's loop, against steps worked out by hand."""

import pickle

import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn
from torch.testing import assert_close

from relflat_sk import MLP, SharpnessAwareMixin
from tests.rounding import FLOAT32, rounding
from tests.training import common
from tests.training.common import (
    INDEX,
    ROWS,
    SIZES,
    WEIGHTS,
    Double,
    Recording,
    X,
    same,
    weights_of,
)

Plain = common.Classifier


class Classifier(SharpnessAwareMixin, Plain):
    pass


class Regressor(SharpnessAwareMixin, common.Regressor):
    pass


class Stock(SharpnessAwareMixin, NeuralNetClassifier):
    pass


def make(kind=Classifier, **params):
    defaults = {"max_epochs": 2, "batch_size": 14, "flatness_weight": 0}
    return common.make(kind, **{**defaults, "optimizer": torch.optim.SGD, **params})


def by_hand(w, loss, radius, eta):
    """Gradient at the worst point of a ball, all parameters in one vector (eq. 2 and 7)."""
    w = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(loss(w), w)
    scale = 1 if eta is None else w.detach().abs() + eta
    step = radius * scale**2 * g / (scale * g).norm()
    worst = (w.detach() + step).requires_grad_()
    return torch.autograd.grad(loss(worst), worst)[0]


@pytest.mark.parametrize("eta", [None, 0.0, 0.5])
@pytest.mark.parametrize("radius", [0.05, 2.0])
def test_a_step_is_that_of_the_papers(radius, eta):
    net = make(
        module=Double,
        sharpness_radius=radius,
        sharpness_adaptive=eta is not None,
        sharpness_eta=0.01 if eta is None else eta,
        lr=0.3,
        batch_size=-1,
        max_epochs=0,
    ).fit(X, INDEX)
    start = [p.detach().clone() for p in net.module_.parameters()]
    net.set_params(max_epochs=1).partial_fit(X, INDEX)

    sizes = [p.shape for p in start]
    inputs, targets = torch.tensor(X).double(), torch.tensor(INDEX)

    def loss(w):
        parts = w.split([size.numel() for size in sizes])
        a, b, c, d = (part.reshape(size) for part, size in zip(parts, sizes, strict=True))
        logits = (inputs @ a.T + b).tanh() @ c.T + d
        return nn.functional.cross_entropy(logits, targets)

    w = torch.cat([p.flatten() for p in start])
    expected = w - 0.3 * by_hand(w, loss, radius, eta)
    found = weights_of(net)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert net.history[-1, "train_loss"] == pytest.approx(loss(w).item(), rel=1e-10)


def test_batch_norm_and_dropout_see_one_step():
    params = {"module": Recording, "lr": 1e-30, "max_epochs": 1}
    net = make(sharpness_radius=0.5, **params).fit(X, INDEX)
    plain = make(Plain, **params).fit(X, INDEX)
    masks, expected = ([seen[0] == 0 for seen in one.module_.seen] for one in (net, plain))
    weights = [seen[-1] for seen in net.module_.seen]
    assert len(masks) == 2 * len(expected) == 6
    for first, second, mask in zip(masks[::2], masks[1::2], expected, strict=True):
        assert_close(first, mask)
        assert_close(second, first)
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        assert_close(first, weights[0], rtol=0, atol=0)  # restored bit by bit
        assert 1e-3 < (second - first).norm() <= 0.5
    for buffer, expected in zip(net.module_.buffers(), plain.module_.buffers(), strict=True):
        assert_close(buffer, expected, rtol=0, atol=0)
    assert net.module_.norm.num_batches_tracked == 3


class Failing(Recording):
    def forward(self, x):
        if len(self.seen) == 3:  # the second pass of the second step
            raise RuntimeError("out of memory, say")
        return super().forward(x)


def test_weights_come_back_after_an_exception():
    net = make(module=Failing, sharpness_radius=0.5, lr=1e-30)
    with pytest.raises(RuntimeError, match="out of memory"):
        net.fit(X, INDEX)
    assert_close(net.module_.first.weight, net.module_.seen[0][-1], rtol=0, atol=0)
    assert net.module_.norm.num_batches_tracked == 2


def test_on_stock_skorch_nets():
    params = {**SIZES, "train_split": None, "verbose": 0}
    params |= {"criterion": nn.CrossEntropyLoss, "max_epochs": 2, "batch_size": 14, "lr": 0.1}
    params |= {"iterator_train__shuffle": True, "optimizer__fused": True}  # our nets' defaults
    torch.manual_seed(0)
    net = Stock(MLP, sharpness_radius=0.3, **params).fit(X, INDEX)
    torch.manual_seed(0)
    ours = make(sharpness_radius=0.3, random_state=None, lr=0.1).fit(X, INDEX)
    same(net, ours, **rounding(6))


@pytest.mark.usefixtures("own_loop")
def test_goes_uphill_of_loss_and_penalty():
    strong = {"flatness_weight": 2.0, "flatness_clip": None}
    net = make(**strong, batch_size=-1, max_epochs=1, sharpness_radius=0.5)
    other = make(flatness_weight=0.0, batch_size=-1, max_epochs=1, sharpness_radius=0.5)
    net.fit(X, INDEX)
    plain = make(Plain, **strong, batch_size=-1)
    plain.set_params(max_epochs=1).fit(X, INDEX)
    # recorded at the weights, as without SAM
    for name in ("train_loss", "flatness_penalty"):
        assert net.history[0, name] == pytest.approx(plain.history[0, name], rel=FLOAT32)
    with pytest.raises(AssertionError):
        same(net, plain, rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        same(net, other.fit(X, INDEX), rtol=1e-4, atol=1e-5)


def test_sample_weights():
    params = {"module": Double, "batch_size": -1, "max_epochs": 3, "sharpness_radius": 0.3}
    net = make(**params).fit(X, INDEX, sample_weight=WEIGHTS)
    same(net, make(**params).fit(X[ROWS], INDEX[ROWS]), rtol=1e-9, atol=1e-12)


class Accumulating(common.AccumulatingMixin, Classifier):
    pass


class Gradients(Callback):
    def __init__(self):
        self.seen = []

    def on_grad_computed(self, net, named_parameters=None, **kwargs):
        self.seen.append(torch.cat([p.grad.flatten().clone() for _, p in named_parameters]))


def test_accumulates_the_gradients_of_each_batch():
    params = {"module": Double, "max_epochs": 1, "sharpness_radius": 0.3}
    net = make(Accumulating, lr=0.1, **params).fit(X, INDEX)
    gradients = Gradients()
    make(lr=1e-300, callbacks=[gradients], **params).fit(X, INDEX)  # all at one point
    start = make(**{**params, "max_epochs": 0}).fit(X, INDEX)
    w, found = (weights_of(which) for which in (start, net))
    assert_close(found, w - 0.1 * torch.stack(gradients.seen).mean(dim=0), rtol=1e-9, atol=1e-12)


def test_weights_cast_by_autocast_are_not_those_of_the_first_pass():
    params = {"sharpness_radius": 1.0, "lr": 0.1}
    whole = common.in_bfloat16(Classifier, "train_step_single")  # around both passes
    cast, full = make(whole, **params).fit(X, INDEX), make(**params).fit(X, INDEX)
    plain = make(Plain, lr=0.1).fit(X, INDEX)
    found, truth, without = (weights_of(net) for net in (cast, full, plain))
    assert (found - truth).norm() < 0.2 * (without - truth).norm()


def test_with_accelerate(accelerated):
    params = {"sharpness_radius": 0.3, "flatness_weight": 1.0}
    params |= {"max_epochs": 2, "batch_size": 14, "optimizer": torch.optim.SGD}
    net = accelerated(SharpnessAwareMixin, **params).fit(X, INDEX)
    same(net, make(**params).fit(X, INDEX), **rounding(6))


def test_clone_pickle_and_parameters():
    net = make(sharpness_radius=0.3, sharpness_adaptive=True).fit(X, INDEX)
    fresh = clone(net)
    assert fresh.get_params()["sharpness_radius"] == 0.3
    same(fresh.fit(X, INDEX), net)
    loaded = pickle.loads(pickle.dumps(net))
    same(loaded.partial_fit(X, INDEX), net.partial_fit(X, INDEX))


@pytest.mark.parametrize("name", ["sharpness_radius", "sharpness_eta"])
@pytest.mark.parametrize("value", [-1.0, None])
def test_refuses_arguments(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number of at least 0, got"):
        make(**{name: value}).fit(X, INDEX)

"""SAM and ASAM in skorch's loop, against steps worked out by hand."""

import pytest
import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn
from torch.testing import assert_close

from relflat_sk import MLP, SharpnessAwareMixin
from tests.rounding import rounding
from tests.training import common
from tests.training.common import INDEX, SIZES, WEIGHTS, Double, Recording, X, same, weights_of

Plain = common.Classifier


class Classifier(SharpnessAwareMixin, Plain):
    pass


class Stock(SharpnessAwareMixin, NeuralNetClassifier):
    pass


def make(kind=Classifier, **params):
    defaults = {"max_epochs": 2, "batch_size": 14, "flatness_weight": 0}
    return common.make(kind, **{**defaults, "optimizer": torch.optim.SGD, **params})


def at_worst_point(w, objective, radius, eta):
    """Gradient at the worst point of a ball, all parameters in one vector (eq. 2 and 7)."""
    w = w.clone().requires_grad_()
    (g,) = torch.autograd.grad(objective(w), w)
    scale = 1 if eta is None else w.detach().abs() + eta
    step = radius * scale**2 * g / (scale * g).norm()
    worst = (w.detach() + step).requires_grad_()
    return torch.autograd.grad(objective(worst), worst)[0]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("penalty", [0, 2.0], ids=["plain", "penalised"])
@pytest.mark.parametrize("eta", [None, 0.0, 0.5])
@pytest.mark.parametrize("radius", [0.05, 2.0])
def test_a_step_is_that_of_the_papers(radius, eta, penalty, weights):
    params = {"sharpness_radius": radius, "sharpness_adaptive": eta is not None}
    params |= {} if eta is None else {"sharpness_eta": eta}
    params |= {"flatness_weight": penalty, "flatness_clip": None, "batch_size": -1, "max_epochs": 0}
    net = clone(make(module=Double, lr=0.3, **params)).fit(X, INDEX)
    start = [p.detach().clone() for p in net.module_.parameters()]
    net.set_params(max_epochs=1).partial_fit(X, INDEX, sample_weight=weights)
    inputs, targets = torch.tensor(X).double(), torch.tensor(INDEX)
    shares = torch.ones(42) if weights is None else torch.tensor(weights)
    shares = shares.double() / shares.sum()

    def terms(w):
        parts = w.split([p.numel() for p in start])
        a, b, c, d = (part.reshape(p.shape) for part, p in zip(parts, start, strict=True))
        features = (inputs @ a.T + b).tanh()
        logits = features @ c.T + d
        p = logits.softmax(dim=1)
        variances = (p @ c.square() - (p @ c).square()).sum(dim=1)
        kappa = shares @ (features.square().sum(dim=1) * variances)
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        return shares @ losses, penalty * kappa / (2 * 6)

    w = nn.utils.parameters_to_vector(start)
    gradient = at_worst_point(w, lambda w: sum(terms(w)), radius, eta)
    assert_close(weights_of(net), w - 0.3 * gradient, rtol=1e-10, atol=1e-12)
    # recorded at the weights, as without SAM
    for name, term in zip(("train_loss", "flatness_penalty"), terms(w), strict=True):
        assert net.history[-1, name] == pytest.approx(term.item(), rel=1e-10)


def test_batch_norm_and_dropout_see_one_step():
    params = {"module": Recording, "lr": 1e-30, "max_epochs": 1}
    net = make(sharpness_radius=0.5, **params).fit(X, INDEX)
    plain = make(Plain, **params).fit(X, INDEX)
    masks, expected = ([seen[0] == 0 for seen in one.module_.seen] for one in (net, plain))
    assert len(masks) == 2 * len(expected) == 6
    assert_close(masks[::2], expected)
    assert_close(masks[1::2], expected)
    weights = [seen[-1] for seen in net.module_.seen]
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        assert_close(first, weights[0], rtol=0, atol=0)  # restored bit by bit
        assert 1e-3 < (second - first).norm() <= 0.5
    assert_close(list(net.module_.buffers()), list(plain.module_.buffers()), rtol=0, atol=0)
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
    expected = weights_of(start) - 0.1 * torch.stack(gradients.seen).mean(dim=0)
    assert_close(weights_of(net), expected, rtol=1e-9, atol=1e-12)


def test_weights_cast_by_autocast_are_not_those_of_the_first_pass():
    params = {"sharpness_radius": 1.0, "lr": 0.1}
    whole = common.in_bfloat16(Classifier, "train_step_single")  # around both passes
    nets = make(whole, **params), make(**params), make(Plain, lr=0.1)
    cast, truth, without = (weights_of(net.fit(X, INDEX)) for net in nets)
    assert (cast - truth).norm() < 0.2 * (without - truth).norm()


def test_with_accelerate(accelerated):
    params = {"sharpness_radius": 0.3, "flatness_weight": 1.0}
    params |= {"max_epochs": 2, "batch_size": 14, "optimizer": torch.optim.SGD}
    net = accelerated(SharpnessAwareMixin, **params).fit(X, INDEX)
    same(net, make(**params).fit(X, INDEX), **rounding(6))

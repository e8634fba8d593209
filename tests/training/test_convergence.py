"""Training until convergence, against measurements made by hand."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EarlyStopping
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close

from relflat_sk import StopAtGradientNorm, StopAtLoss
from relflat_sk.training._callbacks import gradient_norm
from relflat_sk.training._data import with_weights
from tests.rounding import FLOAT32
from tests.training import common
from tests.training.common import INDEX, NAMES, WEIGHTS, Classifier, X

TARGETS = torch.tensor(INDEX)


def make(*callbacks, kind=Classifier, **params):
    return common.make(kind, callbacks=list(callbacks), **{"max_epochs": 200, **params})


class Dropping(nn.Module):
    def __init__(self, n_outputs=3, softmax=False):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(4, 40),
            nn.BatchNorm1d(40),
            nn.ReLU(),
            nn.Dropout(0.6),
            nn.Linear(40, n_outputs),
        )
        self.softmax = softmax

    def forward(self, x):
        return self.body(x).softmax(dim=1) if self.softmax else self.body(x)


class Losses(Callback):
    """The mean loss in evaluation mode after each epoch, computed by hand."""

    def on_epoch_end(self, net, **kwargs):
        with torch.no_grad():
            net.module_.eval()
            loss = nn.functional.cross_entropy(net.module_(torch.tensor(X)), TARGETS)
        net.losses_ = [*getattr(net, "losses_", []), loss.item()]


@pytest.mark.parametrize("weight", [0.0, 0.1], ids=["plain", "penalised"])
def test_stops_at_the_first_epoch_whose_true_loss_is_small_enough(weight):
    net = make(Losses(), StopAtLoss(0.35), module=Dropping, flatness_weight=weight).fit(X, NAMES)
    stop = dict(net.callbacks_)["StopAtLoss"]
    assert net.converged_ is True
    assert len(net.losses_) == len(net.history)
    assert net.losses_[-1] <= 0.35 < min(net.losses_[:-1])
    assert stop.loss_ == pytest.approx(net.losses_[-1], rel=FLOAT32)
    # by the recorded loss, which dropout changes, it would have stopped later
    assert net.history[-1, "train_loss"] > 0.35


def test_does_not_change_training():
    module = {"module": Dropping, "max_epochs": 3, "iterator_train__shuffle": True}
    watched = make(StopAtLoss(1e-9), StopAtGradientNorm(1e-9), **module).fit(X, NAMES)
    plain = make(**module).fit(X, NAMES)
    assert_close(watched.module_.state_dict(), plain.module_.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["alike", "weighted"])
def test_the_loss_is_that_of_the_training_part(weights):
    split = ValidSplit(3)
    net = make(StopAtLoss(0.9), train_split=split).fit(X, NAMES, sample_weight=weights)
    rows = split(net.get_dataset(X, INDEX))[0].indices
    log_p = np.log(net.predict_proba(X))[rows, INDEX[rows]]
    loss = -np.average(log_p, weights=None if weights is None else weights[rows])
    assert dict(net.callbacks_)["StopAtLoss"].loss_ == pytest.approx(loss, rel=FLOAT32)


def test_says_once_that_it_did_not_converge_where_all_epochs_of_a_fit_were_trained(recwarn):
    make(StopAtLoss(1e-6), max_epochs=1).partial_fit(X, NAMES)
    make(StopAtLoss(1e-6), EarlyStopping("train_loss", threshold=10), max_epochs=9).fit(X, NAMES)
    make(StopAtLoss(1e-6), max_epochs=0).fit(X, NAMES)
    make(StopAtLoss(0.5)).fit(X, NAMES)
    assert not recwarn
    net = make(StopAtLoss(1e-6), StopAtGradientNorm(1e-9), max_epochs=2)
    goals = "loss of 1e-06 or a gradient norm of 1e-09 with max_epochs=2"
    with pytest.warns(ConvergenceWarning, match=goals) as caught:
        net.fit(X, NAMES)
    assert len(caught) == 1
    assert net.converged_ is False


HEAVY = torch.tensor([1.0, 5.0, 0.2])


@pytest.mark.parametrize(
    "criterion",
    [{}, {"criterion__reduction": "sum"}, {"criterion__weight": HEAVY}],
    ids=["mean", "sum", "class weights"],
)
@pytest.mark.parametrize("sample_weight", [None, WEIGHTS], ids=["alike", "weighted"])
@pytest.mark.parametrize("weight", [0.0, 2.0], ids=["plain", "penalised"])
def test_gradient_norm_is_that_of_the_whole(criterion, sample_weight, weight):
    params = {**criterion, "flatness_weight": weight, "flatness_clip": None, "flatness_every": 4}
    net = make(module=Dropping, max_epochs=2, **params).fit(X, NAMES)
    dataset = net.get_dataset(X, INDEX)  # batches of 16, 16 and 10
    share = HEAVY[TARGETS] if "criterion__weight" in criterion else torch.ones(42)
    if sample_weight is not None:
        dataset = with_weights(dataset, sample_weight)
        share = share * torch.tensor(sample_weight)

    module = net.module_.eval()
    features = module.body[:-1](torch.tensor(X))
    logits = module.body[-1](features)
    p, W = logits.softmax(dim=1), module.body[-1].weight
    spread = (p @ W.square() - (p @ W).square()).sum(dim=1) * features.square().sum(dim=1)
    losses = nn.functional.cross_entropy(logits, TARGETS, reduction="none")
    objective = share @ (losses + weight * spread / (2 * 40)) / share.sum()
    grads = torch.autograd.grad(objective, list(module.parameters()))
    truth = torch.cat([grad.reshape(-1) for grad in grads]).norm().item()
    assert gradient_norm(net, dataset) == pytest.approx(truth, rel=1e-4)


def test_gradient_norm_is_no_step_for_gradients_and_the_limit():
    net = make(module=Dropping, flatness_layer=0, max_epochs=1).fit(X, NAMES)
    for p in net.module_.parameters():
        p.grad = torch.full_like(p, 3.0)
    limit = net._penalty_limit().__getstate__()
    gradient_norm(net, net.get_dataset(X, np.zeros(42, dtype=np.int64)))
    np.testing.assert_equal(net._penalty_limit().__getstate__(), limit)  # which learns from steps
    assert all(bool((p.grad == 3).all()) for p in net.module_.parameters())


@pytest.mark.parametrize("split", [None, ValidSplit(5)], ids=["all", "split"])
def test_on_stock_skorch_nets(split):
    stops = [StopAtLoss(0.3), StopAtGradientNorm(1e-9, every=5)]
    params = {"callbacks": stops, "verbose": 0, "max_epochs": 300, "train_split": split}
    net = NeuralNetClassifier(
        Dropping, module__softmax=True, criterion=nn.NLLLoss, optimizer=torch.optim.Adam, **params
    ).fit(X, INDEX)
    assert net.converged_
    assert dict(net.callbacks_)["StopAtGradientNorm"].gradient_norm_ > 0
    if split is None:
        chosen = net.predict_proba(X)[np.arange(42), INDEX]
        loss = -np.log(chosen).mean()
        assert dict(net.callbacks_)["StopAtLoss"].loss_ == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    ("callback", "goal"),
    [(StopAtLoss(0.5, every=2), "loss"), (StopAtGradientNorm(0.5, every=2), "tol")],
)
def test_clone_pickle_and_parameters(callback, goal):
    name = type(callback).__name__
    net = make(callback).fit(X, NAMES)
    assert pickle.loads(pickle.dumps(net)).converged_ is True
    fresh = clone(net)
    assert repr(fresh.callbacks) == f"[{name}(0.5, every=2)]"
    assert not [key for key in vars(fresh.callbacks[0]) if key.endswith("_")]
    settings = {f"callbacks__{name}__every": 3, f"callbacks__{name}__{goal}": 100.0}
    assert len(fresh.set_params(**settings).fit(X, NAMES).history) == 3

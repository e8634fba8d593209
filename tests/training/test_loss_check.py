"""Goals are checked without running all data, and training stops at the same epoch."""

import pickle

import numpy as np
import pytest
import torch
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback
from torch import nn
from torch.utils.data import IterableDataset

from relflat_sk import (
    MLP,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
)
from relflat_sk.training import _convergence
from relflat_sk.training._convergence import FAR, acts_alike, is_far

N = 300


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(N, 8)).astype(np.float32)
    return X, (X[:, :4] + 0.3 * rng.normal(size=(N, 4))).argmax(axis=1)


class Counting(MLP):
    """Counts the samples that it evaluates."""

    n_samples = 0

    def forward(self, x):
        if not torch.is_grad_enabled():
            Counting.n_samples += len(x)
        return super().forward(x)


class Dropping(Counting):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.fixture(autouse=True)
def _count_from_zero():
    Counting.n_samples = 0


class EvaluatedSamples(Callback):
    """Records how many samples a net has evaluated by the end of each epoch."""

    def on_epoch_end(self, net, **kwargs):
        net.counts_ = [*getattr(net, "counts_", []), Counting.n_samples]


class Losses(Callback):
    """The mean loss in evaluation mode after each epoch, computed by hand."""

    def __init__(self, X, y):
        self.X, self.y = X, y

    def on_epoch_end(self, net, **kwargs):
        state = torch.get_rng_state()
        with torch.no_grad():
            net.module_.eval()
            loss = nn.functional.cross_entropy(net.module_(self.X), self.y)
        torch.set_rng_state(state)
        net.losses_ = [*getattr(net, "losses_", []), loss.item()]


def make(*callbacks, module=Counting, **parameters):
    defaults = {"max_epochs": 40, "flatness_weight": 0, "verbose": 0, "random_state": 0}
    return RelativeFlatnessRegularizedClassifier(
        module, callbacks=list(callbacks), **{**defaults, **parameters}
    )


def _count(module, args):
    if not torch.is_grad_enabled():
        Counting.n_samples += len(args[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_goal_far_away_takes_no_pass(data, reduction):
    class Observing(EvaluatedSamples):
        def on_train_begin(self, net, **kwargs):
            net.module_.register_forward_pre_hook(_count)

    callbacks = StopAtLoss(1e-6), Observing
    net = make(*callbacks, module=MLP, max_epochs=5, criterion__reduction=reduction).fit(*data)
    part = N // _convergence.SHARE_OF_A_PROOF
    with_sums = [N + epoch * part for epoch in range(5)]  # a sum is no mean: it is not far
    assert net.counts_ == ([0] * 5 if reduction == "mean" else with_sums)
    assert not net.converged_
    assert np.isnan(dict(net.callbacks_)["StopAtLoss"].loss_) == (reduction == "mean")


def test_nets_with_dropout_run_their_hardest_samples(data):
    # the goal callback is before the one that counts
    callbacks = StopAtLoss(1e-6), EvaluatedSamples
    net = make(*callbacks, module=Dropping, max_epochs=5).fit(*data)
    part = N // _convergence.SHARE_OF_A_PROOF
    assert net.counts_ == [N, *(N + epoch * part for epoch in range(1, 5))]


@pytest.mark.parametrize("goal", [0.5, 0.15])
@pytest.mark.parametrize("module", [Counting, Dropping])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"lr": 0.02, "batch_size": 8},
        {"optimizer": torch.optim.SGD, "lr": 0.5, "batch_size": 128},
        {"criterion__label_smoothing": 0.01, "flatness_weight": 0.1},
    ],
    ids=["adam", "fast", "sgd", "smoothed"],
)
def test_stops_at_the_same_epoch(data, monkeypatch, goal, module, params):
    X, y = data
    found = make(StopAtLoss(goal), module=module, **params).fit(X, y)
    # every epoch measured on all data
    monkeypatch.setattr(_convergence, "FAR", np.inf)
    monkeypatch.setattr(_convergence, "FEWEST_FOR_A_PROOF", np.inf)
    expected = make(StopAtLoss(goal), module=module, **params).fit(X, y)
    assert len(found.history) == len(expected.history)
    assert found.converged_ == expected.converged_
    for one, other in zip(found.module_.parameters(), expected.module_.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_proof_is_not_taken_for_a_loss_that_is_reached(data):
    X, y = data
    by_hand = Losses(torch.tensor(X), torch.tensor(y))
    net = make(by_hand, StopAtLoss(0.25), module=Dropping).fit(X, y)
    assert net.converged_
    assert net.losses_[-1] <= 0.25 < min(net.losses_[:-1])
    assert dict(net.callbacks_)["StopAtLoss"].loss_ == pytest.approx(net.losses_[-1], rel=1e-5)


def test_weights_of_samples_count_in_proofs(data):
    X, y = data
    weights = np.where(np.arange(N) % 2, 1.0, 0.0)

    def fit(X, y, **arguments):
        return make(StopAtLoss(0.3), module=Dropping, batch_size=N).fit(X, y, **arguments)

    weighted = fit(X, y, sample_weight=weights)
    stop = dict(weighted.callbacks_)["StopAtLoss"]
    outputs = weighted.forward(X[1::2])
    loss = nn.functional.cross_entropy(outputs, torch.tensor(y[1::2])).item()
    assert stop.loss_ == pytest.approx(loss, rel=1e-5)


def test_losses_that_may_be_negative_prove_nothing(data):
    X, y = data
    Counting.n_samples = 0
    net = NeuralNetRegressor(
        Dropping,
        module__n_features=8,
        module__n_outputs=1,
        criterion=nn.PoissonNLLLoss,
        train_split=None,
        max_epochs=3,
        verbose=0,
        callbacks=[StopAtLoss(1e-6), EvaluatedSamples],
    ).fit(X, y.astype(np.float32)[:, None])
    assert net.counts_ == [N, 2 * N, 3 * N]


class OwnStatistics(nn.Module):
    """A network in which the samples of a batch change each other's outputs."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.norm = nn.BatchNorm1d(n_features, track_running_stats=False)
        self.layers = Counting(n_features, n_outputs)

    def forward(self, x):
        return self.layers(self.norm(x))


@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
def test_statistics_of_the_batch_prove_nothing(data):
    callbacks = StopAtLoss(1e-6), EvaluatedSamples
    net = make(*callbacks, module=OwnStatistics, max_epochs=3).fit(*data)
    assert net.counts_ == [N, 2 * N, 3 * N]


class AsksForMode(nn.Module):
    def forward(self, x):
        return x if self.training else 2 * x


class AsksInHelper(nn.Module):
    def forward(self, x):
        return self.encode(x)

    def encode(self, x):
        return x if self.training else 2 * x


def _with_own_forward():
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: x if layer.training else 2 * x
    return layer


@pytest.mark.parametrize(
    ("module", "alike"),
    [
        (MLP(2, 2), True),
        (nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.LSTM(2, 2)), True),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), False),
        (nn.BatchNorm2d(3), False),
        (nn.RReLU(), False),
        (nn.LSTM(2, 2, num_layers=2, dropout=0.1), False),
        (nn.TransformerEncoderLayer(4, 2), False),
        (Counting(2, 2), True),
        (AsksForMode(), False),
        (AsksInHelper(), False),
        (nn.Sequential(AsksInHelper()), False),
        (_with_own_forward(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_knows_which_networks_act_alike(module, alike):
    assert acts_alike(module) is alike


def test_running_loss_says_nothing_without_batches(data):
    net = make(module=MLP, max_epochs=1).fit(*data)
    loss = net.history[-1, "train_loss"]
    assert is_far(net, loss / (10 * FAR))
    assert not is_far(net, loss)
    net.history[-1]["batches"].clear()
    assert not is_far(net, loss / (10 * FAR))


def test_one_large_batch_is_no_far_loss(data):
    net = make(module=MLP, max_epochs=1).fit(*data)
    assert is_far(net, net.history[-1, "train_loss"] / (10 * FAR))
    for batch, loss in zip(net.history[-1]["batches"], [1e6, *[1.0] * 100], strict=False):
        batch["train_loss"] = loss
    assert not is_far(net, 0.2)


def _plain_net(kind, **parameters):
    """A net of skorch after an epoch, on one batch with a loss of at least 1."""
    net = kind(MLP(3, 1), train_split=None, max_epochs=1, verbose=0, **parameters)
    return net.fit(np.ones((8, 3), "f4"), np.full((8, 1), 10, "f4"))


class Regularised(NeuralNetRegressor):
    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) + 1


class StepsOnItsOwn(NeuralNetRegressor):
    def train_step(self, batch, **fit_params):
        step = super().train_step(batch, **fit_params)
        return step | {"loss": step["loss"] + 1}


def test_only_the_mean_of_the_criterion_is_far():
    assert is_far(_plain_net(NeuralNetRegressor), 1e-3)
    assert not is_far(_plain_net(NeuralNetRegressor, criterion__reduction="sum"), 1e-3)
    assert not is_far(_plain_net(Regularised), 1e-3)
    assert not is_far(_plain_net(StepsOnItsOwn), 1e-3)
    net = _plain_net(NeuralNetRegressor)
    net.get_loss = Regularised.get_loss.__get__(net)
    assert not is_far(net, 1e-3)


class HoldsProof(Callback):
    def on_epoch_end(self, net, **kwargs):
        callback = dict(net.callbacks_)["StopAtLoss"]
        net.proofs_ = [
            getattr(one, "_proof_", None)
            for one in (callback, pickle.loads(pickle.dumps(callback)))
        ]


def test_callbacks_keep_no_data(data):
    net = make(StopAtLoss(1e-6), HoldsProof, module=Dropping, max_epochs=2).fit(*data)
    assert net.proofs_[0] is not None
    assert net.proofs_[1] is None
    assert dict(net.callbacks_)["StopAtLoss"]._proof_ is None


class Once(IterableDataset):
    def __init__(self, X, y):
        self.samples = zip(torch.tensor(X), torch.tensor(y), strict=True)

    def __iter__(self):
        return self.samples


@pytest.mark.parametrize("callback", [StopAtLoss(0.1), StopAtGradientNorm(0.1)])
def test_refuses_a_stream_that_can_be_read_once(data, callback):
    net = make(callback, module__n_features=8, module__n_outputs=4)
    with pytest.raises(ValueError, match=r"0.1\) measures all training data .* stream Once"):
        net.fit(Once(*data), None)

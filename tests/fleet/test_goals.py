"""Goals of nets that train together are checked on all data, in one stacked pass."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from skorch.callbacks import Callback
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    FleetTrainer,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtLoss,
)
from relflat_sk._network import mean_loss
from relflat_sk.fleet import _evaluation, _group
from relflat_sk.training import _convergence
from relflat_sk.training._sample_weights import training_network
from tests.fleet.compare import compare, curve, data


class Checks(Callback):
    """Compares the loss that the goal has found with a pass over all data of the net alone."""

    def on_train_begin(self, net, **kwargs):
        self.found_ = []

    def on_epoch_end(self, net, dataset_train=None, **kwargs):
        goal = next(one for _, one in net.callbacks_ if isinstance(one, StopAtLoss))
        if np.isfinite(goal.loss_):
            expected = mean_loss(training_network(net, dataset_train))
            self.found_.append((goal.loss_, expected))


class Normed(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(
            nn.Linear(n_features, 9),
            nn.BatchNorm1d(9),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(9, n_outputs),
        )
        self.double()


class Dropping(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        inside = nn.Flatten(), nn.Linear(n_features, 9), nn.Tanh(), nn.Dropout(0.3)
        super().__init__(*inside, nn.Linear(9, n_outputs))
        self.double()


@pytest.fixture
def alone(monkeypatch):
    """Counts the passes over all data of a net alone."""
    found, compute = [], _convergence.mean_loss

    def note(*args):
        found.append(1)
        return compute(*args)

    monkeypatch.setattr(_convergence, "mean_loss", note)
    return found


X, _ = data(300)
y = X[:, :3].argmax(1)
FEW = 200  # samples, of which none are run first
KINDS = {
    "classes": (RelativeFlatnessRegularizedClassifier, {}, y),
    "dropout": (RelativeFlatnessRegularizedClassifier, {"module": Dropping}, y),
    "batch norm": (RelativeFlatnessRegularizedClassifier, {"module": Normed}, y),
    "held out": (RelativeFlatnessRegularizedClassifier, {"train_split": ValidSplit(3)}, y),
    "two outputs": (RelativeFlatnessRegularizedRegressor, {}, X[:, :2] ** 2),
    "labels 0 and 1": (RelativeFlatnessRegularizedBinaryClassifier, {}, y > 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_a_pass_of_each_net_alone(kind, alone):
    make, settings, target = KINDS[kind]
    nets = [
        make(
            batch_size=32,
            max_epochs=3,
            verbose=0,
            random_state=seed,
            flatness_weight=0.1 * (seed % 2) if "module" not in settings else 0,
            callbacks=[StopAtLoss(0.3), ("checks", Checks())],
            **settings,
        )
        for seed in range(3)
    ]
    (some, labels), flip = (X[:FEW], target[:FEW]), slice(None, None, -1)
    each = [(some, labels), (some[flip].copy(), labels), (some, labels[flip].copy())]
    trained = FleetTrainer(nets, fleet=3).fit_each(each).estimators_
    for net in trained:
        found = dict(net.callbacks_)["checks"].found_
        assert len(found) == len(net.history)
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=0, atol=1e-10)
    assert not alone


def test_nets_stop_where_they_stop_alone_and_the_hardest_samples_are_run_first(monkeypatch, alone):
    rows, losses = [], _evaluation._losses

    def note(*args):
        rows.append(args[-1])
        return losses(*args)

    monkeypatch.setattr(_evaluation, "_losses", note)
    nets = [
        RelativeFlatnessRegularizedClassifier(
            batch_size=32, max_epochs=60, verbose=0, random_state=seed, lr=0.01 * (1 + seed),
            callbacks=[StopAtLoss(0.06 - 0.01 * seed)], flatness_weight=0,
        )
        for seed in range(4)
    ]  # fmt: skip
    together = FleetTrainer(nets, fleet=4).fit(X, y).estimators_
    assert not alone
    assert len({len(net.history) for net in together}) > 1
    proofs = [one for one in rows if one is not None]
    assert proofs
    assert all(one.shape[1] == 300 // 16 for one in proofs)
    for net, one in zip(nets, together, strict=True):
        single = clone(net).fit(X, y)
        assert len(single.history) == len(one.history)
        np.testing.assert_allclose(curve(single), curve(one), atol=1e-8)
        for stopped in (single, one):
            goal = next(one for _, one in stopped.callbacks_ if isinstance(one, StopAtLoss))
            assert goal.loss_ <= goal.loss
            found = -np.log(stopped.predict_proba(X)[np.arange(len(y)), y]).mean()
            assert goal.loss_ == pytest.approx(found, abs=1e-10)


class Moves(Callback):
    """Changes the weights after an epoch, before the goal is checked."""

    def on_epoch_end(self, net, **kwargs):
        with torch.no_grad():
            for parameter in net.module_.parameters():
                parameter.mul_(0.99)


def test_weights_that_a_callback_has_changed_are_those_that_count():
    nets = [
        RelativeFlatnessRegularizedClassifier(
            batch_size=32, max_epochs=3, verbose=0, random_state=seed, flatness_weight=0,
            callbacks=[("moves", Moves()), StopAtLoss(0.3), ("checks", Checks())],
        )
        for seed in range(2)
    ]  # fmt: skip
    for net in FleetTrainer(nets, fleet=2).fit(X[:FEW], y[:FEW]).estimators_:
        found = dict(net.callbacks_)["checks"].found_
        np.testing.assert_allclose(*zip(*found, strict=True), rtol=0, atol=1e-10)


class Batchwise(nn.Sequential):
    """Acts in evaluation on a batch as a whole."""

    def __init__(self, n_features, n_outputs):
        norm = nn.BatchNorm1d(9, track_running_stats=False)
        super().__init__(nn.Linear(n_features, 9), norm, nn.Linear(9, n_outputs))
        self.double()


class Switching(nn.Sequential):
    """Cannot be stacked in evaluation."""

    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, 9), nn.ReLU(), nn.Linear(9, n_outputs))
        self.double()

    def forward(self, x):
        if not self.training and x.sum() > 1e9:
            return x
        return super().forward(x)


@pytest.mark.parametrize(
    "settings",
    [{"module": Batchwise}, {"module": Switching}, {"criterion__weight": torch.ones(3).double()}],
    ids=["batch norm of a batch", "switches", "class weights"],
)
@pytest.mark.filterwarnings("ignore:batch norm without running statistics")
def test_what_cannot_be_stacked_is_measured_alone(settings, alone, monkeypatch):
    monkeypatch.setattr(_group, "losses_on_all", None)
    compare(
        [
            RelativeFlatnessRegularizedClassifier(
                batch_size=32, max_epochs=2, verbose=0, random_state=seed, flatness_weight=0,
                callbacks=[StopAtLoss(0.3)], **settings,
            )
            for seed in range(2)
        ],
        X=X[:FEW],
        y=y[:FEW],
    )  # fmt: skip
    # both one by one and in the fleet, and the first by itself
    assert len(alone) == 2 * 2 * 2 + 2

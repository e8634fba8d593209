"""Fit nets one by one and as one stacked model, and compare all that training leaves."""

from contextlib import contextmanager

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.base import clone
from skorch.callbacks import Callback

from relflat_sk import fleet_training
from relflat_sk._engine.epoch import EPOCH_TRAINER
from relflat_sk._engine.job import NeedsOwnLoop

QUANTITIES = ("train_loss", "flatness_penalty", "flatness_clipped", "train_batch_size")


def data(n=50, n_classes=3, n_features=6, seed=0):
    rng = np.random.RandomState(seed)
    return rng.randn(n, n_features), rng.randint(0, n_classes, n)


def curve(net, name="train_loss"):
    """A quantity in each step of a net's training."""
    return [batch[name] for epoch in net.history for batch in epoch["batches"] if name in batch]


def states_of(optimizer):
    states = [
        {name: value for name, value in state.items() if value is not None}
        for state in optimizer.state_dict()["state"].values()
    ]
    return [state for state in states if state]


def assert_same(one, other, atol=1e-8):
    """Compare two trained nets: each step, weights, buffers, state of the optimizer."""
    assert len(one.history) == len(other.history)
    for name in QUANTITIES:
        np.testing.assert_allclose(curve(one, name), curve(other, name), rtol=0, atol=atol)
    for before, after in zip(one.history, other.history, strict=True):
        assert set(before) == set(after)
    weights = (net.module_.state_dict() for net in (one, other))
    torch.testing.assert_close(*weights, rtol=0, atol=atol)
    states = [states_of(net.optimizer_) for net in (one, other)]
    torch.testing.assert_close(*states, rtol=0, atol=atol)
    np.testing.assert_allclose(one.relative_flatness_, other.relative_flatness_, atol=atol)


class AtEpoch(Callback):
    """Call a function of the net and its training data before an epoch."""

    def __init__(self, epoch, function):
        self.epoch, self.function = epoch, function

    def on_epoch_begin(self, net, dataset_train=None, **kwargs):
        if len(net.history) == self.epoch:
            self.function(net, dataset_train)


class OwnLoop:
    """Leaves every epoch to the net's own loop."""

    def train_epoch(self, job):
        raise NeedsOwnLoop

    def log_reason(self, reason):
        pass


@contextmanager
def own_loop():
    """Train nets by skorch's loop and torch's autograd, and not by written out formulas."""
    token = EPOCH_TRAINER.set(OwnLoop())
    try:
        yield
    finally:
        EPOCH_TRAINER.reset(token)


def compare(nets, *, X=None, y=None, each=None, fleet=4, atol=1e-8):
    """Fit nets by their own loops and stacked, and one of them by itself; return the stacked.

    Data may be pairs (X, y), or triples with the sample weights.
    """
    if each is None:
        each = [data() if X is None else (X, y)] * len(nets)
    with own_loop():
        singles = [clone(net).fit(*one) for net, one in zip(nets, each, strict=True)]
    with fleet_training(fleet):
        jobs = (delayed(clone(net).fit)(*one) for net, one in zip(nets, each, strict=True))
        stacked = Parallel()(jobs)
    for one, other in zip(singles, stacked, strict=True):
        assert_same(one, other, atol)
    assert_same(singles[0], clone(nets[0]).fit(*each[0]), atol)
    return stacked

"""Data, nets and comparisons that the tests of training share."""

from functools import partial

import numpy as np
import torch
from sklearn.base import is_regressor
from torch import nn
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from relflat_sk import (
    MLP,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
    SharpnessAwareMixin,
)
from tests import data_kinds

Net = RelativeFlatnessRegularizedNet
Classifier = RelativeFlatnessRegularizedClassifier
Binary = RelativeFlatnessRegularizedBinaryClassifier
Regressor = RelativeFlatnessRegularizedRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(42, 4)).astype(np.float32)
INDEX = X[:, :3].argmax(axis=1)
NAMES = np.array(["x", "y", "z"])[INDEX]
VALUES = (X @ np.array([1.0, -2.0, 0.5, 0.0])).astype(np.float32)
LABELS = np.eye(3, dtype=int)[INDEX]
WEIGHTS = rng.integers(0, 4, size=42)
ROWS = np.arange(42).repeat(WEIGHTS)
SIZES = {"module__n_features": 4, "module__n_outputs": 3}
TASKS = {
    "classes": (Classifier, NAMES),
    "binary": (Binary, INDEX > 0),
    "labels": (Binary, LABELS),
    "regression": (Regressor, VALUES),
}


class Sam(SharpnessAwareMixin, Classifier):
    pass


def make(kind=Classifier, **params):
    defaults = {"verbose": 0, "random_state": 0, "max_epochs": 3, "batch_size": 16}
    return kind(**{**defaults, **params})


def same(net, other, rtol=0, atol=0):
    """Compare weights and buffers, bit by bit if no tolerance is given."""
    assert_close(net.module_.state_dict(), other.module_.state_dict(), rtol=rtol, atol=atol)


def results_of(net, inputs=X):
    """What a net has recorded and measured in its training, and what it predicts."""
    results = {name: net.history[:, name] for name in ("train_loss", "flatness_penalty")}
    results |= {"flatness": net.relative_flatness_, "loss": net.constant_comparison_.loss}
    predicted = net.predict(inputs) if is_regressor(net) else net.predict_proba(inputs)
    return results | {"predicted": predicted}


def weights_of(net):
    return torch.cat([p.detach().flatten() for p in net.module_.parameters()])


class Double(MLP):
    """In float64, so that an equality is one of ideas and not one of roundings."""

    def __init__(self, n_features, n_outputs):
        super().__init__(n_features, n_outputs, (6,), activation="tanh")
        self.double()


class Recording(nn.Module):
    """Batch norm and dropout in front of the last layer, with a record of each training pass."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.first, self.norm = nn.Linear(n_features, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(12, n_outputs)
        self.seen = []

    def forward(self, x):
        features = self.drop(self.norm(self.first(x)).exp())
        logits = self.last(features)
        if self.training:
            seen = features, logits, self.first.weight.clone()
            self.seen.append([tensor.detach() for tensor in seen])
        return logits


class Ending(nn.Module):
    def __init__(self, n_features, n_outputs, function):
        super().__init__()
        self.linear, self.function = nn.Linear(n_features, n_outputs), function

    def forward(self, x):
        return self.function(self.linear(x))


def criterion_of(function):
    """A class of criteria that no table knows: they compute a function of output and target."""
    return type("Own", (nn.Module,), {"forward": lambda self, z, y: function(z, y)})


Quartic = criterion_of(lambda output, target: (output - target).pow(4).mean())


def in_bfloat16(kind, method):
    def cast(self, *args, **kwargs):
        with torch.autocast(self.device, dtype=torch.bfloat16):
            return getattr(super(made, self), method)(*args, **kwargs)

    made = type("Cast", (kind,), {method: cast})
    return made


class AccumulatingMixin:
    """Steps over three batches each, as in skorch's documentation."""

    def get_loss(self, *args, training=False, **kwargs):
        loss = super().get_loss(*args, training=training, **kwargs)
        return loss / 3 if training else loss

    def train_step(self, batch, **fit_params):
        step = self.train_step_single(batch, **fit_params)
        if len(self.history[-1, "batches"]) % 3 == 0:
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


def dataset(y=INDEX):
    return TensorDataset(torch.tensor(X), torch.tensor(y))


Stream = partial(data_kinds.Stream, X, INDEX)

"""Copies of nets and their callbacks, made at any time of a training."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from skorch.callbacks import Callback

from relflat_sk import StopAtGradientNorm, StopAtLoss, WeightAverage
from tests.training.common import NAMES, Classifier, X, make


def through_torch(net):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net)), through_torch]


class OwnLoss(Classifier):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        return torch.nn.functional.cross_entropy(y_pred, y_true) / 2


class Copying(Callback):
    """Copies the net at each event, and compares what the copy predicts."""

    def on_batch_end(self, net, *args, **kwargs):
        for way in WAYS:
            other = way(net)
            np.testing.assert_array_equal(other.predict_proba(X), net.predict_proba(X))

    on_grad_computed = on_epoch_end = on_train_end = on_batch_end


@pytest.mark.filterwarnings("ignore:.*has not reached")
@pytest.mark.parametrize("kind", [Classifier, OwnLoss])
@pytest.mark.parametrize("decay", [None, 0.9])
def test_a_net_is_copied_at_any_time(kind, decay):
    stops = [StopAtLoss(1e-9), StopAtGradientNorm(1e-9)]
    callbacks = [Copying(), WeightAverage(0, decay), *stops]
    net = make(kind, callbacks=callbacks, max_epochs=2, flatness_layer="all").fit(X, NAMES)
    for way in WAYS:
        other = way(net)
        assert other.relative_flatness_ == net.relative_flatness_
        other.partial_fit(X, NAMES)


class WithoutTensors(pickle.Pickler):
    """Refuses what skops cannot store outside of the parts that skorch stores itself."""

    def reducer_override(self, value):
        assert not isinstance(value, torch.Tensor | torch.Generator | torch.dtype)
        return NotImplemented


@pytest.mark.filterwarnings("ignore:.*has not reached")
def test_a_fitted_net_holds_no_tensors_beside_its_modules():
    callbacks = [WeightAverage(0), StopAtLoss(1e-9)]
    net = make(Classifier, callbacks=callbacks, max_epochs=2, random_state=0).fit(X, NAMES)
    WithoutTensors(io.BytesIO()).dump(net)

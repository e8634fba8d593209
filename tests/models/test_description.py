"""Warnings name a model so that users recognise it."""

import numpy as np
import torch
from sklearn.neural_network import MLPClassifier
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
)
from relflat_sk._models import describe


def test_parameters_that_differ_from_the_defaults():
    net = RelativeFlatnessRegularizedClassifier(
        lr=0.1, callbacks=[StopAtLoss(0.2)], optimizer=torch.optim.SGD, optimizer__momentum=0.9
    )
    assert describe(net) == (
        "RelativeFlatnessRegularizedClassifier(optimizer=SGD, lr=0.1, "
        "callbacks=[StopAtLoss(0.2)], optimizer__momentum=0.9)"
    )
    assert describe(MLPClassifier(alpha=3)) == "MLPClassifier(alpha=3)"
    assert describe(nn.Linear(2, 3)) == "Linear()"


def test_defaults_of_parent_classes():
    name = "RelativeFlatnessRegularizedBinaryClassifier"
    assert describe(RelativeFlatnessRegularizedBinaryClassifier(verbose=0)) == f"{name}()"
    assert describe(NeuralNetClassifier(nn.Linear)) == "NeuralNetClassifier(module=Linear)"


def test_long_values_and_addresses_are_left_out():
    net = RelativeFlatnessRegularizedClassifier(dataset=np.ones((5, 50)), callbacks=[object()])
    text = describe(net)
    assert len(text) < 200
    assert "..." in text
    assert "\n" not in text
    assert "<object object>" in text

"""A member of a fleet takes a small part of the operations of a single net."""

import numpy as np
import pytest
from torch import nn

from relflat_sk import MLP, EnsembleTrainer, RelativeFlatnessRegularizedClassifier
from tests.devices.simulated import DEVICE, count, simulated_device

MEMBERS = 8


@pytest.fixture(autouse=True)
def device():
    with simulated_device():
        yield


class LeNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5),
            nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip


def count_training(module, n, fleet, epochs):
    X = np.random.RandomState(0).randn(64, 1, 28, 28).astype(np.float32)
    nets = [
        RelativeFlatnessRegularizedClassifier(
            module, lr=0.001 * (1 + seed), random_state=seed, max_epochs=epochs, batch_size=16,
            device=DEVICE, verbose=0,
        )
        for seed in range(n)
    ]  # fmt: skip
    with count() as counts:
        EnsembleTrainer(nets, fleet=fleet).fit(X, np.arange(64) % 10)
    return counts.n_operations


def count_two_epochs(module, n, fleet):
    # the first epoch finds out how to train
    return count_training(module, n, fleet, 3) - count_training(module, n, fleet, 1)


@pytest.mark.parametrize("module", [LeNet, MLP])
def test_a_tenth_of_the_operations(module):
    single = count_two_epochs(module, 1, None)
    member = count_two_epochs(module, MEMBERS, MEMBERS) / MEMBERS
    # the number of operations of a step hardly depends on the number of members: 32 of them
    assert member * MEMBERS / 32 < single / 10

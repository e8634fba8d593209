"""A member of a fleet takes a small part of the operations of a single net."""

import numpy as np
import pytest

from benchmarks._harness.networks import LeNet5
from relflat_sk import MLP, FleetTrainer, RelativeFlatnessRegularizedClassifier
from tests.devices.simulated import DEVICE, count, simulated_device

MEMBERS = 20


@pytest.fixture(autouse=True)
def device():
    with simulated_device():
        yield


def count_training(module, n, fleet, epochs):
    X = np.random.RandomState(0).randn(32, 3, 32, 32).astype(np.float32)
    nets = [
        RelativeFlatnessRegularizedClassifier(
            module, lr=0.001 * (1 + seed), random_state=seed, max_epochs=epochs, batch_size=32,
            device=DEVICE, verbose=0,
        )
        for seed in range(n)
    ]  # fmt: skip
    with count() as counts:
        FleetTrainer(nets, fleet=fleet).fit(X, np.arange(32) % 10)
    return counts.n_operations


def count_step(module, n, fleet):
    """Count the operations of a step of 32 images, for each member."""
    # the first epoch finds out how to train, and an epoch is one step
    return (count_training(module, n, fleet, 2) - count_training(module, n, fleet, 1)) / n


@pytest.mark.parametrize("module", [LeNet5, MLP])
def test_a_tenth_of_the_operations(module):
    assert count_step(module, MEMBERS, MEMBERS) < count_step(module, 1, None) / 10

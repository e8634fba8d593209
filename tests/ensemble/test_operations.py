"""A member of a fleet takes a small part of the operations of a single net."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """
import json, sys
import numpy as np, torch
from torch import nn
from tests import simulated_device
from relflat_sk import MLP, EnsembleTrainer, RelativeFlatnessRegularizedClassifier

class LeNet(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )

rng = np.random.RandomState(0)
X, y = rng.randn(64, 1, 28, 28).astype(np.float32), np.arange(64) % 10
K = 16

def operations(module, n, fleet, epochs):
    nets = [
        RelativeFlatnessRegularizedClassifier(
            module, lr=0.001 * (1 + seed), random_state=seed, max_epochs=epochs, batch_size=16,
            device="sim", verbose=0,
        )
        for seed in range(n)
    ]
    with simulated_device.count() as counts:
        EnsembleTrainer(nets, fleet=fleet).fit(X, y)
    return sum(counts.operations.values())

def of_two_epochs(module, n, fleet):  # the first one finds out how to train
    return operations(module, n, fleet, 3) - operations(module, n, fleet, 1)

module = {"LeNet": LeNet, "MLP": MLP}[sys.argv[1]]
print(json.dumps([of_two_epochs(module, 1, None), of_two_epochs(module, K, K) / K]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("network", ["LeNet", "MLP"])
def test_a_tenth_of_the_operations(network):
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNT, network],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=True,
        capture_output=True,
        text=True,
    )
    single, member = eval(run.stdout)
    # with 16 members; the number of operations of a step hardly depends on the number of members
    assert member * 16 / 32 < single / 10

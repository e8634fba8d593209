"""fleet="auto" keeps within the memory, and trains one by one where that is faster."""

import logging

import pytest
import torch
from torch import nn

from relflat_sk import EnsembleTrainer, RelativeFlatnessRegularizedClassifier
from relflat_sk.ensemble import _fleet
from relflat_sk.ensemble._size import free_memory, memory_of_member
from tests.ensemble.compare import compare, data


def nets(n=6):
    return [
        RelativeFlatnessRegularizedClassifier(
            max_epochs=6, batch_size=16, verbose=0, random_state=seed
        )
        for seed in range(n)
    ]


@pytest.mark.parametrize("slower", [False, True])
def test_the_timed_trial_decides_and_changes_no_result(monkeypatch, caplog, slower):
    caplog.set_level(logging.INFO, logger="relflat_sk")
    seconds = {"single": 1.0, "stacked": 2.0 if slower else 0.5}

    class Rigged(_fleet._Trial):
        def __setattr__(self, name, value):
            super().__setattr__(name, Constant(seconds[name]) if name in seconds else value)

    class Constant(list):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def append(self, _):
            super().append(self.value)

    monkeypatch.setattr(_fleet, "_Trial", Rigged)
    compare(nets(), fleet="auto")
    expected = [
        "trained one by one: an epoch of the stacked model takes 2 s for each net, and one of a "
        "single net 1 s"
    ]
    assert [record.getMessage() for record in caplog.records] == expected * slower


def test_no_more_nets_begin_than_half_of_the_memory_holds(monkeypatch):
    sizes = []
    train = _fleet.Group.train

    def note(self, members):
        sizes.append(len(members))
        monkeypatch.setattr(_fleet, "free_memory", lambda device: None)
        train(self, members)

    monkeypatch.setattr(_fleet.Group, "train", note)
    net = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.Linear(100, 3)).double()
    memory = memory_of_member(net, torch.zeros(16, 6, dtype=torch.float64))
    monkeypatch.setattr(_fleet, "free_memory", lambda device: 2 * 3 * memory + 100)
    EnsembleTrainer(nets(), fleet="auto").fit(*data())
    assert max(sizes) == 3


def test_the_memory_of_a_network_is_counted():
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    weights = 10 * 20 + 20 + 20 * 5 + 5
    found = memory_of_member(net, torch.zeros(8, 10))
    assert 4 * 5 * weights < found < 4 * (6 * weights + 4 * 8 * (10 + 20 + 20 + 5))


def test_the_free_memory_is_known():
    assert free_memory(torch.device("meta")) is None
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 2**20

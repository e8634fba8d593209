"""fleet="auto" keeps within the memory, and trains large convolutions one by one."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.costs import fleet as fleet_benchmark
from relflat_sk import FleetTrainer, RelativeFlatnessRegularizedClassifier
from relflat_sk.fleet import _fleet
from relflat_sk.fleet._size import free_memory, memory_of_member, why_slower
from tests.fleet.compare import compare, data


def nets(n=6):
    return [
        RelativeFlatnessRegularizedClassifier(
            max_epochs=6, batch_size=16, verbose=0, random_state=seed
        )
        for seed in range(n)
    ]


class Convolutions(nn.Sequential):
    def __init__(self, channels):
        super().__init__(
            nn.Conv2d(1, channels, 3, padding=1), nn.Flatten(), nn.Linear(256 * channels, 3)
        )


# 2 * 9 multiplications and additions for each of 256 numbers, 256 samples and channel
@pytest.mark.parametrize(("channels", "operations"), [(8, None), (32, "3.8e+07")])
def test_large_convolutions_are_trained_one_by_one(caplog, channels, operations):
    caplog.set_level(logging.INFO, logger="relflat_sk")
    settings = {"max_epochs": 1, "batch_size": 256, "verbose": 0, "module__channels": channels}
    net = RelativeFlatnessRegularizedClassifier(Convolutions, flatness_weight=0, **settings)
    X = np.random.default_rng(0).normal(size=(256, 1, 16, 16)).astype(np.float32)
    FleetTrainer([net, net], fleet="auto").fit(X, np.arange(256) % 3)
    reason = f"trained one by one: its convolutions take {operations} operations per batch"
    assert [record.getMessage() for record in caplog.records] == [reason] * bool(operations)


def test_what_is_large_depends_on_shapes_alone_and_on_the_device():
    net = Convolutions(32)
    images = torch.zeros(256, 1, 16, 16)
    assert why_slower(net, images[:100]) is None
    assert "3.8e+07 operations" in why_slower(net, images)
    assert why_slower(net.to("meta"), images.to("meta")) is None
    assert why_slower(nn.Sequential(nn.Flatten(), nn.Linear(256, 4000)), images) is None


def test_no_result_depends_on_the_choice():
    compare(nets(), fleet="auto")


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
    FleetTrainer(nets(), fleet="auto").fit(*data())
    assert max(sizes) == 3


def test_the_memory_of_a_network_is_counted():
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    weights = 10 * 20 + 20 + 20 * 5 + 5
    found = memory_of_member(net, torch.zeros(8, 10))
    assert 4 * 5 * weights < found < 4 * (6 * weights + 4 * 8 * (10 + 20 + 20 + 5))


@pytest.mark.slow
def test_many_nets_take_little_more_memory_than_as_many_single_ones():
    assert fleet_benchmark.memory_of(4) <= fleet_benchmark.MOST_MEMORY


def test_the_free_memory_is_known():
    assert free_memory(torch.device("meta")) is None
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 2**20

"""How often the host waits for the device, and how many operations a step and a pass take.

On an accelerator, a small network's step takes as long as its operations take to launch, and each
wait empties the queue of launched operations. The numbers are ratios to skorch's own step and to
the network's forward pass. Operations that compute nothing, such as views, do not count.
"""

from typing import ClassVar

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback
from torch import nn

from benchmarks._harness.networks import LeNet5
from relflat_sk import MLP, FleetTrainer, RelativeFlatnessPenalty, StopAtLoss, measure
from tests.devices.simulated import DEVICE, active_counts, count, simulated_device
from tests.penalty.every_draw import train
from tests.training.common import Classifier, make

CRITERION = nn.CrossEntropyLoss()
SIZE = 10  # of a batch
TRACE_LIKE = [
    "relative_flatness", "hessian_trace", "trace_flatness", "neuron_flatness_sum",
    "neuron_flatness_max", "normalized_relative_flatness",
]  # fmt: skip


@pytest.fixture(autouse=True)
def device():
    with simulated_device():
        yield


def make_data(n_batches):
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(SIZE * n_batches, 3, 32, 32, generator=generator)
    return X, torch.arange(len(X)) % 10


def count_step(net, n=8):
    """Count operations and waits of a training step; a loader has labels on the CPU."""
    X, y = make_data(1)
    net.initialize()
    net.history.new_epoch()

    params = {"training": True, "prefix": "train", "step_fn": net.train_step}
    # the first step finds the layers, and the limit measures norms in each of them
    net.run_single_epoch([(X, y)] * 9, **params)
    with count() as counts:
        net.run_single_epoch([(X, y)] * n, **params)
    return counts.n_operations / n, counts.n_waits / n


@pytest.fixture(scope="module")
def skorch_step():
    params = {"criterion": nn.CrossEntropyLoss, "optimizer": torch.optim.Adam, "verbose": 0}
    with simulated_device():
        return count_step(NeuralNetClassifier(LeNet5, device=DEVICE, **params))


STEPS = {
    "no penalty": ({"flatness_weight": 0}, 1.02),
    "last layer, no limit": ({"flatness_clip": None}, 1.3),
    "last layer": ({}, 1.72),
    "first layer, no limit": ({"flatness_layer": 0, "flatness_clip": None}, 2.14),
    "first layer": ({"flatness_layer": 0}, 2.62),
    "all layers, no limit": ({"flatness_layer": "all", "flatness_clip": None}, 3.22),
    "all layers": ({"flatness_layer": "all"}, 3.75),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, skorch_step):
    params, largest = STEPS[name]
    operations, waits = count_step(Classifier(LeNet5, device=DEVICE, verbose=0, **params))
    assert operations <= largest * skorch_step[0]
    assert waits == skorch_step[1] == 1


def test_a_plain_loop_waits_once_for_labels_on_the_device():
    X, y = (tensor.to(DEVICE) for tensor in make_data(1))
    net, penalty = LeNet5().to(DEVICE), RelativeFlatnessPenalty(weight=1.0)
    for _ in range(2):  # the first step waits once more, to check the network
        with count() as counts:
            train(penalty, net, CRITERION, X, y, 1)
    assert counts.n_waits == 1


def count_batches(compute):
    """Count operations and waits of one batch more, and the waits of the call itself."""
    found = []
    for n_batches in (1, 4):
        X, y = make_data(n_batches)
        with count() as counts:
            compute(X, y)
        found.append((counts.n_operations, counts.n_waits))
    (few, waits), (many, more_waits) = found
    per_batch = (more_waits - waits) / 3
    return (many - few) / 3, per_batch, waits - per_batch


def count_forward_pass(net):
    X, _ = make_data(1)
    with torch.no_grad(), count() as counts:
        net(X.to(DEVICE))
    return counts.n_operations


@pytest.mark.parametrize("layer", [-1, -2])
@pytest.mark.parametrize("name", TRACE_LIKE)
def test_measures_do_not_wait_for_a_batch(name, layer):
    net, options = LeNet5().to(DEVICE), {"criterion": CRITERION, "batch_size": SIZE}
    operations, waits, of_call = count_batches(
        lambda X, y: measure(name, net, X, y, layer=layer, **options)
    )
    assert waits == 0
    assert of_call <= (9 if name.startswith("normalized") else 8)  # which takes a second pass
    if (name, layer) == ("relative_flatness", -1):
        assert operations <= 2.5 * count_forward_pass(net)
        assert of_call <= 3


def test_epochs_with_a_goal():
    """Each waits twice more, however many batches there are: for checks, and for the loss."""
    X, y = make_data(4)
    waits = []
    for callbacks in ([], [StopAtLoss(1e-6)]):
        params = {"batch_size": SIZE, "iterator_valid__batch_size": SIZE, "callbacks": callbacks}
        net = make(module=LeNet5, device=DEVICE, **params)
        with count() as counts:
            net.fit(X, y)
        waits.append(counts.n_waits)
    assert waits[1] - waits[0] <= 2 * 3


class NotesOperations(Callback):
    """Notes at each end of an epoch how many operations there were."""

    found: ClassVar[list] = []

    def on_epoch_end(self, net, **kwargs):
        self.found.append(active_counts()[-1].n_operations)


def count_member_epoch(module, n, fleet, size):
    """Count the operations of an epoch of eight steps, for each member."""
    NotesOperations.found.clear()
    X = np.random.RandomState(0).randn(32, 3, size, size).astype(np.float32)
    params = {"module": module, "max_epochs": 2, "batch_size": 4, "callbacks": [NotesOperations]}
    nets = [make(lr=0.001 * (1 + i), random_state=i, device=DEVICE, **params) for i in range(n)]
    with count():
        FleetTrainer(nets, fleet=fleet).fit(X, np.arange(32) % 10)
    # as many ends of epochs later, each member has trained one; the first finds out how to train
    return (NotesOperations.found[n] - NotesOperations.found[0]) / n


@pytest.mark.parametrize(("module", "size"), [(LeNet5, 32), (MLP, 8)])
def test_a_member_of_a_fleet_takes_a_tenth_of_the_operations(module, size):
    alone = count_member_epoch(module, 1, None, size)
    assert count_member_epoch(module, 20, 20, size) < alone / 10

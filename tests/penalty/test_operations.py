"""How many multiplications a training step takes, where their number decides its time."""

from contextlib import nullcontext
from functools import cache

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._harness.networks import LeNet5, ResNet18
from tests.cases import published_penalty

SIZE = 32  # of images
# behind the layer one pass more, and two to differentiate it, next to the three of a plain step;
# and at each layer, products of gradients and features
STEPS = {
    ("LeNet-5", "first layer"): (LeNet5, 0, 2.0),
    ("LeNet-5", "all layers"): (LeNet5, "all", 2.9),
    ("ResNet-18", "all layers"): (ResNet18, "all", 2.3),
}


@cache
def count_step(network, penalty=None):
    torch.manual_seed(0)
    net, criterion = network(), nn.CrossEntropyLoss()
    X, y = torch.randn(2, 3, SIZE, SIZE), torch.arange(2)
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            with nullcontext() if penalty is None else penalty.capture(net):
                output = net(X)
            loss = criterion(output, y)
            if penalty is not None:
                loss = loss + penalty(criterion, output, y)
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("step", STEPS, ids=", ".join)
def test_multiplications_of_a_step(step):
    network, layer, most = STEPS[step]
    assert count_step(network, published_penalty(layer)) <= most * count_step(network)

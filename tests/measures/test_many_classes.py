"""Heads of very many classes, whose measures are computed over chunks of the classes."""

import pytest
import torch
from torch import nn

from relflat_sk import measure
from relflat_sk._network.network import mean_loss
from tests.losses.test_many_classes import class_by_class
from tests.measures.nets import CE, evaluate, opened
from tests.rounding import FLOAT32

NAMES = ["relative_flatness", "normalized_relative_flatness"]
TRACES = [*NAMES, "hessian_trace", "trace_flatness", "neuron_flatness_sum", "neuron_flatness_max"]


def by_sums(net, X):
    """Flatness at the last layer, from sums over classes in float64."""
    with torch.no_grad():
        features = net[:-1](X).double()
        W, bias = net[-1].weight.detach().double(), net[-1].bias.double()
    forms, squares = class_by_class(features @ W.T + bias, W), features.square()
    spread = features.var(dim=0, correction=0)
    plain = squares.sum(dim=1) * forms.sum(dim=1)
    scaled = (squares / spread).sum(dim=1) * (forms * spread).sum(dim=1)
    return dict(zip(NAMES, (plain.mean().item(), scaled.mean().item()), strict=True))


def make(d, m, gain, n=6):
    """A network whose predictions are the more confident, the greater `gain` is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, m), nn.Tanh(), nn.Linear(m, d))
    with torch.no_grad():
        net[-1].weight.mul_(gain)
    return net, torch.randn(n, 4), torch.randint(d, (n,))


@pytest.mark.parametrize(("d", "m", "gain"), [(7, 5, 20.0), (50257, 9, 0.05)], ids=str)
def test_float32_agrees_with_float64(d, m, gain):
    net, X, y = make(d, m, gain)
    for name, expected in by_sums(net, X).items():
        found = evaluate(name, net, X, y, criterion=CE, batch_size=4)
        assert found.method == "closed form"
        assert found.value == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("d", [5, 5000])
def test_bfloat16_outputs_are_summed_in_float32(d):
    net, X, y = make(d, 16, 1.0)
    net.bfloat16()
    seen = []
    net[-1].register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    network, found = opened("relative_flatness", net, X, y, criterion=CE)
    features, z = (x.detach().double() for x in seen[-1])
    forms = class_by_class(z, net[-1].weight.detach()).sum(dim=1)
    expected = float((features.square().sum(dim=1) * forms).mean())
    assert found.value == pytest.approx(expected, rel=FLOAT32)
    loss = CE(net(X.bfloat16()).double(), y).item()
    assert found.passes.risk == pytest.approx(loss, rel=FLOAT32)
    assert mean_loss(network) == pytest.approx(loss, rel=FLOAT32)


class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Context that notes the bytes of each array that an operation makes."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {
            x.untyped_storage().data_ptr()
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = function(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in before:
            self.found.append(out.untyped_storage().nbytes())
        return out


def test_memory_is_that_of_a_chunk(monkeypatch):
    """No array that a measure makes of classes and features has more classes than a chunk."""
    monkeypatch.setattr("relflat_sk._losses.curvature._ROWS", {False: 64, True: 64})
    monkeypatch.setattr("relflat_sk._numerics._TOGETHER", 64 * 48)
    net, X, y = make(5000, 48, 1.0)
    measure("relative_flatness", net, X, y, criterion=CE)  # also checks what the layer computes
    logits = 4 * len(X) * 5000
    own = net[-1].weight.numel() * 4
    with Sizes() as sizes:
        for name in TRACES:
            measure(name, net, X, y, criterion=CE)
    assert logits < own
    assert max(size for size in sizes.found if size != own) <= logits

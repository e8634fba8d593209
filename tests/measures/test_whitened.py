"""Whitened flatness: its definition, and the mixings under which it does not change."""

import copy

import pytest
import torch
from torch import nn

from relflat_sk import measure
from tests.measures.nets import CE, make

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
NAME = "whitened_flatness"


# tests/measures/test_layer_kinds.py compares it with dense Hessians, and its probes
def test_features_that_depend_on_each_other_count_once():
    net, X, y = make("mlp tanh", n=20)
    doubled = nn.Sequential(nn.Linear(4, 13), nn.Tanh(), nn.Linear(13, 3)).double()
    with torch.no_grad():
        for one in doubled.parameters():
            one.zero_()  # the last neuron is dead
        for part in (slice(0, 6), slice(6, 12)):
            doubled[0].weight[part], doubled[0].bias[part] = net[0].weight, net[0].bias
            doubled[2].weight[:, part] = net[2].weight / 2
        doubled[2].bias.copy_(net[2].bias)
    expected = measure(NAME, net, X, y, criterion=CE)
    assert measure(NAME, doubled, X, y, criterion=CE) == pytest.approx(expected, rel=1e-8)
    found = measure(NAME, doubled.float(), X.float(), y, criterion=CE)
    assert found == pytest.approx(expected, rel=1e-4)


# -- attention and adapters -----------------------------------------------------------------------

HEADS, WIDTH, RANK = 2, 3, 2


class Adapted(nn.Module):
    """Attention of two heads with a low-rank adapter on a linear layer behind it."""

    def __init__(self):
        super().__init__()
        m = HEADS * WIDTH
        self.q, self.k, self.v, self.o = (nn.Linear(m, m) for _ in range(4))
        self.up = nn.Linear(m, 5)
        self.lora_A = nn.Linear(m, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, 5, bias=False)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        q, k, v = (
            one(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        h = (q @ k.mT / WIDTH**0.5).softmax(dim=-1) @ v
        h = x + self.o(h.transpose(1, 2).flatten(2))
        h = self.up(h) + 0.5 * self.lora_B(self.lora_A(h))
        return self.head(torch.tanh(h).mean(1))


def mixed(net):
    """Mix what lies between q and k, v and o in each head, and between the adapter's factors."""
    net = copy.deepcopy(net)
    per_head = torch.block_diag(*torch.randn(HEADS, WIDTH, WIDTH).double())
    per_head_of_v = torch.block_diag(*torch.randn(HEADS, WIDTH, WIDTH).double())
    between = torch.randn(RANK, RANK).double()
    with torch.no_grad():
        for layer, matrix in [
            (net.q, per_head), (net.k, torch.linalg.inv(per_head).T), (net.v, per_head_of_v),
            (net.lora_A, between),
        ]:  # fmt: skip
            layer.weight.copy_(matrix @ layer.weight)
            if layer.bias is not None:
                layer.bias.copy_(matrix @ layer.bias)
        net.o.weight.copy_(net.o.weight @ torch.linalg.inv(per_head_of_v))
        net.lora_B.weight.copy_(net.lora_B.weight @ torch.linalg.inv(between))
    return net


@pytest.mark.parametrize("seed", [0, 1])
def test_no_mixing_within_attention_and_adapters_changes_it(seed):
    torch.manual_seed(seed)
    net, X, y = Adapted().double(), torch.randn(6, 4, HEADS * WIDTH).double(), torch.arange(6) % 3
    other = mixed(net)
    torch.testing.assert_close(other(X), net(X), rtol=1e-10, atol=1e-10)
    options = {"criterion": CE, "method": "exact"}
    for layer in ("q", "k", "v", "o", "lora_A", "lora_B"):
        one, two = (measure(NAME, each, X, y, layer=layer, **options) for each in (net, other))
        assert two == pytest.approx(one, rel=1e-8), layer
        plain = [
            measure("relative_flatness", each, X, y, layer=layer, **options)
            for each in (net, other)
        ]
        unchanged = plain[1] == pytest.approx(plain[0], rel=1e-8)
        assert unchanged == (layer not in {"o", "lora_B"}), layer

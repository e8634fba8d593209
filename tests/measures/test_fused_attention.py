"""Layers in front of `scaled_dot_product_attention`, whose fused kernels cannot be measured."""

import threading

import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.nn import functional as F

from relflat_sk import RelativeFlatnessPenalty, flatness_report, measure, relative_flatness
from relflat_sk._models import DataOptions, to_network
from relflat_sk._network import MathAttention
from relflat_sk.measures._sharpness import fisher_rao_norm
from tests import oracles
from tests.measures.test_layer_kinds import CE

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
HEADS, SIZE = 2, 2


def allowed():
    """The kernels that torch may use."""
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


class FusedAttention(nn.Module):
    """A block with attention in one function, tokens pooled at the end."""

    def __init__(self, causal=False, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(4, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, 4)
        self.head = nn.Linear(4, 3)
        self.causal, self.dropout, self.allowed = causal, dropout, []

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        h = self.attend(q, k, v).transpose(1, 2).flatten(2)
        return self.head((x + self.out(h)).tanh().mean(1))

    def attend(self, q, k, v):
        self.allowed.append(allowed())
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, dropout_p=p)


class WrittenOutAttention(FusedAttention):
    """The same, by matrix products and with a given mask of dropout."""

    mask = 1.0

    def attend(self, q, k, v):
        scores = q @ k.transpose(-2, -1) / SIZE**0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
        return (scores.softmax(-1) * self.mask) @ v


KINDS = {"plain": {}, "causal": {"causal": True}, "dropout": {"dropout": 0.5}}


def make(kind):
    """The network, the same network written out, and data."""
    torch.manual_seed(0)
    net = FusedAttention(**KINDS[kind]).double()
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2)  # attention that is far from a mean
    written = WrittenOutAttention(**KINDS[kind]).double()
    written.load_state_dict(net.state_dict())
    return net, written, torch.randn(6, 3, 4).double(), torch.arange(6) % 3


@pytest.mark.parametrize("layer", ["qkv", "out", "head"])
@pytest.mark.parametrize("kind", KINDS)
def test_measures_agree_with_the_dense_hessian(kind, layer):
    net, written, X, y = make(kind)  # measured in evaluation mode, without dropout
    H, W = oracles.weight_hessian(written.eval(), layer, CE, X, y)
    before = allowed()
    for name, oracle in oracles.TABLE_1.items():
        value = measure(name, net, X, y, layer=layer, criterion=CE, method="exact", batch_size=4)
        assert value == pytest.approx(oracle(H, W), rel=1e-8)
    value = measure("hessian_max_eigenvalue", net, X, y, layer=layer, criterion=CE, rtol=1e-12)
    assert value == pytest.approx(oracles.largest(H), rel=1e-8)
    assert allowed() == before
    assert net.training


def test_report_of_all_layers():
    net, written, X, y = make("causal")
    arguments = {"criterion": CE, "measures": ["relative_flatness"], "method": "exact"}
    found, expected = (flatness_report(one, X, y, **arguments) for one in (net, written))
    assert found["layer"].tolist() == ["qkv", "out", "head"]
    assert found["value"].tolist() == pytest.approx(expected["value"].tolist(), rel=1e-8)


def test_fisher_rao_norm_differentiates_attention_along_the_weights():
    net, written, X, y = make("causal")
    found, expected = (
        measure("fisher_rao_norm", one, X, y, criterion=CE) for one in (net, written)
    )
    assert found == pytest.approx(expected, rel=1e-8)
    assert allowed() == (True, True, True, True)


class AttendsAtTheEnd(FusedAttention):
    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        return self.attend(q, k, v).transpose(1, 2).flatten(2).mean(1)


class WrittenOutAtTheEnd(AttendsAtTheEnd):
    attend = WrittenOutAttention.attend
    mask = 1.0


def test_attention_behind_the_last_layer():
    torch.manual_seed(0)
    net, written = AttendsAtTheEnd().double(), WrittenOutAtTheEnd().double()
    del net.out, net.head, written.out, written.head
    written.load_state_dict(net.state_dict())
    X, y = torch.randn(6, 3, 4).double(), torch.arange(6) % 4
    H, W = oracles.weight_hessian(written, "qkv", CE, X, y)
    value = relative_flatness(net, X, y, criterion=CE, method="exact", batch_size=3)
    assert value == pytest.approx(oracles.kappa_of(H, W), rel=1e-8)
    penalty = RelativeFlatnessPenalty()
    for _ in range(3):
        with penalty.capture(net):
            output = net(X)
        penalty(CE, output, y).backward()


def test_attention_before_the_measured_layer_stays_fused():
    net, _, X, y = make("plain")
    before = allowed()
    for layer in (-1, "out", "head"):
        relative_flatness(net, X, y, layer=layer, criterion=CE, batch_size=3)
    assert set(net.allowed) == {before}
    relative_flatness(net, X, y, layer=0, criterion=CE, batch_size=3)
    assert net.allowed[-2:] == [(False, False, False, True)] * 2


class Fails(FusedAttention):
    def attend(self, q, k, v):
        super().attend(q, k, v)
        raise ZeroDivisionError


@pytest.mark.parametrize("flash", [True, False])
def test_kernels_are_allowed_as_before_also_after_an_exception(flash):
    net, X, y = Fails(), torch.randn(6, 3, 4), torch.arange(6) % 3
    cuda.enable_flash_sdp(flash)
    try:
        before = allowed()
        with pytest.raises(ZeroDivisionError):
            relative_flatness(net, X, y, layer=0, criterion=CE)
        with pytest.raises(ZeroDivisionError):
            fisher_rao_norm(to_network(net, X, y, DataOptions(CE)))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError), RelativeFlatnessPenalty(0).capture(net):
                net(X)
        assert len(net.allowed) == 4
        assert set(net.allowed) == {(False, False, False, True)}
        assert allowed() == before
    finally:
        cuda.enable_flash_sdp(True)


def test_the_last_of_several_contexts_restores_the_kernels():
    before = allowed()
    opened, close = threading.Event(), threading.Event()

    def other():
        with MathAttention():
            opened.set()
            close.wait(10)

    thread = threading.Thread(target=other)
    with MathAttention():
        thread.start()
        opened.wait(10)
    assert allowed() == (False, False, False, True)
    close.set()
    thread.join()
    assert allowed() == before

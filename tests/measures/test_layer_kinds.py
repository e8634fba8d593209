"""Every measure at every kind of layer, against the dense Hessian."""

import itertools
import math

import pytest
import torch
from scipy.linalg import hadamard
from torch import nn

from relflat_sk import measure
from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network
from relflat_sk.measures import _quantities, evaluate
from relflat_sk.measures._layer_measures import TRACE_LIKE, measure_layers
from tests import oracles
from tests.hugging_face import Conv1D, conv1d

# networks with random weights are at no minimum
pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
EXACT = 1e-8
CE = nn.CrossEntropyLoss()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = torch.relu(self.bn(self.stem(x)))
        h = h + torch.relu(self.conv(h))
        return self.out(h.mean((2, 3)))


class Block(nn.Module):
    """A transformer block with explicit projections, tokens pooled at the end."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(6, 18)
        self.proj = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        h = torch.softmax(q @ k.transpose(1, 2) / 6**0.5, dim=-1) @ v
        h = self.norm(x + self.proj(h))
        return self.head(nn.functional.gelu(self.up(h)).mean(1))


NETS = {
    "mlp relu": (lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LeakyReLU(),
                                       nn.Linear(5, 3)), (4,)),
    "mlp tanh": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), (4,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 2, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)),
        (2, 8, 8),
    ),
    "conv tanh": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3, dilation=2), nn.Tanh(), nn.AdaptiveAvgPool1d(2),
                              nn.Flatten(), nn.Linear(6, 3)),
        (2, 9),
    ),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2), nn.ReLU(),
                              nn.AvgPool2d(3), nn.Flatten(), nn.Linear(16, 3)),
        (2, 3, 3),
    ),
    "residual": (Residual, (2, 5, 5)),
    "transformer": (Block, (4, 6)),
    "gpt2": (lambda: nn.Sequential(conv1d(4, 5), nn.GELU(), conv1d(5, 3), nn.Flatten(),
                                   nn.ReLU(), conv1d(6, 3)), (2, 4)),
}  # fmt: skip


def make(kind, n=7):
    torch.manual_seed(0)
    build, shape = NETS[kind]
    net = build().double()
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_()
            m.running_var.uniform_(0.5, 2)
            nn.init.normal_(m.weight)
    return net.eval(), torch.randn(n, *shape).double(), torch.arange(n) % 3


def dense(net, name, X, y, criterion=CE):
    return oracles.weight_hessian(net, name, criterion, X, y)


CASES = [
    (kind, name)
    for kind in NETS
    for name, m in make(kind)[0].named_modules()
    if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d | Conv1D)
]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=["-".join(case) for case in CASES])
def test_every_measure_agrees_with_the_dense_hessian(kind, name):
    net, X, y = make(kind)
    H, W = dense(net, name, X, y)
    for measure_name, oracle in oracles.TABLE_1.items():
        found = evaluate(
            measure_name, net, X, y, layer=name, criterion=CE, method="exact", batch_size=4
        )
        assert found.value == pytest.approx(oracle(H, W), rel=EXACT, abs=1e-12), measure_name
        assert found.stderr == 0


@pytest.mark.parametrize(("kind", "name"), [("conv", "0"), ("conv tanh", "0"), ("mlp relu", "0"),
                                            ("mlp tanh", "0"), ("transformer", "qkv")])  # fmt: skip
@pytest.mark.parametrize(
    "measure_name",
    ["relative_flatness", "hessian_trace", "neuron_flatness_sum", "neuron_flatness_max"],
)
def test_probes_average_to_the_exact_value(kind, name, measure_name, monkeypatch):
    """Signs of which any two average to zero together have the mean of random ones."""
    net, X, y = make(kind)
    arguments = {"layer": name, "criterion": CE}
    exact = measure(measure_name, net, X, y, method="exact", **arguments)
    signs, calls = hadamard(128), itertools.count()

    def rademacher(shape, like, generator):
        drawn = torch.as_tensor(signs[: math.prod(shape[1:]), next(calls)]).to(like)
        return drawn.expand(shape[0], -1).reshape(shape)

    monkeypatch.setattr(_quantities, "rademacher", rademacher)
    found = evaluate(measure_name, net, X, y, method="hutchinson", n_probes=128, rtol=1e-9,
                     **arguments)  # fmt: skip
    assert next(calls) == 128
    assert found.value == pytest.approx(exact, rel=EXACT)
    assert found.stderr > 0


def test_weight_decay_counts_into_the_loss():
    net, X, y = make("mlp relu")
    name, wd = "2", 0.37
    H, W = dense(net, name, X, y)
    H = H + wd * torch.eye(W.numel()).double().reshape(H.shape)
    for measure_name, oracle in oracles.TABLE_1.items():
        value = measure(measure_name, net, X, y, layer=name, criterion=CE, weight_decay=wd)
        assert value == pytest.approx(oracle(H, W), rel=EXACT)


def test_all_layers_share_one_backward_pass_for_each_output(monkeypatch):
    net, X, y = make("conv")
    passes, grad = [], torch.autograd.grad

    def counted(*args, **kwargs):
        passes.append(1)
        return grad(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", counted)
    network = Network(net, Loss(CE), make_batches(X, y))
    found = measure_layers(network, list(TRACE_LIKE), "all")
    assert len(found) == 3 * len(TRACE_LIKE)
    # three classes, and the check of the rows: one for each number of rows that layers put out.
    # The pass for the spread of the features needs no backward pass.
    assert len(passes) == 3 + 2


class Cube(torch.autograd.Function):
    """A user's own function, which torch cannot run for several vectors at once."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x * Square.apply(x, g)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, g):
        ctx.save_for_backward(x, g)
        return x * g

    @staticmethod
    def backward(ctx, outer):
        x, g = ctx.saved_tensors
        if bool(outer.isnan().any()):  # a question that has several answers for several vectors
            raise FloatingPointError
        return outer * g, outer * x


class Cubic(nn.Module):
    def forward(self, x):
        return Cube.apply(x)


def test_functions_that_cannot_be_vectorised_are_differentiated_one_by_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), Cubic(), nn.Linear(6, 3)).double()
    X, y = torch.randn(7, 4).double(), torch.arange(7) % 3
    value = measure("relative_flatness", net, X, y, layer=0, criterion=CE, method="exact")
    assert value == pytest.approx(oracles.kappa_of(*dense(Plain(net), "net.0", X, y)), rel=EXACT)


class Plain(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net[2](self.net[0](x) ** 3)

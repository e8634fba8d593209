"""The last layer with a weight matrix need not be what makes the output."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from relflat_sk import FlatnessWarning, flatness_report, measure, relative_flatness

pytestmark = pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning")
X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


class Net(nn.Module):
    """A linear layer, and a function of its output and further parameters behind it."""

    def __init__(self, function, *shapes, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.body = nn.Linear(4, width), nn.Linear(width, width)
        self.function = function
        self.more = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.head = nn.Linear(width, 3)
        self.norm, self.conv = nn.LayerNorm([width]), nn.ConvTranspose1d(1, 1, 3, padding=1)
        self.register_buffer("fixed", torch.eye(3))

    def forward(self, x):
        return self.function(self, self.body(self.first(x).relu()), *self.more)


def flat(net, y=Y, criterion=None, **arguments):
    return relative_flatness(net, X, y, criterion=criterion or nn.CrossEntropyLoss(), **arguments)


def report(net, y=Y, criterion=None, **arguments):
    arguments = {"layers": [0, -1], "measures": "relative_flatness"} | arguments
    return flatness_report(net, X, y, criterion=criterion or nn.CrossEntropyLoss(), **arguments)


HEADS = {
    "matrix": (lambda net, h, w: h.relu() @ w, (3, 3)),
    "transposed": (lambda net, h, w: h @ w.T, (3, 3)),
    "functional": (lambda net, h, w, b: F.linear(h, w, b), (3, 3), (3,)),
    "cosine": (lambda net, h, w: F.normalize(h) @ F.normalize(w).T, (3, 3)),
    "einsum": (lambda net, h, w: torch.einsum("nd,dk->nk", h, w), (3, 3)),
    "not called": (lambda net, h: F.linear(h, net.head.weight, net.head.bias),),
    "of the norm": (lambda net, h, w: net.norm(h) @ w, (3, 3)),
    "normed": (lambda net, h, w: net.norm(h @ w), (3, 3)),
    "residual": (lambda net, h, w: h + h.tanh() @ w, (3, 3)),
}
OTHERS = {
    "none": (lambda net, h: h,),
    "log-softmax": (lambda net, h: 3 * h.log_softmax(dim=1),),
    "activation": (lambda net, h: h.sigmoid().tanh(),),
    "scale and bias": (lambda net, h, w, b: h * w + b, (3,), (3,)),
    "norm": (lambda net, h: net.norm(h),),
    "residual": (lambda net, h: h + h.relu(),),
    "another branch": (lambda net, h, w: h + torch.ones(len(h), 3) @ w, (3, 3)),
    "constant matrix": (lambda net, h: h @ net.fixed,),
    "a bias": (lambda net, h, b: F.linear(h, net.fixed, b), (3,)),
    "pooling": (lambda net, h: F.max_pool1d(h[:, None], 3, 1, 1)[:, 0],),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_no_layer_is_reported(name):
    net = Net(*HEADS[name])
    head = "head.weight" if name == "not called" else "more.0"
    message = f"layer=-1 is 'body', .* multiplies its output by the parameter '{head}'"
    with pytest.warns(FlatnessWarning, match=message) as found:
        value = flat(net)
    assert sum("layer=-1" in str(one.message) for one in found) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "layer=-1")
        assert flat(net, layer="body") == value
        flat(net, layer=0)
        report(net, layers="all", measures="hessian_trace")
        measure("l2_norm", net, X, Y, criterion=nn.CrossEntropyLoss())


def test_a_vector_can_be_a_head():
    net = Net(lambda net, h, w: h @ w, (3,))
    with pytest.warns(FlatnessWarning, match="by the parameter 'more.0'"):
        flat(net, y=torch.randn(12), criterion=nn.MSELoss())
    with pytest.warns(FlatnessWarning, match="by the parameter 'more.0'"):
        report(net, torch.randn(12), nn.MSELoss())


@pytest.mark.parametrize("name", OTHERS)
def test_other_ends_of_a_network_are_no_heads(name):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "layer=-1")
        flat(Net(*OTHERS[name]))
        report(Net(*OTHERS[name]))


@pytest.mark.filterwarnings("ignore:layer=-1:relflat_sk.FlatnessWarning")
def test_the_graph_of_the_pass_is_enough(monkeypatch):
    net, passes = Net(*HEADS["matrix"]), []
    net.register_forward_hook(lambda *_: passes.append(1))
    flat(net)
    n_passes, passes[:] = len(passes), []
    monkeypatch.setattr("relflat_sk.measures._scan.find_multiplier", lambda *_: None)
    flat(net)
    assert n_passes == len(passes)

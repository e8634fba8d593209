"""A function that torch differentiates once only is refused, never taken for flat."""

import pytest
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from relflat_sk import RelativeFlatnessRegularizedClassifier, measure


class _Cube(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, outer):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * outer


class _Net(nn.Module):
    """Half of what the first layer puts out takes a way that has a second derivative."""

    def __init__(self, n_features=4, n_outputs=3):
        super().__init__()
        self.first, self.last = nn.Linear(n_features, 5), nn.Linear(5, n_outputs)

    def forward(self, x):
        h = self.first(x)
        return self.last(_Cube.apply(h) + h.tanh())


@pytest.fixture
def data():
    torch.manual_seed(0)
    return torch.randn(30, 4).numpy(), torch.arange(30).numpy() % 3


MEASURES = [
    ("relative_flatness", {"layer": 0}),
    ("trace_flatness", {"layer": 0}),
    ("eigenvalue_flatness", {"layer": 0}),
    ("neuron_flatness_max", {"layer": 0}),
    ("joint_eigenvalue_flatness", {}),
    ("fisher_rao_norm", {}),
]


@pytest.mark.parametrize(("name", "where"), MEASURES)
def test_measures(name, where, data):
    with pytest.raises(ValueError, match="once_differentiable"):
        measure(name, _Net(), *data, criterion=nn.CrossEntropyLoss(), **where)


def test_the_last_layer_has_nothing_behind_it(data):
    assert measure("relative_flatness", _Net(), *data, criterion=nn.CrossEntropyLoss()) > 0


def test_penalty(data):
    net = RelativeFlatnessRegularizedClassifier(
        _Net, flatness_layer=0, max_epochs=1, random_state=0, verbose=0
    )
    with pytest.raises(ValueError, match="once_differentiable"):
        net.fit(*data)

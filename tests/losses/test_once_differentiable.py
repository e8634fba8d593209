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


DATA = torch.randn(30, 4).numpy(), torch.arange(30).numpy() % 3
CE = nn.CrossEntropyLoss()
LAYER_WISE = ["relative_flatness", "trace_flatness", "eigenvalue_flatness", "neuron_flatness_max"]


@pytest.mark.parametrize("name", [*LAYER_WISE, "joint_eigenvalue_flatness", "fisher_rao_norm"])
def test_measures(name):
    where = {"layer": 0} if name in LAYER_WISE else {}
    with pytest.raises(ValueError, match="once_differentiable"):
        measure(name, _Net(), *DATA, criterion=CE, **where)


def test_the_last_layer_has_nothing_behind_it():
    assert measure("relative_flatness", _Net(), *DATA, criterion=CE) > 0


def test_penalty():
    net = RelativeFlatnessRegularizedClassifier(
        _Net, flatness_layer=0, max_epochs=1, random_state=0, verbose=0
    )
    with pytest.raises(ValueError, match="once_differentiable"):
        net.fit(*DATA)

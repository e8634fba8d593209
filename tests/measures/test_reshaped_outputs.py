"""A linear layer whose outputs are reshaped to several classifications is measured exactly."""

import pytest
import torch
from torch import nn

from relflat_sk import relative_flatness
from tests import oracles

N = 7
SHAPES = {"classes and 4 labels": (3, 4), "images": (3, 2, 2), "one label": (3, 1)}


def check(module, layer, X, y, criterion):
    expected = oracles.relative_flatness(module, layer, criterion, X, y)
    value = relative_flatness(module, X, y, layer=layer, criterion=criterion)
    assert value == pytest.approx(float(expected), rel=1e-9)


def make(*parts):
    """A network with further layers behind the first, and inputs."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), *[part() for part in parts]).double()
    return module, torch.randn(N, 5, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"weight": torch.tensor([1.0, 2.0, 0.5]).double()}],
    ids=["plain", "smoothing", "class weights"],
)
def test_a_head_of_several_classifications(shape, options):
    n_outputs = torch.Size(shape).numel()
    module, X = make(lambda: nn.Linear(6, n_outputs), lambda: nn.Unflatten(1, shape))
    y = torch.randint(0, 3, (N, *shape[1:]))
    check(module, "2", X, y, nn.CrossEntropyLoss(**options))


def test_weights_of_outputs_that_broadcast_along_the_last_axis():
    module, X = make(lambda: nn.Linear(6, 4), lambda: nn.Unflatten(1, (4, 1)))
    y = torch.rand(N, 4, 1).round().double()
    weight = torch.tensor([1.0, 3.0, 2.0, 5.0]).double()[:, None]
    check(module, "2", X, y, nn.BCEWithLogitsLoss(pos_weight=weight))


@pytest.mark.parametrize("dim", [1, 2])
def test_a_softmax_before_the_outputs_are_flattened(dim):
    shape = nn.Unflatten(1, (2, 3))
    module, X = make(lambda: nn.Linear(6, 6), lambda: shape, lambda: nn.LogSoftmax(dim), nn.Flatten)
    check(module, "2", X, torch.randint(0, 6, (N,)), nn.NLLLoss())

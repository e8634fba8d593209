"""The Fisher-Rao norm against per-sample gradients in a loop."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk import measure
from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network
from relflat_sk.measures._sharpness import fisher_rao_norm
from tests.cases import CASES
from tests.measures.test_layer_kinds import NETS
from tests.measures.test_layer_kinds import make as make_kind

CE = nn.CrossEntropyLoss()
EXACT = 1e-10
pytestmark = pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning")


def norm_by_loop(net, loss_of, X, weight=None):
    """``sqrt(mean_i <w, grad l_i>^2)`` with ``loss_of(output, i)`` the loss of sample i."""
    net.eval()
    parameters = list(net.parameters())
    squares = []
    for i in range(len(X)):
        loss = loss_of(net(X[i : i + 1]), i)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        slope = sum((g * w).sum() for g, w in zip(found, parameters, strict=True) if g is not None)
        squares.append(slope.item() ** 2)
    return float(np.sqrt(np.average(squares, weights=weight)))


def network(net, criterion, X, y, **options):
    return Network(net, Loss(criterion), make_batches(X, y, **options))


@pytest.mark.parametrize("kind", NETS)
def test_every_architecture(kind):
    net, X, y = make_kind(kind)
    expected = norm_by_loop(net, lambda output, i: CE(output, y[i : i + 1]), X)
    found = fisher_rao_norm(network(net, CE, X, y, batch_size=4))
    assert found.value == pytest.approx(expected, rel=EXACT)
    assert (found.stderr, found.method) == (0.0, "exact")


@pytest.mark.parametrize("case", CASES)
def test_every_loss(case):
    """The per-sample losses that are differentiated have the criterion's mean."""
    make_net, make_criterion, make_target, _ = CASES[case]
    torch.manual_seed(1)
    net, criterion, X, y = (
        make_net(),
        make_criterion(),
        torch.randn(11, 5).double(),
        make_target(11),
    )
    summed, divisor = criterion, 1.0
    if hasattr(criterion, "reduction"):
        summed = make_criterion()
        summed.reduction = "sum"
        divisor = (summed(net(X), y) / criterion(net(X), y)).item() / 11
    expected = norm_by_loop(net, lambda output, i: summed(output, y[i : i + 1]) / divisor, X)
    found = fisher_rao_norm(network(net, criterion, X, y, batch_size=4))
    assert found.value == pytest.approx(expected, rel=EXACT)


def test_a_criterion_that_sums():
    net, X, y = make_kind("mlp tanh")
    summed = nn.MultiMarginLoss(reduction="sum")
    expected = norm_by_loop(net, lambda output, i: summed(output, y[i : i + 1]), X)
    found = fisher_rao_norm(network(net, summed, X, y, batch_size=4))
    assert found.value == pytest.approx(expected, rel=EXACT)


def test_sample_weights():
    net, X, y = make_kind("mlp tanh")
    weight = np.arange(len(X)) % 3
    expected = norm_by_loop(net, lambda output, i: CE(output, y[i : i + 1]), X, weight)
    found = fisher_rao_norm(network(net, CE, X, y, batch_size=4, sample_weight=weight))
    assert found.value == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("n_layers", [1, 2, 4])
def test_bias_free_relu_networks_have_the_closed_form_of_the_paper(n_layers, device):
    """``L sqrt(mean_i (<p_i, z_i> - z_iy)^2)`` under softmax cross-entropy."""
    sizes = [5] + [7] * (n_layers - 1) + [3]
    layers = []
    for m, d in pairwise(sizes):
        layers += [nn.Linear(m, d, bias=False), nn.ReLU()]
    net = nn.Sequential(*layers[:-1]).double()
    X, y = torch.randn(20, 5).double(), torch.randint(0, 3, (20,))
    z = net(X)
    slopes = (z.softmax(1) * z).sum(1) - z[torch.arange(20), y]
    expected = n_layers * slopes.square().mean().sqrt().item()
    found = measure("fisher_rao_norm", net, X, y, criterion=CE, device=device)
    assert found == pytest.approx(expected, rel=1e-8)


class Square(torch.autograd.Function):
    """An operation without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g


class Backward(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.unused = nn.Linear(4, 3)

    def forward(self, x):
        return Square.apply(self.body(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.LSTM(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.body(x)[0][:, -1])


class Constant(nn.Module):
    """A network whose output does not depend on its weights."""

    def __init__(self, function):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.body(x).detach())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Backward, (4,)),
        (Recurrent, (6, 4)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    ],
    ids=["custom function", "lstm", "weight norm"],
)
def test_operations_without_a_forward_derivative(make, shape):
    net, X, y = make(), torch.randn(7, *shape), torch.arange(7) % 3
    expected = norm_by_loop(net, lambda output, i: CE(output, y[i : i + 1]), X)
    found = fisher_rao_norm(network(net, CE, X, y, batch_size=4))
    assert found.value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("function", [torch.relu, Square.apply])
def test_losses_that_do_not_depend_on_the_weights_have_no_slope(function):
    X, y = torch.randn(7, 4), torch.arange(7) % 3
    net = Constant(function)
    assert fisher_rao_norm(network(net, CE, X, y)).value == 0.0


def test_frozen_weights_count():
    net, X, y = make_kind("mlp tanh")
    before = fisher_rao_norm(network(net, CE, X, y)).value
    net.requires_grad_(False)
    assert fisher_rao_norm(network(net, CE, X, y)).value == before


def test_labels_are_needed():
    net, X, _ = make_kind("mlp tanh")
    with pytest.raises(ValueError, match="y is needed to compute a loss"):
        measure("fisher_rao_norm", net, X, criterion=CE)

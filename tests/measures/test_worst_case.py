"""The largest rise, against all corners of the box and against eigenvalues."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network
from relflat_sk.measures._perturbation import map_weights, weights_of
from relflat_sk.measures._sharpness import largest_rise
from tests.measures.test_layer_kinds import make as make_kind

CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def network(net, criterion, X, y, batch_size=4):
    return Network(net, Loss(criterion), make_batches(X, y, batch_size=batch_size))


def loss_at(net, criterion, X, y, weights):
    with torch.no_grad():
        return criterion(functional_call(net, weights, (X,)), y).item()


def rise_by_corners(net, criterion, X, y, radius):
    """Compute a convex loss in all corners of the box, one of which has the largest."""
    weights = dict(net.named_parameters())
    before = loss_at(net, criterion, X, y, weights)
    found = []
    size = sum(w.numel() for w in weights.values())
    for signs in itertools.product((-1.0, 1.0), repeat=size):
        parts = torch.tensor(signs).double().split([w.numel() for w in weights.values()])
        corner = {
            name: w + radius[name] * part.reshape(w.shape)
            for (name, w), part in zip(weights.items(), parts, strict=True)
        }
        found.append(loss_at(net, criterion, X, y, corner) - before)
    return max(found)


def softmax_regression(seed):
    torch.manual_seed(seed)
    net = nn.Linear(2, 3).double()
    return net, torch.randn(9, 2).double(), torch.arange(9) % 3


@pytest.mark.parametrize(("size", "n_restarts"), [(1e-3, 0), (0.1, 0), (3.0, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_corner_of_the_box_is_found(seed, size, n_restarts):
    net, X, y = softmax_regression(seed)
    radius = {
        name: size * (w.abs() + 0.1) for name, w in weights_of(network(net, CE, X, y)).items()
    }
    expected = rise_by_corners(net, CE, X, y, radius)
    loss, rise = largest_rise(network(net, CE, X, y), radius, n_restarts=n_restarts, random_state=0)
    assert loss == pytest.approx(CE(net(X), y).item())
    # large boxes have several maxima
    assert rise == pytest.approx(expected, rel=0.01 if n_restarts else 1e-4)
    assert rise <= expected * (1 + 1e-9)


@pytest.mark.parametrize("n_restarts", [0, 2])
def test_the_rise_in_a_ball_at_a_minimum_follows_from_the_largest_eigenvalue(n_restarts):
    X = torch.randn(40, 3).double()
    y = X @ torch.tensor([[1.0], [-2.0], [0.3]]).double()
    net = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -2.0, 0.3]]))
    scale = net.weight.detach()[0].abs()
    H = 2 * (X * scale).T @ (X * scale) / len(X)
    radius = {"weight": 0.1 * net.weight.detach().abs()}
    _, rise = largest_rise(network(net, MSE, X, y), radius, norm="l2", n_restarts=n_restarts,
                           n_steps=60, random_state=0)  # fmt: skip
    # the gradient is zero up to rounding there, so the first direction is random
    expected = 0.1**2 / 2 * torch.linalg.eigvalsh(H)[-1].item()
    assert rise <= expected * (1 + 1e-9)
    assert rise == pytest.approx(expected, rel=0.01 if n_restarts else 1)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_rise_in_small_neighbourhoods_is_the_dual_norm_of_the_gradient(norm):
    net, X, y = make_kind("conv")
    gradients = torch.autograd.grad(CE(net.eval()(X), y), list(net.parameters()))
    weights = dict(net.named_parameters())
    radius = {name: 1e-7 * w.detach().abs() for name, w in weights.items()}
    scaled = torch.cat([(g * r).flatten() for g, r in zip(gradients, radius.values(), strict=True)])
    expected = scaled.abs().sum() if norm == "linf" else scaled.norm()
    _, rise = largest_rise(network(net, CE, X, y), radius, norm=norm)
    assert rise == pytest.approx(expected.item(), rel=1e-4)


def test_more_restarts_find_no_smaller_rise():
    net, X, y = make_kind("mlp tanh")
    at = network(net, CE, X, y)
    radius = {name: 2 * torch.ones_like(w) for name, w in weights_of(at).items()}
    found = [
        largest_rise(at, radius, n_steps=5, n_restarts=k, random_state=0)[1] for k in (0, 1, 4)
    ]
    assert found == sorted(found)
    assert found[0] > 0


def test_a_loss_that_only_falls_has_a_rise_of_zero():
    """The loss is largest at the network's weights."""
    net = nn.Linear(1, 1, bias=False).double()
    X, y = torch.ones(3, 1).double(), torch.zeros(3, 1).double()
    at = Network(net, Loss(lambda output, y: -(output - y).square().mean()), make_batches(X, y))
    with torch.no_grad():
        net.weight.zero_()
    _, rise = largest_rise(at, {"weight": torch.ones(1, 1).double()})
    assert rise == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "l1"}, "norm must be one of .'l2', 'linf'., got 'l1'"),
        ({"n_steps": 0}, "n_steps must be a positive integer, got 0"),
        ({"n_restarts": -1}, "n_restarts must be an integer of at least 0, got -1"),
        ({"n_steps": True}, "n_steps must be a positive integer, got True"),
    ],
)
def test_bad_arguments(arguments, message):
    net, X, y = softmax_regression(0)
    with pytest.raises(ValueError, match=message):
        largest_rise(network(net, CE, X, y), {}, **arguments)


def test_numbers_of_steps_may_be_numpy_integers():
    net, X, y = softmax_regression(0)
    at, counts = network(net, CE, X, y), {"n_steps": np.int64(3), "n_restarts": np.int64(1)}
    radius = map_weights(lambda w: 0.1 * w.abs(), weights_of(at))
    plain = {name: int(count) for name, count in counts.items()}
    expected = largest_rise(at, radius, random_state=0, **plain)
    assert largest_rise(at, radius, random_state=0, **counts) == expected

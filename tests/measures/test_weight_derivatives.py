"""The Fisher-Rao norm and the largest eigenvalue in all weights, against loops and Hessians."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian

from relflat_sk import measure
from relflat_sk.measures._eigenvalues import largest_eigenvalue
from relflat_sk.measures._sharpness import fisher_rao_norm
from tests.cases import CASES
from tests.measures.evaluate import evaluate
from tests.measures.nets import NETS, PROBLEMS, network
from tests.measures.nets import make as make_kind

CE = nn.CrossEntropyLoss()


EXACT = 1e-10


pytestmark = [
    pytest.mark.filterwarnings("ignore:NLLLoss takes log:relflat_sk.FlatnessWarning"),
    # networks with random weights are at no minimum
    pytest.mark.filterwarnings("ignore:.*is negative:relflat_sk.FlatnessWarning"),
]


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


# recurrent layers have no forward derivative
OTHERS = ["lstm", "computed weights"]


@pytest.mark.parametrize("name", [*NETS, *CASES, *OTHERS])
def test_every_architecture_and_loss(name):
    """The per-sample losses that are differentiated have the criterion's mean."""
    problem = PROBLEMS[name]()
    net, criterion, X, y = problem.net, problem.criterion, problem.X, problem.y
    counts = (y != getattr(criterion, "ignore_index", torch.nan)).reshape(len(y), -1).any(1).numpy()
    summed, divisor = criterion, 1.0
    if hasattr(criterion, "reduction"):
        summed = copy.deepcopy(criterion)
        summed.reduction = "sum"
        divisor = (summed(net(X), y) / criterion(net(X), y)).item() / counts.sum()

    def loss_of(output, i):
        return summed(output, y[i : i + 1]) / divisor

    expected = norm_by_loop(net, loss_of, X, counts)
    found = fisher_rao_norm(network(net, criterion, X, y, batch_size=4))
    assert found.value == pytest.approx(expected, rel=EXACT)
    assert (found.stderr, found.method) == (0.0, "exact")


# -- the largest eigenvalue in all weights together ---------------------------------------------


def joint(net, criterion, X, y):
    """P19, Table 1: |w|^2 lambda_max of the dense Hessian in all weight matrices together."""
    names = [name for name, p in net.named_parameters() if p.ndim >= 2]
    shapes = [net.get_parameter(name).shape for name in names]
    flat = torch.cat([net.get_parameter(name).detach().flatten() for name in names])

    def risk(vector):
        parts = vector.split([shape.numel() for shape in shapes])
        weights = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
        return criterion(functional_call(net, weights, (X,)), y)

    H = hessian(risk)(flat).detach()
    return float(flat.square().sum() * torch.linalg.eigvalsh(H)[-1])


@pytest.mark.parametrize("kind", ["mlp relu", "mlp tanh", "conv tanh"])
def test_joint_eigenvalue_flatness_is_that_of_the_dense_hessian(kind):
    net, X, y = make_kind(kind)
    expected = joint(net, CE, X, y)
    options = {"criterion": CE, "batch_size": 4, "rtol": 1e-9, "random_state": 0}
    found = evaluate("joint_eigenvalue_flatness", net, X, y, **options)
    assert found.value == pytest.approx(expected, rel=1e-7)
    assert found.stderr < 1e-6 * found.value
    assert found.method == "lanczos"
    # a block of the Hessian has no larger eigenvalue, and no weight is larger than all of them
    assert found.value > measure("network_flatness", net, X, y, **options)


@pytest.mark.parametrize("size", [8, 60])
def test_a_matrix_of_zeros_has_the_eigenvalue_zero(size):
    found = largest_eigenvalue(
        torch.zeros_like, size, rtol=0.01, random_state=0, where="in a dead layer"
    )
    assert found == (0.0, 0.0)

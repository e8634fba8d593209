"""Measures of all weights: formulas, error bars, dense Hessians, and a network that stays."""

import copy
import itertools
from functools import cache, partial

import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from torch import nn
from torch.func import functional_call, hessian

from relflat_sk import FlatnessWarning, measure
from relflat_sk._network.network import mean_loss
from relflat_sk._random import draw_seeds
from relflat_sk.measures import _sharpness
from relflat_sk.measures._sharpness import (
    SHARPNESS_MEASURES,
    adaptive_sharpness,
    draw_noise,
    error_rate,
    fisher_rao_norm,
    keskar_sharpness,
    largest_rise,
    noisy_risks,
    pac_bayes_flatness,
    pac_bayes_magnitude_flatness,
    weights_of,
)
from tests.cases import CASES, Net
from tests.measures.nets import NETS, PROBLEMS, UNTRAINED, evaluate, network
from tests.measures.nets import make as make_kind

CE, MSE, BCE = nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss()
pytestmark = UNTRAINED


def regression(seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(3, 1).double()
    return net, torch.randn(12, 3).double(), torch.randn(12, 1).double()


def exact_rise(net, X, spread_of):
    """Noise of variance ``s_j^2`` on weight j raises the squared error by ``s_j^2 mean x_j^2``."""
    along = spread_of(net.weight[0]).square() @ X.square().mean(0)
    return (along + spread_of(net.bias).square().sum()).item()


def assert_honest(found, exact, bias=0.0):
    """Compare standard errors with errors, whose mean is at most the bias; return both."""
    errors = np.array([one.value - exact for one in found])
    stated = np.array([one.stderr for one in found])
    assert np.sqrt((stated**2).mean()) == pytest.approx(errors.std(), rel=0.2)
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(len(errors)) + bias
    return errors, stated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "spread_of"),
    [
        ("expected_sharpness", {"alpha": 0.1}, lambda w: 0.1 * (10 * w.abs() + 1)),
        ("adaptive_sharpness", {"kind": "average", "rho": 0.5}, lambda w: 0.5 * w),
    ],
)
def test_values_and_error_bars_of_a_linear_regression(name, arguments, spread_of):
    net, X, y = regression()
    at, exact = network(net, MSE, X, y), exact_rise(net, X, spread_of)
    function = partial(SHARPNESS_MEASURES[name].compute, at, **arguments, n_draws=5)
    found = [function(random_state=seed) for seed in range(100)]
    assert_honest(found, exact)
    assert found[0].method == "monte carlo"


def test_one_weight_moves_to_the_worse_end_of_its_interval():
    """Keskar's sharpness is relative to one plus the loss, the adaptive one to the weight."""
    X, y = torch.ones(4, 1).double(), torch.full((4, 1), 3.0).double()
    net = nn.Linear(1, 1, bias=False).double()
    net.weight.data.fill_(2.0)
    at = network(net, MSE, X, y)
    found = keskar_sharpness(at, alpha=0.1)
    assert found.value == pytest.approx((1.3**2 - 1) / (1 + 1))
    assert (found.stderr, found.method) == (0.0, "ascent")
    assert adaptive_sharpness(at, rho=0.1).value == pytest.approx(1.2**2 - 1)
    with pytest.raises(ValueError, match="divides by 1 . loss, and the mean loss is -5"):
        keskar_sharpness(network(net, lambda z, y: (z - y).square().mean() - 6, X, y))


def unit_logits(_, z):
    z = z - z.mean(1, keepdim=True)
    return z / z.norm(dim=1, keepdim=True)


HEADS = {
    "logits": (lambda net: net, CE),
    "log-probabilities": (lambda net: nn.Sequential(net, nn.LogSoftmax(dim=1)), nn.NLLLoss()),
    "skorch": (
        lambda net: NeuralNetClassifier(nn.Sequential(net, nn.Softmax(dim=1))).initialize(), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["worst", "average"])
@pytest.mark.parametrize("head", HEADS)
def test_normalised_logits(kind, head):
    net, X, y = make_kind("mlp tanh")
    make_model, criterion = HEADS[head]
    arguments = {"kind": kind, "normalize_logits": True, "random_state": 0}
    found = measure("adaptive_sharpness", make_model(net), X, y, criterion=criterion, **arguments)
    at = network(nn.Sequential(net, Net(unit_logits)), CE, X, y)
    expected = adaptive_sharpness(at, kind=kind, random_state=0)
    assert found == pytest.approx(expected.value, rel=1e-6)


def rise_by_corners(net, X, y, radius):
    """Compute a convex loss in all corners of the box, one of which has the largest."""
    moves = radius * torch.tensor([*itertools.product((-1.0, 1.0), repeat=len(radius))]).double()
    weight, bias = moves.split([net.weight.numel(), len(net.bias)], dim=1)
    z = X @ (net.weight + weight.reshape(-1, *net.weight.shape)).mT + (net.bias + bias)[:, None]
    losses = nn.functional.cross_entropy(z.mT, y.expand(len(z), -1), reduction="none").mean(dim=1)
    return (losses.max() - CE(net(X), y)).item()


@pytest.mark.parametrize("size", [1e-3, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_corner_of_the_box_is_found(seed, size):
    torch.manual_seed(seed)
    net, X, y = nn.Linear(2, 3).double(), torch.randn(9, 2).double(), torch.arange(9) % 3
    radius = size * (weights_of(network(net, CE, X, y)).abs() + 0.1)
    expected = rise_by_corners(net, X, y, radius)
    loss, rise = largest_rise(network(net, CE, X, y), radius)
    assert loss == pytest.approx(CE(net(X), y).item())
    assert rise == pytest.approx(expected, rel=1e-4)
    assert rise <= expected * (1 + 1e-9)


@pytest.mark.parametrize(
    ("weight", "criterion", "y"),
    [([[1.0]], BCE, torch.ones(2, 1)), ([[-1.0], [1.0]], CE, torch.ones(2).long())],
    ids=["binary", "classification"],
)
def test_noise_that_causes_errors(weight, criterion, y):
    """Noise of at least the margin, in one of its two signs, makes the only sample wrong."""
    net = nn.Linear(1, len(weight), bias=False).double()
    net.weight.data = torch.tensor(weight).double()
    at = network(net, criterion, torch.ones(2, 1).double(), y)
    found = pac_bayes_flatness(at, n_draws=24, random_state=0)
    noise = torch.stack([draw_noise(weights_of(at), seed) for seed in draw_seeds(0, 24)])
    along = noise @ net.weight.detach().flatten()
    # the fifth error of 48 raises their share above 0.1; the margin is the number of outputs
    fifth = along.abs().sort(descending=True).values[4].item()
    assert found.value == pytest.approx((fifth / len(weight)) ** 2, abs=found.stderr)
    assert found.stderr < found.value


def risks_by_formula(at, X):
    """With noise of both signs, the mean squared error rises by the mean square of its change."""
    before, inputs = mean_loss(at), torch.cat([X, torch.ones(len(X), 1)], dim=1)

    @cache
    def noise(seed):
        return draw_noise(weights_of(at), seed)

    def risks(network, deviation, seeds, risk=mean_loss):
        draws = deviation * torch.stack([noise(seed) for seed in seeds])
        return before + (draws @ inputs.T).square().mean(dim=1).numpy()

    return risks


@pytest.mark.parametrize("kind", ["plain", "magnitude"])
def test_error_bars_are_right(kind, monkeypatch):
    """A formula gives the risks in hundreds of searches, in which a network would take a minute."""
    net, X, y = regression()
    at = network(net, MSE, X, y)
    formula, deviation = risks_by_formula(at, X), weights_of(at).abs()
    expected = noisy_risks(at, deviation, range(3))
    np.testing.assert_allclose(formula(at, deviation, range(3)), expected, rtol=1e-12)
    monkeypatch.setattr(_sharpness, "noisy_risks", formula)
    even, relative = (exact_rise(net, X, spread) for spread in (torch.ones_like, torch.abs))
    if kind == "plain":
        exact, function = even / 0.1, pac_bayes_flatness
    else:
        exact = relative / (0.1 - 0.03**2 * even)
        function = partial(pac_bayes_magnitude_flatness, eps=0.03)
    found = [function(at, n_draws=20, random_state=seed) for seed in range(100)]
    assert found[0].method == "monte carlo"
    # the mean of 1 / estimate is off by the square of the relative error
    bias = 2 * np.mean([one.stderr for one in found]) ** 2 / exact
    errors, stated = assert_honest(found, exact, bias)
    assert (np.abs(errors) < 4 * stated).mean() >= 0.99


def test_a_network_that_cannot_get_worse_is_flat():
    net, X = nn.Linear(3, 3).double(), regression()[1]
    at, outputs = network(net, CE, X, net(X).argmin(1)), []
    net.register_forward_hook(lambda net, x, output: outputs.append(output))
    assert pac_bayes_flatness(at, target=0.5, random_state=0).value == 0.0
    assert len(outputs) <= 50  # ten draws in both signs are tried at one sigma


Z = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 5.0, 0.0], [0.0, 0.0, torch.nan]])
CLASSES, ROWS = torch.tensor([0, 1, 1, 2]), torch.arange(4)[:, None]
# one label of each row is on the wrong side of zero, and in the last row it is the nan
LABELS = torch.tensor([[1.0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("criterion", "y", "weight", "expected"),
    [
        (CE, CLASSES, None, 0.5),
        (nn.CrossEntropyLoss(ignore_index=1), CLASSES, None, 0.5),
        (CE, CLASSES, np.array([1.0, 3.0, 0.0, 0.0]), 0.75),
        (CE, nn.functional.one_hot(CLASSES, 3).float(), None, 0.5),
        (BCE, LABELS, None, 4 / 12),
        (nn.BCELoss(), LABELS[:3], None, 3 / 9),
    ],
)
def test_error_rate_counts_labels(criterion, y, weight, expected):
    net = nn.Sequential(nn.Embedding.from_pretrained(Z, freeze=False), nn.Flatten())
    if isinstance(criterion, nn.BCELoss):
        net.append(nn.Sigmoid())
    at = network(net, criterion, ROWS[: len(y)], y, batch_size=3, sample_weight=weight)
    assert error_rate(at) == pytest.approx(expected)


def test_shared_weights_are_disturbed_once():
    net, X = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double(), regression()[1]
    net[2].weight = net[0].weight
    at = network(net, MSE, X, X)
    assert len(weights_of(at)) == 9 + 3 + 3
    assert keskar_sharpness(at).value > 0


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
    assert found.value == pytest.approx(expected, rel=1e-10)
    assert (found.stderr, found.method) == (0.0, "exact")


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


@pytest.mark.parametrize("batch_size", [4, 1024])
@pytest.mark.parametrize(
    "kind",
    ["mlp relu", "mlp tanh", "conv tanh", "conv", "stride, padding, dilation", "same", "reflect",
     "three axes"],
)  # fmt: skip
def test_joint_eigenvalue_flatness_is_that_of_the_dense_hessian(kind, batch_size):
    net, X, y = make_kind(kind)
    expected = joint(net, CE, X, y)
    options = {"criterion": CE, "batch_size": batch_size, "rtol": 1e-9, "random_state": 0}
    found = evaluate("joint_eigenvalue_flatness", net, X, y, **options)
    assert found.value == pytest.approx(expected, rel=1e-7)
    assert found.stderr < 1e-6 * found.value
    assert found.method == "lanczos"
    # a block of the Hessian has no larger eigenvalue, and no weight is larger than all of them
    assert found.value > measure("network_flatness", net, X, y, **options)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_joint_eigenvalue_flatness_of_weight_norm_is_that_of_its_definition(dim):
    torch.manual_seed(0)
    normed, out = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
    normed = nn.utils.parametrizations.weight_norm(normed, dim=dim)
    g, v = (parameter.detach() for parameter in normed.parametrizations.weight.parameters())

    def run(net, x):
        v, over = net.of["v"], {0: 1, 1: 0, None: None}[dim]
        weight = v * net.of["g"] / v.square().sum(over, keepdim=True).sqrt()
        return net.out(torch.tanh(nn.functional.linear(x, weight, normed.bias)))

    written = Net(run, of=nn.ParameterDict({"g": g, "v": v}), out=out)
    X, y = torch.randn(9, 4).double(), torch.arange(9) % 3
    options = {"criterion": CE, "rtol": 1e-9, "random_state": 0}
    found = measure(
        "joint_eigenvalue_flatness", nn.Sequential(normed, nn.Tanh(), out), X, y, **options
    )
    assert found == pytest.approx(joint(written, CE, X, y), rel=1e-7)


@pytest.mark.parametrize("name", ["adaptive_sharpness", "expected_sharpness", "keskar_sharpness"])
def test_disturbances_that_half_precision_rounds_are_told(name):
    net, X, y = make_kind("mlp tanh")
    data = net.bfloat16(), X.bfloat16(), y
    with pytest.warns(FlatnessWarning, match="bfloat16, which rounds"):
        measure(name, *data, criterion=CE, random_state=0)
    measure("fisher_rao_norm", *data, criterion=CE)  # without a warning
    measure("pac_bayes_flatness", *data, criterion=CE, risk="loss", random_state=0)

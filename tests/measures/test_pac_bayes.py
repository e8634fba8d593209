"""PAC-Bayes flatness, where the expected rise of the risk has a formula."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from relflat_sk._losses.loss import Loss
from relflat_sk._network.batches import make_batches
from relflat_sk._network.network import Network, mean_loss
from relflat_sk._random import draw_seeds
from relflat_sk.measures import _pac_bayes
from relflat_sk.measures._pac_bayes import (
    error_rate,
    pac_bayes_flatness,
    pac_bayes_magnitude_flatness,
)
from relflat_sk.measures._perturbation import (
    draw_noise,
    map_weights,
    noisy_risks,
    weights_of,
)
from tests.measures.test_layer_kinds import make as make_kind

CE, MSE, BCE = nn.CrossEntropyLoss(), nn.MSELoss(), nn.BCEWithLogitsLoss()


def network(net, criterion, X, y, **options):
    return Network(net, Loss(criterion), make_batches(X, y, **options))


def regression():
    torch.manual_seed(0)
    net = nn.Linear(3, 1).double()
    X = torch.randn(12, 3).double()
    return net, X, torch.randn(12, 1).double()


def exact_plain(X, target):
    """The squared error rises by ``sigma^2 (mean |x|^2 + 1)`` on average."""
    return (X.square().sum(1).mean().item() + 1) / target


def exact_magnitude(net, X, target, eps):
    """Noise of variance ``v_j`` on weight j raises it by ``sum_j v_j mean x_j^2``."""
    squares = X.square().mean(0)
    along = (net.weight[0].square() * squares).sum() + net.bias.square()
    return along.item() / (target - eps**2 * (squares.sum().item() + 1))


def drawn(at, name, seed, n_draws):
    """The noise on a parameter in each draw, in units of its deviation."""
    weights = weights_of(at)
    return torch.stack([draw_noise(weights, each)[name] for each in draw_seeds(seed, n_draws)])


def test_noise_on_a_linear_regression():
    """The squared error rises by the mean square of the change, whatever the sign of the noise."""
    net, X, y = regression()
    at = network(net, MSE, X, y, batch_size=5)
    weight, bias = (drawn(at, name, 0, 3) for name in ("weight", "bias"))

    def mean_square(weight_deviation, bias_deviation):
        change = (weight_deviation * weight)[:, 0] @ X.T + bias_deviation * bias
        return change.square().mean().item()

    found = pac_bayes_flatness(at, target=2.0, n_draws=3, random_state=0)
    assert found.value == pytest.approx(mean_square(1.0, 1.0) / 2.0, rel=0.01)
    assert found.method == "monte carlo"
    found = pac_bayes_magnitude_flatness(at, target=0.1, eps=0.05, n_draws=3, random_state=0)
    sigma = found.value**-0.5
    at_sigma = ((sigma * w).square() + 0.05**2 for w in (net.weight.detach(), net.bias.detach()))
    assert mean_square(*(variance.sqrt() for variance in at_sigma)) == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize("task", ["binary", "classification"])
def test_noise_that_causes_errors(task):
    """Noise of at least the margin, in one of its two signs, makes the only sample wrong."""
    X = torch.ones(2, 1).double()
    if task == "binary":
        net, criterion, y = nn.Linear(1, 1, bias=False), BCE, torch.ones(2, 1)
        margin, weight = 1.0, torch.ones(1, 1)
    else:
        net, criterion, y = nn.Linear(1, 2, bias=False), CE, torch.ones(2).long()
        margin, weight = 2.0, torch.tensor([[-1.0], [1.0]])
    with torch.no_grad():
        net.weight.copy_(weight)
    at = network(net.double(), criterion, X, y)
    found = pac_bayes_flatness(at, n_draws=24, random_state=0)
    noise = drawn(at, "weight", 0, 24)
    along = noise[:, 0, 0] if task == "binary" else noise[:, 1, 0] - noise[:, 0, 0]
    # the fifth error of 48 raises their share above 0.1
    fifth = along.abs().sort(descending=True).values[4].item()
    assert found.value == pytest.approx((fifth / margin) ** 2, rel=0.01)

    def rises(step):
        return (along.abs() * found.value**-0.5 * np.exp(step) > margin).double() / 2

    slope = (rises(0.2).mean() - rises(-0.2).mean()) / 0.4
    expected = 2 * found.value * rises(0.0).std() / 24**0.5 / slope
    assert found.stderr == pytest.approx(expected.item(), rel=1e-9)


def risks_by_formula(at, X):
    """With noise of both signs, the mean squared error rises by the mean square of its change."""
    before, inputs = mean_loss(at), torch.cat([X, torch.ones(len(X), 1)], dim=1)

    def as_vector(weights):
        return torch.cat([weights["weight"][0], weights["bias"]])

    @cache
    def noise(seed):
        return as_vector(draw_noise(weights_of(at), seed))

    def risks(network, deviation, seeds, risk=mean_loss):
        draws = as_vector(deviation) * torch.stack([noise(seed) for seed in seeds])
        return before + (draws @ inputs.T).square().mean(dim=1).numpy()

    return risks


@pytest.mark.parametrize("measure", ["plain", "magnitude"])
def test_error_bars_are_right(measure, monkeypatch):
    """A formula gives the risks in hundreds of searches, in which a network would take a minute."""
    net, X, y = regression()
    at = network(net, MSE, X, y)
    formula, deviation = risks_by_formula(at, X), map_weights(torch.abs, weights_of(at))
    expected = noisy_risks(at, deviation, range(3))
    np.testing.assert_allclose(formula(at, deviation, range(3)), expected, rtol=1e-12)
    monkeypatch.setattr(_pac_bayes, "noisy_risks", formula)
    if measure == "plain":
        exact, function = exact_plain(X, 0.1), pac_bayes_flatness
    else:
        exact, function = exact_magnitude(net, X, 0.1, 1e-3), pac_bayes_magnitude_flatness
    found = [function(at, n_draws=20, random_state=seed) for seed in range(100)]
    errors = np.array([one.value - exact for one in found])
    stated = np.array([one.stderr for one in found])
    assert np.sqrt((stated**2).mean()) == pytest.approx(errors.std(), rel=0.2)
    assert (np.abs(errors) < 4 * stated).mean() >= 0.99
    # the mean of 1 / estimate is off by the square of the relative error
    bias = exact * (stated.mean() / exact) ** 2
    assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(len(errors)) + 2 * bias


def test_eps_limits_the_invariance_to_scale():
    """With a tiny eps the scale of layers does not matter, with a large one it does."""
    net, X, _ = make_kind("mlp relu")
    y = net(X).argmax(1)
    before = {}
    for factor in (1.0, 4.0):
        with torch.no_grad():
            net[0].weight *= factor
            net[0].bias *= factor
            net[2].weight /= factor
        for eps in (1e-12, 0.1):
            at = network(net, CE, X, y)
            found = pac_bayes_magnitude_flatness(at, eps=eps, risk="loss", random_state=0).value
            before.setdefault(eps, []).append(found)
    assert before[1e-12][1] == pytest.approx(before[1e-12][0], rel=1e-6)
    assert before[0.1][1] != pytest.approx(before[0.1][0], rel=0.05)


def test_errors_are_counted_for_classifiers_and_losses_otherwise():
    net, X, _ = make_kind("mlp tanh")
    y = net(X).argmax(1)
    at = network(net, CE, X, y)
    found = {
        risk: pac_bayes_flatness(at, risk=risk, n_draws=3, random_state=0)
        for risk in ("auto", "error", "loss")
    }
    assert found["auto"] == found["error"] != found["loss"]
    with pytest.raises(ValueError, match="MSELoss.. has no classes.* use risk='loss'"):
        pac_bayes_flatness(network(*_as_case(regression())), risk="error")


def _as_case(case):
    net, X, y = case
    return net, MSE, X, y


def test_a_network_that_cannot_get_worse_is_flat():
    _, X, _ = regression()
    net = nn.Linear(3, 3).double()
    assert pac_bayes_flatness(
        network(net, CE, X, net(X).argmin(1)), target=0.5, random_state=0
    ).value == 0.0  # fmt: skip


def test_diverged_weights_give_nan():
    net, X, y = regression()
    with torch.no_grad():
        net.weight.fill_(torch.nan)
    assert np.isnan(pac_bayes_flatness(network(net, MSE, X, y)).value)


def test_weights_of_zero_are_disturbed_too():
    net, X, y = regression()
    with torch.no_grad():
        net.weight.zero_()
        net.bias.zero_()
    found = pac_bayes_flatness(network(net, MSE, X, y), n_draws=30, random_state=0)
    assert abs(found.value - exact_plain(X, 0.1)) < 4 * found.stderr + 0.01 * found.value


def test_error_rate_of_classes_counts_labels():
    z = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 5.0, 0.0], [0.0, 0.0, torch.nan]])

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(z)

        def forward(self, x):
            return self.table[x[:, 0].long()]

    X = torch.arange(4.0)[:, None]
    y = torch.tensor([0, 1, 1, 2])
    at = network(Table(), CE, X, y, batch_size=3)
    assert error_rate(at) == 0.5
    ignoring = nn.CrossEntropyLoss(ignore_index=1)
    assert error_rate(network(Table(), ignoring, X, y)) == 0.5
    weight = np.array([1.0, 3.0, 0.0, 0.0])
    assert error_rate(network(Table(), CE, X, y, sample_weight=weight)) == 0.75
    shares = nn.functional.one_hot(y, 3).float()
    assert error_rate(network(Table(), CE, X, shares)) == 0.5
    outputs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
    # one label of each row is on the wrong side of zero, and in the last row it is the nan
    assert error_rate(network(Table(), BCE, X, outputs)) == pytest.approx(4 / 12)
    inside = nn.Sequential(Table(), nn.Sigmoid())
    assert error_rate(network(inside, nn.BCELoss(), X[:3], outputs[:3])) == pytest.approx(3 / 9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0.0}, "target must be a finite positive number, got 0.0"),
        ({"risk": "margin"}, "risk must be 'auto', 'error' or 'loss', got 'margin'"),
        ({"n_draws": 1}, "n_draws must be an integer of at least 2, got 1: one draw"),
        ({"random_state": "seed"}, "random_state must be an int, .*got 'seed'"),
    ],
)
def test_bad_arguments(arguments, message):
    net, X, y = regression()
    with pytest.raises(ValueError, match=message):
        pac_bayes_flatness(network(net, MSE, X, y), **arguments)


def test_bad_eps():
    net, X, y = regression()
    at = network(net, MSE, X, y)
    with pytest.raises(ValueError, match="eps must be a finite positive number, got -1"):
        pac_bayes_magnitude_flatness(at, eps=-1)
    with pytest.raises(ValueError, match="Use a smaller eps"):
        pac_bayes_magnitude_flatness(at, eps=10.0, random_state=0)

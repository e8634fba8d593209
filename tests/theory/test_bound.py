"""Representativeness and the bound against their definitions, with smoothings of all kinds."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chi2
from sklearn.base import clone
from sklearn.model_selection import ShuffleSplit
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    feature_robustness,
    generalization_bound,
    relative_flatness,
    representativeness,
)
from relflat_sk.theory import Smoothing
from relflat_sk.theory._moves import KERNELS
from tests.theory.problems import CE, network, regression

# over so many splits, held-out and other losses agree
MANY = {"n_splits": 3000, "n_draws": 300, "random_state": 0}


def density_moment(m, sigma, limit):
    """The mean squared length of a normal vector given a length of at most `limit`."""

    def density(r):
        return r ** (m - 1) * np.exp(-(r**2) / (2 * sigma**2))

    return quad(lambda r: r**2 * density(r), 0, limit)[0] / quad(density, 0, limit)[0]


MOMENTS = {
    "normal": lambda m, sigma: m * sigma**2,
    "uniform": lambda m, sigma: sigma**2 * m / (m + 2),
    "sphere": lambda m, sigma: sigma**2,
    "truncated_normal": lambda m, sigma: density_moment(m, sigma, 1),
}


def radii_of(kernel, n, m, sigma):
    return KERNELS[kernel].radii(n, m, sigma, torch.Generator().manual_seed(0)).numpy()


def test_narrow_normal_distributions_of_many_features_stay_in_the_ball():
    # the share of the normal distribution in the ball underflows; nearly all of it is at the edge
    m, sigma = 4000, 0.03
    assert chi2.cdf(1 / sigma**2, m) == 0
    shift = 1 - radii_of("truncated_normal", 5000, m, sigma)
    assert shift.min() >= 0
    # of density exp(-(m - 1 - 1 / sigma^2) shift), nearly
    assert shift.mean() == pytest.approx(1 / (m - 1 - 1 / sigma**2), rel=0.06)


@pytest.mark.parametrize("sigma", [0.3, 2.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_representativeness_of_a_regression_by_kernel(kernel, sigma):
    """For squared errors, the mean rise is that of the variance of ``w xi``."""
    model, X, y = regression()
    delta, m = 0.35 / sigma, 3
    lengths = delta * np.linalg.norm(X, axis=1)
    rises = (model.coef_**2).sum() * lengths**2 * MOMENTS[kernel](m, sigma) / m
    smoothing = Smoothing(kernel=kernel, sigma=sigma)
    value, stderr = representativeness(model, X, y, delta=delta, smoothing=smoothing, **MANY)
    assert value == pytest.approx(-rises.mean(), abs=5 * stderr)
    assert stderr < 0.1 * rises.mean() + ((model.predict(X) - y) ** 2).std() / 50


def splits_of(X, n_splits):
    """The splits of random_state=0, as the splits are drawn first."""
    rng = np.random.RandomState(0)
    return list(ShuffleSplit(n_splits, test_size=0.25, random_state=rng).split(X))


@pytest.mark.parametrize("refit", [False, True])
def test_shares_of_samples(refit):
    model, X, y = regression()
    alphas = np.where((model.predict(X) - y) ** 2 > 0.5, 3.0, 1.0)
    options = {"delta": 1e-9, "smoothing": Smoothing(alphas=alphas), "n_draws": 2, "refit": refit}
    value, stderr = representativeness(model, X, y, n_splits=9, random_state=0, **options)
    expected = []
    for rest, held in splits_of(X, 9):
        fitted = clone(model).fit(X[rest], y[rest]) if refit else model
        losses = (fitted.predict(X) - y) ** 2
        expected.append(losses[held].mean() - np.average(losses[rest], weights=alphas[rest]))
    assert value == pytest.approx(np.mean(expected), rel=1e-6)
    assert stderr == pytest.approx(np.std(expected, ddof=1) / 3, rel=1e-6)


def label_noise(labels, rng):
    assert labels.shape == (40, 1)
    return labels + rng.normal(scale=0.8, size=labels.shape)


@pytest.mark.parametrize("layer", [-1, 0])
def test_without_refit_representativeness_tends_to_minus_the_robustness(layer):
    net, X, y = network()
    options = {"layer": layer, "random_state": 0, **CE}
    value, stderr = representativeness(net, X, y, delta=0.5, n_splits=2000, n_draws=50, **options)
    moved = {"matrices": "truncated_normal", "n_draws": 100}
    rise, error = feature_robustness(net, X, y, 0.5, **moved, **options)
    both = np.hypot(stderr, error)
    assert value == pytest.approx(-rise, abs=4 * both)
    # neither is 0, and the standard errors are small enough to show it
    assert rise > 0
    assert both < 0.1


@pytest.mark.parametrize(("refit", "n_splits"), [(False, 10), (True, 3)])
def test_standard_errors_are_the_spread_over_seeds(refit, n_splits):
    model, X, y = regression(n=30)
    options = {"delta": 0.9, "refit": refit, "n_splits": n_splits, "n_draws": 2}
    found = [representativeness(model, X, y, random_state=seed, **options) for seed in range(40)]
    values, stderrs = np.array(found).T
    assert np.sqrt(np.mean(stderrs**2)) == pytest.approx(values.std(ddof=1), rel=0.2)


def test_tensors_data_sets_and_lists_are_split():
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    X, y = torch.randn(20, 3), torch.arange(20) % 2
    settings = {"criterion": nn.CrossEntropyLoss, "train_split": None, "verbose": 0}
    net = NeuralNetClassifier(module, max_epochs=1, **settings).fit(X, y)
    before = copy.deepcopy(net.module_.state_dict())
    options = {"refit": True, "n_splits": 3, "random_state": 0}
    expected = representativeness(net, X, y, **options)
    assert expected[1] > 0
    assert representativeness(net, TensorDataset(X, y), None, **options) == expected
    torch.testing.assert_close(net.module_.state_dict(), before, rtol=0, atol=0)
    model, X, y = regression(n=30)
    expected = representativeness(model, X, y, **options)
    assert representativeness(model, X.tolist(), y.tolist(), **options) == expected


def test_loaders_must_not_shuffle_only_where_samples_have_shares():
    net, X, y = network()
    smoothing = Smoothing(alphas=np.arange(40.0))
    loader = DataLoader(TensorDataset(X, y), batch_size=9)
    options = {"smoothing": smoothing, "random_state": 0, **CE}
    found = representativeness(net, loader, None, **options)
    expected = representativeness(net, X, y, batch_size=9, **options)
    assert found == pytest.approx(expected, rel=1e-12)
    shuffling = DataLoader(TensorDataset(X, y), batch_size=9, shuffle=True)
    with pytest.raises(ValueError, match="known order, but the RandomSampler"):
        representativeness(net, shuffling, None, **options)
    assert representativeness(net, shuffling, None, **CE)[1] > 0


@pytest.mark.parametrize("n_ignored", [0, 25])
@pytest.mark.parametrize(("layer", "m"), [(-1, 6), (0, 5)])
def test_the_parts_of_the_bound(layer, m, n_ignored):
    net, X, y = network()
    inputs = torch.cat([3 * X[:n_ignored], X])
    labels = torch.cat([torch.full((n_ignored,), -100), y])  # of which the loss takes none
    options = {"layer": layer, "batch_size": 20, "random_state": 0}
    bound = generalization_bound(net, inputs, labels, **options, **CE)
    kappa = relative_flatness(net, X, y, layer=layer, **CE)
    assert bound.delta == pytest.approx(40 ** (-1 / (4 + m)), rel=1e-12)
    assert bound.flatness_term == pytest.approx(40 ** (-2 / (4 + m)) * kappa / (2 * m), rel=1e-9)
    assert bound.empirical_risk == pytest.approx(CE["criterion"](net(X), y).item())
    terms = bound.empirical_risk + bound.representativeness + bound.flatness_term
    assert bound.total == pytest.approx(terms, rel=1e-12)
    assert bound.stderr > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.total = 0.0


@pytest.mark.parametrize(
    ("kernel", "sigma", "delta", "factor"),
    [
        ("truncated_normal", 1.0, 0.3, 1.0),
        ("normal", 0.3, 0.01, 6 * 0.09),
        ("uniform", 2.0, 0.01, 4 * 6 / 8),
        ("sphere", 0.5, 0.01, 0.25),
    ],
)
def test_flatness_term_and_robustness_by_kernel(kernel, sigma, delta, factor):
    net, X, y = network()
    options = {"smoothing": Smoothing(kernel=kernel, sigma=sigma), "n_draws": 400}
    bound = generalization_bound(net, X, y, delta=delta, random_state=0, **options, **CE)
    assert bound.delta == delta
    kappa = relative_flatness(net, X, y, **CE)
    assert bound.flatness_term == pytest.approx(delta**2 * factor * kappa / 12, rel=1e-9)
    assert bound.gap_bound == abs(bound.robustness) + abs(bound.representativeness)
    if kernel == "truncated_normal":
        moved = {"matrices": kernel, "n_draws": 400, "random_state": 1}
        rise, error = feature_robustness(net, X, y, delta, **moved, **CE)
        assert bound.robustness == pytest.approx(rise, abs=5 * error)
    else:  # for so small a radius, it is the second order itself
        assert bound.robustness == pytest.approx(bound.flatness_term, rel=0.15)


@pytest.mark.parametrize("layer", [-1, 0])
def test_the_bound_of_a_kernel_density_estimate(layer):
    """Against the Hessian of each sample's loss in the layer's features."""
    net, X, y = network(n=30)
    body, tail = (net[:-1], net[-1]) if layer else (nn.Identity(), net)
    h = 0.02  # small enough for the second order to be the rise itself

    def trace(features, label):
        loss = lambda phi: CE["criterion"](tail(phi)[None], label[None])  # noqa: E731
        return torch.autograd.functional.hessian(loss, features).trace().item()

    traces = [trace(*sample) for sample in zip(body(X).detach(), y, strict=True)]
    expected = h**2 / 2 * np.mean(traces)
    options = {"layer": layer, "smoothing": Smoothing(bandwidth=h), "n_splits": 2,
               "n_draws": 100, "random_state": 0, **CE}  # fmt: skip
    bound = generalization_bound(net, X, y, **options)
    assert bound.flatness_term == pytest.approx(expected, rel=1e-9)
    assert bound.bandwidth == h
    assert np.isnan(bound.delta)
    assert bound.robustness == pytest.approx(expected, rel=0.3)
    alone, error = representativeness(net, X, y, **options)
    assert bound.representativeness == pytest.approx(alone, abs=5 * error)


@pytest.mark.parametrize("bandwidth", [None, 0.1])
def test_the_bound_with_noise_on_the_labels(bandwidth):
    """Squared errors: noise of deviation s adds its variance to all losses, moved or not."""
    model, X, y = regression()
    options = {"n_splits": 20, "n_draws": 200, "random_state": 0}
    options["delta"] = 0.3 if bandwidth is None else None

    def bound_of(**noise):
        smoothing = Smoothing(bandwidth=bandwidth, **noise)
        return generalization_bound(model, X, y, smoothing=smoothing, **options)

    bound, plain = bound_of(label_noise=label_noise), bound_of()
    variance, error = 0.8**2, 0.04
    assert bound.label_term == pytest.approx(variance, abs=error)
    assert plain.label_term == 0
    assert bound.flatness_term == plain.flatness_term
    assert bound.robustness == pytest.approx(plain.robustness + variance, abs=error)
    assert bound.representativeness == pytest.approx(plain.representativeness - variance, abs=error)
    # the rise by the labels is in the sum once with each sign
    assert bound.total == pytest.approx(plain.total, abs=2 * error)
    terms = bound.representativeness + bound.flatness_term + bound.label_term
    assert bound.total == pytest.approx(bound.empirical_risk + terms)


def test_the_bound_with_shares_weighs_loss_and_flatness():
    net, X, y = network()
    alphas = np.linspace(0, 1, 40)
    smoothing = Smoothing(alphas=alphas)
    bound = generalization_bound(net, X, y, smoothing=smoothing, random_state=0, **CE)
    each = nn.CrossEntropyLoss(reduction="none")(net(X), y).detach().numpy()
    assert bound.empirical_risk == pytest.approx(alphas @ each / alphas.sum(), rel=1e-9)
    terms = relative_flatness(net, X, y, per_sample=True, **CE)
    kappa = alphas @ terms / alphas.sum()
    assert bound.flatness_term == pytest.approx(bound.delta**2 * kappa / 12, rel=1e-9)


def test_the_bound_needs_one_vector_per_sample():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2))
    X, y = torch.randn(6, 1, 3, 3), torch.arange(6) % 2
    with pytest.raises(ValueError, match=r"layer '0' receives \(1, 3, 3\). Choose a linear layer"):
        generalization_bound(net, X, y, layer=0, **CE)
    assert generalization_bound(net, X, y, **CE).delta < 1

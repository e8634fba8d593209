"""Kernels, bandwidths, shares and noisy labels of the smoothed sample; the bound with them."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import chi2
from sklearn.base import clone
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.model_selection import ShuffleSplit
from torch import nn

from relflat_sk import (
    feature_robustness,
    generalization_bound,
    label_constancy,
    relative_flatness,
    representativeness,
)
from relflat_sk.theory._kernels import KERNELS
from tests.cases import mlp

CE = {"criterion": nn.CrossEntropyLoss()}
ONE = {"n_splits": 2, "n_draws": 2000, "random_state": 0}


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("m", "sigma"), [(1, 1.0), (3, 2.0), (3, 0.3), (40, 0.1), (40, 0.9)])
def test_lengths_have_the_second_moment_of_their_density(kernel, m, sigma):
    generator = torch.Generator().manual_seed(0)
    radii = KERNELS[kernel].radii(40_000, m, sigma, generator).numpy()
    expected = MOMENTS[kernel](m, sigma)
    assert (radii**2).mean() == pytest.approx(expected, abs=4.5 * (radii**2).std() / 200 + 1e-12)
    assert expected <= KERNELS[kernel].second_moment(m, sigma) * (1 + 1e-12)
    if kernel == "truncated_normal":
        assert radii.max() <= 1


def test_narrow_normal_distributions_of_many_features_stay_in_the_ball():
    # the share of the normal distribution in the ball underflows; nearly all of it is at the edge
    m, sigma = 4000, 0.2
    assert chi2.cdf(1 / sigma**2, m) == 0
    generator = torch.Generator().manual_seed(0)
    radii = KERNELS["truncated_normal"].radii(5000, m, sigma, generator).numpy()
    shift = 1 - radii  # of density exp(-(m - 1 - 1 / sigma^2) shift), nearly
    assert radii.max() <= 1
    assert shift.mean() == pytest.approx(1 / (m - 1 - 1 / sigma**2), rel=0.06)


def regression(n=40, m=3):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, m))
    y = X @ np.arange(1.0, m + 1) + rng.normal(size=n)
    return LinearRegression().fit(X, y), X, y


def smoothed_rise(w, norms, delta, kernel, sigma):
    """For squared errors, the mean rise is that of the variance of ``w xi``."""
    m = len(w)
    return (w**2).sum() * (delta * norms) ** 2 * MOMENTS[kernel](m, sigma) / m


@pytest.mark.parametrize("kernel", KERNELS)
def test_representativeness_of_a_regression_by_kernel(kernel):
    model, X, y = regression()
    delta, sigma = 0.5, 0.7
    rises = smoothed_rise(model.coef_, np.linalg.norm(X, axis=1), delta, kernel, sigma)
    losses = (model.predict(X) - y) ** 2
    value, stderr = representativeness(
        model, X, y, delta=delta, kernel=kernel, sigma=sigma, n_splits=3000, n_draws=300,
        random_state=0,
    )  # fmt: skip
    # over many splits, held-out and other losses agree
    assert value == pytest.approx(-rises.mean(), abs=5 * stderr)
    assert stderr < 0.1 * rises.mean() + losses.std() / 50


@pytest.mark.parametrize("bandwidth", [0.4, "scott", "silverman"])
def test_gaussian_kernel_density_estimates(bandwidth):
    model, X, y = regression()
    n, m = X.shape
    spread = np.sqrt(X.var(axis=0, ddof=1).mean())
    h = {
        0.4: 0.4,
        "scott": spread * n ** (-1 / (m + 4)),
        "silverman": spread * (n * (m + 2) / 4) ** (-1 / (m + 4)),
    }[bandwidth]
    value, stderr = representativeness(
        model, X, y, bandwidth=bandwidth, n_splits=3000, n_draws=300, random_state=0
    )
    assert value == pytest.approx(-(h**2) * (model.coef_**2).sum(), abs=5 * stderr)
    assert stderr < 0.2 * abs(value)


def test_each_new_model_has_a_bandwidth_of_its_own_samples():
    model, X, y = regression()
    arguments = {"bandwidth": "scott", "n_splits": 2, "n_draws": 3000, "refit": True}
    value, _ = representativeness(model, X, y, random_state=0, **arguments)
    # the same splits, as the splits are drawn first
    found, rng = [], np.random.RandomState(0)
    for rest, held in ShuffleSplit(2, test_size=0.25, random_state=rng).split(X):
        fitted = clone(model).fit(X[rest], y[rest])
        n, m = len(rest), X.shape[1]
        h = np.sqrt(X[rest].var(axis=0, ddof=1).mean()) * n ** (-1 / (m + 4))
        losses = (fitted.predict(X) - y) ** 2
        rise = h**2 * (fitted.coef_**2).sum()
        found.append(losses[held].mean() - losses[rest].mean() - rise)
    assert value == pytest.approx(np.mean(found), rel=0.01)


def test_shares_of_samples():
    model, X, y = regression()
    losses = (model.predict(X) - y) ** 2
    alphas = np.where(losses > np.median(losses), 3.0, 1.0)
    value, stderr = representativeness(
        model, X, y, delta=1e-9, alphas=alphas, n_splits=4000, n_draws=2, random_state=0
    )
    rng = np.random.default_rng(1)
    expected = []
    for _ in range(4000):
        held = rng.permutation(40) < 10
        rest = alphas[~held] @ losses[~held] / alphas[~held].sum()
        expected.append(losses[held].mean() - rest)
    both = np.hypot(stderr, np.std(expected) / np.sqrt(4000))
    assert value == pytest.approx(np.mean(expected), abs=5 * both)
    assert value < -10 * both  # equal shares give zero
    refitted, _ = representativeness(
        model, X, y, delta=0.1, alphas=alphas, refit=True, n_splits=3, random_state=0
    )
    plain, _ = representativeness(model, X, y, delta=0.1, refit=True, n_splits=3, random_state=0)
    assert refitted < plain


def test_noise_on_the_labels():
    model, X, y = regression()

    def noise(labels, rng):
        assert labels.shape == (40, 1)
        return labels + rng.normal(scale=0.8, size=labels.shape)

    value, stderr = representativeness(
        model, X, y, delta=1e-9, label_noise=noise, n_splits=3000, n_draws=500, random_state=0
    )
    assert value == pytest.approx(-(0.8**2), abs=5 * stderr)
    assert stderr < 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "box"}, "kernel must be one of .*, got 'box'"),
        ({"sigma": 0}, "sigma must be a finite positive number, got 0"),
        ({"bandwidth": "best"}, "bandwidth must be a positive number, \"scott\" or .* got 'best'"),
        ({"bandwidth": -1}, "bandwidth must be a finite positive number, got -1"),
        ({"bandwidth": 0.1, "delta": 0.1}, "bandwidth=0.1 is the same for all samples, and delta"),
        (
            {"bandwidth": 0.1, "kernel": "uniform"},
            "bandwidth=0.1 .*, but kernel='uniform' and sigma",
        ),
        ({"bandwidth": 0.1, "sigma": 2.0}, "in place of a kernel, but .* and sigma=2.0 are given"),
        ({"alphas": [1.0]}, r"alphas must be 40 numbers, .* got an array of shape \(1,\)"),
        ({"alphas": np.zeros(40)}, "alphas must be 40 numbers"),
        ({"alphas": -np.ones(40)}, "alphas must be 40 numbers"),
    ],
    ids=[
        "kernel",
        "sigma",
        "rule",
        "bandwidth",
        "and delta",
        "and kernel",
        "and sigma",
        "one share",
        "zeros",
        "negative",
    ],
)
def test_smoothing_says_what_is_wrong(arguments, message):
    model, X, y = regression()
    with pytest.raises(ValueError, match=message):
        representativeness(model, X, y, **arguments)


def test_a_split_in_which_no_sample_counts_is_refused():
    model, X, y = regression()
    alphas = np.zeros(40)
    alphas[0] = 1.0
    with pytest.raises(ValueError, match="no sample of one part of a split counts: their alphas"):
        representativeness(model, X, y, alphas=alphas, random_state=0)


# the bound


def test_the_bound_takes_delta_and_the_measured_robustness():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(40, 5).double(), torch.arange(40) % 4
    bound = generalization_bound(net, X, y, delta=0.3, random_state=0, **CE)
    kappa = relative_flatness(net, X, y, **CE)
    assert bound.delta == 0.3
    assert bound.flatness_term == pytest.approx(0.3**2 * kappa / 12, rel=1e-9)
    rise, error = feature_robustness(
        net, X, y, 0.3, matrices="truncated_normal", n_draws=400, random_state=1, **CE
    )
    many = generalization_bound(net, X, y, delta=0.3, n_draws=400, random_state=0, **CE)
    assert many.robustness == pytest.approx(rise, abs=5 * error)
    assert many.gap_bound == abs(many.robustness) + abs(many.representativeness)


@pytest.mark.parametrize(
    ("kernel", "sigma", "factor"),
    [("normal", 0.3, 6 * 0.09), ("uniform", 2.0, 4 * 6 / 8), ("sphere", 0.5, 0.25)],
)
def test_flatness_terms_of_other_kernels(kernel, sigma, factor):
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(40, 5).double(), torch.arange(40) % 4
    kappa = relative_flatness(net, X, y, **CE)
    options = {"kernel": kernel, "sigma": sigma, "delta": 0.01, "n_draws": 400, **CE}
    bound = generalization_bound(net, X, y, random_state=0, **options)
    expected = 0.01**2 * factor * kappa / 12
    assert bound.flatness_term == pytest.approx(expected, rel=1e-9)
    # for so small a radius, it is the rise itself
    assert bound.robustness == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("bandwidth", [0.02, "scott"])
def test_the_bound_of_a_kernel_density_estimate(layer, bandwidth):
    """Against the Hessian of each sample's loss in the layer's features."""
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(30, 5).double(), torch.arange(30) % 4
    body, tail = (net[:-1], net[-1]) if layer else (nn.Identity(), net)
    features = body(X).detach()
    traces = [
        torch.autograd.functional.hessian(
            lambda f, label=label: nn.functional.cross_entropy(tail(f)[None], label[None]), phi
        ).trace()
        for phi, label in zip(features, y, strict=True)
    ]
    n, m = features.shape
    spread = features.var(dim=0).mean().sqrt().item()
    h = 0.02 if bandwidth == 0.02 else spread * n ** (-1 / (m + 4))
    expected = h**2 / 2 * torch.stack(traces).mean().item()
    options = {"layer": layer, "bandwidth": bandwidth, "n_splits": 2, "n_draws": 100, **CE}
    bound = generalization_bound(net, X, y, random_state=0, **options)
    assert bound.flatness_term == pytest.approx(expected, rel=1e-9)
    assert bound.bandwidth == pytest.approx(h, rel=1e-12)
    assert np.isnan(bound.delta)
    if bandwidth == 0.02:  # small enough for the second order to be the rise itself
        assert bound.robustness == pytest.approx(expected, rel=0.3)
    alone, error = representativeness(net, X, y, random_state=0, **options)
    assert bound.representativeness == pytest.approx(alone, abs=5 * error)
    with pytest.raises(ValueError, match=r"bandwidth=0.1 is the same .*, and delta=0.1 in"):
        generalization_bound(net, X, y, bandwidth=0.1, delta=0.1, **CE)
    with pytest.raises(ValueError, match="bandwidth='scott' smooths .*, but kernel='normal' and"):
        generalization_bound(net, X, y, bandwidth="scott", kernel="normal", **CE)


def test_the_bound_with_noise_on_the_labels():
    """Squared errors: noise of deviation s adds its variance to all losses, moved or not."""
    model, X, y = regression()

    def noise(labels, rng):
        return labels + rng.normal(scale=0.8, size=labels.shape)

    options = {"delta": 0.3, "n_splits": 20, "n_draws": 400, "random_state": 0}
    bound = generalization_bound(model, X, y, label_noise=noise, **options)
    plain = generalization_bound(model, X, y, **options)
    variance, error = 0.8**2, 0.04
    assert bound.label_term == pytest.approx(variance, abs=error)
    assert plain.label_term == 0
    assert bound.flatness_term == plain.flatness_term
    assert bound.robustness == pytest.approx(plain.robustness + variance, abs=error)
    assert bound.representativeness == pytest.approx(plain.representativeness - variance, abs=error)
    # the rise by the labels is in the sum once with each sign
    assert bound.total == pytest.approx(plain.total, abs=2 * error)
    assert bound.total == pytest.approx(
        bound.empirical_risk + bound.representativeness + bound.flatness_term + bound.label_term
    )


def test_the_bound_with_shares_weighs_loss_and_flatness():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(40, 5).double(), torch.arange(40) % 4
    alphas = np.linspace(0, 1, 40)
    bound = generalization_bound(net, X, y, alphas=alphas, random_state=0, **CE)
    each = nn.CrossEntropyLoss(reduction="none")(net(X), y).detach().numpy()
    assert bound.empirical_risk == pytest.approx(alphas @ each / alphas.sum(), rel=1e-9)
    terms = relative_flatness(net, X, y, per_sample=True, **CE)
    kappa = alphas @ terms / alphas.sum()
    assert bound.flatness_term == pytest.approx(bound.delta**2 * kappa / 12, rel=1e-9)
    with pytest.raises(ValueError, match="kernel must be one of"):
        generalization_bound(net, X, y, kernel="box", **CE)


# labels by their loss


def test_constancy_by_loss_from_all_pairs():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(30, 5).double(), torch.arange(30) % 4
    features = net[:-1](X).detach()
    each = nn.CrossEntropyLoss(reduction="none")
    expected = []
    for i in range(30):
        near = (features - features[i]).norm(dim=1).argsort()[1:4]
        for j in near.tolist():
            output = net(X[j : j + 1]).detach()
            expected.append(float(each(output, y[i : i + 1]) - each(output, y[j : j + 1])))
    for batch_size in (30, 7):
        found = label_constancy(net, X, y, n_neighbors=3, by="loss", batch_size=batch_size, **CE)
        assert found == pytest.approx(np.mean(expected), rel=1e-9)


def test_constancy_by_loss_with_class_weights_is_the_difference_of_two_means():
    torch.manual_seed(0)
    net, X, y = mlp(4), torch.randn(30, 5).double(), torch.arange(30) % 4
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 8.0, 2.0, 0.5]).double())
    features, output = net[:-1](X).detach(), net(X).detach()
    near = torch.cdist(features, features).fill_diagonal_(torch.inf).argmin(dim=1)
    expected = criterion(output[near], y) - criterion(output[near], y[near])
    found = label_constancy(net, X, y, n_neighbors=1, by="loss", criterion=criterion)
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_constancy_by_loss_of_a_regression_and_of_classes_apart():
    model, X, y = regression()
    predicted = model.predict(X)
    near = np.array([np.argsort(((X - x) ** 2).sum(axis=1))[1:3] for x in X])
    expected = np.mean((predicted[near] - y[:, None]) ** 2 - (predicted[near] - y[near]) ** 2)
    assert label_constancy(model, X, y, n_neighbors=2, by="loss") == pytest.approx(expected)
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 20)
    apart = rng.normal(size=(40, 2)) + 20 * labels[:, None]
    classifier = LogisticRegression().fit(apart, labels)
    assert label_constancy(classifier, apart, labels, by="loss") == 0
    with pytest.raises(ValueError, match='by must be "labels" or "loss", got \'size\''):
        label_constancy(classifier, apart, labels, by="size")

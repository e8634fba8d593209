"""Representativeness, the bound and label constancy against their definitions."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import (
    LayerNotFoundError,
    feature_robustness,
    generalization_bound,
    label_constancy,
    relative_flatness,
    reparameterize,
    representativeness,
)
from tests.cases import mlp

CROSS_ENTROPY = {"criterion": nn.CrossEntropyLoss()}


def network(n=40):
    torch.manual_seed(0)
    return mlp(4), torch.randn(n, 5).double(), torch.arange(n) % 4


def regression(n=60, m=3):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, m))
    y = X @ np.arange(1.0, m + 1) + rng.normal(size=n)
    return LinearRegression().fit(X, y), X, y


# representativeness


@pytest.mark.parametrize("layer", [-1, 0])
def test_without_refit_representativeness_tends_to_minus_the_robustness(layer):
    net, X, y = network()
    options = {"layer": layer, "random_state": 0, **CROSS_ENTROPY}
    value, stderr = representativeness(net, X, y, delta=0.5, n_splits=2000, n_draws=100, **options)
    rise, error = feature_robustness(
        net, X, y, 0.5, matrices="truncated_normal", n_draws=200, **options
    )
    both = np.hypot(stderr, error)
    assert value == pytest.approx(-rise, abs=4 * both)
    # neither is 0, and the standard errors are small enough to show it
    assert rise > 0
    assert both < 0.1


def test_a_split_gives_the_held_out_loss_minus_the_smoothed_loss_of_the_rest():
    # with so small a delta nothing is smoothed, and the difference between the parts remains
    net, X, y = network()
    with torch.no_grad():
        losses = nn.CrossEntropyLoss(reduction="none")(net(X), y).numpy()
    options = {"delta": 1e-9, "n_splits": 2, "n_draws": 2, "test_size": 0.25, **CROSS_ENTROPY}
    gaps = [representativeness(net, X, y, random_state=seed, **options) for seed in range(200)]
    values, stderrs = np.array(gaps).T
    rng = np.random.default_rng(0)
    expected = []
    for _ in range(3000):
        held = rng.permutation(40) < 10
        expected.append(losses[held].mean() - losses[~held].mean())
    assert values.std() == pytest.approx(np.std(expected) / np.sqrt(2), rel=0.2)
    assert np.sqrt(np.mean(stderrs**2)) == pytest.approx(values.std(), rel=0.2)


def test_refit_estimates_the_gap_by_repeated_splits():
    X, y = load_iris(return_X_y=True)
    X = X[:, :2]
    model = LogisticRegression(C=100).fit(X, y)
    options = {"delta": 0.2, "n_splits": 20, "n_draws": 10, "refit": True}
    value, stderr = representativeness(model, X, y, random_state=0, **options)
    rng = np.random.default_rng(0)
    gaps, rises = [], []
    for seed in range(20):
        held = rng.permutation(150) < 38
        fitted = LogisticRegression(C=100).fit(X[~held], y[~held])
        gaps.append(
            log_loss(y[held], fitted.predict_proba(X[held]))
            - log_loss(y[~held], fitted.predict_proba(X[~held]))
        )
        rises.append(
            feature_robustness(
                fitted,
                X[~held],
                y[~held],
                0.2,
                matrices="truncated_normal",
                n_draws=10,
                random_state=seed,
            )[0]
        )
    expected = np.subtract(gaps, rises)
    error = np.hypot(stderr, expected.std(ddof=1) / np.sqrt(20))
    assert value == pytest.approx(expected.mean(), abs=4 * error)
    assert error < 0.1


@pytest.mark.parametrize(("refit", "n_splits", "n_draws"), [(False, 10, 2), (True, 3, 2)])
def test_standard_errors_are_the_spread_over_seeds(refit, n_splits, n_draws):
    model, X, y = regression(n=30)
    options = {"delta": 0.9, "refit": refit, "n_splits": n_splits, "n_draws": n_draws}
    found = [representativeness(model, X, y, random_state=seed, **options) for seed in range(100)]
    values, stderrs = np.array(found).T
    assert np.sqrt(np.mean(stderrs**2)) == pytest.approx(values.std(ddof=1), rel=0.2)


def test_delta_defaults_to_that_of_the_theorem():
    model, X, y = regression(n=60, m=3)
    one, other = (
        representativeness(model, X, y, delta=delta, random_state=0)
        for delta in (None, 60 ** (-1 / 7))
    )
    assert one == other


def test_skorch_nets_and_tensors_are_split():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    X, y = torch.randn(20, 3), torch.arange(20) % 2
    net = NeuralNetClassifier(
        module, criterion=nn.CrossEntropyLoss, train_split=None, max_epochs=1, verbose=0
    ).fit(X, y)
    before = [p.clone() for p in net.module_.parameters()]
    value, stderr = representativeness(net, X, y, refit=True, n_splits=3, random_state=0)
    assert np.isfinite(value)
    assert stderr > 0
    for p, kept in zip(net.module_.parameters(), before, strict=True):
        assert torch.equal(p, kept)


def test_random_states():
    model, X, y = regression()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002

    def run(random_state):
        return representativeness(model, X, y, random_state=random_state)

    assert run(0) == run(0)
    assert run(0) != run(1)
    assert run(None) != run(None)
    assert run(np.random.RandomState(3)) == run(np.random.RandomState(3))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002


# the bound


@pytest.mark.parametrize("layer", [-1, 0])
def test_the_parts_of_the_bound(layer):
    net, X, y = network()
    m = {-1: 6, 0: 5}[layer]
    bound = generalization_bound(net, X, y, layer=layer, random_state=0, **CROSS_ENTROPY)
    kappa = relative_flatness(net, X, y, layer=layer, **CROSS_ENTROPY)
    assert bound.delta == pytest.approx(40 ** (-1 / (4 + m)), rel=1e-12)
    assert bound.flatness_term == pytest.approx(40 ** (-2 / (4 + m)) * kappa / (2 * m), rel=1e-9)
    assert bound.empirical_risk == pytest.approx(nn.CrossEntropyLoss()(net(X), y).item())
    assert bound.total == pytest.approx(
        bound.empirical_risk + bound.representativeness + bound.flatness_term, rel=1e-12
    )
    assert bound.stderr > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        bound.total = 0.0


def test_the_flatness_term_bounds_the_smoothing_of_linear_regression():
    # there are no higher orders; truncation makes the noise smaller
    model, X, y = regression()
    bound = generalization_bound(model, X, y, n_splits=2000, n_draws=100, random_state=0)
    rise, error = feature_robustness(
        model, X, y, bound.delta, matrices="truncated_normal", n_draws=500, random_state=0
    )
    assert rise < bound.flatness_term
    # without refit the representativeness is minus that rise, so that the total is above the risk
    assert bound.total - bound.empirical_risk == pytest.approx(
        bound.flatness_term - rise, abs=4 * np.hypot(error, bound.stderr)
    )


def test_bound_with_refit_is_on_average_above_the_risk_on_new_data():
    rng = np.random.default_rng(0)
    totals, risks = [], []
    for seed in range(10):
        X = rng.normal(size=(1060, 10))
        y = X @ np.ones(10) + 2 * rng.normal(size=1060)
        model = LinearRegression().fit(X[:60], y[:60])
        bound = generalization_bound(
            model, X[:60], y[:60], refit=True, n_splits=4, n_draws=2, random_state=seed
        )
        totals.append(bound.total)
        risks.append(np.mean((model.predict(X[60:]) - y[60:]) ** 2))
    assert np.mean(totals) > np.mean(risks)


def test_pipelines():
    X, y = load_iris(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    found = generalization_bound(pipeline, X, y, random_state=0)
    expected = generalization_bound(pipeline[-1], pipeline[0].transform(X), y, random_state=0)
    assert found == expected


# constancy of labels


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("batch_size", [40, 7])
def test_neighbours_by_brute_force(layer, batch_size):
    net, X, y = network()
    features = X if layer == 0 else net[:-1](X).detach()
    distances = cdist(features, features)
    np.fill_diagonal(distances, np.inf)
    near = np.argsort(distances, axis=1)[:, :3]
    expected = (y.numpy()[near] == y.numpy()[:, None]).mean()
    found = label_constancy(net, X, y, layer=layer, n_neighbors=3, batch_size=batch_size)
    assert found == pytest.approx(expected, rel=1e-12)


def test_layer_by_position_name_and_module():
    net, X, y = network()
    layers = (1, np.int64(-2), "2", net[2])
    found = {label_constancy(net, X, y, layer=layer, device="cpu") for layer in layers}
    assert len(found) == 1


def test_labels_of_any_kind():
    X, y = load_iris(return_X_y=True)
    names = load_iris().target_names[y]
    expected = label_constancy(LogisticRegression(max_iter=1000).fit(X, y), X, y)
    assert label_constancy(LogisticRegression(max_iter=1000).fit(X, names), X, names) == expected
    one_hot = np.eye(3)[y]
    net = nn.Linear(4, 3).double()
    assert label_constancy(net, X, one_hot) == expected
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
    assert label_constancy(net, data, None) == expected


def test_unrelated_labels_agree_as_often_as_chance():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(2000, 3)), rng.choice(3, size=2000, p=[0.5, 0.3, 0.2])
    found = label_constancy(nn.Linear(3, 3).double(), X, y)
    assert found == pytest.approx(0.5**2 + 0.3**2 + 0.2**2, abs=0.02)


ORDERED = {
    "constancy": (label_constancy, {"by": "loss"}),
    "shares": (representativeness, {"alphas": np.arange(40.0), "random_state": 0}),
}


@pytest.mark.parametrize("kind", ORDERED)
def test_loaders_must_not_shuffle_where_the_order_of_samples_counts(kind):
    function, arguments = ORDERED[kind]
    net, X, y = network()
    loader = DataLoader(TensorDataset(X, y), batch_size=9)
    found = function(net, loader, None, **arguments, **CROSS_ENTROPY)
    expected = function(net, X, y, batch_size=9, **arguments, **CROSS_ENTROPY)
    assert found == pytest.approx(expected, rel=1e-12)
    shuffling = DataLoader(TensorDataset(X, y), batch_size=9, shuffle=True)
    with pytest.raises(ValueError, match="known order, but the RandomSampler"):
        function(net, shuffling, None, **arguments, **CROSS_ENTROPY)


def test_loaders_may_shuffle_where_the_order_of_samples_does_not_count():
    net, X, y = network()
    loader = DataLoader(TensorDataset(X, y), batch_size=9, shuffle=True)
    assert label_constancy(net, loader, None) == label_constancy(net, X, y)
    assert representativeness(net, loader, None, **CROSS_ENTROPY)[1] > 0


@settings(deadline=None, max_examples=10)
@given(scale=st.floats(0.01, 100))
def test_the_scale_of_layers_does_not_matter(scale):
    torch.manual_seed(0)
    net, X, y = mlp(4, activation=nn.ReLU), torch.randn(40, 5).double(), torch.arange(40) % 4
    same = reparameterize(net, [scale, 1, 1 / scale])
    assert label_constancy(same, X, y) == label_constancy(net, X, y)


# errors

BAD = {
    "delta": ({"delta": -1}, ValueError, "delta must be a finite positive number, got -1"),
    "one split": ({"n_splits": 1}, ValueError, "n_splits must be an integer of at least 2, got 1"),
    "splits": ({"n_splits": "5"}, ValueError, "n_splits must be .* got '5'"),
    "test size": ({"test_size": 1.5}, ValueError, "test_size must be .* got 1.5"),
    "count": ({"test_size": 10}, ValueError, "test_size must be .* got 10"),
    "refit": ({"refit": True}, TypeError, "refit=True needs an estimator .* got Sequential"),
    "draws": ({"n_draws": 1}, ValueError, "n_draws must be an integer of at least 2, got 1"),
    "labels": ({"y": None}, ValueError, "y is needed to compute a loss"),
    "layer": ({"layer": "no"}, LayerNotFoundError, "there is no layer 'no'"),
    "random state": ({"random_state": "x"}, ValueError, "random_state must be an int, .* got 'x'"),
    "criterion": (
        {"criterion": lambda output, y: (output.sum(dim=1) - y).abs().mean()},
        ValueError,
        r"losses of shape \(\) for 40 samples",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_representativeness_says_what_is_wrong(bad):
    arguments, error, message = BAD[bad]
    net, X, y = network()
    with pytest.raises(error, match=message):
        representativeness(net, X, **{"y": y, **CROSS_ENTROPY, **arguments})


def test_the_bound_needs_one_vector_per_sample():
    net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, 2))
    X, y = torch.randn(6, 1, 3, 3), torch.arange(6) % 2
    with pytest.raises(ValueError, match=r"layer '0' receives \(1, 3, 3\). Choose a linear layer"):
        generalization_bound(net, X, y, layer=0, **CROSS_ENTROPY)
    assert generalization_bound(net, X, y, **CROSS_ENTROPY).delta < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_neighbors": 0}, "n_neighbors must be an integer between 1 and 39, .* got 0"),
        ({"n_neighbors": 40}, "n_neighbors must be .* got 40"),
        ({"n_neighbors": 2.0}, "n_neighbors must be .* got 2.0"),
        ({"y": np.linspace(0, 1, 40)}, "y must hold classes, got continuous values such as 0.0"),
        ({"y": None}, "y is needed for the labels to compare"),
    ],
    ids=["none", "too many", "float", "regression", "no labels"],
)
def test_constancy_says_what_is_wrong(arguments, message):
    net, X, y = network()
    with pytest.raises(ValueError, match=message):
        label_constancy(net, X, **{"y": y, **arguments})

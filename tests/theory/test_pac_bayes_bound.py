"""The PAC-Bayes bound against its formulas, and against errors that are known exactly."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import FixedThresholdClassifier, GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from torch import nn

from relflat_sk import pac_bayes_bound
from relflat_sk.theory._pac_bayes_bound import kl_inverse

BCE, CE = nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()
GRID = (0.125, 0.25, 0.5, 1.0, 2.0)


def divergence(q, p):
    return sum(a * math.log(a / b) for a, b in ((q, p), (1 - q, 1 - p)) if a)


def largest(q, c):
    """The inverse of the divergence by a root finder, in place of halving."""
    if divergence(q, 1 - 1e-15) <= c:
        return 1.0
    return brentq(lambda p: divergence(q, p) - c, max(q, 1e-300), 1 - 1e-15, xtol=1e-14)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 0.99), st.floats(1e-6, 5))
def test_the_inverse_of_the_divergence(mean, c):
    found = kl_inverse(mean, c)
    assert found == pytest.approx(largest(mean, c), rel=1e-6, abs=1e-9)
    assert mean <= found <= min(1, mean + math.sqrt(c / 2) + 1e-12)


def line(weight=2.0):
    """A classifier of numbers by their sign, without bias."""
    net = nn.Linear(1, 1, bias=False).double()
    net.weight.data = torch.tensor([[weight]], dtype=torch.double)
    return net


def signs(n, flipped, seed=0):
    """Numbers of which a known share has the label of the other sign."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 1))
    wrong = rng.random(n) < flipped
    return torch.tensor(X), torch.tensor((X[:, 0] > 0) != wrong).double()[:, None]


def test_the_parts_satisfy_the_formulas_at_the_best_sigma():
    n, delta, n_draws = 400, 0.1, 500
    X, y = signs(n, 0.1)
    share = float(((X > 0).double() != y).double().mean())
    options = {"delta": delta, "sigmas": GRID, "n_draws": n_draws, "random_state": 0}
    found = pac_bayes_bound(line(), X, y, criterion=BCE, **options)
    assert (found.confidence, found.n_samples) == (0.9, n)
    assert found.empirical_error == pytest.approx(share, rel=1e-12)
    assert found.kl == pytest.approx(2.0**2 / (2 * found.sigma**2), rel=1e-12)
    assert found.noisy_error == pytest.approx(found.empirical_error + found.expected_sharpness)
    limit = largest(found.noisy_error, math.log(2 / delta) / n_draws)
    assert found.noisy_error_limit == pytest.approx(limit, rel=1e-6)
    confidence = delta / 2 / len(GRID)

    def bound(error, kl):
        return largest(error, (kl + math.log(2 * math.sqrt(n) / confidence)) / n)

    assert found.bound == pytest.approx(bound(limit, found.kl), rel=1e-6)
    printed = limit + math.sqrt((found.kl + math.log(2 * n / confidence)) / n)
    assert found.mcallester == pytest.approx(printed, rel=1e-6)
    assert limit < found.bound < found.mcallester < 1
    exact = {}
    for sigma in GRID:
        flip = norm.cdf(-2.0 / sigma)  # with the sign flipped by the noise, all others are wrong
        error = (1 - flip) * share + flip * (1 - share)
        if sigma == found.sigma:
            close = 5 * math.sqrt(flip / n_draws) + 1e-9
            assert found.noisy_error == pytest.approx(error, abs=close)
        exact[sigma] = bound(error, 2.0**2 / (2 * sigma**2))
    # the 16 trial draws tell bounds apart that are not close together; the limit of the error with
    # noise costs a little
    best = exact[found.sigma]
    assert best < min(exact.values()) + 0.01 < sorted(exact.values())[2]
    assert best < found.bound < best + 0.06


ARGUMENTS = {"criterion": CE, "sigmas": [0.05], "n_draws": 20, "random_state": 0}


def trained():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    before = copy.deepcopy(net)
    for parameter in net.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    X = torch.randn(60, 2)
    return net, before, X, net(X).argmax(dim=1)


def test_the_prior_is_around_the_initial_weights_or_zero():
    net, before, X, y = trained()
    w, v = (nn.utils.parameters_to_vector(each.parameters()).double() for each in (net, before))
    state = {name: value.numpy() for name, value in before.state_dict().items()}
    for initial in (before, before.state_dict(), state, None):
        found = pac_bayes_bound(net, X, y, initial=initial, **ARGUMENTS)
        apart = (w if initial is None else w - v).square().sum().item()
        assert found.kl == pytest.approx(apart / (2 * 0.05**2), rel=1e-6)


def test_outputs_that_are_no_numbers_count_as_errors():
    net = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False))
    net[0].weight.data = torch.tensor([[1e30], [1e30]])
    net[1].weight.data = torch.tensor([[1.0, -1.0], [1.0, 1.0]])  # infinity minus infinity
    found = pac_bayes_bound(net, torch.full((20, 1), 1e30), torch.zeros(20).long(), **ARGUMENTS)
    assert found.empirical_error == found.noisy_error == found.bound == 1


def test_pipelines_count_as_their_last_step_if_they_were_not_fitted_to_data():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(200, 2))
    y = np.where(X[:, 0] + 0.1 * rng.normal(size=200) > 0, "yes", "no")
    model = LogisticRegression(C=0.1)
    arguments = {"sigmas": GRID, "n_draws": 50, "random_state": 0}
    expected = pac_bayes_bound(model.fit(X, y), X, y, **arguments)
    assert expected.bound < 0.5
    pipe = make_pipeline(FunctionTransformer(), "passthrough", model).fit(X, y)
    assert pac_bayes_bound(pipe, X, y, **arguments) == expected
    pipe = make_pipeline(StandardScaler(), model)
    search = GridSearchCV(pipe, {"logisticregression__C": [0.1]}, cv=2)
    wrapped = FixedThresholdClassifier(pipe), FrozenEstimator(pipe.fit(X, y))
    for fitted in (pipe, search, make_pipeline(pipe), *wrapped):
        fitted.fit(X, y)
        with pytest.raises(ValueError, match="step 'standardscaler' of the pipeline was fitted"):
            pac_bayes_bound(fitted, X, y)


def test_buffers_that_training_did_not_change_are_no_statistics():
    net, before, X, y = trained()
    for each in (net, before):
        each.register_buffer("scale", torch.ones(2))
    for initial in (before, before.state_dict()):
        assert pac_bayes_bound(net, X, y, initial=initial, **ARGUMENTS).bound <= 1
    net.scale *= 2
    for initial in (None, before, before.state_dict()):
        with pytest.raises(ValueError, match="the buffer 'scale' of the network may depend"):
            pac_bayes_bound(net, X, y, initial=initial, **ARGUMENTS)

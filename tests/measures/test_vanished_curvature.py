"""Models whose curvature has vanished are no flat minima: they get no score."""

import math
import warnings

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV
from sklearn.preprocessing import scale
from torch import nn

from relflat_sk import (
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    flattest_within,
)
from relflat_sk.measures._minimum import ConstantComparison, find_objection

X, Y = load_iris(return_X_y=True)
X, Y = scale(X[:100]).astype(np.float32), Y[:100]  # two classes that a plane separates
SETTINGS = {"max_epochs": 5, "lr": 0.02, "verbose": 0, "random_state": 0}
VANISHED = "has no curvature left .*may be saturated.*its score is nan"


class Scaled(nn.Module):
    """A linear network with large outputs."""

    def __init__(self, n_features, n_outputs, factor=1.0):
        super().__init__()
        self.linear, self.factor = nn.Linear(n_features, n_outputs), factor

    def forward(self, x):
        return self.factor * self.linear(x)


def classifier(factor):
    """Make a classifier that is saturated if its factor is large."""
    return RelativeFlatnessRegularizedClassifier(
        Scaled, module__factor=factor, flatness_weight=0, **SETTINGS
    )


@pytest.mark.parametrize("data", ["given", "train"])
@pytest.mark.parametrize("factor", [1e3, 1e6], ids=["loss 1e-9 or less", "loss 0"])
def test_saturated_networks_have_no_score(factor, data):
    net = classifier(factor).fit(X, Y)
    assert net.score(X, Y) == 1
    assert net.constant_comparison_.loss < 1e-7
    assert 0 <= net.relative_flatness_ < 1e-3  # less than that of any honest network
    with pytest.warns(FlatnessWarning, match=VANISHED):
        assert math.isnan(FlatnessScorer(data=data)(net, X, Y))
    with pytest.warns(FlatnessWarning, match="no curvature left .*it is scored anyway"):
        assert FlatnessScorer(data=data, at_minimum="warn")(net, X, Y) == -net.relative_flatness_


@pytest.mark.filterwarnings("ignore:One or more of the test scores are non-finite")
def test_saturated_networks_do_not_win_a_search():
    search = GridSearchCV(
        classifier(1.0),
        {"module__factor": [1e6, 1.0]},
        scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()},
        refit=flattest_within(0.05),
        cv=3,
    )
    with pytest.warns(FlatnessWarning, match=VANISHED):
        search.fit(X, Y)
    assert_array_equal(np.isfinite(search.cv_results_["mean_test_flatness"]), [False, True])
    assert search.best_params_ == {"module__factor": 1.0}


@pytest.mark.filterwarnings(
    "ignore:relative_flatness is 0 because L1Loss:relflat_sk.FlatnessWarning"
)
@pytest.mark.filterwarnings("ignore:the penalty of .* has no effect:relflat_sk.FlatnessWarning")
@pytest.mark.parametrize("data", ["given", "train"])
def test_criteria_without_curvature_have_no_score(data):
    y = X @ np.float32([1, 2, 0, -1])
    net = RelativeFlatnessRegularizedRegressor(criterion=nn.L1Loss, **SETTINGS).fit(X, y)
    with pytest.warns(FlatnessWarning, match="has no curvature left .*its criterion may have"):
        assert math.isnan(FlatnessScorer(data=data)(net, X, y))
    scorer = FlatnessScorer(measure_params={"criterion": nn.MSELoss()})
    assert scorer(net, X, y) < 0


@pytest.mark.parametrize("name", [
    "relative_flatness", "normalized_relative_flatness", "trace_flatness", "eigenvalue_flatness",
    "network_flatness", "neuron_flatness_sum", "neuron_flatness_max", "hessian_trace",
])  # fmt: skip
def test_a_perfect_fit_of_squared_errors_is_scored(name):
    """Its loss is zero, and its curvature that of any other fit."""
    y = X @ np.float32([1, 2, 0, -1])
    model = LinearRegression().fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FlatnessScorer(name)(model, X, y) < -1e-2 * y.var()


def test_without_labels_zero_is_no_score_either():
    net = RelativeFlatnessRegularizedClassifier(module__hidden_layer_sizes=(), **SETTINGS)
    net.fit(X, Y)
    with torch.no_grad():
        for parameter in net.module_.parameters():
            parameter.mul_(1e6)
    with pytest.warns(FlatnessWarning, match=VANISHED):
        assert math.isnan(FlatnessScorer()(net, X))


@pytest.mark.parametrize(
    ("measure", "flatness", "loss", "vanished"),
    [
        ("relative_flatness", 0.0, 0.1, True),
        ("relative_flatness", 0.9e-6, 0.1, True),
        ("relative_flatness", 1.1e-6, 0.1, False),
        ("relative_flatness", 0.9, 0.9e-6, True),
        ("relative_flatness", 1.1, 0.9e-6, False),
        ("relative_flatness", 0.9, 1.1e-6, False),
        ("hessian_trace", 0.0, 0.1, True),
        ("hessian_trace", 1e-9, 0.9e-6, False),
        ("gradient_norm", 0.0, 0.1, False),
        ("l2_norm", 0.0, 0.1, False),
    ],
)
def test_how_little_is_nothing(measure, flatness, loss, vanished):
    objection = find_objection(None, measure, flatness, ConstantComparison(loss, 1.0))
    assert (objection is not None) == vanished


# -- arguments that cannot be meant ---------------------------------------------------------

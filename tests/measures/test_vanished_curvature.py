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
from torch.utils.data import DataLoader, Dataset, TensorDataset

from relflat_sk import (
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    flatness_report,
    flattest_within,
    measure,
    relative_flatness,
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
        assert FlatnessScorer(data=data, non_minimum="warn")(net, X, Y) == -net.relative_flatness_


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


class Measured(nn.Module):
    """A ReLU network whose layers are scaled, or dead."""

    def __init__(self, scale=1.0, dead=False, unused=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.scale, self.unused = scale, unused
        with torch.no_grad():
            self.first.bias.fill_(-1e3 if dead else 0.5)
            self.last.weight.copy_(torch.stack([-torch.ones(8), torch.ones(8)]))
            self.first.weight[:] = torch.tensor([0.2, -0.2, 0.5, 0.5])
            self.last.bias.copy_(torch.tensor([4.0, -4.0]))

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.scale * self.last(hidden * 0 if self.unused else hidden)


DEAD = "no better than the best constant .*may be dead"
SATURATED = "no curvature left that could be compared.* may be saturated"


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dead": True}, DEAD), ({"scale": 0.0}, DEAD), ({"scale": 1e4}, SATURATED)],
    ids=["dead", "constant", "saturated"],
)
@pytest.mark.parametrize("layer", [0, -1])
def test_measures_of_dead_and_saturated_networks_warn(settings, message, layer):
    net, features = Measured(**settings), torch.from_numpy(X)
    labels = torch.from_numpy(Y)
    if message == SATURATED:
        labels = net(features).argmax(dim=1).detach()
        assert 0 < labels.float().mean() < 1
    arguments = {"criterion": nn.CrossEntropyLoss(), "layer": layer}
    with pytest.warns(FlatnessWarning, match=f"relative_flatness is .*{message}") as found:
        assert abs(relative_flatness(net, features, labels, **arguments)) < 1e-5
    assert len(found) == 1
    with pytest.warns(FlatnessWarning, match=f"eigenvalue_flatness is .*{message}"):
        measure("eigenvalue_flatness", net, features, labels, **arguments)
    del arguments["layer"]
    names = ["relative_flatness", "hessian_trace", "gradient_norm", "l2_norm"]
    names = names if message == DEAD else names[:1]
    with pytest.warns(FlatnessWarning, match=f"^relative_flatness.* is .*{message}") as found:
        flatness_report(net, features, labels, measures=names, **arguments)
    assert len(found) == 1


def test_a_layer_that_the_loss_ignores_is_not_called_dead():
    net, labels = Measured(unused=True), torch.zeros(len(X)).long()
    labels[0] = 1
    with torch.no_grad():
        net.last.bias.copy_(torch.tensor([2.0, -2.0]))  # the best constant, nearly
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0"):
        relative_flatness(
            net, torch.from_numpy(X), labels, layer=0, criterion=nn.CrossEntropyLoss()
        )


def test_honest_networks_are_measured_in_one_pass_and_without_a_warning():
    net, features, labels = Measured(0.1), torch.from_numpy(X), torch.from_numpy(Y)
    passes = []
    net.register_forward_hook(lambda *_: passes.append(1))
    seen = TensorDataset(features, labels)
    reads = CountedReads(seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relative_flatness(net, DataLoader(reads, 25), layer=-1, criterion=nn.CrossEntropyLoss())
    assert reads.count == len(X)
    dead = Measured(0.0)
    n_usual, passes[:] = len(passes), []
    dead.register_forward_hook(lambda *_: passes.append(1))
    with pytest.warns(FlatnessWarning, match=DEAD):
        relative_flatness(dead, DataLoader(reads, 25), layer=-1, criterion=nn.CrossEntropyLoss())
    assert len(passes) == n_usual


class CountedReads(Dataset):
    def __init__(self, data):
        self.data, self.count = data, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        self.count += 1
        return self.data[i]


def test_criteria_that_take_no_constant_are_measured_without_one():
    class Own(nn.Module):
        def forward(self, output, target):
            if not output.requires_grad or output.dtype == torch.float64:
                raise TypeError("float32 networks only")
            return nn.functional.mse_loss(output[:, 0], target)

    net, labels = Measured(0.0), torch.from_numpy(Y).float()
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0: there is no curvature"):
        relative_flatness(net, torch.from_numpy(X), labels, criterion=Own())


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

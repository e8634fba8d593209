"""Zeros and nans come with their reason: no curvature, dead, saturated or diverged networks."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LinearRegression
from sklearn.preprocessing import scale
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    flatness_report,
    get_measure_names,
    measure,
    relative_flatness,
)
from relflat_sk.measures._layer_measures import LAYER_MEASURES
from relflat_sk.measures._minimum import ConstantComparison, find_objection
from tests.cases import Net

CE = nn.CrossEntropyLoss()
X, Y = load_iris(return_X_y=True)
X, Y = scale(X[:100]).astype(np.float32), Y[:100]  # two classes that a plane separates
INPUTS, LABELS = torch.from_numpy(X), torch.from_numpy(Y)
TARGET = X @ np.float32([1, 2, 0, -1])
COLUMN = TARGET[:, None]
SETTINGS = {"max_epochs": 5, "lr": 0.02, "verbose": 0, "random_state": 0}


def network(n_outputs, activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, n_outputs))


# -- criteria without curvature -------------------------------------------------------------------


def zero_one(output, target):
    return (output.argmax(dim=1) != target).float().mean()


def detached(output, target):
    return nn.functional.cross_entropy(output.detach(), target)


def hinge(output, target):
    return (1 - output * target).relu().mean()


def squared_hinge(output, target):
    return (1 - output * target).relu().square().mean()


CRITERIA = {
    "0-1 loss": (zero_one, 2, Y),
    "detached": (detached, 2, Y),
    "L1Loss": (nn.L1Loss(), 1, COLUMN),
    "hinge": (hinge, 1, np.sign(COLUMN)),
    "NLLLoss of logits": (nn.NLLLoss(), 2, Y),
}


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_without_curvature_is_reported(name, layer):
    criterion, n_outputs, y = CRITERIA[name]
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0 because .* has no curvature"):
        value = relative_flatness(network(n_outputs), X, y, layer=layer, criterion=criterion)
    assert value == 0
    names = ["relative_flatness", "hessian_trace", "gradient_norm"]
    with pytest.warns(FlatnessWarning, match="^relative_flatness, hessian_trace is 0") as caught:
        flatness_report(network(n_outputs), X, y, measures=names, layers=layer, criterion=criterion)
    assert len(caught) == 1


def test_other_values_are_no_reason_to_warn():
    # hidden units that bend: the network is curved where the loss is not
    options = {"layer": 0, "criterion": nn.L1Loss(), "method": "exact"}
    relative_flatness(network(1, nn.Tanh), X, -COLUMN, **options)
    measure("gradient_norm", network(2), X, Y, criterion=zero_one)
    relative_flatness(network(2), X, criterion=CE)  # without labels, the loss is nan


def certain(n_outputs, bias):
    """A network that gives the same certain answer to all inputs."""
    net = network(n_outputs)
    with torch.no_grad():
        net[2].weight.zero_()
        net[2].bias.copy_(torch.tensor(bias))
    return net


@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize(
    ("net", "y", "criterion"),
    [
        (certain(1, [5.0]), np.ones_like(COLUMN), squared_hinge),
        (nn.Sequential(*certain(2, [1e4, 0.0]), nn.LogSoftmax(dim=1)), 0 * Y, nn.NLLLoss()),
    ],
    ids=["squared hinge", "log-probabilities"],
)
def test_a_loss_at_its_lowest_value_is_flat_indeed(net, y, criterion, layer):
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0, .*of 0 is no better"):
        assert relative_flatness(net, X, y, layer=layer, criterion=criterion) == 0


@pytest.mark.filterwarnings("ignore:relative_flatness is 0 bec:relflat_sk.FlatnessWarning")
def test_criteria_without_curvature_have_no_score():
    net = RelativeFlatnessRegularizedRegressor(criterion=nn.L1Loss, **SETTINGS)
    with pytest.warns(FlatnessWarning, match="the penalty of .* has no effect"):
        net.fit(X, TARGET)
    for data in ("given", "train"):
        with pytest.warns(FlatnessWarning, match="has no curvature left .*its criterion may have"):
            assert math.isnan(FlatnessScorer(data=data)(net, X, TARGET))
    scorer = FlatnessScorer(measure_params={"criterion": nn.MSELoss()})
    assert scorer(net, X, TARGET) < 0


# -- dead and saturated networks ------------------------------------------------------------------


VANISHED = "has no curvature left .*may be saturated.*its score is nan"


@pytest.mark.parametrize("data", ["given", "train"])
@pytest.mark.parametrize("factor", [1e3, 1e6], ids=["loss 1e-9 or less", "loss 0"])
def test_saturated_networks_have_no_score(factor, data):
    large = Net(lambda net, x: factor * net.linear(x), linear=nn.Linear(4, 2))
    net = RelativeFlatnessRegularizedClassifier(large, flatness_weight=0, **SETTINGS).fit(X, Y)
    assert net.score(X, Y) == 1
    assert net.constant_comparison_.loss < 1e-7
    assert 0 <= net.relative_flatness_ < 1e-3  # less than that of any honest network
    with pytest.warns(FlatnessWarning, match=VANISHED):
        assert math.isnan(FlatnessScorer(data=data)(net, X, Y))
    with pytest.warns(FlatnessWarning, match="no curvature left .*it is scored anyway"):
        assert FlatnessScorer(data=data, non_minimum="warn")(net, X, Y) == -net.relative_flatness_


def test_a_perfect_fit_of_squared_errors_is_scored():
    """Its loss is zero, and its curvature that of any other fit."""
    model = LinearRegression().fit(X, TARGET)
    names = LAYER_MEASURES.keys() - {"comparable_flatness", "gradient_norm"}
    for name in (*names, "network_flatness"):
        assert FlatnessScorer(name)(model, X, TARGET) < -1e-2 * TARGET.var()


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
    net, labels = Measured(**settings), LABELS
    if message == SATURATED:
        labels = net(INPUTS).argmax(dim=1).detach()
        assert 0 < labels.float().mean() < 1
    arguments = {"criterion": CE, "layer": layer}
    with pytest.warns(FlatnessWarning, match=f"relative_flatness is .*{message}") as found:
        assert abs(relative_flatness(net, INPUTS, labels, **arguments)) < 1e-5
    assert len(found) == 1
    with pytest.warns(FlatnessWarning, match=f"eigenvalue_flatness is .*{message}"):
        measure("eigenvalue_flatness", net, INPUTS, labels, **arguments)
    names = ["relative_flatness", "hessian_trace", "gradient_norm", "l2_norm"]
    names = names if message == DEAD else names[:1]
    with pytest.warns(FlatnessWarning, match=f"^relative_flatness.* is .*{message}") as found:
        flatness_report(net, INPUTS, labels, measures=names, criterion=CE)
    assert len(found) == 1


def test_a_layer_that_the_loss_ignores_is_not_called_dead():
    net, labels = Measured(unused=True), torch.zeros(len(X)).long()
    labels[0] = 1
    with torch.no_grad():
        net.last.bias.copy_(torch.tensor([2.0, -2.0]))  # the best constant, nearly
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0"):
        relative_flatness(net, INPUTS, labels, layer=0, criterion=CE)


@pytest.mark.parametrize(("scale", "said"), [(0.0, "is 0: there is no curvature"), (0.1, "is ")])
def test_a_constant_loss_that_cannot_be_computed_is_said_of_small_values(scale, said):
    class Own(nn.Module):
        def forward(self, output, target):
            if output.dtype == torch.float64:
                raise TypeError("float32 networks only")
            return (output[:, 0] - target).square().mean() * 1e-4 + (1e3 if scale else 0)

    said += ".*best constant prediction could not be computed .*float32 networks only"
    with pytest.warns(FlatnessWarning, match=f"^relative_flatness {said}"):
        relative_flatness(Measured(scale), INPUTS, LABELS.float(), criterion=Own())


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
        ("relative_flatness", 0.0, math.nan, True),  # without labels
        ("relative_flatness", 1e-9, math.nan, False),
    ],
)
def test_how_little_is_nothing(measure, flatness, loss, vanished):
    comparison = ConstantComparison(loss, loss if math.isnan(loss) else 1.0)
    objection = find_objection(None, measure, flatness, comparison)
    assert (objection is not None) == vanished


# -- weights that are nan, infinite, or not there at all ------------------------------------------

RANDOM, THREE = torch.randn(20, 4), torch.arange(20) % 3


def with_weight(value, parameter="hidden0.weight"):
    net = MLP(4, 3)
    with torch.no_grad():
        net.get_parameter(parameter).view(-1)[0] = value
    return net


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("parameter", ["hidden0.weight", "output.bias"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relative_flatness", {"layer": 0}),
        ("relative_flatness", {"layer": -1}),
        ("normalized_relative_flatness", {"layer": -1}),
        ("eigenvalue_flatness", {"layer": -1}),
        ("hessian_trace", {"aggregate": "max"}),
        ("l2_norm", {}),
    ],
)
def test_measures_of_weights_that_are_not_finite_warn_once(value, parameter, name, options):
    net = with_weight(value, parameter)
    message = f"the value of {name} is nan or infinite, because '{parameter}' of the network cont"
    with pytest.warns(FlatnessWarning, match=message) as found:
        assert not math.isfinite(measure(name, net, RANDOM, THREE, criterion=CE, **options))
    assert len(found) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reports_warn_once(value):
    message = rf"and {len(get_measure_names()) - 1} more is nan or inf.*'hidden0.weight'"
    with pytest.warns(FlatnessWarning, match=message) as found:
        report = flatness_report(with_weight(value), RANDOM, THREE, criterion=CE)
    assert len(found) == 1
    assert not np.isfinite(report.set_index("measure").loc[get_measure_names(), "value"]).any()


def test_overflowing_outputs_warn():
    net = MLP(4, 3)
    with torch.no_grad():
        net.hidden0.weight.mul_(1e30)
        net.output.weight.mul_(1e30)
    for y, cause in ((THREE, "the mean loss is nan: .* outputs are too large"),
                     (None, "features or outputs .* are nan or too large")):  # fmt: skip
        with pytest.warns(FlatnessWarning, match=cause):
            assert not math.isfinite(relative_flatness(net, RANDOM, y, criterion=CE))


@pytest.mark.parametrize("layer", [0, -1])
def test_without_a_loss_there_is_no_curvature(layer):
    # skorch takes the logarithm of what its classifiers put out, which logits do not survive
    net = NeuralNetClassifier(
        MLP, module__n_features=4, module__n_outputs=3, max_epochs=1, verbose=0
    ).initialize()
    message = "because the mean loss is nan: .* such as logits in place of probabilities"
    options = {"layer": layer, "per_sample": True, "return_stderr": True}
    with pytest.warns(FlatnessWarning, match=message):
        terms, errors = relative_flatness(net, RANDOM.numpy(), THREE.numpy(), **options)
    assert np.isnan([terms, errors]).all()


def test_a_function_without_derivatives_is_named_as_the_cause():
    """In a network with unit features, as cosine heads have."""
    net = Net(
        lambda net, x: net.last(nn.functional.normalize(net.first(x))),
        first=nn.Linear(4, 6, bias=False), last=nn.Linear(6, 3),
    )  # fmt: skip
    data = RANDOM.clone()
    data[0] = 0  # whose features the network divides by their norm of 0
    message = "derivative at some sample.* a norm or a square root at 0, .*normalize"
    with pytest.warns(FlatnessWarning, match=message) as found:
        assert math.isnan(relative_flatness(net, data, THREE, layer=0, criterion=CE))
    assert len(found) == 1
    with pytest.warns(FlatnessWarning, match=f"hessian_trace .*{message}"):
        report = flatness_report(
            net, data, THREE, criterion=CE, measures=["hessian_trace", "l2_norm"]
        )
    assert report["value"].isna().sum() == 1
    # at the layer behind the function
    assert relative_flatness(net, data, THREE, criterion=CE) > 0


# -- weights that have no number ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relative_flatness", "l2_norm"])
def test_lazy_layers_are_not_filled_by_a_measure(name):
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="lazy layers"):
        measure(name, net, RANDOM, THREE, criterion=CE)
    assert net[2].has_uninitialized_params()


def test_no_imaginary_part_is_left_out():
    net = Net(
        lambda net, x: net.real(net.complex(x.to(torch.complex64)).abs()),
        complex=nn.Linear(4, 5, dtype=torch.complex64), real=nn.Linear(5, 3),
    )  # fmt: skip
    whole = ("l2_norm", "adaptive_sharpness", "joint_eigenvalue_flatness")
    for name, at in (("relative_flatness", {"layer": 0}), *((name, {}) for name in whole)):
        with pytest.raises(ValueError, match="complex"):
            measure(name, net, RANDOM, THREE, criterion=CE, **at)
    head, features = net.real, net.complex(RANDOM.to(torch.complex64)).abs().detach()
    expected = relative_flatness(head, features, THREE, criterion=CE)
    assert relative_flatness(net, RANDOM, THREE, criterion=CE) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:it could not be checked:relflat_sk.FlatnessWarning")
def test_a_criterion_without_enough_memory_is_no_wrong_criterion():
    def criterion(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        relative_flatness(Measured(0.1), INPUTS, LABELS, criterion=criterion)

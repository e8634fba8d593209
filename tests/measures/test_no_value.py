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
from tests.cases import Net

CE = nn.CrossEntropyLoss()
X, Y = load_iris(return_X_y=True)
X, Y = scale(X[:100]).astype(np.float32), Y[:100]  # two classes that a plane separates
INPUTS, LABELS = torch.from_numpy(X), torch.from_numpy(Y)
TARGET = X @ np.float32([1, 2, 0, -1])
COLUMN = TARGET[:, None]
SETTINGS = {"max_epochs": 5, "lr": 0.02, "verbose": 0, "random_state": 0}


def network(n_outputs, activation=nn.ReLU):
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, n_outputs))


def warned(message, call, *args, **options):
    with pytest.warns(FlatnessWarning, match=message) as caught:
        value = call(*args, **options)
    assert len(caught) == 1
    return value


def scores(model, y, message, verdict="its score is nan", **options):
    """The scores on the given data and of the training, each with a warning."""
    return [
        warned(f"{message}.*{verdict}", FlatnessScorer(data=data, **options), model, X, y)
        for data in ("given", "train")
    ]


def zero_one(output, target):
    return (output.argmax(dim=1) != target).float().mean()


def detached(output, target):
    return nn.functional.cross_entropy(output.detach(), target)


def hinge(output, target):
    return (1 - output * target).relu().mean()


def squared_hinge(output, target):
    return (1 - output * target).relu().square().mean()


def certain(n_outputs, *bias):
    """A network that gives the same certain answer to all inputs."""
    net = network(n_outputs)
    nn.init.zeros_(net[2].weight)
    net[2].bias.data = torch.tensor(bias)
    return net


def scaled(scale=1.0, dead=False, unused=False):
    """A ReLU network whose layers are scaled, dead or not used."""

    def run(net, x):
        hidden = net.first(x).relu()
        return scale * net.last(hidden * 0 if unused else hidden)

    first, last = nn.Linear(4, 8), nn.Linear(8, 2)
    first.bias.data.fill_(-1e3 if dead else 0.5)
    first.weight.data[:] = torch.tensor([0.2, -0.2, 0.5, 0.5])
    last.weight.data = torch.tensor([[-1.0], [1.0]]).repeat(1, 8)
    last.bias.data = torch.tensor([4.0, -4.0])
    return Net(run, first=first, last=last)


NO_CURVATURE = "is 0 because .* has no curvature"
LOWEST = "is 0, .*of 0 is no better"
DEAD = "is .*no better than the best constant .*may be dead"
SATURATED = "is .*no curvature left that could be compared.* may be saturated"
# a network, its labels and criterion, and what is said of its flatness
NOTHING = {
    "0-1 loss": (network(2), Y, zero_one, NO_CURVATURE),
    "detached": (network(2), Y, detached, NO_CURVATURE),
    "L1Loss": (network(1), COLUMN, nn.L1Loss(), NO_CURVATURE),
    "hinge": (network(1), np.sign(COLUMN), hinge, NO_CURVATURE),
    "NLLLoss of logits": (network(2), Y, nn.NLLLoss(), NO_CURVATURE),
    "squared hinge": (certain(1, 5.0), np.ones_like(COLUMN), squared_hinge, LOWEST),
    "log-probabilities": (
        nn.Sequential(*certain(2, 1e4, 0.0), nn.LogSoftmax(dim=1)), 0 * Y, nn.NLLLoss(), LOWEST,
    ),
    "dead": (scaled(dead=True), Y, CE, DEAD),
    "constant": (scaled(0.0), Y, CE, DEAD),
    "saturated": (scaled(1e4), scaled()(INPUTS).argmax(dim=1), CE, SATURATED),
}  # fmt: skip


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", NOTHING)
def test_why_a_value_is_nothing_is_said_once(name, layer):
    *at, criterion, message = NOTHING[name]
    at, options = (at[0], X, at[1]), {"criterion": criterion}
    value = warned(f"^relative_flatness {message}", relative_flatness, *at, layer=layer, **options)
    assert value == 0 if message in {NO_CURVATURE, LOWEST} else abs(value) < 1e-5
    with pytest.warns(FlatnessWarning, match=f"eigenvalue_flatness {message}"):
        measure("eigenvalue_flatness", *at, layer=layer, **options)
    if message == SATURATED:
        assert 0 < at[2].float().mean() < 1
        names, found = ["relative_flatness"], ""
    else:
        names = ["relative_flatness", "hessian_trace", "gradient_norm", "l2_norm"]
        found = ", hessian_trace"
    message = f"^relative_flatness{found} {message}"
    warned(message, flatness_report, *at, measures=names, layers=layer, **options)


def test_other_values_are_no_reason_to_warn():
    # hidden units that bend: the network is curved where the loss is not
    options = {"layer": 0, "criterion": nn.L1Loss(), "method": "exact"}
    relative_flatness(network(1, nn.Tanh), X, -COLUMN, **options)
    measure("gradient_norm", network(2), X, Y, criterion=zero_one)
    relative_flatness(network(2), X, criterion=CE)  # without labels, the loss is nan


@pytest.mark.filterwarnings("ignore:relative_flatness is 0 bec:relflat_sk.FlatnessWarning")
def test_criteria_without_curvature_have_no_score():
    net = RelativeFlatnessRegularizedRegressor(criterion=nn.L1Loss, **SETTINGS)
    with pytest.warns(FlatnessWarning, match="the penalty of .* has no effect"):
        net.fit(X, TARGET)
    found = scores(net, TARGET, "has no curvature left .*its criterion may have")
    assert np.isnan(found).all()
    scorer = FlatnessScorer(measure_params={"criterion": nn.MSELoss()})
    assert scorer(net, X, TARGET) < 0


@pytest.mark.parametrize("factor", [1e3, 1e6], ids=["loss 1e-9 or less", "loss 0"])
def test_saturated_networks_have_no_score(factor):
    large = Net(lambda net, x: factor * net.linear(x), linear=nn.Linear(4, 2))
    net = RelativeFlatnessRegularizedClassifier(large, flatness_weight=0, **SETTINGS).fit(X, Y)
    assert net.score(X, Y) == 1
    assert net.constant_comparison_.loss < 1e-7
    assert 0 <= net.relative_flatness_ < 1e-3  # less than that of any honest network
    assert np.isnan(scores(net, Y, "has no curvature left .*may be saturated")).all()
    found = scores(net, Y, "no curvature left", "it is scored anyway", non_minimum="warn")
    assert found == [-net.relative_flatness_] * 2


def test_a_perfect_fit_of_squared_errors_is_scored():
    """Its loss is zero, and its curvature that of any other fit."""
    model = LinearRegression().fit(X, TARGET)
    names = LAYER_MEASURES.keys() - {"comparable_flatness", "gradient_norm"}
    for name in (*names, "network_flatness"):
        assert FlatnessScorer(name)(model, X, TARGET) < -1e-2 * TARGET.var()
    # which is no curvature, or not in the unit of the loss, and may be small
    assert FlatnessScorer("gradient_norm")(model, X, TARGET) == pytest.approx(0, abs=1e-4)
    model = LinearRegression().fit(1e-3 * X, TARGET)
    assert -1e-4 < FlatnessScorer("hessian_trace")(model, 1e-3 * X, TARGET) < 0


def test_a_layer_that_the_loss_ignores_is_not_called_dead():
    net, labels = scaled(unused=True), (torch.arange(len(X)) == 0).long()
    net.last.bias.data = torch.tensor([2.0, -2.0])  # the best constant, nearly
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
        relative_flatness(scaled(scale), INPUTS, LABELS.float(), criterion=Own())


RANDOM, THREE = torch.randn(20, 4), torch.arange(20) % 3


def with_weight(value, parameter="hidden0.weight"):
    net = MLP(4, 3)
    net.get_parameter(parameter).data.view(-1)[0] = value
    return net


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("parameter", ["hidden0.weight", "output.bias"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("relative_flatness", {"layer": 0}),
        ("relative_flatness", {}),
        ("normalized_relative_flatness", {}),
        ("eigenvalue_flatness", {}),
        ("hessian_trace", {"aggregate": "max"}),
        ("l2_norm", {}),
    ],
)
def test_measures_of_weights_that_are_not_finite_warn_once(value, parameter, name, options):
    at = name, with_weight(value, parameter), RANDOM, THREE
    message = f"the value of {name} is nan or infinite, because '{parameter}' of the network cont"
    assert not math.isfinite(warned(message, measure, *at, criterion=CE, **options))


@pytest.mark.parametrize("parameter", ["hidden0.weight", "output.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_reports_warn_once(value, parameter):
    message = rf"and {len(get_measure_names()) - 1} more is nan or inf.*'{parameter}'"
    at = with_weight(value, parameter), RANDOM, THREE
    report = warned(message, flatness_report, *at, criterion=CE).set_index("measure")
    assert not np.isfinite(report.loc[get_measure_names(), "value"]).any()


@pytest.mark.parametrize("criterion", [nn.BCELoss(), nn.BCEWithLogitsLoss()])
def test_infinite_logits_of_two_classes_have_no_temperature(criterion):
    net, y = network(1), (THREE > 0).float()[:, None]
    net[2].bias.data.fill_(math.inf)
    net = nn.Sequential(*net, nn.Sigmoid()) if isinstance(criterion, nn.BCELoss) else net
    options = {"criterion": criterion, "measures": ["comparable_flatness"]}
    message = "^the value of comparable_flatness is nan or infinite, because '2.bias'"
    assert warned(message, flatness_report, net, RANDOM, y, **options)["value"].isna().all()


def test_other_causes_are_named():
    net = MLP(4, 3)
    for layer in (net.hidden0, net.output):
        layer.weight.data.mul_(1e30)
    large, unlabelled = "the mean loss is nan: .* outputs are too", "features or outputs .* are nan"
    assert np.isnan(warned(large, relative_flatness, net, RANDOM, THREE, criterion=CE))
    assert not np.isfinite(warned(unlabelled, relative_flatness, net, RANDOM, criterion=CE))
    # skorch takes the logarithm of what its classifiers put out, which logits do not survive
    net = NeuralNetClassifier(MLP(4, 3)).initialize()
    message = "because the mean loss is nan: .* such as logits in place of probabilities"
    for layer in (0, -1):
        options = {"layer": layer, "per_sample": True, "return_stderr": True}
        found = warned(message, relative_flatness, net, RANDOM.numpy(), THREE.numpy(), **options)
        assert np.isnan(found).all()


def test_a_function_without_derivatives_is_named_as_the_cause():
    """In a network with unit features, as cosine heads have."""
    net = Net(
        lambda net, x: net.last(nn.functional.normalize(net.first(x))),
        first=nn.Linear(4, 6, bias=False), last=nn.Linear(6, 3),
    )  # fmt: skip
    data = RANDOM.clone()
    data[0] = 0  # whose features the network divides by their norm of 0
    at, options = (net, data, THREE), {"criterion": CE}
    message = "derivative at some sample.* a norm or a square root at 0, .*normalize"
    assert math.isnan(warned(message, relative_flatness, *at, layer=0, **options))
    options["measures"] = ["hessian_trace", "l2_norm"]
    report = warned(f"hessian_trace .*{message}", flatness_report, *at, **options)
    assert report["value"].isna().sum() == 1
    # at the layer behind the function
    assert relative_flatness(*at, criterion=CE) > 0


@pytest.mark.parametrize("name", ["relative_flatness", "l2_norm"])
def test_lazy_layers_are_not_filled_by_a_measure(name):
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(ValueError, match="lazy layers"):
        measure(name, net, RANDOM, THREE, criterion=CE)
    assert net[2].has_uninitialized_params()


def test_no_imaginary_part_is_left_out():
    head, imaginary = nn.Linear(5, 3), nn.Linear(4, 5, dtype=torch.complex64)
    run = lambda net, x: net.head(net.complex(x.to(torch.complex64)).abs())  # noqa: E731
    net = Net(run, complex=imaginary, head=head)
    names = ("relative_flatness", "l2_norm", "adaptive_sharpness", "joint_eigenvalue_flatness")
    for name in names:
        at = {"layer": 0} if name == "relative_flatness" else {}
        with pytest.raises(ValueError, match="complex"):
            measure(name, net, RANDOM, THREE, criterion=CE, **at)
    features = imaginary(RANDOM.to(torch.complex64)).abs().detach()
    expected = relative_flatness(head, features, THREE, criterion=CE)
    assert relative_flatness(net, RANDOM, THREE, criterion=CE) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:it could not be checked:relflat_sk.FlatnessWarning")
def test_a_criterion_without_enough_memory_is_no_wrong_criterion():
    def criterion(output, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        relative_flatness(scaled(0.1), INPUTS, LABELS, criterion=criterion)

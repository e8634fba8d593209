"""A flatness of zero because the criterion has no curvature comes with a warning."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression
from torch import Tensor, nn

from relflat_sk import FlatnessWarning, flatness_report, measure, relative_flatness

X = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)
TARGET = X[:, :1] - X[:, 1:2]


def network(n_outputs, activation=nn.ReLU):
    """Make a network with seeded weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), activation(), nn.Linear(8, n_outputs))


class Scaled(nn.Module):
    """Multiply by a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def zero_one(output: Tensor, target: Tensor) -> Tensor:
    """Compute the share of wrong labels."""
    return (output.argmax(dim=1) != target).float().mean()


def detached(output: Tensor, target: Tensor) -> Tensor:
    """Compute cross-entropy without a graph."""
    return nn.functional.cross_entropy(output.detach(), target)


def own_absolute_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the mean absolute error as a user would write it."""
    return (output - target).abs().mean()


def hinge(output: Tensor, target: Tensor) -> Tensor:
    """Compute the hinge loss of targets -1 and 1."""
    return (1 - output * target).relu().mean()


def squared_hinge(output: Tensor, target: Tensor) -> Tensor:
    """Compute the squared hinge loss of targets -1 and 1."""
    return (1 - output * target).relu().square().mean()


CRITERIA = {
    "0-1 loss": (zero_one, 2, Y),
    "detached": (detached, 2, Y),
    "L1Loss": (nn.L1Loss(), 1, TARGET),
    "own L1": (own_absolute_error, 1, TARGET),
    "hinge": (hinge, 1, np.sign(TARGET)),
}


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_without_curvature_is_reported(name, layer):
    criterion, n_outputs, y = CRITERIA[name]
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0 because .* has no curvature"):
        value = relative_flatness(network(n_outputs), X, y, layer=layer, criterion=criterion)
    assert value == 0


def test_the_report_warns_once_and_names_the_measures():
    names = ["relative_flatness", "hessian_trace", "gradient_norm"]
    with pytest.warns(FlatnessWarning) as caught:
        flatness_report(network(1), X, TARGET, measures=names, criterion=nn.L1Loss())
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("relative_flatness, hessian_trace is 0 because L1Loss has no curv")
    assert "So 0 does not mean that the minimum is flat" in message


DEAD, SATURATED = "is 0, which .* may be dead", "is 0: .* may be saturated"


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        # all features are zero, but the loss is curved
        (
            lambda: relative_flatness(
                nn.Sequential(nn.ReLU(), network(2)),
                -np.abs(X),
                Y,
                layer=0,
                criterion=nn.CrossEntropyLoss(),
            ),
            DEAD,
        ),
        # outputs so large that their curvature is zero in floating point
        (
            lambda: relative_flatness(
                nn.Sequential(network(2), Scaled(1e6)),
                X,
                nn.Sequential(network(2))(torch.as_tensor(X)).argmax(dim=1),
                layer="0.2",
                criterion=nn.CrossEntropyLoss(),
            ),
            SATURATED,
        ),
        (lambda: relative_flatness(LinearRegression().fit(X, 0 * TARGET), X, TARGET), DEAD),
    ],
    ids=["dead", "saturated", "zero weights"],
)
def test_other_zeros_have_other_reasons(measured, message):
    with pytest.warns(FlatnessWarning, match=message) as caught:
        measured()
    assert len(caught) == 1


@pytest.mark.parametrize(
    "measured",
    [
        # hidden units that bend: the network is curved where the loss is not
        lambda: relative_flatness(
            network(1, nn.Tanh), X, TARGET, layer=0, criterion=nn.L1Loss(), method="exact"
        ),
        lambda: measure("gradient_norm", network(2), X, Y, criterion=zero_one),
    ],
    ids=["curved network", "no curvature measured"],
)
def test_other_values_are_no_reason_to_warn(measured):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured()


def test_a_loss_at_its_lowest_value_is_flat_indeed():
    module = network(1)
    with torch.no_grad():
        module[2].weight.zero_()
        module[2].bias.copy_(torch.tensor([5.0]))
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0, .*of 0 is no better"):
        assert relative_flatness(module, X, np.ones_like(TARGET), criterion=squared_hinge) == 0


@pytest.mark.parametrize("layer", [0, -1])
def test_nll_loss_of_logits_warns(layer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    X, y = torch.randn(20, 4), torch.arange(20) % 3
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0 because NLLLoss has no"):
        assert relative_flatness(net, X, y, layer=layer, criterion=nn.NLLLoss()) == 0
    with torch.no_grad():
        net[-1].bias[0] = 1e4  # saturated: flat indeed
    proper = nn.Sequential(*net, nn.LogSoftmax(dim=1))
    with pytest.warns(FlatnessWarning, match="relative_flatness is 0, .*of 0 is no better"):
        assert relative_flatness(proper, X, y * 0, layer=layer, criterion=nn.NLLLoss()) == 0

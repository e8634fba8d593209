"""Layers whose rows are no samples, that compute something else, or that nothing depends on."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from relflat_sk import FlatnessWarning, RelativeFlatnessPenalty, flatness_report, relative_flatness
from tests import oracles
from tests.penalty.every_draw import assert_right_on_average

N = 6
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()
Y = torch.arange(N) % 3
WEIGHTS = torch.linspace(1, 2, N)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double()


class Net(nn.Module):
    """Two layers, and a function that uses them."""

    def __init__(self, run, n_outputs=3):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.run = nn.Linear(5, 4), nn.Linear(4, n_outputs), run
        self.double()

    def forward(self, x):
        return self.run(self.a, self.b, x)


NEIGHBOURS = numbers(N, N).softmax(1)


def sequence_first(a, b, x):
    return b(a(x.transpose(0, 1)).relu().sum(0))


def tokens_as_rows(a, b, x):
    return b(a(x.flatten(0, 1)).relu().view(*x.shape[:2], -1).sum(1))


def neighbours(a, b, x):
    return NEIGHBOURS @ b(a(x).relu())


def centred(a, b, x):
    z = a(x)
    return b((z - z.mean(0)).relu())


def sorted_by_length(a, b, x):
    order = x[:, 0].argsort()
    return b(a(x[order]).relu())[order.argsort()]


# what a network does with its layers, and the shape of a sample
RUNS = {
    "sequence first": (sequence_first, (2, 5)),
    "as many tokens as samples": (sequence_first, (N, 5)),
    "tokens as rows": (tokens_as_rows, (2, 5)),
    "graph": (neighbours, (5,)),
    "mean of the batch": (centred, (5,)),
    "other order": (sorted_by_length, (5,)),
}


@pytest.mark.parametrize("kind", RUNS)
def test_layers_whose_rows_are_no_samples_are_refused(kind):
    run, shape = RUNS[kind]
    net, X = Net(run), numbers(N, *shape)
    with pytest.raises(
        ValueError, match="rows at layer 'a' into|depend on other rows of what layer 'a'"
    ):
        relative_flatness(net, X, Y, layer="a", criterion=CE)
    penalty = RelativeFlatnessPenalty("a")
    with penalty.capture(net):
        y_pred = net(X)
    with pytest.raises(ValueError, match="depend on other rows of what layer 'a' puts out, of"):
        penalty(CE, y_pred, Y, WEIGHTS if kind == "other order" else None)


def test_rows_are_checked_in_a_batch_of_each_size():
    data = TensorDataset(numbers(N, 5), Y)
    loader = DataLoader(data, batch_sampler=[[0], list(range(1, N))])  # one sample mixes nothing
    with pytest.raises(ValueError, match="depend on other rows of what layer 'a' puts out, of"):
        relative_flatness(Net(centred), loader, layer="a", criterion=CE)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize(
    ("n_outputs", "shape"), [(6, (5,)), (3, (2, 5))], ids=["two heads", "two tokens"]
)
def test_penalties_of_several_outputs_for_each_sample(n_outputs, shape, name):
    net, X = Net(lambda a, b, x: b(a(x).relu()).view(-1, 3), n_outputs), numbers(N, *shape)
    y = torch.arange(2 * N) % 3
    H, W = oracles.weight_hessian(net, name, CE, X, y)
    truth = oracles.kappa_of(H, W) / (2 * W.shape[1])
    assert_right_on_average(RelativeFlatnessPenalty(name), net, CE, X, y, truth)


@pytest.mark.parametrize("rows", [slice(None, None, 2), [2, 0, 1, 5, 3, 4]], ids=["some", "order"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_penalties_of_chosen_rows(rows, name):
    net, X, y = Net(lambda a, b, x: b(a(x).relu())[rows]), numbers(N, 5), Y[rows]
    H, W = oracles.weight_hessian(net, name, CE, X, y)
    truth = oracles.kappa_of(H, W) / (2 * W.shape[1])
    copies = 400
    net.run = lambda a, b, x: b(a(x).relu()).view(copies, N, 3)[:, rows].flatten(0, 1)
    torch.manual_seed(0)
    penalty = RelativeFlatnessPenalty(name, probes=8)
    with penalty.capture(net):
        y_pred = net(X.repeat(copies, 1))
    assert penalty(CE, y_pred, y.repeat(copies)).item() == pytest.approx(truth, rel=0.05)


class Scaled(nn.Linear):
    """A linear layer that is none."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "ending", [nn.Identity(), nn.ReLU(inplace=True)], ids=["plain", "in place"]
)
def test_penalties_refuse_layers_that_compute_something_else(ending):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), Scaled(4, 3), ending).double()
    for layer in (-1, "all"):
        penalty = RelativeFlatnessPenalty(layer)
        with penalty.capture(net):
            y_pred = net(numbers(N, 5))
        with pytest.raises(ValueError, match="layer '2' does not compute W x"):
            penalty(CE, y_pred, Y)


def with_second_output(a, b, x):
    z = a(x)
    return z, b(z.tanh())


def test_layers_of_a_second_output_are_refused():
    net = Net(with_second_output)
    message = "criterion does not depend on the output of layer 'b'"
    with pytest.raises(ValueError, match=message):
        relative_flatness(net, numbers(N, 5), numbers(N, 4), criterion=MSE)
    penalty = RelativeFlatnessPenalty()
    with penalty.capture(net):
        y_pred = net(numbers(N, 5))
    with pytest.raises(ValueError, match=message):
        penalty(MSE, y_pred, numbers(N, 4))


def test_all_layers_are_those_that_the_criterion_depends_on():
    net, X, y = Net(with_second_output), numbers(N, 5), numbers(N, 4)
    with pytest.warns(FlatnessWarning, match="'b' left out: the criterion does not depend on"):
        report = flatness_report(net, X, y, criterion=MSE, measures="relative_flatness")
    assert list(report["layer"]) == ["a"]
    values = []
    for layer in ("all", "a"):
        penalty = RelativeFlatnessPenalty(layer)
        with penalty.capture(net):
            y_pred = net(X)
        values.append(penalty(MSE, y_pred, y).item())
    assert values[0] == pytest.approx(values[1], rel=1e-12)

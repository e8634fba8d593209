"""Which of the three ways to a curvature is chosen at which layer."""

import pytest
import torch
from torch import nn

from relflat_sk._losses.loss import Loss
from relflat_sk._network.layers import weight_layers
from relflat_sk._network.recording import record_tail
from relflat_sk._network.tail import Tail, choose_curvatures


def choose(net, X, y, criterion, **params):
    loss = Loss(criterion)
    names = list(weight_layers(net))
    with torch.no_grad(), record_tail(net, *names) as recorder:
        output = loss.classes_second(net(X), y)
    records = [recorder[name] for name in names]
    tail = Tail(loss, output, loss.read_target(output, y), records[-1], torch.Tensor.double)
    chosen = choose_curvatures(tail, records, **params)
    ways = []
    if chosen.linear:
        ways.append(("gradients", [one.name for one in chosen.linear], tuple(chosen.base[0].shape)))
    if chosen.others:
        ways.append(("products", [one.name for one in chosen.others]))
    closed = [("closed form", one.name, tuple(x.shape)) for one, x, _ in chosen.closed]
    return ways + closed


def mlp(first, second, *head):
    return nn.Sequential(nn.Linear(4, 5), first, nn.Linear(5, 5), second, nn.Linear(5, 3), *head)


X, Y = torch.randn(6, 4), torch.arange(6) % 3
LAST = ("closed form", "4", (6, 5))


@pytest.mark.parametrize(
    ("net", "criterion", "expected"),
    [
        (
            mlp(nn.ReLU(), nn.ReLU()),
            nn.CrossEntropyLoss(),
            [("gradients", ["0", "2"], (6, 3)), LAST],
        ),
        (mlp(nn.Tanh(), nn.Tanh()), nn.CrossEntropyLoss(), [("products", ["0", "2"]), LAST]),
        (
            mlp(nn.Tanh(), nn.ReLU()),
            nn.CrossEntropyLoss(),
            [("gradients", ["2"], (6, 3)), ("products", ["0"]), LAST],
        ),
        (
            mlp(nn.ReLU(), nn.ReLU(), nn.LogSoftmax(dim=1)),
            nn.NLLLoss(),
            [("gradients", ["0", "2"], (6, 3)), LAST],
        ),
        (
            mlp(nn.ReLU(), nn.ReLU()),
            nn.MultiMarginLoss(),
            [("products", ["0", "2", "4"])],
        ),
    ],
    ids=["relu", "tanh", "both", "log-softmax in the network", "criterion not in the table"],
)
def test_the_way_follows_from_what_the_network_computed(net, criterion, expected):
    assert choose(net, X, Y, criterion) == expected


def test_layers_go_the_same_way_together():
    net = mlp(nn.Tanh(), nn.ReLU())
    found = choose(net, X, Y, nn.CrossEntropyLoss(), together=True)
    assert found == [("products", ["0", "2"]), LAST]


def test_tokens_of_a_language_model_are_rows_of_a_closed_form():
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    X, y = torch.randn(6, 7, 4), torch.zeros(6, 7, dtype=torch.long)
    assert choose(net, X, y, nn.CrossEntropyLoss()) == [
        ("products", ["0"]),
        ("closed form", "2", (42, 5)),
    ]

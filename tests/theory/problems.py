"""Small networks and data of the tests of the theory, and moved features by definition."""

import numpy as np
import torch
from sklearn.linear_model import LinearRegression
from torch import nn

from tests.cases import mlp

CE = {"criterion": nn.CrossEntropyLoss()}


def network(n=40, **arguments):
    torch.manual_seed(0)
    return mlp(4, **arguments), torch.randn(n, 5).double(), torch.arange(n) % 4


def plane_network(n=30):
    """A network of three inputs and two hidden features, sure of all its labels."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    X = torch.randn(n, 3).double()
    return net, X, net(X).argmax(dim=1)


def regression(n=40, m=3):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, m))
    y = X @ np.arange(1.0, m + 1) + rng.normal(size=n)
    return LinearRegression().fit(X, y), X, y


def rise_by(net, name, X, y, move, criterion=CE["criterion"]):
    """The rise of the mean loss if a layer receives ``x + move x``, with x as one vector."""
    move = torch.as_tensor(move).double()

    def moved(layer, inputs):
        return inputs[0] + (inputs[0].flatten(1) @ move.T).reshape(inputs[0].shape)

    before = criterion(net(X), y)
    with net.get_submodule(name).register_forward_pre_hook(moved):
        return float((criterion(net(X), y) - before).detach())


def rises_by(net, position, X, y, moves):
    """The rises by many moves of what a layer receives, in a chain under cross-entropy."""
    features = net[:position](X).detach()
    moved = features + features @ torch.as_tensor(np.array(moves)).mT
    each = nn.functional.cross_entropy(
        net[position:](moved).flatten(0, 1), y.repeat(len(moves)), reduction="none"
    )
    return (each.reshape(len(moves), -1).mean(dim=1) - CE["criterion"](net(X), y)).detach().numpy()


def rotations(n):
    angles = 2 * torch.pi * torch.arange(n).double() / n
    rows = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], dim=1)
    return rows.reshape(n, 2, 2)

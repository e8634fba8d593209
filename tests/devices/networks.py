"""Small networks, data and random numbers, on the CPU."""

import copy
from functools import cache

import torch
from torch import nn

CRITERION = nn.CrossEntropyLoss()


class GeneratorOfTheCPU(torch._C.Generator):
    """`torch.Generator` on the CPU, for any device."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, device="cpu")
        made.asked_for = torch.device(device)
        return made

    @property
    def device(self):
        return self.asked_for


def make_mlp(activation=nn.ReLU):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), activation(), nn.Linear(7, 3))


def make_conv():
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3)).eval()


NETWORKS = {"relu": make_mlp, "tanh": lambda: make_mlp(nn.Tanh), "convolution": make_conv}


def make_data(n=40):
    X = torch.randn(n, 6, generator=torch.Generator().manual_seed(1))
    return X, X[:, :3].argmax(dim=1)


def trained(network="relu"):
    """A network whose predictions are right, for measures that need a margin."""
    return copy.deepcopy(train(network))


@cache
def train(network):
    net, (X, y) = NETWORKS[network](), make_data()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        CRITERION(net(X), y).backward()
        optimizer.step()
    return net.eval()

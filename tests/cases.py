"""Criteria with networks and targets that fit them, as data: functions of no arguments."""

from functools import partial

import torch
from torch import nn

from relflat_sk import RelativeFlatnessPenalty

# kappa / (2 m) itself, as the papers have it
published_penalty = partial(RelativeFlatnessPenalty, weight=1.0, clip=None)


def classes(k):
    """Class indices as targets; as below, a function of the number of samples."""
    return lambda n: torch.arange(n) % k


def labels(k):
    return lambda n: (torch.rand(n, k) > 0.5).double()


def numbers(k):
    return lambda n: torch.randn(n, k).double()


def shares(k):
    """Probabilities of k classes that do not sum to one, which torch does not ask for."""
    return lambda n: torch.rand(n, k).double()


def counts(k):
    return lambda n: torch.randint(0, 5, (n, k)).double()


def mlp(n_outputs, tail=None, activation=nn.Tanh):
    layers = [nn.Linear(5, 7), activation(), nn.Linear(7, 6), activation(), nn.Linear(6, n_outputs)]
    return nn.Sequential(*layers, *([tail()] if tail is not None else [])).double()


class Net(nn.Module):
    """Named modules, and the function of them and of the inputs that is the forward pass."""

    def __init__(self, run, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = run

    def forward(self, *inputs, **named):
        return self.run(self, *inputs, **named)


def squeezed():
    """One output, returned without its axis, by a functional tail."""

    def run(net, x):
        return net.out(torch.tanh(net.hidden(x))).squeeze(-1)

    return Net(run, hidden=nn.Linear(5, 6), out=nn.Linear(6, 1)).double()


def fourth_power(output, y):
    return (output - y).pow(4).sum(1).mean()


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0]).double()
OF_LABELS = torch.tensor([1.0, 3.0, 0.2]).double()
POSITIVE = torch.tensor([2.0, 0.5, 4.0]).double()
SOFTMAX, LOG_SOFTMAX = partial(nn.Softmax, dim=1), partial(nn.LogSoftmax, dim=1)
CE, BCE, NLL = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.NLLLoss

# name: (network, criterion, targets of n samples, whether a closed form covers it)
CASES = {
    "cross-entropy": (partial(mlp, 4), CE, classes(4), True),
    "cross-entropy smoothed": (partial(mlp, 4), partial(CE, label_smoothing=0.2), classes(4), True),
    "cross-entropy class weights": (partial(mlp, 4), partial(CE, WEIGHTS), classes(4), True),
    "cross-entropy weights, smoothed, ignoring": (
        partial(mlp, 4), partial(CE, WEIGHTS, label_smoothing=0.1, ignore_index=2), classes(4),
        True,
    ),
    "cross-entropy ignore_index": (partial(mlp, 4), partial(CE, ignore_index=1), classes(4), True),
    "cross-entropy of probabilities": (
        partial(mlp, 4), partial(CE, WEIGHTS, label_smoothing=0.1), shares(4), True,
    ),
    "cross-entropy of log-softmax": (partial(mlp, 4, LOG_SOFTMAX), CE, classes(4), True),
    "nll of softmax, as torch computes it": (partial(mlp, 4, SOFTMAX), NLL, classes(4), False),
    "nll of log-softmax": (
        partial(mlp, 4, LOG_SOFTMAX), partial(NLL, WEIGHTS, ignore_index=0), classes(4), True,
    ),
    "bce with logits": (partial(mlp, 1), BCE, labels(1), True),
    "bce with logits, squeezed": (squeezed, BCE, lambda n: labels(1)(n).squeeze(1), True),
    "bce multi-label, pos_weight and weight": (
        partial(mlp, 3), partial(BCE, OF_LABELS, pos_weight=POSITIVE), labels(3), True,
    ),
    "bce of sigmoid": (
        partial(mlp, 3, nn.Sigmoid), partial(nn.BCELoss, OF_LABELS), labels(3), True,
    ),
    "squared error": (partial(mlp, 3), nn.MSELoss, numbers(3), True),
    "squared error, one output": (squeezed, nn.MSELoss, lambda n: torch.randn(n).double(), True),
    "poisson": (partial(mlp, 2), nn.PoissonNLLLoss, counts(2), True),
    "poisson of rates": (
        partial(mlp, 2, nn.Softplus), partial(nn.PoissonNLLLoss, log_input=False), counts(2),
        False,
    ),
    # what the table does not cover
    "huber": (partial(mlp, 2), partial(nn.HuberLoss, delta=0.7), numbers(2), False),
    "kl divergence": (
        partial(mlp, 4, LOG_SOFTMAX), partial(nn.KLDivLoss, reduction="batchmean"),
        lambda n: shares(4)(n).softmax(1), False,
    ),
    "a function": (partial(mlp, 2), lambda: fourth_power, numbers(2), False),
    "smooth l1 behind softsign": (
        partial(mlp, 2, nn.Softsign), nn.SmoothL1Loss, lambda n: labels(2)(n) * 2 - 1, False,
    ),
    "cross-entropy behind a clamp": (
        partial(mlp, 4, partial(nn.Hardtanh, -9, 9)), CE, classes(4), False,
    ),
}  # fmt: skip

"""Criteria with networks and targets that fit them, as data: zero-argument lambdas."""

import torch
from torch import nn


def classes(n, k):
    return torch.arange(n) % k


def indicator(n, k):
    return (torch.rand(n, k) > 0.5).double()


def mlp(n_outputs, tail=None, activation=nn.Tanh):
    layers = [
        nn.Linear(5, 7),
        activation(),
        nn.Linear(7, 6),
        activation(),
        nn.Linear(6, n_outputs),
    ]
    return nn.Sequential(*layers, *([tail] if tail is not None else [])).double()


class Squeezed(nn.Module):
    """One output, returned without its axis, by a functional tail."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(5, 6).double()
        self.out = nn.Linear(6, 1).double()

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(x))).squeeze(-1)


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0]).double()

# name: (network, criterion, targets of 11 samples, whether a closed form covers it)
CASES = {
    "cross-entropy": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(),
        lambda n: classes(n, 4),
        True,
    ),
    "cross-entropy smoothed": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda n: classes(n, 4),
        True,
    ),
    "cross-entropy class weights": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(weight=WEIGHTS),
        lambda n: classes(n, 4),
        True,
    ),
    "cross-entropy weights, smoothed, ignoring": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, ignore_index=2),
        lambda n: classes(n, 4),
        True,
    ),
    "cross-entropy ignore_index": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(ignore_index=1),
        lambda n: classes(n, 4),
        True,
    ),
    "cross-entropy of probabilities": (
        lambda: mlp(4),
        lambda: nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
        lambda n: torch.rand(n, 4).double(),  # torch does not ask for a sum of one
        True,
    ),
    "cross-entropy of log-softmax": (
        lambda: mlp(4, nn.LogSoftmax(dim=1)),
        lambda: nn.CrossEntropyLoss(),
        lambda n: classes(n, 4),
        True,
    ),
    "nll of softmax, as torch computes it": (
        lambda: mlp(4, nn.Softmax(dim=1)),
        lambda: nn.NLLLoss(),
        lambda n: classes(n, 4),
        False,
    ),
    "nll of log-softmax": (
        lambda: mlp(4, nn.LogSoftmax(dim=1)),
        lambda: nn.NLLLoss(weight=WEIGHTS, ignore_index=0),
        lambda n: classes(n, 4),
        True,
    ),
    "bce with logits": (
        lambda: mlp(1),
        lambda: nn.BCEWithLogitsLoss(),
        lambda n: indicator(n, 1),
        True,
    ),
    "bce with logits, squeezed": (
        Squeezed,
        lambda: nn.BCEWithLogitsLoss(),
        lambda n: indicator(n, 1).squeeze(1),
        True,
    ),
    "bce multi-label, pos_weight and weight": (
        lambda: mlp(3),
        lambda: nn.BCEWithLogitsLoss(
            pos_weight=torch.tensor([2.0, 0.5, 4.0]).double(),
            weight=torch.tensor([1.0, 3.0, 0.2]).double(),
        ),
        lambda n: indicator(n, 3),
        True,
    ),
    "bce of sigmoid": (
        lambda: mlp(3, nn.Sigmoid()),
        lambda: nn.BCELoss(weight=torch.tensor([1.0, 3.0, 0.2]).double()),
        lambda n: indicator(n, 3),
        True,
    ),
    "squared error": (
        lambda: mlp(3),
        lambda: nn.MSELoss(),
        lambda n: torch.randn(n, 3).double(),
        True,
    ),
    "squared error, one output": (
        Squeezed,
        lambda: nn.MSELoss(),
        lambda n: torch.randn(n).double(),
        True,
    ),
    "poisson": (
        lambda: mlp(2),
        lambda: nn.PoissonNLLLoss(),
        lambda n: torch.randint(0, 5, (n, 2)).double(),
        True,
    ),
    "poisson of rates": (
        lambda: mlp(2, nn.Softplus()),
        lambda: nn.PoissonNLLLoss(log_input=False),
        lambda n: torch.randint(0, 5, (n, 2)).double(),
        False,
    ),
    # what the table does not cover
    "huber": (
        lambda: mlp(2),
        lambda: nn.HuberLoss(delta=0.7),
        lambda n: torch.randn(n, 2).double(),
        False,
    ),
    "kl divergence": (
        lambda: mlp(4, nn.LogSoftmax(dim=1)),
        lambda: nn.KLDivLoss(reduction="batchmean"),
        lambda n: torch.rand(n, 4).double().softmax(1),
        False,
    ),
    "a function": (
        lambda: mlp(2),
        lambda: lambda output, y: (output - y).pow(4).sum(1).mean(),
        lambda n: torch.randn(n, 2).double(),
        False,
    ),
    "smooth l1 behind softsign": (
        lambda: mlp(2, nn.Softsign()),
        lambda: nn.SmoothL1Loss(),
        lambda n: indicator(n, 2) * 2 - 1,
        False,
    ),
    "cross-entropy behind a clamp": (
        lambda: mlp(4, nn.Hardtanh(-9, 9)),
        lambda: nn.CrossEntropyLoss(),
        lambda n: classes(n, 4),
        False,
    ),
}

"""
The penalty in your own loop
============================

``RelativeFlatnessPenalty`` adds the penalty to any training loop in torch. It records what the
layer receives in the forward pass that the loop makes anyway.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from relflat_sk import RelativeFlatnessPenalty, relative_flatness

digits = load_digits()
X = torch.as_tensor(digits.data / 16, dtype=torch.float32)
y = torch.as_tensor(digits.target)
criterion = nn.CrossEntropyLoss()


def train(weight):
    """Train, and return the loss and the flatness of all data after each epoch."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    penalty = RelativeFlatnessPenalty(weight=weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    curves = []
    for _ in range(20):
        for batch in torch.randperm(len(X)).split(64):
            with penalty.capture(net):
                output = net(X[batch])
            loss = criterion(output, y[batch]) + penalty(criterion, output, y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(criterion(net(X), y))
        curves.append((loss, float(relative_flatness(net, X, y, criterion=criterion))))
    return torch.tensor(curves).T


# %%
# With the penalty, the network is flatter at the same loss
# ---------------------------------------------------------
# Each point is an epoch. The training loss falls from left to right.

curves = {weight: train(weight) for weight in (0.0, 10.0)}
fig, ax = plt.subplots(layout="constrained")
for weight, (losses, flatness) in curves.items():
    ax.semilogx(losses, flatness, "o", label=f"weight {weight:g}")
ax.set(xlabel="training loss (nats)", ylabel="relative flatness (small is flat)", ylim=(0, None))
ax.invert_xaxis()
ax.legend()

plain, flat = curves.values()
reached = max(plain[0].min(), flat[0].min())
assert reached < 0.1
at = [float(flatness[losses.sub(reached).abs().argmin()]) for losses, flatness in (plain, flat)]
assert at[1] < at[0]

"""
Rank fine-tuned convolutional networks
======================================

A small convolutional network learns the digits 0 to 4. It is then fine-tuned on 100 images of the
digits 5 to 9, with several learning rates and batch sizes. ``rank_models`` loads the weights of
each run into the network, and ranks them without other data than those it was fine-tuned on. The
ranking describes the runs. To choose one, held-out data are better ("Does it help?").
"""

import copy
import itertools

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from relflat_sk import MeasurePanelsDisplay, rank_models

torch.manual_seed(0)
criterion = nn.CrossEntropyLoss()
digits = load_digits()
images = torch.as_tensor(digits.images / 16, dtype=torch.float32)[:, None]
labels = torch.as_tensor(digits.target)
known = labels < 5
X_known, y_known = images[known], labels[known]
X, y = images[~known], labels[~known] - 5
X, y, X_test, y_test = X[:100], y[:100], X[100:], y[100:]

net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 32),
    nn.ReLU(),
    nn.Linear(32, 5),
)


def train(inputs, targets, epochs, lr, batch_size=16):
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(inputs)).split(batch_size):
            optimizer.zero_grad()
            criterion(net(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    return copy.deepcopy(net.state_dict())


pretrained = train(X_known, y_known, 5, 0.005)
checkpoints = {}
for lr, batch_size, run in itertools.product((0.002, 0.005, 0.01), (5, 20), (1, 2)):
    net.load_state_dict(pretrained)
    checkpoints[lr, batch_size, run] = train(X, y, 30, lr, batch_size)

# %%
# Rank the runs
# -------------
# The module gets back the weights that it had.

net.load_state_dict(pretrained)
minima = rank_models(
    checkpoints,
    X,
    y,
    module=net,
    criterion=criterion,
    measure=["comparable_flatness", "relative_flatness"],
    X_test=X_test,
    y_test=y_test,
)
assert torch.equal(net[9].weight, pretrained["9.weight"])
minima[["model", "comparable_flatness", "train_loss", "test_loss", "depth", "rank"]]

# %%
# Does the measure tell which run is good?
# ----------------------------------------
# A column that is added by hand colors the points, and can be an axis of the statistics.

minima["param_lr"] = [list(checkpoints)[trial][0] for trial in minima["trial"]]
display = MeasurePanelsDisplay.from_minima(
    minima,
    ["comparable_flatness", "relative_flatness"],
    "test_loss",
    color_by="lr",
    random_state=0,
)
plt.gcf().set_size_inches(9, 4)

assert minima["comparable_flatness"].notna().all()
assert len(minima) == len(checkpoints)

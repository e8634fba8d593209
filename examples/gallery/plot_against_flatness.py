"""
Training against flatness
=========================

A negative weight of the penalty rewards sharpness. The networks still learn, and generalise worse.
When they are trained on without the penalty, relative flatness falls and the accuracy on other
images comes back (Han et al. 2025, "Flatness is Necessary, Neural Collapse is Not").
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import RelativeFlatnessRegularizedClassifier

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=600, random_state=0)

# %%
# Half of the epochs against flatness
# -----------------------------------
# ``partial_fit`` goes on with the training. No net has a penalty from epoch 30 on. The curves are
# means of four nets.


def train(weight, seed):
    """Train a net, and measure it every five epochs."""
    net = RelativeFlatnessRegularizedClassifier(
        flatness_weight=weight, max_epochs=5, random_state=seed, verbose=0
    )
    values = []
    for epoch in epochs:
        if epoch > 30:
            net.set_params(flatness_weight=0.0)
        net.partial_fit(X, y)
        values.append([net.relative_flatness_, net.score(X, y), net.score(X_test, y_test)])
    return np.transpose(values)


epochs = np.arange(5, 61, 5)
curves = {
    name: np.mean([train(weight, seed) for seed in range(4)], axis=0)
    for name, weight in {"no penalty": 0.0, "against flatness, then released": -1.0}.items()
}

titles = ["relative flatness (nats, small is flat)", "training accuracy", "test accuracy"]
fig, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for i, (ax, title) in enumerate(zip(axes, titles, strict=True)):
    for name, values in curves.items():
        ax.plot(epochs, values[i], "o-", label=name)
    ax.axvline(30, color="0.6", linestyle="--")
    ax.set(xlabel="epoch", ylabel=title)
axes[0].set_yscale("log")
axes[2].sharey(axes[1])
axes[1].autoscale()
axes[2].legend()

plain, against = curves.values()
before, end = epochs == 30, epochs == 60
assert against[0, before] > 1000 * plain[0, before]
assert against[2, before] < plain[2, before] - 0.02
assert against[0, end] < against[0, before] / 2
assert against[2, end] > against[2, before] + 0.01

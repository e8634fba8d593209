"""
A large penalty with and without its limit
==========================================

A dead network, whose output is constant, is perfectly flat. The published objective, the loss plus
a multiple of relative flatness, ends there if the multiple is large. By default, the nets limit the
penalty (``flatness_clip=1``): a weight that is far too large costs accuracy, and not the network.
Choose weights from 0.1 to 10, by folds (``RelativeFlatnessPenaltyCV``).
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import FlatnessWarning, RelativeFlatnessRegularizedClassifier

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, random_state=0)

# %%
# Weights over four orders of magnitude
# -------------------------------------

warnings.simplefilter("ignore", FlatnessWarning)  # some nets without limit end dead
weights = [0.1, 1.0, 10.0, 100.0, 1000.0]
accuracy = {
    clip: [
        RelativeFlatnessRegularizedClassifier(
            flatness_weight=weight,
            flatness_clip=clip,
            random_state=0,
            verbose=0,
        )
        .fit(X, y)
        .score(X_test, y_test)
        for weight in weights
    ]
    for clip in (1.0, None)
}

fig, ax = plt.subplots(layout="constrained")
for clip, label in ((1.0, "flatness_clip=1, the default"), (None, "flatness_clip=None")):
    ax.semilogx(weights, accuracy[clip], "o-", label=label)
ax.set(xlabel="flatness_weight", ylabel="test accuracy", ylim=(0, 1))
ax.legend(loc="lower left")

assert min(accuracy[1.0][:3]) > 0.95
assert min(accuracy[1.0]) > 0.8
assert np.argmin(accuracy[None]) == len(weights) - 1
assert min(accuracy[None]) < 0.9

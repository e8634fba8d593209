"""
What relative flatness means: noise on the features
===================================================

Noise ``A phi`` on the features that a layer receives changes the loss as much as a change of the
layer's weight from ``W`` to ``W + W A`` does. Averaged over random orthogonal matrices of size
delta, the loss rises by ``delta^2 / (2 m) kappa``, to second order, with the layer's relative
flatness kappa and its m inputs (Petzka et al. 2021, Theorem 5).
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

from relflat_sk import RelativeFlatnessRegularizedClassifier, StopAtLoss, feature_robustness

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)


def train(weight):
    return RelativeFlatnessRegularizedClassifier(
        flatness_weight=weight,
        callbacks=[StopAtLoss(0.02)],
        lr=0.01,
        max_epochs=200,
        random_state=0,
        verbose=0,
    ).fit(X, y)


nets = {"without penalty": train(0.0), "with penalty": train(3.0)}

# %%
# The rise of the loss, and what flatness predicts
# ------------------------------------------------
# The points are measured; the lines follow from the relative flatness alone. At a distance, the
# loss rises by more than its second order predicts.

deltas = np.logspace(-1.5, 0.25, 8)
fig, ax = plt.subplots(layout="constrained")
curves = {}
for name, net in nets.items():
    m = net.module_[-1].in_features
    predicted = deltas**2 / (2 * m) * net.relative_flatness_
    rises, errors = np.transpose([
        feature_robustness(net, X, y, delta, n_draws=16, random_state=0) for delta in deltas
    ])
    points = ax.errorbar(deltas, rises, 2 * errors, fmt="o", label=f"measured, {name}")
    ax.plot(deltas, predicted, color=points[0].get_color(), label=f"predicted, {name}")
    curves[name] = rises, predicted
ax.set(
    xscale="log",
    yscale="log",
    xlabel="delta, size of the noise on the features",
    ylabel="rise of the training loss (nats)",
)
ax.legend()

small = deltas < 0.2
for rises, predicted in curves.values():
    np.testing.assert_allclose(rises[small], predicted[small], rtol=0.15)
    assert rises[-1] > 2 * predicted[-1]

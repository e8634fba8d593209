"""
An ensemble of flat minima
==========================

``FleetTrainer`` trains many nets at the same time, as one stacked model. The mean of their
probabilities predicts better than the nets do on average. Half of these nets were trained with the
penalty. They are the flattest, and their mean is better than that of all, because the penalty
helps here. Among networks without it, the mean of all is best ("Does it help?").
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split

from relflat_sk import FleetTrainer, RelativeFlatnessRegularizedClassifier, StopAtLoss

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=400, random_state=0)
nets = [
    RelativeFlatnessRegularizedClassifier(
        flatness_weight=weight,
        callbacks=[StopAtLoss(0.05)],
        lr=0.01,
        max_epochs=300,
        random_state=seed,
        verbose=0,
    )
    for seed in range(10)
    for weight in (0.0, 3.0)
]
nets = FleetTrainer(nets).fit(X, y).estimators_

# %%
# Ensembles of growing size
# -------------------------
# The nets are added one by one, the flattest or the sharpest first.

nets = sorted(nets, key=lambda net: net.relative_flatness_)
probabilities = np.array([net.predict_proba(X_test) for net in nets])
sizes = np.arange(1, len(nets) + 1)
means = {
    "flattest first": np.cumsum(probabilities, axis=0),
    "sharpest first": np.cumsum(probabilities[::-1], axis=0),
}
losses = {
    name: [log_loss(y_test, total / size) for size, total in zip(sizes, totals, strict=True)]
    for name, totals in means.items()
}
alone = [log_loss(y_test, probability) for probability in probabilities]
fig, ax = plt.subplots(layout="constrained")
ax.axhline(np.mean(alone), color="0.6", linestyle="--", label="mean of single nets")
for name, values in losses.items():
    ax.plot(sizes, values, "o-", label=name)
ax.set(xlabel="nets in the ensemble", ylabel="test loss (nats)", xticks=sizes[1::2])
ax.legend()

assert losses["flattest first"][-1] < np.mean(alone)
assert losses["flattest first"][9] < losses["flattest first"][-1]

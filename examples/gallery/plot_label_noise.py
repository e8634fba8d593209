"""
Random labels: what the training loss does not show
===================================================

A network can learn random labels by heart, and then has the same training loss as one that has
learned something (Zhang et al. 2017). Relative flatness is computed from the same training data,
and tells the networks apart. It compares the shares of random labels here: among networks that
differ in width and training and share the same wrong labels, it is misleading ("Does it help?").
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier, StopAtLoss

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=300, random_state=0)
net = RelativeFlatnessRegularizedClassifier(
    flatness_weight=0.0, callbacks=[StopAtLoss(0.05)], lr=0.01, max_epochs=300, verbose=0
)

# %%
# Networks with more and more random labels
# -----------------------------------------
# Names of the space that begin with ``data__`` vary the training data. All networks are trained to
# the same loss, as one stacked model.

search = FlatMinimaSearch(
    net,
    {"data__random_labels": [0.0, 0.1, 0.2, 0.4, 0.7, 1.0], "random_state": [0, 1]},
    fleet=12,
).fit(X, y, X_test=X_test, y_test=y_test)
minima = search.minima_
columns = ["param_data__random_labels", "train_loss", "relative_flatness", "generalization_gap"]
print(minima[columns].to_string(index=False))

fig, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
share = minima["param_data__random_labels"].astype(float)
names = {
    "train_loss": "training loss (nats)",
    "relative_flatness": "relative flatness (nats, small is flat)",
}
for ax, (column, name) in zip(axes, names.items(), strict=True):
    points = ax.scatter(minima[column], minima["generalization_gap"], c=share, cmap="viridis")
    ax.set(xlabel=name, xlim=(0, 1.1 * minima[column].max()))
axes[0].set_ylabel("generalisation gap (nats)")
fig.colorbar(points, label="share of random labels")

assert minima["converged"].all()
assert minima["train_loss"].max() < 0.05
assert minima["relative_flatness"].corr(minima["generalization_gap"], method="spearman") > 0.7

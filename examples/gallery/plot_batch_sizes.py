"""
A sweep of batch sizes
======================

A search trains every candidate to the same loss on all training data, and ranks the minima by
flatness. Held-out data serve only to see how well the ranking predicts the generalisation gap.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessGapDisplay,
    MinimaRankingDisplay,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
    correlate_measures,
)

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=400, random_state=0)
net = RelativeFlatnessRegularizedClassifier(
    flatness_weight=0.0, max_epochs=200, callbacks=[StopAtLoss(0.05)], lr=0.01, verbose=0
)
search = FlatMinimaSearch(
    net,
    {"batch_size": [8, 32, 128], "lr_scaling": ["linear"], "random_state": [0, 1, 2, 3]},
    fleet=12,
).fit(X, y, X_test=X_test, y_test=y_test)

# %%
# How well the ranking predicts the gap
# -------------------------------------
# Nets that were trained in the largest batches have the largest gaps. Twelve minima are few: the
# intervals of the coefficients are wide, and include 0.

columns = ["param_batch_size", "train_loss", "relative_flatness", "generalization_gap", "rank"]
print(search.minima_[columns].to_string(index=False))

fig, axes = plt.subplots(1, 2, figsize=(14, 5), layout="constrained")
FlatnessGapDisplay.from_minima(search, ax=axes[0])
MinimaRankingDisplay.from_minima(search, ax=axes[1])

found = correlate_measures(search.minima_, random_state=0)
print(found[["measure", "kendall", "kendall_low", "kendall_high"]].to_string(index=False))

# %%
# The mean of all networks
# ------------------------
# The search predicts with the mean of all networks ("Does it help?").

scores = {"flattest minimum": search.best_estimator_, "mean of all": search}
for name, model in scores.items():
    print(f"{name}: test accuracy {model.score(X_test, y_test):.3f}")

assert search.minima_["converged"].all()
assert search.score(X_test, y_test) > search.minima_["test_score"].mean()

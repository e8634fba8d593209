"""
Displays of a search and of networks
====================================

Displays are made as in scikit-learn: from a search or its table (``from_minima``), or from a
trained network (``from_estimator``). They draw into axes of yours, or make a figure.
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from skorch.callbacks import EpochScoring

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessHistoryDisplay,
    FlatnessScorer,
    HyperparameterDisplay,
    MeasurePanelsDisplay,
    RelativeFlatnessRegularizedClassifier,
    SharpnessKLDisplay,
    StopAtLoss,
    TrainingCurvesDisplay,
)

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=400, random_state=0)
net = RelativeFlatnessRegularizedClassifier(
    flatness_weight=0.0, lr=0.01, max_epochs=300, callbacks=[StopAtLoss(0.05)], verbose=0
)
shares = "data__random_labels"
search = FlatMinimaSearch(
    net,
    {shares: [0.0, 0.2, 0.5, 1.0], "random_state": [0, 1, 2]},
    measure=["relative_flatness", "hessian_trace", "l2_norm"],
    fleet=12,
).fit(X, y, X_test=X_test, y_test=y_test)

# %%
# The minima of a search
# ----------------------
# A curve on the right is the training of a candidate. It ends where the loss reached the goal.

fig, axes = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
HyperparameterDisplay.from_minima(search, shares, color_by=None, ax=axes[0])
curves = TrainingCurvesDisplay.from_minima(search, ax=axes[1])

# %%
# Several measures against the gap
# --------------------------------
# Relative flatness and the norm of the weights grow with the gap. The Hessian's trace does not.

panels = MeasurePanelsDisplay.from_minima(search, random_state=0)

# %%
# The training of a network
# -------------------------
# The callback ``EpochScoring`` records the flatness on the training data in each epoch. It comes
# before ``StopAtLoss``, which ends the last one.

recorder = EpochScoring(
    FlatnessScorer(non_minimum="accept"), name="relative_flatness", on_train=True
)
flat = net.set_params(flatness_weight=3.0, callbacks=[recorder, StopAtLoss(0.05)], random_state=0)
history = FlatnessHistoryDisplay.from_estimator(flat.fit(X, y))

# %%
# Noise on all weights
# --------------------
# A PAC-Bayes bound adds the two axes. The network with the penalty has the smaller rise of the
# loss at every scale of the noise.

nets = {"without penalty": search.best_estimator_, "with penalty": flat}
noise = SharpnessKLDisplay.from_estimator(
    nets, X, y, alphas=(0.02, 0.03, 0.04, 0.06, 0.08), random_state=0
)

tau = {name: row["kendall"] for name, row in panels.correlations.items()}
assert tau["relative_flatness"] > 0.7 > tau["hessian_trace"]
assert history.flatness["relative_flatness"][-1] < search.minima_["relative_flatness"].min()
plain, flat = (curve["expected_sharpness"] for curve in noise.curves.values())
assert (flat < plain).all()

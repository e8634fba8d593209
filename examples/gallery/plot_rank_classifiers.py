"""
Rank classifiers of scikit-learn
================================

``rank_models`` ranks models that are trained already, and returns the table that a search makes:
one row for each model, with its measures, losses and the parameters that differ. The ranking
describes the models. To choose one, held-out data are better ("Does it help?").
"""

import itertools

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier

from relflat_sk import MeasurePanelsDisplay, correlate_measures, rank_models

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=400, random_state=0)
models = {
    f"{size} units, batches of {batch}, rate {lr}": MLPClassifier(
        (size,), batch_size=batch, learning_rate_init=lr, max_iter=500, tol=1e-3, random_state=0
    ).fit(X, y)
    for size, batch, lr in itertools.product((20, 100), (8, 64), (0.001, 0.01))
}

# %%
# The table
# ---------
# The networks have different widths, and their training ended at different losses. The measure that
# ranks by default compares them: it is normalised, per feature, and at equal loss.

minima = rank_models(
    models,
    X,
    y,
    X_test=X_test,
    y_test=y_test,
    measure=["comparable_flatness", "relative_flatness"],
)
columns = ["model", "comparable_flatness", "train_loss", "test_loss", "test_score", "rank"]
minima[columns].round(4)

# %%
# Does the measure tell which one is good?
# ----------------------------------------
# Eight models are few, and the intervals wide.

display = MeasurePanelsDisplay.from_minima(minima, target="test_loss", random_state=0)
plt.gcf().set_size_inches(9, 4)
correlate_measures(minima, "test_loss", random_state=0).round(2)

# %%

assert minima["converged"].all()
assert len(minima) == len(models)

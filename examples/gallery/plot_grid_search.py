"""
A flat model among the good ones: a scorer in GridSearchCV
==========================================================

``FlatnessScorer`` is a scorer like any other. ``flattest_within(0.01)`` selects the flattest
candidate among those whose accuracy is at most one percentage point below the best. Flatness only
decides between candidates that are about equally good: it is no way to find the best ("Does it
help?").
"""

import matplotlib.pyplot as plt
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from relflat_sk import FlatnessScorer, flattest_within

X, y = load_digits(return_X_y=True)
model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
search = GridSearchCV(
    model,
    {"logisticregression__C": [1e-4, 1e-3, 1e-2, 1e-1, 1.0]},
    scoring={"accuracy": "accuracy", "flatness": FlatnessScorer()},
    refit=flattest_within(0.01),
    cv=3,
).fit(X, y)

# %%
# Accuracy against flatness
# -------------------------
# The score is minus the measure, so that greater is flatter.

results = search.cv_results_
accuracy, flatness = results["mean_test_accuracy"], -results["mean_test_flatness"]
fig, ax = plt.subplots(figsize=(8, 4.8), layout="constrained")
ax.axhspan(accuracy.max() - 0.01, accuracy.max(), color="0.9", label="within one point")
ax.semilogx(flatness, accuracy, "o")
for C, x, height in zip(results["param_logisticregression__C"], flatness, accuracy, strict=True):
    where = {"xytext": (0, -16), "textcoords": "offset points", "ha": "center", "size": 9}
    ax.annotate(f"C={C:g}", (x, height), **where)
best = search.best_index_
ax.plot(flatness[best], accuracy[best], "o", ms=15, mfc="none", label="selected")
ax.set(xlabel="relative flatness (small is flat)", ylabel="mean accuracy of three folds")
ax.margins(0.12)
ax.legend(loc="lower right")
print(search.best_params_)

good = accuracy >= accuracy.max() - 0.01
assert good[best]
assert flatness[best] == flatness[good].min()

"""
A search in Optuna's plots and dashboard
========================================

A search is a study of Optuna: with a ``storage`` it stays in a file, which Optuna's own plots and
the program ``optuna-dashboard`` read. The values of its trials are the flatness of the minima,
and all other columns of the table are the trials' user attributes.
"""

import tempfile
import warnings
from pathlib import Path

import optuna
from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.distributions import FloatDistribution
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from relflat_sk import (
    FlatMinimaSearch,
    RelativeFlatnessRegularizedClassifier,
    StopAtLoss,
)

folder = tempfile.TemporaryDirectory()
storage = f"sqlite:///{folder.name}/minima.db"
artifacts = Path(folder.name) / "artifacts"
artifacts.mkdir()

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X / 16, y, train_size=400, random_state=0)
net = RelativeFlatnessRegularizedClassifier(
    flatness_weight=0.0, callbacks=[StopAtLoss(0.05)], max_epochs=200, verbose=0
)
search = FlatMinimaSearch(
    net,
    {"lr": FloatDistribution(0.003, 0.03, log=True), "batch_size": [16, 64]},
    n_trials=10,
    fleet=10,
    storage=storage,
    study_name="digits",
    artifact_store=artifacts,
    sampler=optuna.samplers.RandomSampler(seed=0),
    random_state=0,
).fit(X, y, X_test=X_test, y_test=y_test)

# %%
# Optuna's own plots
# ------------------

study = optuna.load_study(study_name="digits", storage=storage)
warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)


def draw(**target):
    """Draw Optuna's slice plot of a target, with learning rates as numbers."""
    _, ax = optuna.visualization.matplotlib.plot_slice(study, **target)
    ax.set_xticks([0.003, 0.01, 0.03], ["0.003", "0.01", "0.03"])
    ax.set_xticks([], minor=True)
    ax.figure.set(size_inches=(10, 4), layout_engine="constrained")
    ax.figure.suptitle("")
    return ax.figure


figure = draw(target_name="relative flatness (small is flat)")

# %%
# Any column is a target
# ----------------------


def gap(trial):
    return trial.user_attrs["generalization_gap"]


figure = draw(target=gap, target_name="generalisation gap (nats)")

# %%
# The dashboard, with artifacts
# -----------------------------
# The weights of every minimum are an artifact of its trial, and a picture can be one of the study.
# ``optuna-dashboard sqlite:///minima.db --artifact-dir artifacts`` shows all of it.

picture = Path(folder.name) / "minima.png"
figure.savefig(picture)
store = FileSystemArtifactStore(artifacts)
upload_artifact(artifact_store=store, file_path=str(picture), study_or_trial=study)

assert study.best_params == search.best_params_
assert study.best_value == -search.best_score_
assert [meta.filename for meta in get_all_artifact_meta(study)] == ["minima.png"]
folder.cleanup()

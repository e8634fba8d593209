"""Data, nets and searches that the tests of the search share; most train within milliseconds."""

import time
import warnings

import numpy as np
import optuna
import pytest
from pandas.testing import assert_frame_equal
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import StandardScaler, scale
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    StopAtLoss,
    rank_minima,
)
from relflat_sk.search._measure import TrainingData
from relflat_sk.search._storage import open_storage
from relflat_sk.search._task import vary_data

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
X, X_TEST, Y, Y_TEST = X[::2], X[1::2], Y[::2], Y[1::2]
LABELS = load_iris().target_names[Y]
TARGET = X @ np.float32([1.0, -2.0, 0.5, 0.0])
WEIGHTS = np.where(np.arange(len(X)) % 3, 1.0, 3.0)
FILES = {"sqlite": "minima.db", "journal": "minima.log"}  # of storages
NO_MINIMA = pytest.mark.filterwarnings("ignore:.* candidates are no minima")


def make_net(kind=RelativeFlatnessRegularizedClassifier, **parameters):
    """A net that reaches a goal of its own within a few epochs."""
    defaults = {
        "flatness_weight": 0,
        "module__hidden_layer_sizes": (6,),
        "lr": 0.05,
        "batch_size": 8,
        "max_epochs": 30,
        "callbacks": [StopAtLoss(0.4)],
        "verbose": 0,
    }
    return kind(**{**defaults, **parameters})


def make_regressor(**parameters):
    defaults = {"callbacks": None, "max_epochs": 10}
    return make_net(RelativeFlatnessRegularizedRegressor, **{**defaults, **parameters})


def plain_net(**parameters):
    """skorch's own: no random_state, and a fifth of the data held out."""
    defaults = {
        "module__n_features": 4,
        "module__n_outputs": 3,
        "criterion": nn.CrossEntropyLoss,
        "max_epochs": 3,
        "lr": 0.5,
        "verbose": 0,
    }
    return NeuralNetClassifier(MLP, **{**defaults, **parameters})


def piped(model):
    return Pipeline([("scale", StandardScaler()), ("net", model)])


def make_search(estimator=None, space=None, **parameters):
    estimator = make_net() if estimator is None else estimator
    sizes = {"batch_size": [8, 16], "module__hidden_layer_sizes": [(4,), (8,)]}
    space = sizes if space is None else space
    return FlatMinimaSearch(estimator, space, **{"random_state": 0, **parameters})


def logistic(space=None, estimator=None, **parameters):
    """A search that takes milliseconds; C determines the depth, so it varies little."""
    space = {"C": [0.3, 0.5, 1.0]} if space is None else space
    estimator = LogisticRegression(max_iter=1000) if estimator is None else estimator
    return make_search(estimator, space, **parameters)


def attributes_of(trial):
    return {**trial.user_attrs, **trial.user_attrs.get("details", {})}


def train_one(estimator, space, X=X, y=Y, held_out=(None, None), **parameters):
    """Train one candidate; return the search, what its trial records, and the candidate."""
    search = make_search(estimator, space, **{"n_trials": 1, "refit": True, **parameters})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlatnessWarning)
        search.fit(X, y, *held_out)
    return search, attributes_of(search.study_.trials[0]), search.best_estimator_


def record(estimator, X=X, y=Y, space=None, **parameters):
    """Train one candidate; return what its trial records, and the candidate."""
    space = {"lr": [0.05]} if space is None else space
    return train_one(estimator, space, X, y, **parameters)[1:]


def vary(X, y, fit_params=None, sample_weight=None, **amounts):
    return vary_data(TrainingData(X, y, X, y, fit_params or {}, sample_weight), **amounts)


def table_of(found):
    """The minima of a search or a study, without what differs whenever they are trained."""
    minima = rank_minima(found) if isinstance(found, optuna.Study) else found.minima_
    dropped = ["trial", "seconds", "rank", "artifact_id", "in_fleet"]
    minima = minima.drop(columns=dropped, errors="ignore")
    return minima.sort_values(list(minima.filter(like="param_")), ignore_index=True)


def assert_same_results(found, other, **tolerances):
    assert_frame_equal(table_of(found), table_of(other), **tolerances)


def load(stored):
    return optuna.load_study(
        study_name=stored["study_name"], storage=open_storage(stored["storage"])
    )


class Fails(LogisticRegression):
    def fit(self, X, y):
        if self.C == 1.0:
            raise RuntimeError("out of luck")
        return super().fit(X, y)


class Slow(LogisticRegression):
    """Takes longer than a kill or a stop takes to be noticed, on a machine however busy."""

    def fit(self, X, y):
        time.sleep(0.2)
        return super().fit(X, y)

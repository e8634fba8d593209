"""Tests of saved weights and of `remeasure`: minima measured again without training."""

import pickle
import re

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import FlatnessWarning, MinimaObjective, measure
from relflat_sk._models.network_of import final_estimator
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._task import train
from tests.search.examples import (
    TARGET,
    X,
    Y,
    logistic,
    make_net,
    make_regressor,
    make_search,
    piped,
)


class Normalised(nn.Module):
    """Has buffers, and a layer that is sized by the first batch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LazyLinear(3))

    def forward(self, x):
        return self.layers(x)


SIZES = {"batch_size": [16, 64]}
CANDIDATES = {
    "ours": (make_net(), {"module__hidden_layer_sizes": [(4,), (8,)]}),
    "pipeline": (piped(make_net()), {"net__lr": [0.05, 0.1]}),
    "buffers": (
        NeuralNetClassifier(
            Normalised, criterion=nn.CrossEntropyLoss, lr=0.3, max_epochs=20, verbose=0
        ),
        SIZES,
    ),
    "sgd": (SGDClassifier(loss="log_loss"), {"alpha": [0.01, 0.1]}),
    "mlp": (MLPClassifier((5, 4), max_iter=40), {"batch_size": [16, 32]}),
}
REGRESSORS = {
    "wrapped": (
        TransformedTargetRegressor(make_regressor(max_epochs=5)),
        {"regressor__lr": [0.01, 0.02]},
    ),
    "ridge": (Ridge(), {"alpha": [0.1, 1.0], "fit_intercept": [True, False]}),
    "mlp regressor": (MLPRegressor(hidden_layer_sizes=(5,), max_iter=40), {"batch_size": [16, 32]}),
}


def settings(estimator):
    """Return the parameters of an estimator as text, without addresses."""
    params = final_estimator(estimator).get_params(deep=False)
    params.pop("_params_to_validate", None)  # skorch's note to itself
    return re.sub(r" at 0x\w+|<class '|'>", "", repr(params))


def find(kind):
    return (*CANDIDATES[kind], Y) if kind in CANDIDATES else (*REGRESSORS[kind], TARGET)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("kind", [*CANDIDATES, *REGRESSORS])
def test_restored_candidates_are_those_that_were_trained(kind, tmp_path):
    estimator, space, y = find(kind)
    objective = MinimaObjective(
        estimator, X, y, space, artifact_store=tmp_path / "minima", random_state=0
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    fitted = []
    for _ in range(2):
        trial = study.ask()
        params = objective.recipe.space.suggest(trial)
        minimum, trained = train(objective.recipe.task, params, objective.recipe.seed_of(trial))
        objective.recipe.record(trial, params, minimum, trained)
        study.tell(trial, minimum.values)
        fitted.append(trained.estimator)
    for trial, one in zip(study.trials, fitted, strict=True):
        state = torch.get_rng_state()
        restored = objective.get_estimator(trial)
        assert_array_equal(torch.get_rng_state(), state)
        assert_allclose(restored.predict(X), one.predict(X), rtol=1e-6)
        name = "relative_flatness"
        assert_allclose(measure(name, restored, X, y), trial.user_attrs[name], rtol=1e-6)
        assert settings(restored) == settings(one)
        n_iter, before = (getattr(final_estimator(x), "n_iter_", None) for x in (restored, one))
        assert_array_equal(n_iter, before)
        assert type(n_iter) is type(before)
        assert len(pickle.dumps(restored)) < 1.1 * len(pickle.dumps(one)) + 1000


def test_a_restored_net_knows_its_flatness(kept, end_training):
    """The flatness is that of the restored weights, not of the initial ones."""
    search = make_search(space=SIZES, **kept).fit(X, Y)
    best = search.best_estimator_
    end_training()
    again = make_search(space=SIZES, **kept).fit(X, Y).best_estimator_
    assert again is not best
    assert_allclose(again.relative_flatness_, best.relative_flatness_, rtol=1e-6)
    assert not hasattr(again.history, "train_loss")


def test_remeasure_is_what_would_have_been_measured(
    make_storage, tmp_path, monkeypatch, end_training
):
    kept = {"artifact_store": tmp_path, "storage": make_storage(), "study_name": "sweep"}
    search = logistic(**kept).fit(X, Y)
    columns = list(search.minima_)
    end_training()
    found = search.remeasure(["hessian_trace", "trace_flatness", "relative_flatness"])
    assert found is search.minima_
    assert set(found) == {*columns, "hessian_trace", "trace_flatness"}
    assert found["rank"].tolist() == [1, 2, 3]
    for row in found.to_dict("records"):
        own = LogisticRegression(max_iter=1000, C=row["param_C"]).fit(X, Y)
        for name in ("hessian_trace", "trace_flatness", "relative_flatness"):
            assert_allclose(row[name], measure(name, own, X, Y), rtol=1e-6)
    # the study knows them, and another session does
    resumed = logistic(refit=False, **kept).fit(X, Y)
    assert resumed.minima_.equals(found)
    monkeypatch.setattr(Recipe, "provide", None)  # nothing is measured twice
    assert resumed.remeasure(["hessian_trace"]).equals(found)


def test_a_search_that_was_pickled_needs_its_data(kept):
    search = logistic(**kept).fit(X, Y)
    assert len(pickle.dumps(search)) < X.nbytes + 60_000
    other = pickle.loads(pickle.dumps(search))
    with pytest.raises(ValueError, match="X and y are needed, .* a search that was pickled"):
        other.remeasure(["trace_flatness"])
    with pytest.raises(ValueError, match="made with something else:\n  X: "):
        other.remeasure(["trace_flatness"], X[::2], Y[::2])
    assert np.isfinite(other.remeasure(["trace_flatness"], X, Y)["trace_flatness"]).all()


@pytest.mark.parametrize("store", [None, "given later"])
def test_without_weights(tmp_path, store):
    search = logistic().fit(X, Y)
    search.set_params(artifact_store=None if store is None else tmp_path)
    with pytest.raises(ValueError, match="no weights of these minima were saved.*artifact_store"):
        search.remeasure(["trace_flatness"], X, Y)


def test_some_weights(stored, kept):
    """The weights of the first session were not saved."""
    logistic(n_trials=1, refit=False, **stored).fit(X, Y)
    search = logistic(refit=False, **kept).fit(X, Y)
    with pytest.warns(FlatnessWarning, match=r"trace_flatness of trials \[0\] stay nan"):
        table = search.remeasure(["trace_flatness"])
    found = table.sort_values("trial")["trace_flatness"]
    assert found.isna().tolist() == [True, False, False]

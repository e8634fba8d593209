"""Minima are had again, from saved weights or by training once more, and measured again."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.linear_model import LogisticRegression, Ridge, SGDClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from skorch import NeuralNetClassifier
from torch import nn

from relflat_sk import FlatnessWarning, measure, relative_flatness
from relflat_sk._models.network_of import final_estimator
from relflat_sk.search._recipe import Recipe
from relflat_sk.search._task import Task
from tests.search.examples import (
    NO_MINIMA,
    TARGET,
    Fails,
    X,
    Y,
    logistic,
    make_net,
    make_regressor,
    make_search,
    piped,
)


class Normalised(nn.Sequential):
    """Has buffers, and a layer that is sized by the first batch."""

    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LazyLinear(3))


NORMALISED = NeuralNetClassifier(
    Normalised, criterion=nn.CrossEntropyLoss, lr=0.3, max_epochs=20, verbose=0
)
WRAPPED = TransformedTargetRegressor(make_regressor(max_epochs=5))
SIZES = {"batch_size": [16, 32]}
CANDIDATES = {  # estimator, space, targets
    "ours": (make_net(), {"module__hidden_layer_sizes": [(4,), (8,)]}, Y),
    "pipeline": (piped(make_net()), {"net__lr": [0.05, 0.1]}, Y),
    "buffers": (NORMALISED, SIZES, Y),
    "sgd": (SGDClassifier(loss="log_loss"), {"alpha": [0.01, 0.1]}, Y),
    "mlp": (MLPClassifier((5, 4), max_iter=40), SIZES, Y),
    "wrapped": (WRAPPED, {"regressor__lr": [0.01, 0.02]}, TARGET),
    "ridge": (Ridge(), {"fit_intercept": [True, False]}, TARGET),
    "mlp regressor": (MLPRegressor(hidden_layer_sizes=(5,), max_iter=40), SIZES, TARGET),
}


def outputs(estimator):
    return getattr(estimator, "predict_proba", estimator.predict)(X)


def settings(estimator):
    params = final_estimator(estimator).get_params(deep=False)
    params.pop("_params_to_validate", None)  # skorch's note to itself
    return re.sub(r" at 0x\w+|<class '|'>", "", repr(params))


@NO_MINIMA
@pytest.mark.filterwarnings("ignore:no candidate converged", "ignore:.*left out of the ranking")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "trained again"])
@pytest.mark.parametrize("kind", CANDIDATES)
def test_every_minimum_can_be_had_again(kind, is_saved, stored, tmp_path, end_training):
    estimator, space, y = CANDIDATES[kind]
    stored["artifact_store"] = tmp_path / "minima" if is_saved else None
    search = make_search(estimator, space, **stored).fit(X, y)
    trained = [search.get_estimator(number) for number in range(2)]
    if is_saved:
        end_training()
    resumed = clone(search).set_params(refit=False).fit(X, y)
    flatness = search.minima_.set_index("trial")["relative_flatness"]
    for number, expected in enumerate(trained):
        state = torch.get_rng_state()
        found = resumed.get_estimator(number)
        assert_array_equal(torch.get_rng_state(), state)
        assert_allclose(outputs(found), outputs(expected), rtol=1e-6)
        assert_allclose(measure("relative_flatness", found, X, y), flatness[number], rtol=1e-6)
        assert type(found) is type(estimator)
        assert settings(found) == settings(expected)
        params = found.get_params()
        assert None not in [params[name] for name in params if name.endswith("random_state")]
        for name in ("n_iter_", "relative_flatness_"):
            value, before = (getattr(final_estimator(x), name, np.nan) for x in (found, expected))
            assert_allclose(np.asarray(value, float), np.asarray(before, float), rtol=1e-6)
            assert type(value) is type(before)
        if is_saved:
            assert len(pickle.dumps(found)) < 1.1 * len(pickle.dumps(expected)) + 1000


@NO_MINIMA
def test_without_a_random_state_torchs_decides_and_minima_are_had_again():
    wide = make_net(module__hidden_layer_sizes=(50,))  # any seed trains it
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        search = make_search(wide, SIZES, random_state=None, refit=False).fit(X, Y)
        losses.append(search.minima_["train_loss"].tolist())
    assert losses[0] == losses[1]
    assert not set(losses[0]) & set(losses[2])
    copied = pickle.loads(pickle.dumps(search))
    for number, flatness in search.minima_[["trial", "relative_flatness"]].to_numpy():
        for found in (search.get_estimator(number), copied.get_estimator(number, X, Y)):
            assert relative_flatness(found, X, Y) == flatness


def test_other_results_of_the_same_training_are_noticed(stored, monkeypatch):
    """Another version of a library, or another machine, may train another network."""
    search = make_search(make_net(), SIZES, refit=True, **stored).fit(X, Y)
    prepare = Task.prepare
    monkeypatch.setattr(Task, "prepare", lambda task, params, seed: prepare(task, params, seed + 1))
    number = int(search.minima_["trial"][1])
    with pytest.raises(ValueError, match=rf"minimum of trial {number} cannot be had again"):
        search.get_estimator(number)
    with pytest.warns(FlatnessWarning, match="minimum of trial 0 cannot be had again"):
        found = search.remeasure(["l2_norm"], retrain=True)
    assert found["l2_norm"].isna().all()
    with pytest.warns(FlatnessWarning, match="best_estimator_ is not the network of the table"):
        clone(search).fit(X, Y)


@NO_MINIMA
def test_trials_without_an_estimator():
    search = make_search(Fails(max_iter=1000), {"C": [0.5, 1.0]}).fit(X, Y)
    for number, reason in (
        (1, r"trial 1 has no estimator \(RuntimeError: out of luck\)"),
        (7, r"trial 7 has no estimator \(there is no such trial\)"),
        ("best", r"trial 'best' has no estimator"),
    ):
        with pytest.raises(ValueError, match=reason):
            search.get_estimator(number)


# -- measured again -------------------------------------------------------------------------------


def test_remeasure_finds_what_a_search_would(make_storage, tmp_path, monkeypatch, end_training):
    kept = {"artifact_store": tmp_path, "storage": make_storage(), "study_name": "sweep"}
    search = logistic(**kept).fit(X, Y)
    columns = list(search.minima_)
    end_training()
    names = ["hessian_trace", "trace_flatness", "relative_flatness"]
    found = search.remeasure(names)
    assert found is search.minima_
    assert set(found) == {*columns, *names}
    assert found["rank"].tolist() == [1, 2, 3]
    for row in found.to_dict("records"):
        own = LogisticRegression(max_iter=1000, C=row["param_C"]).fit(X, Y)
        expected = [measure(name, own, X, Y) for name in names]
        assert_allclose([row[name] for name in names], expected, rtol=1e-6)
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


@pytest.mark.parametrize("given_later", [False, True])
def test_without_weights(tmp_path, given_later):
    search = logistic().fit(X, Y).set_params(artifact_store=tmp_path if given_later else None)
    with pytest.raises(ValueError, match="no weights of these minima were saved.*artifact_store"):
        search.remeasure(["trace_flatness"], X, Y)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-200])


def overwrite(path):
    path.write_bytes(b"nothing that torch can read")


def exchange(path):
    """Put the weights of another minimum there, which can be read."""
    other = next(one for one in sorted(path.parent.iterdir()) if one != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [truncate, overwrite, exchange, Path.unlink])
def test_damaged_weights_are_named_and_the_others_are_measured(kept, damage):
    search = logistic(refit=False, **kept).fit(X, Y)
    before = search.get_estimator(1).predict_proba(X)
    path = kept["artifact_store"] / search.study_.trials[1].user_attrs["artifact_id"]
    damage(path)
    message = rf"the weights of trial 1.* '{path.name}'"
    with pytest.warns(FlatnessWarning, match=message) as warned:
        found = search.remeasure(["l2_norm"]).set_index("trial").sort_index()
    assert found["l2_norm"].isna().tolist() == [False, True, False]
    assert "remeasure(..., retrain=True)" in str(warned[0].message)
    again = "The candidate is trained again"
    with pytest.warns(FlatnessWarning, match=again):
        whole = search.remeasure(["l2_norm"], retrain=True).set_index("param_C")
    expected = logistic(measure=["relative_flatness", "l2_norm"]).fit(X, Y).minima_
    expected = expected.set_index("param_C").loc[whole.index]
    assert_allclose(whole["l2_norm"], expected["l2_norm"], rtol=1e-6)
    with pytest.warns(FlatnessWarning, match=again):
        assert_array_equal(search.get_estimator(1).predict_proba(X), before)


def test_files_and_folders_may_be_in_the_home_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    logistic(storage="~/minima.db", study_name="sweep", artifact_store="~/minima").fit(X, Y)
    assert (tmp_path / "minima.db").exists()
    assert len(list((tmp_path / "minima").iterdir())) == 3

"""Tests of where and how candidates are measured, and of arguments of `fit`."""

import pickle

import numpy as np
import optuna
import pytest
import sklearn
import torch
from numpy.testing import assert_allclose
from optuna.storages import InMemoryStorage
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import (
    FlatMinimaSearch,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    measure,
)

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
WEIGHTS = np.where(np.arange(len(X)) % 3, 1.0, 3.0)


def net(**parameters):
    defaults = {"max_epochs": 10, "flatness_weight": 0, "verbose": 0, "random_state": 0}
    return RelativeFlatnessRegularizedClassifier(**{**defaults, **parameters})


def make(estimator=None, space=None, **parameters):
    estimator = net() if estimator is None else estimator
    space = {"lr": [0.01, 0.02]} if space is None else space
    settings = {"random_state": 0, "goal": None, "depth_band": None, **parameters}
    return FlatMinimaSearch(estimator, space, **settings)


pytestmark = pytest.mark.filterwarnings("ignore:no candidate converged")


# -- layer and arguments of measures ---------------------------------------------------------


@pytest.mark.parametrize("layer", [0, "hidden0"])
def test_layer(layer):
    search = make(layer=layer).fit(X, Y)
    found = measure("relative_flatness", search.best_estimator_, X, Y, layer=0)
    assert_allclose(search.minima_["relative_flatness"].iloc[0], found)
    assert found != measure("relative_flatness", search.best_estimator_, X, Y)


def test_arguments_of_measures(tmp_path):
    params = {"batch_size": 7, "weight_decay": 0.1}
    search = make(measure="hessian_trace", measure_params=params, artifact_store=tmp_path).fit(X, Y)
    best = search.best_estimator_
    found = measure("hessian_trace", best, X, Y, weight_decay=0.1)
    assert_allclose(search.minima_["hessian_trace"].iloc[0], found, rtol=1e-5)
    assert found > measure("hessian_trace", best, X, Y)
    again = search.remeasure(["trace_flatness"])
    found = measure("trace_flatness", best, X, Y, weight_decay=0.1)
    assert_allclose(again["trace_flatness"].iloc[0], found, rtol=1e-5)


def test_device(monkeypatch):
    """Every device is the same here, so only what is asked for is seen."""
    seen = []

    class Spy(RelativeFlatnessRegularizedClassifier):
        def initialize(self):
            seen.append(self.device)
            return super().initialize()

    make(Spy(max_epochs=2, verbose=0, device="meta"), device=torch.device("cpu")).fit(X, Y)
    assert set(seen) == {"cpu"}
    seen.clear()
    chosen = Spy(max_epochs=2, verbose=0, device="meta")
    make(chosen, {"device": ["cpu"], "lr": [0.01]}, device="cpu").fit(X, Y)
    assert set(seen) == {"cpu"}
    search = make(LogisticRegression(max_iter=1000), {"C": [0.5]}, device="cpu").fit(X, Y)
    assert search.minima_["relative_flatness"].notna().all()


@pytest.mark.parametrize(
    ("parameters", "error", "match"),
    [
        ({"layer": torch.nn.Linear(2, 2)}, TypeError, "layer must be the position of a layer or"),
        ({"layer": True}, TypeError, "layer must be the position"),
        ({"measure_params": ["rtol"]}, TypeError, "measure_params must be a dict or None"),
        ({"measure_params": {"probes": 3}}, TypeError, "'probes' is no argument of"),
        ({"measure_params": {"layer": 0}}, ValueError, "give it as layer=... instead"),
        ({"measure_params": {"random_state": 0}}, ValueError, "give it as random_state=..."),
        ({"measure_params": {"batch_size": 0}}, ValueError, "batch_size must be"),
        ({"measure": ["joint_eigenvalue_flatness"], "layer": 0}, ValueError, "has no layers to ch"),
        ({"device": "tpu9"}, ValueError, "device"),
    ],
)
def test_bad_arguments_before_training(parameters, error, match):
    with pytest.raises(error, match=match):
        make(**parameters).fit(X, Y)


def test_another_layer_is_another_study(tmp_path):
    stored = {"storage": f"sqlite:///{tmp_path}/minima.db", "study_name": "s"}
    make(**stored).fit(X, Y)
    with pytest.raises(ValueError, match="layer"):
        make(layer=0, **stored).fit(X, Y)
    with pytest.raises(ValueError, match="measure_params"):
        make(measure_params={"weight_decay": 1.0}, **stored).fit(X, Y)
    with pytest.raises(ValueError, match="sample_weight"):
        make(**stored).fit(X, Y, sample_weight=WEIGHTS)


# -- arguments of fit ------------------------------------------------------------------------


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_weights_count_in_training_and_measures(n_jobs):
    search = make(n_jobs=n_jobs).fit(X, Y, sample_weight=WEIGHTS)
    best = search.best_estimator_
    alone = net(lr=search.best_params_["lr"]).fit(X, Y, sample_weight=WEIGHTS)
    assert_allclose(best.predict_proba(X), alone.predict_proba(X), rtol=1e-5)
    found = measure("relative_flatness", best, X, Y, sample_weight=WEIGHTS)
    row = search.minima_.iloc[0]
    assert_allclose(row["relative_flatness"], found, rtol=1e-6)
    assert_allclose(row["train_score"], best.score(X, Y, sample_weight=WEIGHTS))
    losses = -np.log(best.predict_proba(X)[np.arange(len(X)), Y])
    assert_allclose(row["train_loss"], np.average(losses, weights=WEIGHTS), rtol=1e-4)


def test_weights_of_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), net())
    name = "relativeflatnessregularizedclassifier"
    search = make(pipeline, {f"{name}__lr": [0.01]}).fit(
        X, Y, **{f"{name}__sample_weight": WEIGHTS}
    )
    best = search.best_estimator_
    found = measure("relative_flatness", best, X, Y, sample_weight=WEIGHTS)
    assert_allclose(search.minima_["relative_flatness"].iloc[0], found, rtol=1e-6)


def test_weights_are_chosen_with_the_samples():
    objective = MinimaObjective(
        net(),
        X,
        Y,
        {"data__train_size": [60], "data__confusion_size": [30]},
        random_state=0,
        goal=None,
        fit_params={"sample_weight": WEIGHTS},
    )
    trial = optuna.create_study().ask()
    fitted = objective.run(trial)[1]
    data = objective.data(trial.params)
    weight_of = {row.tobytes(): weight for row, weight in zip(X, WEIGHTS, strict=True)}
    assert len(data.fit_params["sample_weight"]) == 90
    assert len(data.sample_weight) == 60
    found = measure("relative_flatness", fitted, data.X, data.y, sample_weight=data.sample_weight)
    assert_allclose(trial.user_attrs["relative_flatness"], found, rtol=1e-6)
    several = {row.tobytes() for row in X if (row == X).all(axis=1).sum() > 1}
    for row, weight in zip(data.X, data.sample_weight, strict=True):
        assert row.tobytes() in several or weight_of[row.tobytes()] == weight


def test_restored_minima_use_the_weights(tmp_path):
    search = make(artifact_store=tmp_path).fit(X, Y, sample_weight=WEIGHTS)
    copied = pickle.loads(pickle.dumps(search))
    found = copied.remeasure(["trace_flatness"], X, Y, sample_weight=WEIGHTS)
    best = search.best_estimator_
    expected = measure("trace_flatness", best, X, Y, sample_weight=WEIGHTS)
    assert_allclose(found["trace_flatness"].iloc[0], expected, rtol=1e-6)
    number = int(search.minima_["trial"].iloc[1])
    one = copied.get_estimator(number, X, Y, sample_weight=WEIGHTS)
    other = search.get_estimator(number)
    np.testing.assert_array_equal(one.predict_proba(X), other.predict_proba(X))


class Asks(LogisticRegression):
    """Records what its `fit` is given."""

    def fit(self, X, y, sample_weight=None, mark=None):
        self.mark_ = mark
        return super().fit(X, y, sample_weight=sample_weight)


def test_other_arguments_of_fit():
    search = make(Asks(max_iter=1000), {"C": [1.0]}).fit(X, Y, mark="text", sample_weight=None)
    assert search.best_estimator_.mark_ == "text"


def test_metadata_routing():
    with sklearn.config_context(enable_metadata_routing=True):
        asks = Asks(max_iter=1000).set_fit_request(sample_weight=True, mark=False)
        search = make(asks, {"C": [1.0]})
        pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), search)
        pipeline.fit(X, Y, sample_weight=WEIGHTS)
        inputs = StandardScaler().fit_transform(X)
        expected = LogisticRegression(max_iter=1000).fit(inputs, Y, sample_weight=WEIGHTS)
        assert_allclose(pipeline.predict_proba(X), expected.predict_proba(inputs))
        refused = make(Asks(max_iter=1000), {"C": [1.0]})
        with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError, match="sample_weight"):
            refused.fit(X, Y, sample_weight=WEIGHTS)


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (WEIGHTS[:-1], "149"),
        (-WEIGHTS, "negative"),
        (np.full(len(X), np.nan), "finite"),
        ((Y == 1).astype(float), r"sample_weight is positive for one class only, \[1\]"),
    ],
)
def test_bad_weights_before_training(weights, match):
    with pytest.raises(ValueError, match=match):
        make().fit(X, Y, sample_weight=weights)


def test_bad_arguments_of_fit():
    with pytest.raises(TypeError, match="fit_params must be a dict or None"):
        MinimaObjective(net(), X, Y, {"lr": [0.1]}, fit_params=WEIGHTS)


# -- a layer that is not there -----------------------------------------------------------------


class CountsEpochs(Callback):
    n_epochs = 0

    def on_epoch_begin(self, net, **kwargs):
        CountsEpochs.n_epochs += 1


@pytest.mark.parametrize("layer", [2, -3, "head", "layers.1"])
def test_a_missing_layer_is_found_before_the_first_epoch(layer, tmp_path):
    CountsEpochs.n_epochs = 0
    stored = {"storage": f"sqlite:///{tmp_path / 'minima.db'}", "study_name": "sweep"}
    search = make(net(callbacks=[CountsEpochs()]), layer=layer, **stored)
    match = rf"layer={layer!r} cannot be measured: .* a layer that each candidate has"
    with pytest.raises(RuntimeError, match=match):
        search.fit(X, Y)
    assert not CountsEpochs.n_epochs
    # nothing is recorded: the corrected call goes on
    found = make(net(callbacks=[CountsEpochs()]), layer=0, **stored).fit(X, Y)
    assert found.minima_["state"].eq("complete").all()
    assert CountsEpochs.n_epochs
    assert [type(one) for one in found.best_estimator_.callbacks] == [CountsEpochs]
    assert pickle.loads(pickle.dumps(found.best_estimator_)).callbacks


def test_a_missing_layer_of_an_estimator_of_scikit_learn_is_no_result():
    stored = {"storage": InMemoryStorage(), "study_name": "sweep"}
    logistic, space = LogisticRegression(max_iter=1000), {"C": [0.5, 1.0]}
    with pytest.raises(RuntimeError, match="layer=1 cannot be measured: .*each candidate has"):
        make(logistic, space, layer=1, **stored).fit(X, Y)
    found = make(logistic, space, layer=0, **stored).fit(X, Y)
    assert found.minima_["state"].eq("complete").all()


class Lazy(nn.Sequential):
    def __init__(self, **sizes):
        super().__init__(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(3))


def test_lazy_layers_have_no_type_before_the_first_batch():
    lazy = net(module=Lazy)
    found = make(lazy, {"lr": [0.01]}, layer="2").fit(X, Y)
    assert found.minima_["state"].tolist() == ["complete"]

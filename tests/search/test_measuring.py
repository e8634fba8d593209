"""Tests of where and how candidates are measured, and of arguments of `fit`."""

import pickle

import numpy as np
import pytest
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import Callback

from relflat_sk import (
    FlatnessScorer,
    FlatnessWarning,
    measure,
)
from relflat_sk.search._data import vary_data
from tests.search.examples import WEIGHTS, X, Y, logistic, make_net, make_search, piped

pytestmark = pytest.mark.filterwarnings("ignore:no candidate converged")


def net(**parameters):
    return make_net(**{"max_epochs": 10, "callbacks": None, "random_state": 0, **parameters})


def make(estimator=None, space=None, **parameters):
    estimator = net() if estimator is None else estimator
    space = {"lr": [0.01, 0.02]} if space is None else space
    return make_search(estimator, space, **{"goal": None, **parameters})


def flattest(search, name="relative_flatness"):
    return search.minima_[name].iloc[0]


def test_layer_and_arguments_of_measures(tmp_path):
    params = {"batch_size": 7, "weight_decay": 0.1}
    names = "hessian_trace", "trace_flatness"
    scorers = [FlatnessScorer(name, layer="hidden0", measure_params=params) for name in names]
    search = make(measure=scorers[0], artifact_store=tmp_path).fit(X, Y)
    best = search.best_estimator_
    found = measure("hessian_trace", best, X, Y, layer=0, weight_decay=0.1)
    assert_allclose(flattest(search, "hessian_trace"), found, rtol=1e-5)
    assert found > measure("hessian_trace", best, X, Y, layer=0)
    again = search.remeasure([scorers[1], "l2_norm"])
    found = measure("trace_flatness", best, X, Y, layer=0, weight_decay=0.1)
    assert_allclose(again["trace_flatness"].iloc[0], found, rtol=1e-5)
    with pytest.raises(ValueError, match="measure trace_flatness: "):
        search.remeasure(["trace_flatness"])


def unlucky(model, X, y):
    if model.C == 1.0:
        raise RuntimeError("out of luck")
    return model.C


MAGNITUDE = "pac_bayes_magnitude_flatness"


def test_a_measure_that_fails_is_nan_and_its_candidate_ranked_by_another(tmp_path):
    """Of noise as large as this, no sigma is small enough."""
    shared = {"storage": tmp_path / "minima.db", "study_name": "sweep"}
    noisy = FlatnessScorer(MAGNITUDE, measure_params={"eps": 50.0, "n_draws": 2})
    search = logistic(measure=["relative_flatness", noisy, unlucky], **shared)
    with pytest.warns(
        FlatnessWarning, match=f"3 of 3 minima are ranked, but .*\\s+.*{MAGNITUDE} is"
    ):
        table = search.fit(X, Y).minima_.set_index("param_C")
    assert table["converged"].all()
    assert_allclose(table["relative_flatness"], logistic().fit(X, Y).minima_["relative_flatness"])
    assert table[MAGNITUDE].isna().all()
    assert_array_equal(table["unlucky"], [0.3, 0.5, np.nan])
    assert table["reason"].str.contains(f"^{MAGNITUDE} is nan: .*Use a smaller eps").all()
    assert table["reason"].str.contains("unlucky is nan: RuntimeError: out of luck").sum() == 1
    assert (search.cv_results_["mean_test_score"] < 0).all()

    # what fails is left out, and the others are measured
    def fails_for_one(model, X, y):
        return unlucky(model, X, y)

    with pytest.warns(FlatnessWarning, match="fails_for_one of trial .: RuntimeError: out of luck"):
        found = search.remeasure(["trace_flatness", fails_for_one], retrain=True)
    assert found["trace_flatness"].notna().all()
    assert found["fails_for_one"].isna().sum() == 1


def test_the_measure_that_ranks_fails_its_candidate():
    search = logistic(measure=[unlucky, "relative_flatness"])
    with pytest.warns(FlatnessWarning, match="1 x RuntimeError: out of luck"):
        table = search.fit(X, Y).minima_
    assert table["state"].tolist() == ["complete", "complete", "failed"]


def test_weights_count_in_training_and_measures_also_of_workers():
    search = make(n_jobs=2).fit(X, Y, sample_weight=WEIGHTS)
    best = search.best_estimator_
    alone = net(lr=search.best_params_["lr"]).fit(X, Y, sample_weight=WEIGHTS)
    assert_allclose(best.predict_proba(X), alone.predict_proba(X), rtol=1e-5)
    found = measure("relative_flatness", best, X, Y, sample_weight=WEIGHTS)
    row = search.minima_.iloc[0]
    assert_allclose(row["relative_flatness"], found, rtol=1e-6)
    assert_allclose(row["train_score"], best.score(X, Y, sample_weight=WEIGHTS))
    losses = -np.log(best.predict_proba(X)[np.arange(len(X)), Y])
    assert_allclose(row["train_loss"], np.average(losses, weights=WEIGHTS), rtol=1e-4)


def test_weights_of_a_pipeline_and_of_restored_minima(tmp_path):
    weights = {"net__sample_weight": WEIGHTS}
    search = make(piped(net()), {"net__lr": [0.01, 0.02]}, artifact_store=tmp_path)
    best = search.fit(X, Y, **weights).best_estimator_
    found = measure("relative_flatness", best, X, Y, sample_weight=WEIGHTS)
    assert_allclose(flattest(search), found, rtol=1e-6)
    copied = pickle.loads(pickle.dumps(search))
    found = copied.remeasure(["trace_flatness"], X, Y, **weights)
    expected = measure("trace_flatness", best, X, Y, sample_weight=WEIGHTS)
    assert_allclose(found["trace_flatness"].iloc[0], expected, rtol=1e-6)
    number = int(search.minima_["trial"].iloc[1])
    one = copied.get_estimator(number, X, Y, **weights)
    assert_array_equal(one.predict_proba(X), search.get_estimator(number).predict_proba(X))


def test_weights_are_chosen_with_the_samples():
    space = {"data__train_size": [30], "data__confusion_size": [15]}
    search = make(space=space).fit(X, Y, sample_weight=WEIGHTS)
    fitted, trial = search.best_estimator_, search.study_.trials[0]
    sizes = {"train_size": 30, "confusion_size": 15}
    per_sample = {"fit_params": {"sample_weight": WEIGHTS}, "sample_weight": WEIGHTS}
    data = vary_data(X, Y, **sizes, **per_sample, stratify=True)
    assert len(data.fit_params["sample_weight"]) == 45
    assert len(data.sample_weight) == 30
    found = measure("relative_flatness", fitted, data.X, data.y, sample_weight=data.sample_weight)
    assert_allclose(trial.user_attrs["relative_flatness"], found, rtol=1e-6)
    chosen = vary_data(np.arange(len(X)), Y, **sizes, stratify=True).X
    assert_array_equal(data.sample_weight, WEIGHTS[chosen])


class Asks(LogisticRegression):
    """Records what its `fit` is given."""

    def fit(self, X, y, sample_weight=None, mark=None):
        self.mark_ = mark
        return super().fit(X, y, sample_weight=sample_weight)


def test_other_arguments_of_fit_and_metadata_routing():
    asks = Asks(max_iter=1000)
    search = make(asks, {"C": [1.0]}).fit(X, Y, mark="text", sample_weight=None)
    assert search.best_estimator_.mark_ == "text"
    with sklearn.config_context(enable_metadata_routing=True):
        with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError, match="sample_weight"):
            make(asks, {"C": [1.0]}).fit(X, Y, sample_weight=WEIGHTS)
        search = make(asks.set_fit_request(sample_weight=True, mark=False), {"C": [1.0]})
        pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), search)
        pipeline.fit(X, Y, sample_weight=WEIGHTS)
        inputs = StandardScaler().fit_transform(X)
        expected = LogisticRegression(max_iter=1000).fit(inputs, Y, sample_weight=WEIGHTS)
        assert_allclose(pipeline.predict_proba(X), expected.predict_proba(inputs))


def test_score_takes_weights_by_metadata_routing_as_scikit_learns_searches_do():
    asks = LogisticRegression(max_iter=1000)
    space, weights = {"C": [0.5, 0.6]}, np.arange(len(X)) + 1.0
    for refit in ("mean", True):
        search = make(asks, space, refit=refit).fit(X, Y)
        with pytest.raises(ValueError, match=r"score was given \['sample_weight'\]"):
            search.score(X, Y, sample_weight=weights)
        with sklearn.config_context(enable_metadata_routing=True):
            for other in (search, GridSearchCV(asks, space).fit(X, Y)):
                with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError, match="sample_wei"):
                    other.score(X, Y, sample_weight=weights)
            asking = clone(asks).set_score_request(sample_weight=True)
            search = make(asking, space, refit=refit).fit(X, Y)
            right = np.average(search.predict(X) == Y, weights=weights)
            assert search.score(X, Y, sample_weight=weights) == pytest.approx(right)
            assert search.score(X, Y) != pytest.approx(right)


class CountsEpochs(Callback):
    n_epochs = 0

    def on_epoch_begin(self, net, **kwargs):
        CountsEpochs.n_epochs += 1


@pytest.mark.parametrize("layer", [2, "head"])
def test_a_missing_layer_is_found_before_the_first_epoch(layer, stored):
    CountsEpochs.n_epochs = 0
    scorer = FlatnessScorer(layer=layer)
    search = make(net(callbacks=[CountsEpochs()]), measure=scorer, **stored)
    match = rf"layer={layer!r} cannot be measured: .* a layer that each candidate has"
    with pytest.raises(RuntimeError, match=match):
        search.fit(X, Y)
    assert not CountsEpochs.n_epochs
    # nothing is recorded: the corrected call goes on
    found = search.set_params(measure__layer=0).fit(X, Y)
    assert found.minima_["state"].eq("complete").all()
    assert [type(callback) for callback in found.best_estimator_.callbacks] == [CountsEpochs]

"""What candidates are measured with: functions of one's own, at equal loss, with sample weights."""

import pickle

import numpy as np
import optuna
import pytest
import sklearn
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_classification
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNet
from skorch.callbacks import Callback
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessScorer,
    FlatnessWarning,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    correlate_measures,
    measure,
    rank_minima,
)
from tests.search.examples import (
    WEIGHTS,
    X_TEST,
    Y_TEST,
    X,
    Y,
    attributes_of,
    logistic,
    make_net,
    make_search,
    piped,
)

pytestmark = pytest.mark.filterwarnings("ignore:no candidate converged")
MODEL = LogisticRegression(max_iter=1000)
SPACE = {"C": [0.3, 1.0, 3.0]}


def coefficients(model, X, y):
    return float(np.linalg.norm(model.coef_))


def largest_weight(model, X, y):
    return float(np.abs(model.coef_).max()), 0.0


def unlucky(model, X, y):
    if model.C == 1.0:
        raise RuntimeError("out of luck")
    return model.C


def net(**parameters):
    return make_net(**{"max_epochs": 10, "callbacks": None, "random_state": 0, **parameters})


def search_nets(estimator=None, space=None, **parameters):
    estimator = net() if estimator is None else estimator
    space = {"lr": [0.01, 0.02]} if space is None else space
    return make_search(estimator, space, **{"goal": None, **parameters})


# -- functions ------------------------------------------------------------------------------------


def test_functions_of_ones_own_rank_and_are_measured_later(kept):
    search = logistic(SPACE, measure=[coefficients, "relative_flatness"], **kept)
    table = search.fit(X, Y, X_TEST, Y_TEST).minima_
    assert list(table.columns[:4]) == ["trial", "param_C", "coefficients", "train_loss"]
    assert table["param_C"].tolist() == SPACE["C"]
    assert table["coefficients"].is_monotonic_increasing
    assert search.best_score_ == pytest.approx(-table["coefficients"].iloc[0])
    assert {"coefficients", "relative_flatness"} <= set(correlate_measures(search)["measure"])
    assert "ranked by coefficients" in search.report()
    table = search.remeasure([coefficients, largest_weight]).set_index("param_C")
    for C in SPACE["C"]:
        weights = clone(MODEL).set_params(C=C).fit(X, Y).coef_
        expected = [np.linalg.norm(weights), np.abs(weights).max()]
        assert_allclose(table.loc[C, ["coefficients", "largest_weight"]].tolist(), expected)

    def smallest_weight(model, X, y):
        return float(np.abs(model.coef_).min())

    # under the same name, another function would add numbers that cannot be compared
    smallest_weight.__name__ = "coefficients"
    with pytest.raises(ValueError, match="measure coefficients: "):
        search.remeasure([smallest_weight])
    assert search.remeasure(coefficients)["coefficients"].notna().all()  # one is enough


def test_layer_and_arguments_of_measures(tmp_path):
    params = {"batch_size": 7, "weight_decay": 0.1}
    names = "hessian_trace", "trace_flatness"
    scorers = [FlatnessScorer(name, layer="hidden0", measure_params=params) for name in names]
    search = search_nets(measure=scorers[0], artifact_store=tmp_path).fit(X, Y)
    row = search.remeasure([scorers[1], "l2_norm"]).iloc[0]
    for name in names:
        found = measure(name, search.best_estimator_, X, Y, layer=0, weight_decay=0.1)
        assert_allclose(row[name], found, rtol=1e-5)
        assert found > measure(name, search.best_estimator_, X, Y, layer=0)
    with pytest.raises(ValueError, match="measure trace_flatness: "):
        search.remeasure(["trace_flatness"])


# -- without a value ------------------------------------------------------------------------------


def test_a_measure_that_is_not_finite_is_no_minimum():
    def nowhere(model, X, y):
        return np.inf

    message = r"no candidate converged.*\n  3 x cannot be ranked: nowhere is inf"
    with pytest.warns(FlatnessWarning, match=message):
        search = logistic(SPACE, measure=nowhere).fit(X, Y)
    assert not search.minima_["converged"].any()


MAGNITUDE = "pac_bayes_magnitude_flatness"


def test_a_measure_that_fails_is_nan_and_its_candidate_ranked_by_another(tmp_path):
    """Of noise as large as this, no sigma is small enough."""
    shared = {"storage": tmp_path / "minima.db", "study_name": "sweep"}
    noisy = FlatnessScorer(MAGNITUDE, measure_params={"eps": 50.0, "n_draws": 2})
    search = logistic(measure=["relative_flatness", noisy, unlucky], **shared)
    match = f"3 of 3 minima are ranked, but .*\\s+.*{MAGNITUDE} is"
    with pytest.warns(FlatnessWarning, match=match):
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


def test_the_measure_that_ranks_fails_its_candidate_whose_loss_is_recorded(tmp_path):
    search = logistic(measure=[unlucky, "relative_flatness"])
    with pytest.warns(FlatnessWarning, match="1 x RuntimeError: out of luck"):
        table = search.fit(X, Y).minima_
    assert table["state"].tolist() == ["complete", "complete", "failed"]
    options = {"measures": [unlucky], "artifact_store": tmp_path}
    objective = MinimaObjective(MODEL, X, Y, {"C": [1.0]}, **options)
    trial = optuna.create_study().ask()
    with pytest.raises(RuntimeError, match="out of luck"):
        objective(trial)
    attrs = attributes_of(trial)
    assert attrs["reason"] == "RuntimeError: out of luck"
    assert attrs["train_loss"] > 0
    assert (attrs["converged"], attrs["failed"]) == (False, True)
    assert attrs["seconds"] >= 0
    assert not {"unlucky", "artifact_id"} & attrs.keys()


class CountsEpochs(Callback):
    n_epochs = 0

    def on_epoch_begin(self, net, **kwargs):
        CountsEpochs.n_epochs += 1


@pytest.mark.parametrize("layer", [2, "head"])
def test_a_missing_layer_is_found_before_the_first_epoch(layer, stored):
    CountsEpochs.n_epochs = 0
    scorer = FlatnessScorer(layer=layer)
    search = search_nets(net(callbacks=[CountsEpochs()]), measure=scorer, **stored)
    match = rf"layer={layer!r} cannot be measured: .* a layer that each candidate has"
    with pytest.raises(RuntimeError, match=match):
        search.fit(X, Y)
    assert not CountsEpochs.n_epochs
    # nothing is recorded: the corrected call goes on
    found = search.set_params(measure__layer=0).fit(X, Y)
    assert found.minima_["state"].eq("complete").all()
    assert [type(callback) for callback in found.best_estimator_.callbacks] == [CountsEpochs]


# -- one pass over the data -----------------------------------------------------------------------

TRACES = ["relative_flatness", "hessian_trace", "trace_flatness"]
TRACES += ["neuron_flatness_sum", "neuron_flatness_max"]
# The first batch, here all samples, runs once more for all measures together: a class of the
# user's may use the weight of a layer outside of its call, which only a run with a graph shows.
FIRST_BATCH = len(X)


class Counting(MLP):
    """Counts the samples that pass it, in training and in evaluation."""

    n_samples = 0

    def forward(self, x):
        Counting.n_samples += len(x)
        return super().forward(x)


@pytest.mark.parametrize("names", [TRACES, TRACES[:1], [*TRACES, "gradient_norm"]])
def test_measures_take_one_pass_more_than_the_training(names, tmp_path):
    sizes = {"n_features": 4, "n_outputs": 3, "hidden_layer_sizes": (8, 8)}
    counting = NeuralNet(
        Counting, criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.5, batch_size=10, verbose=0,
        **{f"module__{name}": value for name, value in sizes.items()},
    )  # fmt: skip
    options = {"measure": names, "artifact_store": tmp_path, "refit": True}
    search = search_nets(counting, {"lr": [0.5]}, **options)
    Counting.n_samples = 0
    (row,) = search.fit(X, Y).minima_.to_dict("records")
    assert Counting.n_samples == (3 + 1) * len(X) + FIRST_BATCH
    assert attributes_of(search.study_.trials[0])["artifact_id"]
    fitted = search.best_estimator_
    assert_allclose([row[name] for name in names], [measure(n, fitted, X, Y) for n in names], 1e-6)
    probabilities = fitted.forward(X).double().softmax(dim=1)
    assert_allclose(row["train_loss"], log_loss(Y, probabilities), rtol=1e-6)
    if names == TRACES[:1]:
        Counting.n_samples = 0
        assert search.remeasure(TRACES)[TRACES].notna().all(axis=None)
        assert Counting.n_samples == len(X) + FIRST_BATCH


# -- networks whose loss is zero ------------------------------------------------------------------

BLOBS = make_blobs(60, 5, centers=3, random_state=0)
SATURATES = 1e5


class Gain(MLP):
    """Multiplies its outputs, so that a network without errors has no loss at all."""

    def __init__(self, n_features, n_outputs, gain=1.0):
        super().__init__(n_features, n_outputs)
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x)


def search_gains(max_epochs=40, **parameters):
    gains = RelativeFlatnessRegularizedClassifier(Gain, max_epochs=max_epochs, verbose=0)
    space = {"module__gain": [1.0, SATURATES], "batch_size": [16, 32]}
    return make_search(gains, space, **parameters)


def test_saturated_networks_rank_behind_all_minima():
    with pytest.warns(FlatnessWarning, match="2 of 4 candidates are no minima(.|\n)*saturated"):
        found = search_gains(goal=0.02).fit(*BLOBS)
    table = found.minima_
    assert table["param_module__gain"].tolist() == [1.0, 1.0, SATURATES, SATURATES]
    assert table["converged"].tolist() == [True, True, False, False]
    assert (table["relative_flatness"][:2] > 0.1).all()
    assert (table["relative_flatness"][2:] == 0).all()
    assert found.best_params_["module__gain"] == 1.0
    # a sampler that learns is not drawn to them, and the mean has them
    values = [trial.value for trial in found.study_.get_trials()]
    assert np.isinf(values).tolist() == [False, False, True, True]
    assert len(found.ensemble_.estimators) == 4


@pytest.mark.parametrize(
    ("name", "params", "fleet"),
    [("comparable_flatness", None, 4), ("hessian_trace", {"at_loss": 0.1}, None)],
)
def test_at_equal_loss_networks_of_all_depths_are_ranked(name, params, fleet, tmp_path):
    # without a warning, and without a goal: nine epochs are too few for a plateau
    names = [FlatnessScorer(name, measure_params=params), "gradient_norm"]
    options = {"measure": names, "fleet": fleet, "artifact_store": tmp_path}
    found = search_gains(9, goal=None, **options).fit(*BLOBS)
    table = found.minima_
    assert table["depth"].max() > 1e3 * table["depth"].min()
    assert table[["converged", "comparable"]].all(axis=None)
    assert set(table["ended_by"]) == {"equal loss"}
    assert table[name].is_monotonic_increasing
    again = measure(name, found.best_estimator_, *BLOBS, **(params or {}))
    assert table[name][0] == pytest.approx(again, rel=1e-4)
    assert table["train_loss"].min() == 0  # that of the networks, not of the temperature
    if params is None:
        assert rank_minima(found.study_, name)["comparable"].all()
    others = [FlatnessScorer("neuron_flatness_sum", measure_params=params), "trace_flatness"]
    remeasured = found.remeasure(others)
    assert (remeasured["neuron_flatness_sum"] > 0).all() == (params is not None)
    assert not (remeasured["trace_flatness"] > 0).all()


def test_the_mean_has_networks_that_have_learned_but_do_not_reach_the_common_loss():
    inputs, labels = make_classification(200, 5, flip_y=0.3, random_state=0)
    noisy = RelativeFlatnessRegularizedClassifier(max_epochs=20, verbose=0)
    found = make_search(noisy, {"batch_size": [16, 32]}, measure="comparable_flatness")
    with pytest.warns(FlatnessWarning, match="no candidate converged"):
        found.fit(inputs.astype(np.float32), labels)
    assert found.minima_["state"].tolist() == ["complete", "complete"]
    assert found.minima_["comparable_flatness"].isna().all()
    assert len(found.ensemble_.estimators) == 2


# -- arguments of fit and of score ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "prefix", "n_jobs"), [(net(), "", 2), (piped(net()), "net__", None)]
)
def test_weights_count_in_training_and_measures_also_later(estimator, prefix, n_jobs, tmp_path):
    weights, options = {f"{prefix}sample_weight": WEIGHTS}, {"sample_weight": WEIGHTS}
    space = {f"{prefix}lr": [0.01, 0.02]}
    search = search_nets(estimator, space, n_jobs=n_jobs, artifact_store=tmp_path)
    best = search.fit(X, Y, **weights).best_estimator_
    alone = clone(estimator).set_params(**search.best_params_).fit(X, Y, **weights)
    assert_allclose(best.predict_proba(X), alone.predict_proba(X), rtol=1e-5)
    copied = pickle.loads(pickle.dumps(search))
    row = copied.remeasure(["trace_flatness"], X, Y, **weights).iloc[0]
    for name in ("relative_flatness", "trace_flatness"):
        assert_allclose(row[name], measure(name, best, X, Y, **options), rtol=1e-6)
    assert_allclose(row["train_score"], np.average(best.predict(X) == Y, weights=WEIGHTS))
    losses = -np.log(best.predict_proba(X)[np.arange(len(X)), Y])
    assert_allclose(row["train_loss"], np.average(losses, weights=WEIGHTS), rtol=1e-4)
    number = int(search.minima_["trial"].iloc[1])
    again = copied.get_estimator(number, X, Y, **weights)
    assert_array_equal(again.predict_proba(X), search.get_estimator(number).predict_proba(X))


class Asks(LogisticRegression):
    """Records what its `fit` is given."""

    def fit(self, X, y, sample_weight=None, mark=None):
        self.mark_ = mark
        return super().fit(X, y, sample_weight=sample_weight)


def test_other_arguments_of_fit_and_metadata_routing():
    asks, space = Asks(max_iter=1000), {"C": [1.0]}
    search = make_search(asks, space).fit(X, Y, mark="text", sample_weight=None)
    assert search.best_estimator_.mark_ == "text"
    with sklearn.config_context(enable_metadata_routing=True):
        with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError, match="sample_weight"):
            make_search(asks, space).fit(X, Y, sample_weight=WEIGHTS)
        search = make_search(asks.set_fit_request(sample_weight=True, mark=False), space)
        pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), search)
        pipeline.fit(X, Y, sample_weight=WEIGHTS)
        inputs = StandardScaler().fit_transform(X)
        expected = clone(MODEL).fit(inputs, Y, sample_weight=WEIGHTS)
        assert_allclose(pipeline.predict_proba(X), expected.predict_proba(inputs))


@pytest.mark.parametrize("how", [{}, {"fleet": 2}, {"n_jobs": 2}], ids=str)
def test_candidates_are_trained_with_the_configuration_of_scikit_learn(how):
    """A thread and a process have one of their own; nobody asked for weights in `score`."""
    with sklearn.config_context(enable_metadata_routing=True):
        scaler, net = (
            x.set_fit_request(sample_weight=True) for x in (StandardScaler(), make_net())
        )
        search = make_search(
            Pipeline([("scale", scaler), ("net", net)]), {"net__lr": [0.05]}, **how
        )
        search.fit(X, Y, sample_weight=WEIGHTS)
    for _, row in search.minima_.iterrows():
        model = search.get_estimator(row["trial"])
        assert_allclose(model[0].mean_, np.average(X, axis=0, weights=WEIGHTS), atol=1e-6)
        right = np.average(model.predict(X) == Y, weights=WEIGHTS)
        assert row["train_score"] == pytest.approx(right)


@pytest.mark.parametrize("refit", ["mean", True])
def test_score_takes_weights_by_metadata_routing_as_scikit_learns_searches_do(refit):
    space, weights = {"C": [0.5, 0.6]}, np.arange(len(X)) + 1.0
    search = make_search(MODEL, space, refit=refit).fit(X, Y)
    with pytest.raises(ValueError, match=r"score was given \['sample_weight'\]"):
        search.score(X, Y, sample_weight=weights)
    with sklearn.config_context(enable_metadata_routing=True):
        for other in (search, GridSearchCV(MODEL, space).fit(X, Y)):
            with pytest.raises(sklearn.exceptions.UnsetMetadataPassedError, match="sample_wei"):
                other.score(X, Y, sample_weight=weights)
        asking = clone(MODEL).set_score_request(sample_weight=True)
        search = make_search(asking, space, refit=refit).fit(X, Y)
        right = np.average(search.predict(X) == Y, weights=weights)
        assert search.score(X, Y, sample_weight=weights) == pytest.approx(right)
        assert search.score(X, Y) != pytest.approx(right)

"""What searches rank by: functions of your own, all in one pass, networks whose loss is zero."""

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import make_blobs, make_classification
from sklearn.linear_model import LogisticRegression
from skorch import NeuralNet
from torch import nn

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessScorer,
    FlatnessWarning,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    correlate_measures,
    measure,
    rank_minima,
)
from relflat_sk.search import _measure
from tests.search.examples import X_TEST, Y_TEST, X, Y, attributes_of, logistic, train_one

MODEL = LogisticRegression(max_iter=1000)
SPACE = {"C": [0.3, 1.0, 3.0]}


def coefficients(model, X, y, *, order=2):
    return float(np.linalg.norm(model.coef_.ravel(), ord=order))


def largest_weight(model, X, y):
    return float(np.abs(model.coef_).max()), 0.0


def expected(C, order=2):
    return np.linalg.norm(LogisticRegression(max_iter=1000, C=C).fit(X, Y).coef_.ravel(), ord=order)


def test_a_search_ranks_by_a_function(tmp_path):
    search = logistic(SPACE, measure=[coefficients, "relative_flatness"])
    search.fit(X, Y, X_TEST, Y_TEST)
    table = search.minima_
    assert list(table.columns[:4]) == ["trial", "param_C", "coefficients", "train_loss"]
    assert table["param_C"].tolist() == [0.3, 1.0, 3.0]
    assert table["coefficients"].is_monotonic_increasing
    assert search.best_score_ == pytest.approx(-table["coefficients"].iloc[0])
    assert {"coefficients", "relative_flatness"} <= set(correlate_measures(search)["measure"])
    page = search.report(tmp_path / "minima.html").read_text(encoding="utf-8")
    assert "ranked by coefficients" in page


def test_a_single_function_with_arguments_and_an_objective():
    scorer = FlatnessScorer(coefficients, measure_params={"order": 1})
    search = logistic(SPACE, measure=scorer).fit(X, Y)
    row = search.minima_.set_index("param_C").loc[1.0]
    assert row["coefficients"] == pytest.approx(expected(1.0, order=1), rel=1e-9)
    objective = MinimaObjective(MODEL, X, Y, SPACE, measures=[largest_weight, "train_loss"])
    study = optuna.create_study(directions=["minimize"] * 2)
    study.optimize(objective, 2)
    names = ["largest_weight", "train_loss"]
    assert all(trial.values == [trial.user_attrs[n] for n in names] for trial in study.trials)


def test_remeasuring_by_name_and_by_function(kept):
    search = logistic(SPACE, **kept).fit(X, Y)
    table = search.remeasure([coefficients, largest_weight]).set_index("param_C")
    for C in SPACE["C"]:
        assert table.loc[C, "coefficients"] == pytest.approx(expected(C), rel=1e-9)
        assert table.loc[C, "largest_weight"] < table.loc[C, "coefficients"]

    def smallest_weight(model, X, y):
        return float(np.abs(model.coef_).min())

    # under the same name, another function would add numbers that cannot be compared
    smallest_weight.__name__ = "coefficients"
    with pytest.raises(ValueError, match="measure coefficients: "):
        search.remeasure([smallest_weight])
    assert search.remeasure(coefficients)["coefficients"].notna().all()  # one is enough


def test_a_measure_that_is_not_finite_is_no_minimum():
    def nowhere(model, X, y):
        return np.inf

    message = r"no candidate converged.*\n  3 x cannot be ranked: nowhere is inf"
    with pytest.warns(FlatnessWarning, match=message):
        search = logistic(SPACE, measure=nowhere).fit(X, Y)
    assert not search.minima_["converged"].any()


TRACES = [
    "relative_flatness",
    "hessian_trace",
    "trace_flatness",
    "neuron_flatness_sum",
    "neuron_flatness_max",
]
N_EPOCHS = 3
# The first batch, here all samples, runs once more for all measures together: a class of the
# user's may use the weight of a layer outside of its call, which only a run with a graph shows.
FIRST_BATCH = len(X)


class Counting(MLP):
    """Counts the samples that pass it, in training and in evaluation."""

    n_samples = 0

    def forward(self, x):
        Counting.n_samples += len(x)
        return super().forward(x)


@pytest.fixture(autouse=True)
def _nothing_counted():
    Counting.n_samples = 0


def counting_net(kind=NeuralNet, **parameters):
    return kind(
        Counting,
        criterion=nn.CrossEntropyLoss,
        module__n_features=4,
        module__n_outputs=3,
        module__hidden_layer_sizes=(8, 8),
        max_epochs=N_EPOCHS,
        lr=0.5,
        batch_size=10,
        verbose=0,
        **parameters,
    )


def run(net, **parameters):
    """Run a trial; return its attributes, the net and the samples that passed the module."""
    parameters = {"measure": TRACES, "goal": None, **parameters}
    _, attrs, fitted = train_one(net, {"batch_size": [10]}, **parameters)
    return attrs, fitted, Counting.n_samples


@pytest.mark.parametrize("names", [TRACES, TRACES[:1], [*TRACES, "gradient_norm"]])
def test_measures_take_one_pass_more_than_the_training(names, tmp_path):
    attrs, fitted, n_samples = run(counting_net(), measure=names, artifact_store=tmp_path)
    assert n_samples == (N_EPOCHS + 1) * len(X) + FIRST_BATCH
    assert attrs["artifact_id"]
    for name in names:
        assert_allclose(attrs[name], measure(name, fitted, X, Y), rtol=1e-6)
    outputs = fitted.forward(X).double()
    loss = nn.CrossEntropyLoss()(outputs, torch.from_numpy(Y))
    assert_allclose(attrs["train_loss"], float(loss), rtol=1e-6)


def test_remeasuring_takes_one_pass(tmp_path):
    search = FlatMinimaSearch(
        counting_net(),
        {"batch_size": [10]},
        measure="l2_norm",
        goal=1.0,
        artifact_store=tmp_path,
        random_state=0,
    ).fit(X, Y)
    Counting.n_samples = 0
    table = search.remeasure(TRACES)
    assert Counting.n_samples == len(X) + FIRST_BATCH
    assert np.isfinite(table[TRACES].to_numpy()).all()


def test_the_loss_is_recorded_also_if_a_measure_fails(monkeypatch, tmp_path):
    def fails(*args, **kwargs):
        raise RuntimeError("cannot be measured")

    monkeypatch.setattr(_measure, "measure_network", fails)
    objective = MinimaObjective(counting_net(), X, Y, {"batch_size": [10]}, artifact_store=tmp_path)
    trial = optuna.create_study().ask()
    with pytest.raises(RuntimeError, match="cannot be measured"):
        objective(trial)
    attrs = attributes_of(trial)
    assert attrs["reason"] == "RuntimeError: cannot be measured"
    assert attrs["train_loss"] > 0
    assert (attrs["converged"], attrs["failed"]) == (False, True)
    assert attrs["seconds"] >= 0
    assert "relative_flatness" not in attrs
    assert "artifact_id" not in attrs


BLOBS = make_blobs(60, 5, centers=3, random_state=0)
SATURATES = 1e5


class Gain(MLP):
    """Multiplies its outputs, so that a network without errors has no loss at all."""

    def __init__(self, n_features, n_outputs, gain=1.0):
        super().__init__(n_features, n_outputs)
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x)


def search_gains(gains, **params):
    net = RelativeFlatnessRegularizedClassifier(Gain, max_epochs=40, verbose=0)
    space = {"module__gain": gains, "batch_size": [16, 32]}
    return FlatMinimaSearch(net, space, **{"goal": 0.02, "random_state": 0, **params})


def test_saturated_networks_rank_behind_all_minima():
    with pytest.warns(FlatnessWarning, match="2 of 4 candidates are no minima(.|\n)*saturated"):
        found = search_gains([1.0, SATURATES]).fit(*BLOBS)
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
    found = search_gains(
        [1.0, SATURATES], measure=[FlatnessScorer(name, measure_params=params), "gradient_norm"],
        goal=None, fleet=fleet, artifact_store=tmp_path,
    ).set_params(estimator__max_epochs=9).fit(*BLOBS)  # fmt: skip
    table = found.minima_
    assert table["depth"].max() > 1e3 * table["depth"].min()
    assert table["converged"].all()
    assert table["comparable"].all()
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
    X, y = make_classification(200, 5, flip_y=0.3, random_state=0)
    net = RelativeFlatnessRegularizedClassifier(max_epochs=20, verbose=0)
    found = FlatMinimaSearch(
        net, {"batch_size": [16, 32]}, measure="comparable_flatness", random_state=0
    )
    with pytest.warns(FlatnessWarning, match="no candidate converged"):
        found.fit(X.astype(np.float32), y)
    assert found.minima_["state"].tolist() == ["complete", "complete"]
    assert found.minima_["comparable_flatness"].isna().all()
    assert len(found.ensemble_.estimators) == 2

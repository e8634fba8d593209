"""A network whose loss has rounded to 0 has no flatness, and does not win a search."""

import numpy as np
import pytest
from sklearn.datasets import make_blobs

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessScorer,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    measure,
    rank_minima,
)

X, Y = make_blobs(60, 5, centers=3, random_state=0)
SATURATES = 1e5


class Gain(MLP):
    """Multiplies its outputs, so that a network without errors has no loss at all."""

    def __init__(self, n_features, n_outputs, gain=1.0):
        super().__init__(n_features, n_outputs)
        self.gain = gain

    def forward(self, x):
        return self.gain * super().forward(x)


def search(gains, **params):
    net = RelativeFlatnessRegularizedClassifier(Gain, max_epochs=40, verbose=0)
    space = {"module__gain": gains, "batch_size": [16, 32]}
    return FlatMinimaSearch(net, space, **{"goal": 0.02, "random_state": 0, **params})


@pytest.mark.parametrize("fleet", [None, 4])
def test_saturated_networks_rank_behind_all_minima(fleet):
    with pytest.warns(FlatnessWarning, match="2 of 4 candidates are no minima(.|\n)*saturated"):
        found = search([1.0, SATURATES], fleet=fleet).fit(X, Y)
    table = found.minima_
    assert table["param_module__gain"].tolist() == [1.0, 1.0, SATURATES, SATURATES]
    assert table["converged"].tolist() == [True, True, False, False]
    assert (table["relative_flatness"][:2] > 0.1).all()
    assert (table["relative_flatness"][2:] == 0).all()
    assert found.best_params_["module__gain"] == 1.0
    # a sampler that learns is not drawn to them
    values = [trial.value for trial in found.study_.get_trials() if trial.value is not None]
    assert len(values) == 2
    assert np.isfinite(values).all()


def test_only_saturated_networks():
    message = "no candidate has a curvature to compare.*train to a larger loss"
    with pytest.warns(FlatnessWarning, match=message):
        found = search([SATURATES]).fit(X, Y)
    assert not found.minima_["converged"].any()
    assert found.score(X, Y) == 1


@pytest.mark.parametrize("fleet", [None, 4])
@pytest.mark.parametrize(
    ("name", "params"), [("comparable_flatness", None), ("hessian_trace", {"at_loss": 0.1})]
)
def test_at_equal_loss_networks_of_all_depths_are_ranked(name, params, fleet, tmp_path):
    # without a warning, and without a goal: nine epochs are too few for a plateau
    found = search(
        [1.0, SATURATES], measure=[FlatnessScorer(name, measure_params=params), "gradient_norm"],
        goal=None, fleet=fleet, artifact_store=tmp_path,
    ).set_params(estimator__max_epochs=9).fit(X, Y)  # fmt: skip
    table = found.minima_
    assert table["depth"].max() > 1e3 * table["depth"].min()
    assert table["converged"].all()
    assert table["comparable"].all()
    assert set(table["ended_by"]) == {"equal loss"}
    assert table[name].is_monotonic_increasing
    again = measure(name, found.best_estimator_, X, Y, **(params or {}))
    assert table[name][0] == pytest.approx(again, rel=1e-4)
    assert table["train_loss"].min() == 0  # that of the networks, not of the temperature
    if params is None:
        assert rank_minima(found.study_, name)["comparable"].all()
    others = [FlatnessScorer("neuron_flatness_sum", measure_params=params), "trace_flatness"]
    remeasured = found.remeasure(others)
    assert (remeasured["neuron_flatness_sum"] > 0).all() == (params is not None)
    assert not (remeasured["trace_flatness"] > 0).all()


def test_a_network_that_has_not_fitted_has_no_rank_at_equal_loss():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=20, lr=0.1, verbose=0)
    space = {"data__random_labels": [0.0, 1.0], "batch_size": [16, 32]}
    found = FlatMinimaSearch(net, space, measure="comparable_flatness", goal=None, random_state=0)
    with pytest.warns(FlatnessWarning, match="no temperature gives the loss of at_loss=0.05"):
        table = found.fit(X, Y).minima_
    assert table["param_data__random_labels"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert table["converged"].tolist() == [True, True, False, False]
    assert table["comparable_flatness"].isna().tolist() == [False, False, True, True]
    assert table["reason"][2].startswith("cannot be ranked: comparable_flatness is nan, no temper")

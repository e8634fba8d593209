"""Searches rank by measures of your own: tables, processes, remeasuring, resumed studies."""

import numpy as np
import optuna
import pytest
from sklearn.linear_model import LogisticRegression

from relflat_sk import (
    FlatnessScorer,
    FlatnessWarning,
    MeasurePanelsDisplay,
    MinimaObjective,
    correlate_measures,
    register_measure,
)
from relflat_sk.measures._names import _REGISTERED
from tests.search.examples import X_TEST, Y_TEST, X, Y, logistic

MODEL = LogisticRegression(max_iter=1000)
SPACE = {"C": [0.3, 1.0, 3.0]}


def coefficients(model, X, y, *, order=2):
    return float(np.linalg.norm(model.coef_.ravel(), ord=order))


def largest_weight(model, X, y):
    return float(np.abs(model.coef_).max()), 0.0


@pytest.fixture(autouse=True)
def registry():
    """Forget what a test registers."""
    before = dict(_REGISTERED)
    yield
    _REGISTERED.clear()
    _REGISTERED.update(before)


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
    pytest.importorskip("matplotlib")
    panels = MeasurePanelsDisplay.from_minima(search)
    assert any(axis.get_xlabel() == "coefficients" for axis in panels.axes_)


def test_a_single_function_with_arguments_and_an_objective():
    scorer = FlatnessScorer(coefficients, measure_params={"order": 1})
    search = logistic(SPACE, measure=scorer).fit(X, Y)
    row = search.minima_.set_index("param_C").loc[1.0]
    assert row["coefficients"] == pytest.approx(expected(1.0, order=1), rel=1e-9)
    objective = MinimaObjective(MODEL, X, Y, SPACE, measures=[largest_weight, "train_loss"])
    study = optuna.create_study(
        directions=["minimize"] * 2, sampler=optuna.samplers.GridSampler(SPACE, seed=0)
    )
    study.optimize(objective)
    assert all(set(t.user_attrs) >= {"largest_weight", "train_loss"} for t in study.trials)
    assert all(type(key) is str for t in study.trials for key in t.user_attrs)


def test_remeasuring_by_name_and_by_function(tmp_path, stored):
    search = logistic(SPACE, artifact_store=tmp_path / "weights", **stored).fit(X, Y)
    register_measure("size", coefficients)
    table = search.remeasure(["size", largest_weight]).set_index("param_C")
    for C in SPACE["C"]:
        assert table.loc[C, "size"] == pytest.approx(expected(C), rel=1e-9)
        assert table.loc[C, "largest_weight"] < table.loc[C, "size"]

    def largest_weight_of_another_kind(model, X, y):
        return float(np.abs(model.coef_).min())

    # under the same name, another function would add numbers that cannot be compared
    register_measure("size", None)
    register_measure("size", largest_weight_of_another_kind)
    message = r"measures, size: coefficients \(code .* then, largest_weight_of_another_kind"
    with pytest.raises(ValueError, match=message):
        search.remeasure(["size"])
    with pytest.raises(ValueError, match="measures must be a sequence of names, got <function"):
        search.remeasure(coefficients)


def test_a_resumed_study_knows_the_function(tmp_path, stored):
    options = {**stored, "artifact_store": tmp_path / "weights"}
    logistic(SPACE, measure=coefficients, **options).fit(X, Y)
    wider = {"C": [0.3, 1.0, 3.0, 2.0]}
    both = [coefficients, largest_weight]  # may be added: earlier minima are measured again
    table = logistic(wider, measure=both, **options).fit(X, Y).minima_
    assert np.isfinite(table[["coefficients", "largest_weight"]].to_numpy()).all()
    assert len(table) == 4

    def other(model, X, y):
        return 1.0

    other.__name__ = "coefficients"
    with pytest.raises(ValueError, match=r"coefficients: coefficients \(code .* then, other"):
        logistic(wider, measure=other, **options).fit(X, Y)


def test_a_measure_that_is_not_finite_is_no_minimum():
    def nowhere(model, X, y):
        return np.inf

    message = r"no candidate has a finite measure.*\n  3 x cannot be ranked: nowhere is inf"
    with pytest.warns(FlatnessWarning, match=message):
        search = logistic(SPACE, measure=nowhere).fit(X, Y)
    assert not search.minima_["converged"].any()

"""Measures of one's own work wherever a measure's name does."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from relflat_sk import (
    FlatnessScorer,
    LayerFlatnessDisplay,
    flatness_report,
    get_measure_names,
    measure,
    register_measure,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures import evaluate
from relflat_sk.measures._own import _REGISTERED, OwnMeasure, find_measure

X, Y = load_iris(return_X_y=True)
MODEL = LogisticRegression(max_iter=1000).fit(X, Y)


def size_of_weights(model, X, y, *, order=2):
    """The norm of the coefficients, which no other measure computes."""
    return np.linalg.norm(model.coef_.ravel(), ord=order)


def with_error(model, X, y):
    return torch.tensor(3.5, requires_grad=True), np.float32(0.25)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Forget what a test registers."""
    before = dict(_REGISTERED)
    yield
    _REGISTERED.clear()
    _REGISTERED.update(before)


def test_the_function_gets_model_and_data_as_they_were_passed():
    pipeline = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, Y)
    got = []

    def keep(model, X, y):
        got.append((model, X, y))
        return 1

    assert measure(keep, pipeline, X, Y) == 1.0
    model, data, labels = got[0]
    assert model is pipeline
    assert data is X
    assert labels is Y


def test_by_function_and_by_name():
    expected = np.sqrt((MODEL.coef_**2).sum())
    assert measure(size_of_weights, MODEL, X, Y) == pytest.approx(expected, rel=1e-12)
    register_measure("coefficients", size_of_weights, invariance=["own neurons", "layer"])
    assert "coefficients" in get_measure_names()
    found = evaluate("coefficients", MODEL, X, Y)
    assert found.value == pytest.approx(expected, rel=1e-12)
    assert (found.stderr, found.method, found.n_samples) == (0.0, "own", 150)
    assert found.risk == pytest.approx(evaluate("l2_norm", MODEL, X, Y).risk, rel=1e-12)
    one = measure("coefficients", MODEL, X, Y, order=1)
    assert one == pytest.approx(np.abs(MODEL.coef_).sum(), rel=1e-12)
    assert measure("coefficients", MODEL, X, Y, aggregate="max") == found.value


def test_standard_errors_and_reports():
    register_measure("coefficients", size_of_weights, invariance=("own neurons", "layer"))
    names = ["relative_flatness", with_error, "coefficients"]
    report = flatness_report(MODEL, X, Y, measures=names).set_index("measure")
    assert report.index.tolist() == ["relative_flatness", "with_error", "coefficients"]
    assert all(type(name) is str for name in report.index)
    row = report.loc["with_error"]
    assert (row["value"], row["stderr"], row["layer"], row["method"]) == (3.5, 0.25, "", "own")
    assert report["invariance"].tolist() == ["layer, own neurons", "unknown", "layer, own neurons"]
    every = flatness_report(MODEL, X, Y, n_draws=2, n_steps=2)
    assert "coefficients" in set(every["measure"])
    register_measure("coefficients", with_error, invariance=[])  # the new one counts
    again = flatness_report(MODEL, X, Y, measures="coefficients")
    assert again[["value", "invariance"]].to_numpy().tolist() == [[3.5, "none"]]
    register_measure("coefficients", None)
    assert "coefficients" not in get_measure_names()


def test_scores():
    scorer = FlatnessScorer(size_of_weights, measure_params={"order": 1})
    expected = -np.abs(MODEL.coef_).sum()
    assert scorer(MODEL, X, Y) == pytest.approx(expected, rel=1e-12)
    register_measure("coefficients", size_of_weights)
    scoring = {"function": FlatnessScorer(size_of_weights), "name": FlatnessScorer("coefficients")}
    found = cross_validate(MODEL, X, Y, cv=3, scoring=scoring)
    assert (found["test_function"] == found["test_name"]).all()
    assert (found["test_function"] < 0).all()


def test_displays():
    pytest.importorskip("matplotlib")
    display = LayerFlatnessDisplay.from_estimator(
        MODEL, X, Y, measures=["relative_flatness", with_error]
    )
    assert set(display.report["measure"]) == {"relative_flatness", "with_error"}


def test_weights_and_seeds_reach_functions_that_take_them():
    weights = np.arange(150.0)

    def weighted(model, X, y, *, sample_weight=None, random_state=None):
        return sample_weight.sum() + random_state

    assert measure(weighted, MODEL, X, Y, sample_weight=weights, random_state=3) == 11178.0
    with pytest.raises(ValueError, match=r"'size_of_weights' does not take sample weights"):
        measure(size_of_weights, MODEL, X, Y, sample_weight=weights)


def test_a_module_is_in_evaluation_mode_and_returned_as_it_was():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double().train()
    inputs = torch.from_numpy(X)
    modes, state = [], torch.get_rng_state()

    def rude(model, X, y, *, fails=False):
        modes.append(model.training)
        model.train()
        torch.rand(3)
        if fails:
            raise RuntimeError("broken")
        return 1.0

    options = {"criterion": nn.CrossEntropyLoss()}
    assert measure(rude, net, inputs, torch.from_numpy(Y), **options) == 1.0
    net.eval()
    with pytest.raises(RuntimeError, match="broken"):
        measure(rude, net, inputs, torch.from_numpy(Y), fails=True, **options)
    assert modes == [False, False]
    assert not net.training
    assert torch.equal(torch.get_rng_state(), state)


def test_names_hold_their_function_in_other_processes():
    register_measure("coefficients", size_of_weights)
    name = find_measure("coefficients")
    copy = pickle.loads(pickle.dumps(name))
    _REGISTERED.clear()
    assert isinstance(copy, OwnMeasure)
    assert copy == "coefficients"
    assert measure(copy, MODEL, X, Y) == measure(size_of_weights, MODEL, X, Y)


def returns(value):
    def own(model, X, y):
        return value

    return own


@pytest.mark.parametrize(
    "value", ["3", None, [1.0, 2.0], (1.0, 2.0, 3.0), 1j, np.ones(2)],
    ids=["text", "none", "list", "three", "complex", "array"],
)  # fmt: skip
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="the measure 'own' must return a number, or a pair"):
        measure(returns(value), MODEL, X, Y)


def test_errors():
    with pytest.raises(ValueError, match=r"the measure 'own' returned a standard error of -1"):
        measure(returns((1.0, -1.0)), MODEL, X, Y)
    for one in (lambda model, X, y: 1.0, partial(size_of_weights, order=1)):
        with pytest.raises(ValueError, match=r"has no name for its column: define it by def"):
            measure(one, MODEL, X, Y)
    with pytest.raises(TypeError, match=r"'radius' is no argument of size_of_weights"):
        measure(size_of_weights, MODEL, X, Y, radius=1)
    with pytest.raises(ValueError, match=r"weight_decay cannot be counted into size_of_weights"):
        measure(size_of_weights, MODEL, X, Y, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"per_sample=True needs .* got 'size_of_weights'"):
        measure(size_of_weights, MODEL, X, Y, per_sample=True)
    with pytest.raises(ValueError, match=r"there is no measure 'coefficients'; choose from .*func"):
        measure("coefficients", MODEL, X, Y)

    def train_loss(model, X, y):
        return 1.0

    with pytest.raises(ValueError, match=r"'train_loss' is a measure or a column of relflat_sk"):
        measure(train_loss, MODEL, X, Y)


@pytest.mark.parametrize("name", ["l2_norm", "rank", "param_lr", "artifact_id", "seed", "in_fleet"])
def test_registration_refuses_names_with_a_meaning(name):
    with pytest.raises(ValueError, match=f"'{name}' is a measure or a column of relflat_sk"):
        register_measure(name, size_of_weights)


def test_registration_errors():
    with pytest.raises(TypeError, match="function must be a function of model, X and y, got 3"):
        register_measure("three", 3)
    with pytest.raises(ValueError, match="name must be a text, got 3"):
        register_measure(3, size_of_weights)
    with pytest.raises(ValueError, match=r"invariance must name some of .* got 'all'"):
        register_measure("mine", size_of_weights, invariance="all")
    assert "mine" not in get_measure_names()


def test_in_a_report_of_everything_a_function_that_fails_is_nan():

    def refuses(model, X, y):
        raise ValueError("only for trees")

    register_measure("refusing", refuses)
    with pytest.warns(FlatnessWarning, match="refusing does not apply .*: only for trees"):
        report = flatness_report(MODEL, X, Y, n_draws=2, n_steps=2)
    assert np.isnan(report.set_index("measure").loc["refusing", "value"])

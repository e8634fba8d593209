"""Measures of your own work wherever a measure's name does."""

import inspect
import operator
import pickle
from contextlib import nullcontext
from functools import partial

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from torch import nn

from relflat_sk import (
    FlatnessScorer,
    MinimaObjective,
    flatness_report,
    measure,
    rank_minima,
)
from relflat_sk.exceptions import FlatnessWarning
from relflat_sk.measures._functions import TAKEN
from relflat_sk.measures._measure_network import measure_network, measure_opened
from tests.measures.nets import evaluate
from tests.network.test_network import prepared, same, state_of

X, Y = load_iris(return_X_y=True)
MODEL = LogisticRegression(max_iter=1000).fit(X, Y)


def size_of_weights(model, X, y, *, order=2):
    """The norm of the coefficients, which no other measure computes."""
    return np.linalg.norm(model.coef_.ravel(), ord=order)


def with_error(model, X, y):
    return torch.tensor(3.5, requires_grad=True), np.float32(0.25)


def test_a_function_in_place_of_a_name():
    got = []
    assert measure(lambda model, X, y: got.extend((model, X, y)) or 1, MODEL, X, Y) == 1.0
    assert all(map(operator.is_, got, (MODEL, X, Y)))
    found = evaluate(size_of_weights, MODEL, X, Y)
    assert found.value == pytest.approx(np.sqrt((MODEL.coef_**2).sum()), rel=1e-12)
    assert (found.stderr, found.method, found.passes.n_samples) == (0.0, "function", 150)
    risk = evaluate("l2_norm", MODEL, X, Y).passes.risk
    assert found.passes.risk == pytest.approx(risk, rel=1e-12)
    by_order = measure(size_of_weights, MODEL, X, Y, order=1)
    assert by_order == pytest.approx(np.abs(MODEL.coef_).sum(), rel=1e-12)
    scorer = FlatnessScorer(size_of_weights, measure_params={"order": 1})
    assert scorer(MODEL, X, Y) == clone(scorer)(MODEL, X, Y) == -by_order
    names = ["relative_flatness", with_error, size_of_weights]
    report = flatness_report(MODEL, X, Y, measures=names).set_index("measure")
    assert report.index.tolist() == ["relative_flatness", "with_error", "size_of_weights"]
    row = report.loc["with_error"]
    assert (row["value"], row["stderr"], row["layer"], row["method"]) == (3.5, 0.25, "", "function")
    assert report["invariance"].tolist() == ["layer, own neurons", "unknown", "unknown"]


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "fails"])
def test_a_module_is_in_evaluation_mode_and_returned_as_it_was(fails):
    net, data, labels = prepared()
    before, parameters, modes = state_of(net), list(net.parameters()), []

    def rude(model, X, y):
        modes.append(model.training)
        model.train()
        model(X).sum().backward()
        model.out.weight.data.mul_(2)
        model.body[0].weight = nn.Parameter(torch.zeros(6, 4))
        model.half()
        if fails:
            raise RuntimeError("broken")
        return 1.0

    with pytest.raises(RuntimeError, match="broken") if fails else nullcontext():
        measure(rude, net, data, labels, criterion=nn.CrossEntropyLoss())
    assert modes == [False]
    same(before, state_of(net))
    assert all(map(operator.is_, net.parameters(), parameters))


def test_objectives_go_to_other_processes_with_their_functions():
    objective = MinimaObjective(MODEL, X, Y, {"C": [1.0]}, measures=[size_of_weights])
    study = optuna.create_study()
    study.optimize(pickle.loads(pickle.dumps(objective)), n_trials=1)
    assert study.best_value == pytest.approx(measure(size_of_weights, MODEL, X, Y), rel=0.1)


class Norm:
    def __call__(self, model, X, y, order=1):
        return size_of_weights(model, X, y, order=order)


@pytest.mark.parametrize(
    "callable_", [partial(size_of_weights, order=1), Norm()], ids=["partial", "instance"]
)
def test_what_can_be_called_is_a_measure_and_needs_a_name_in_tables_only(callable_):
    expected = measure(size_of_weights, MODEL, X, Y, order=1)
    assert measure(callable_, MODEL, X, Y) == expected
    assert FlatnessScorer(callable_)(MODEL, X, Y) == -expected
    for use in (
        lambda: flatness_report(MODEL, X, Y, measures=callable_),
        lambda: flatness_report(MODEL, X, Y, measures=lambda *data: expected),
        lambda: MinimaObjective(MODEL, X, Y, {"C": [1.0]}, measures=[callable_]),
        lambda: rank_minima(pd.DataFrame({"l2_norm": [1.0]}), by=callable_),
    ):
        with pytest.raises(ValueError, match=r"has no name for its column: define it by def"):
            use()


@pytest.mark.parametrize("name", sorted(TAKEN))
def test_arguments_that_get_no_value_are_refused(name):
    namespace = {}
    exec(f"def mine(model, X, y, *, {name}=3): return {name}", namespace)
    with pytest.raises(ValueError, match=f"has an argument '{name}', which the functions that"):
        measure(namespace["mine"], MODEL, X, Y)


def test_arguments_of_the_library_are_not_those_of_functions():
    own = set()
    for function in (measure, flatness_report, measure_opened, measure_network):
        own |= inspect.signature(function).parameters.keys()
    assert own - {"params", "model", "X", "y", "sample_weight"} == TAKEN


def mine(net, inputs, labels, scale=1.0, /, power=1, *, random_state=None, sample_weight=(0.0,)):
    return scale + 10 * power + 100 * random_state + 1000 * sum(sample_weight)


def test_all_arguments_behind_model_and_data_reach_the_function():
    options = {"power": 2, "random_state": 3, "sample_weight": np.full(150, 4 / 150)}
    assert measure(mine, MODEL, X, Y, **options) == pytest.approx(4321.0)
    with pytest.raises(TypeError, match=r"'rtol' .*\['power', 'random_state', 'sample_weight'\]"):
        measure(mine, MODEL, X, Y, rtol=0.1)


def trains(model, X, y):
    model.partial_fit(X, y)
    model._note = "not there before"
    return 1.0


def test_training_goes_on_as_if_nothing_had_been_measured():
    """An MLP holds its optimizer and its random numbers in private attributes."""
    model, other = (
        MLPClassifier((4,), random_state=0).partial_fit(X, Y, classes=range(3)) for _ in range(2)
    )
    measure(trains, model, X, Y)
    assert not hasattr(model, "_note")
    weights, expected = (each.partial_fit(X, Y).coefs_ for each in (model, other))
    for found, by_itself in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(found, by_itself)


def test_a_measure_that_is_nan_is_no_sign_of_divergence():
    with pytest.warns(FlatnessWarning, match="cannot be scored: the measure 'own' is nan. With"):
        assert np.isnan(FlatnessScorer(returns(np.nan))(MODEL, X, Y))


def returns(value):
    def own(model, X, y):
        return value

    return own

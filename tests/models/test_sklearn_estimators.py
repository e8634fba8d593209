"""Tests for scikit-learn estimators as modules: every estimator, loss and target encoding."""

import copy
from functools import cache
from inspect import signature

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_array
from scipy.special import expit, log_expit, log_softmax
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import (
    ElasticNet,
    HuberRegressor,
    Lasso,
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.multiclass import OneVsRestClassifier
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.utils import compute_class_weight, compute_sample_weight
from torch import nn

from relflat_sk import measure, relative_flatness
from relflat_sk._models.sklearn_estimators import to_torch

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64 on both sides, sums of a few terms

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 5))
SCORES = X @ RNG.normal(size=(5, 3)) + RNG.normal(size=(60, 3))
TWO = np.array(["no", "yes"])[(SCORES[:, 0] > 0).astype(int)]
THREE = np.array(["a", "b", "c"])[SCORES.argmax(axis=1)]
LABELS = (SCORES > 0).astype(int)
ONE_TARGET = SCORES[:, 0]
THREE_TARGETS = SCORES
COUNTS = RNG.poisson(np.exp(SCORES / 2))

# Names in the oracles below: z is the linear predictor of shape (n, k), t the target as numbers
# of the same shape, and s = +-1 the target of losses of two classes.


def per_class(labels):
    """Make one column of 0 and 1 per class; for two classes, that of the second only."""
    classes = np.unique(labels)
    columns = (np.asarray(labels)[:, None] == classes).astype(float)
    return columns[:, 1:] if len(classes) == 2 else columns


def columns(y):
    return np.asarray(y, dtype=float).reshape(len(y), -1)


def linear(estimator):
    return X @ np.atleast_2d(estimator.coef_).T + estimator.intercept_


HIDDEN = {"identity": lambda z: z, "logistic": expit, "relu": lambda z: z.clip(0), "tanh": np.tanh}


def layered(estimator):
    *hidden, (weight, bias) = zip(estimator.coefs_, estimator.intercepts_, strict=True)
    values = X
    for matrix, shift in hidden:
        values = HIDDEN[estimator.activation](values @ matrix + shift)
    return values @ weight + bias


def logistic(z, t):
    return -(t * log_expit(z) + (1 - t) * log_expit(-z))


def cross_entropy(z, t):
    return -(t * log_softmax(z, axis=1)).sum(axis=1)


def squared(z, t):
    return (z - t) ** 2


def poisson(z, t):
    """Negative log-likelihood up to log t!, which no prediction changes."""
    return np.exp(z) - t * z


def huber(residual, epsilon):
    size = np.abs(residual)
    return np.where(size <= epsilon, size**2 / 2, epsilon * (size - epsilon / 2))


def of_all(loss):
    """Sum a loss over the outputs."""
    return lambda z, t: loss(z, t).sum(axis=1)


def of_signs(columns):
    """Make a column of -1 and 1 of each column of 0 and 1."""
    return lambda y: 2 * columns(y) - 1


def sgd(kind, loss):
    # a poor fit on purpose: samples on every branch of the piecewise losses
    fixed = {"learning_rate": "constant", "eta0": 0.05, "max_iter": 3, "random_state": 0}
    return kind(loss=loss, epsilon=0.3, **fixed)


def mlp(kind, activation="relu", **parameters):
    fixed = {"solver": "lbfgs", "max_iter": 40, "alpha": 0.0, "random_state": 0}
    return kind(hidden_layer_sizes=(6, 4), activation=activation, **fixed, **parameters)


MULTINOMIAL = THREE, linear, cross_entropy, per_class
RIDGES = Ridge(alpha=np.array([1.0, 2.0, 3.0]))
# name -> (estimator, y, its linear predictor, its loss of (z, t), t of y)
CASES = {
    "linear": (LinearRegression(), ONE_TARGET, linear, squared, columns),
    "linear-outputs": (LinearRegression(), THREE_TARGETS, linear, squared, columns),
    "ridge": (Ridge(), ONE_TARGET, linear, squared, columns),
    "ridge-outputs": (RIDGES, THREE_TARGETS, linear, squared, columns),
    "ridge-cv": (RidgeCV(), ONE_TARGET, linear, squared, columns),
    "ridge-two": (RidgeClassifier(), TWO, linear, squared, of_signs(per_class)),
    "ridge-three": (RidgeClassifier(), THREE, linear, squared, of_signs(per_class)),
    "ridge-labels": (RidgeClassifier(), LABELS, linear, squared, of_signs(columns)),
    "ridge-cv-two": (RidgeClassifierCV(), TWO, linear, squared, of_signs(per_class)),
    "ridge-cv-three": (RidgeClassifierCV(), THREE, linear, squared, of_signs(per_class)),
    "ridge-cv-labels": (RidgeClassifierCV(), LABELS, linear, squared, of_signs(columns)),
    "logistic-two": (LogisticRegression(), TWO, linear, logistic, per_class),
    "logistic-three": (LogisticRegression(), *MULTINOMIAL),
    "logistic-no-intercept": (LogisticRegression(fit_intercept=False), *MULTINOMIAL),
    "mlp-two": (mlp(MLPClassifier), TWO, layered, logistic, per_class),
    "mlp-three": (mlp(MLPClassifier, "tanh"), THREE, layered, cross_entropy, per_class),
    "mlp-labels": (mlp(MLPClassifier, "logistic"), LABELS, layered, of_all(logistic), columns),
    "elastic-net": (ElasticNet(alpha=0.1), ONE_TARGET, linear, squared, columns),
    "lasso": (Lasso(alpha=0.1), ONE_TARGET, linear, squared, columns),
    "huber": (HuberRegressor(epsilon=1.1), ONE_TARGET, linear, None, columns),
    "poisson": (PoissonRegressor(), COUNTS[:, 0], linear, poisson, columns),
    "mlp-one-target": (mlp(MLPRegressor), ONE_TARGET, layered, squared, columns),
    "mlp-outputs": (mlp(MLPRegressor, "identity"), THREE_TARGETS, layered, squared, columns),
    "sgd-two": (sgd(SGDClassifier, "log_loss"), TWO, linear, logistic, per_class),
    "sgd-three": (sgd(SGDClassifier, "log_loss"), THREE, linear, of_all(logistic), per_class),
    "sgd-huber": (
        sgd(SGDRegressor, "huber"), ONE_TARGET, linear, lambda z, t: huber(z - t, 0.3), columns,
    ),
    "sgd-squared": (sgd(SGDRegressor, "squared_error"), ONE_TARGET, linear, squared, columns),
}  # fmt: skip
if "loss" in signature(MLPRegressor).parameters:
    counting = mlp(MLPRegressor, loss="poisson")
    CASES["mlp-counts"] = (counting, COUNTS, layered, poisson, columns)


def tensor(array):
    return torch.as_tensor(np.asarray(array))


def outputs(model, inputs=X):
    return model.module(torch.as_tensor(inputs)).detach().numpy()


@cache
def fitted(name):
    estimator, y, *_ = CASES[name]
    return estimator.fit(X, y)


@pytest.mark.parametrize("name", CASES)
def test_module_and_criterion_are_the_estimators(name):
    _, y, predictor, loss, targets = CASES[name]
    if name == "huber":
        loss = lambda z, t: huber(z - t, 1.1 * fitted(name).scale_)  # noqa: E731
    model = to_torch(fitted(name))
    z = outputs(model)
    assert z.ndim == 2
    assert_allclose(z, predictor(fitted(name)), **EXACT)
    value = model.criterion(tensor(z), tensor(model.encode_target(y)))
    assert value.dtype == torch.float64
    # torch's BCE with logits cancels for confident samples: 1e-15 off, absolutely
    assert_allclose(value.item(), loss(z, targets(y)).mean(), **EXACT)
    assert isinstance(model.module[-1], nn.Linear)
    assert not model.module.training


def test_weights_are_copies_and_no_random_number_is_drawn():
    estimator = mlp(MLPClassifier).fit(X, TWO)
    weights = estimator.coefs_ + estimator.intercepts_
    expected, before = copy.deepcopy(weights), torch.get_rng_state()
    model = to_torch(estimator)
    assert_array_equal(torch.get_rng_state(), before)
    for parameter in model.module.parameters():
        parameter.data.add_(1)
    for kept, original in zip(weights, expected, strict=True):
        assert_array_equal(kept, original)


class Mine(Ridge):
    pass


@pytest.mark.parametrize("estimator", [Mine(), SGDRegressor(random_state=0)])
def test_subclasses_and_sparse_coefficients_are_converted(estimator):
    expected = estimator.fit(X, ONE_TARGET).predict(X)
    model = to_torch(estimator.sparsify() if hasattr(estimator, "sparsify") else estimator)
    assert_allclose(outputs(model).ravel(), expected, **EXACT)
    assert model.encode_target(ONE_TARGET).shape == (60, 1)


WEIGHS_BALANCED = "sample_weight" in signature(compute_class_weight).parameters
WEIGHTS = {
    "two": (TWO, {"no": 0.5, "yes": 3.0}),
    "three": (THREE, {"a": 0.5, "c": 3.0}),  # "b" is not named: it weighs 1
}


@pytest.mark.parametrize("at_loss", [None, 0.5])
@pytest.mark.parametrize("balanced", [False, True], ids=["dict", "balanced"])
@pytest.mark.parametrize("classes", WEIGHTS)
def test_class_weights_count_like_sample_weights(classes, balanced, at_loss):
    y, class_weight = WEIGHTS[classes]
    class_weight = "balanced" if balanced else class_weight
    weighted = LogisticRegression(class_weight=class_weight).fit(X, y)
    plain = copy.copy(weighted).set_params(class_weight=None)
    found, expected = (
        relative_flatness(model, X, y, sample_weight=weight, at_loss=at_loss, batch_size=7)
        for model, weight in ((weighted, None), (plain, compute_sample_weight(class_weight, y)))
    )
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.skipif(not WEIGHS_BALANCED, reason="this scikit-learn counts samples")
@pytest.mark.parametrize("classes", WEIGHTS)
def test_weighted_samples_are_balanced_as_in_fit(classes):
    y, _ = WEIGHTS[classes]
    weight = np.arange(60) % 4 * np.where(y == y[0], 3.0, 1.0)
    model = LogisticRegression(class_weight="balanced", tol=1e-10).fit(X, y, sample_weight=weight)
    # the classes' weights leave the sum of the samples' as it is, by which the penalty is divided
    options = {"sample_weight": weight, "weight_decay": 1 / weight.sum()}
    assert measure("gradient_norm", model, X, y, **options) < 1e-6


@pytest.mark.parametrize("balanced", [False, True], ids=["dict", "balanced"])
@pytest.mark.parametrize("classes", WEIGHTS)
def test_weighted_sgd_classifier_weighs_its_samples(classes, balanced):
    y, class_weight = WEIGHTS[classes]
    estimator = sgd(SGDClassifier, "log_loss")
    estimator.set_params(class_weight="balanced" if balanced else class_weight).fit(X, y)
    model, z, t = to_torch(estimator, y), linear(estimator), per_class(y)
    # the weights in fit: those of both classes, or of each class against the rest
    c = estimator._expanded_class_weight
    weights = np.where(t == 1, c[1], c[0]) if classes == "two" else np.where(t == 1, c, 1.0)
    value = model.criterion(tensor(z), tensor(model.encode_target(y))).item()
    assert_allclose(value, (weights * logistic(z, t)).sum(axis=1).mean(), rtol=1e-12)
    assert not np.isclose(value, logistic(z, t).sum(axis=1).mean(), rtol=1e-3)


def test_balanced_weights_ignore_classes_that_the_labels_lack():
    estimator = LogisticRegression(class_weight="balanced").fit(X, THREE)
    model = to_torch(estimator, ["a", "a", "a", "c"])
    assert_allclose(model.criterion.weight, [4 / (2 * 3), 1.0, 4 / (2 * 1)], rtol=1e-12)


OBJECTS = np.array(["x", "y", "z"], dtype=object)


@pytest.mark.parametrize("classes", [["a", "b", "c"], [-1, 5, 7], [0.0, 1, 7], OBJECTS], ids=str)
def test_labels_of_any_type_become_class_indices(classes):
    indices = SCORES.argmax(axis=1)
    labels = np.asarray(classes)[indices]
    encode = to_torch(LogisticRegression().fit(X, labels)).encode_target
    for same in (labels, list(labels), pd.Series(labels), pd.Series(labels, dtype="category")):
        assert_array_equal(encode(same), indices, strict=True)


def test_labels_of_one_or_two_classes_and_indicators_become_columns():
    positive = SCORES[:, 0] > 0
    encode = to_torch(LogisticRegression().fit(X, positive)).encode_target
    for same in (positive, positive[:, None]):
        assert_array_equal(encode(same), positive[:, None].astype(float), strict=True)
    single = mlp(MLPClassifier).fit(X, np.full(60, "only"))
    assert_array_equal(to_torch(single).encode_target(["only"]), [[0.0]])  # the negative class
    encode = to_torch(fitted("mlp-labels")).encode_target
    for same in (LABELS, csr_array(LABELS)):
        assert_array_equal(encode(same), LABELS.astype(float))


@pytest.mark.parametrize(
    ("name", "y", "message"),
    [
        *(
            (name, labels, rf"not fitted on, such as .*{shown}.*; it knows \[")
            for name in ("logistic-two", "sgd-three", "mlp-three")
            for labels, shown in ((["b", "who?", "d"], r"'d', 'who\?'\]"), ([np.nan, 1], "1"))
        ),
        ("mlp-labels", LABELS[:, :2], r"label indicator matrix of shape \(n, 3\)"),
        ("mlp-labels", LABELS + 1, r"label indicator matrix of shape \(n, 3\)"),
        ("linear", np.full(60, np.nan), "y contains NaN"),
        ("linear", TWO, "could not convert string"),
    ],
)
def test_targets_that_do_not_fit(name, y, message):
    with pytest.raises(ValueError, match=message):
        to_torch(fitted(name)).encode_target(y)


def test_a_frozen_estimator_is_the_one_inside():
    model = LogisticRegression().fit(X, THREE)
    expected = relative_flatness(model, X, THREE)
    assert relative_flatness(FrozenEstimator(model), X, THREE) == expected
    with pytest.raises(NotFittedError):
        relative_flatness(FrozenEstimator(LogisticRegression()), X, THREE)


def before_scikit_learn_1_8(y, **params):
    model = LogisticRegression().fit(X, y)
    vars(model).update(params)
    return model


BALANCED = r'"balanced"\) weighs .* which takes labels: pass y'
NO_NETWORK = r"type {} is not a network .* are: ElasticNet, .*LogisticRegression, .*SGDRegressor\."
REFUSED = [
    (sgd(SGDClassifier, "hinge"), TWO, r"SGDClassifier\(loss='hinge'\) .*: log_loss\."),
    (sgd(SGDRegressor, "epsilon_insensitive"), ONE_TARGET, "'epsi.*work: huber, squared_error"),
    (LogisticRegression(class_weight="balanced"), TWO, BALANCED),
    (sgd(SGDClassifier, "log_loss").set_params(class_weight="balanced"), TWO, BALANCED),
    (RidgeClassifier(class_weight="balanced"), TWO, r"ht='balanced'\) weighs.* sample_weight"),
    (before_scikit_learn_1_8(THREE, solver="liblinear"), None, "solver='libl.*of 3 classes"),
    (before_scikit_learn_1_8(THREE, multi_class="ovr"), None, "multi_class='ovr'"),
    (before_scikit_learn_1_8(TWO, multi_class="multinomial"), None, "'multinom.*of 2 classes"),
    (OneVsRestClassifier(LogisticRegression()), TWO, NO_NETWORK.format("OneVsRestCl.*")),
    (RandomForestClassifier(2), TWO, NO_NETWORK.format("RandomForestClassifier")),
    (None, None, "type NoneType is not a network"),
    (LogisticRegression, None, "a fitted instance, not the class LogisticRegression.$"),
    (nn.Linear(5, 1).state_dict(), None, "type OrderedDict is not a net"),
]


@pytest.mark.parametrize(("model", "y", "message"), REFUSED)
def test_models_without_one_loss_are_refused(model, y, message):
    if y is not None:
        model.fit(X, y)
    with pytest.raises(ValueError if "weigh" in message else TypeError, match=message):
        relative_flatness(model, X)

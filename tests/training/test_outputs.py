"""What nets make of outputs: tensors, tuples, mappings; probabilities, logarithms, classes."""

import copy
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_expit, log_softmax
from sklearn.base import clone
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import FleetTrainer, relative_flatness
from tests.rounding import FLOAT32, rounding
from tests.training.common import (
    INDEX,
    LABELS,
    NAMES,
    SIZES,
    TASKS,
    Binary,
    Classifier,
    Net,
    Regressor,
    Stream,
    X,
    criterion_of,
    dataset,
    make,
)


class ModelOutput(OrderedDict):
    """A mapping with attributes, as in the package transformers."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Cache:
    """Something that is no tensor, as the cache of keys and values of a language model."""


class Module(nn.Module):
    """Returns an output of the class's form."""

    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.hidden = nn.Linear(n_features, 8)
        self.head = nn.Linear(8, n_outputs)

    def wrap(self, hidden, logits):
        return logits

    def forward(self, x):
        hidden = torch.relu(self.hidden(x))
        return self.wrap(hidden, self.head(hidden))


class Dict(Module):
    def wrap(self, hidden, logits):
        return {"hidden": hidden, "logits": logits}


class HuggingFace(Module):
    def wrap(self, hidden, logits):
        states = (hidden, logits)
        return ModelOutput(logits=logits, past_key_values=Cache(), hidden_states=states)


class Pair(Module):
    def wrap(self, hidden, logits):
        return logits, hidden


class NoLogits(Module):
    def wrap(self, hidden, logits):
        return {"scores": logits}


@pytest.mark.parametrize("task", TASKS)
def test_mappings_and_tuples_equal_tensors(task):
    kind, y = TASKS[task]

    def results(net):
        return [
            net.predict(X) if task == "regression" else net.predict_proba(X),
            net.score(X, y),
            net.history[:, "valid_loss"],
            net.relative_flatness_,
            relative_flatness(net, X, y),
        ]

    plain, *others = (
        make(kind, module=module, train_split=ValidSplit(3)).fit(X, y)
        for module in (Module, Dict, HuggingFace, Pair)
    )
    for wrapped in others:
        for found, expected in zip(results(wrapped), results(plain), strict=True):
            assert_allclose(found, expected, **rounding(6))
        if task != "regression":
            assert_array_equal(wrapped.predict(X), plain.predict(X))


def both_parts(output, target):
    """Takes the module's mapping."""
    loss = nn.functional.cross_entropy(output["logits"], target)
    return loss + 0.01 * output["hidden"].square().mean()


def scores(output, target):
    return nn.functional.cross_entropy(output["scores"], target)


def misspelt(output, target):
    return output["logit"].mean()


@pytest.mark.parametrize(
    ("params", "error", "match"),
    [
        ({"module": Dict, "criterion": criterion_of(both_parts)}, ValueError, "whole output"),
        ({"module": NoLogits, "criterion": criterion_of(scores)}, ValueError, "whole output"),
        ({"module": Dict, "criterion": criterion_of(misspelt)}, ValueError, "KeyError: 'logit'"),
        ({"module": NoLogits}, TypeError, "'logits', got dict"),
        ({"predict_nonlinearity": "softmax"}, TypeError, "predict_nonlinearity"),
    ],
)
def test_outputs_that_cannot_be_read_are_refused(params, error, match):
    with pytest.raises(error, match=match):
        make(flatness_weight=0, **params).fit(X, NAMES).predict(X)


class Softmax(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, n_outputs), nn.Softmax(dim=1))


class Sigmoid(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, n_outputs), nn.Sigmoid())


@pytest.mark.parametrize(
    ("kind", "params", "y"),
    [
        (Classifier, {"module": Dict}, NAMES),
        (Classifier, {"module": Softmax, "criterion": nn.NLLLoss}, NAMES),
        (Classifier, {"predict_nonlinearity": torch.sigmoid}, NAMES),
        (Binary, {}, INDEX > 0),
        (Binary, {}, LABELS),
        (Binary, {"module": Sigmoid, "criterion": nn.BCELoss}, INDEX > 0),
        (Net, {"criterion": nn.BCEWithLogitsLoss}, INDEX > 0),
    ],
)
def test_logarithm_of_the_probabilities(kind, params, y):
    net = make(kind, **params).fit(X, y)
    found, expected = net.predict_log_proba(X), net.predict_proba(X)
    assert found.dtype == expected.dtype
    assert_allclose(found, np.log(expected), rtol=1e-4, atol=1e-6)
    assert expected.shape == (42, len(net.classes_))
    assert len(net.predict(X)) == 42


def _nll_of_probabilities(p, y):
    return nn.functional.nll_loss(p.log(), y)


@pytest.mark.parametrize(
    ("kind", "function", "y"),
    [
        (Classifier, nn.functional.cross_entropy, NAMES),
        (Binary, nn.functional.binary_cross_entropy_with_logits, INDEX > 0),
        (Binary, nn.functional.binary_cross_entropy_with_logits, LABELS),
    ],
    ids=["classes", "binary", "labels"],
)
def test_criteria_of_ones_own_predict_as_those_of_torch(kind, function, y):
    expected, net = (
        make(kind, flatness_weight=0, **own).fit(X, y)
        for own in ({}, {"criterion": criterion_of(function)})
    )
    assert_allclose(net.predict_proba(X), expected.predict_proba(X), rtol=1e-4)
    assert_array_equal(net.predict(X), expected.predict(X))
    assert_allclose(net.predict_log_proba(X), expected.predict_log_proba(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("nonlinearity", ["auto", None])
@pytest.mark.parametrize(
    ("kind", "function", "module", "y"),
    [
        (Classifier, _nll_of_probabilities, Softmax, NAMES),
        (Binary, nn.functional.binary_cross_entropy, Sigmoid, INDEX > 0),
        (Binary, nn.functional.binary_cross_entropy, Sigmoid, LABELS),
    ],
    ids=["classes", "binary", "labels"],
)
def test_criteria_of_ones_own_may_take_the_modules_probabilities(
    kind, function, module, y, nonlinearity, tmp_path
):
    params = {"criterion": criterion_of(function), "module": module, "flatness_weight": 0}
    params["predict_nonlinearity"] = nonlinearity
    net = make(kind, **params, max_epochs=30).fit(X, y)
    with torch.no_grad():
        p = net.module_(torch.tensor(X)).numpy()
    expected = p if p.shape[1] > 1 else np.hstack([1 - p, p])
    assert_allclose(net.predict_proba(X), expected, rtol=FLOAT32)
    assert_allclose(net.predict_log_proba(X), np.log(expected), rtol=1e-4, atol=1e-6)
    labels = p > 0.5 if y is LABELS else net.classes_[expected.argmax(axis=1)]
    assert_array_equal(net.predict(X), labels)
    assert len(np.unique(labels)) > 1
    # weights that were trained elsewhere, in a net that has seen no data
    net.save_params(f_params=tmp_path / "weights.pt")
    for method in ("predict", "predict_proba", "predict_log_proba"):
        sizes = {"module__n_features": X.shape[1], "module__n_outputs": p.shape[1]}
        other = make(kind, **params, **sizes).initialize()
        other.load_params(f_params=tmp_path / "weights.pt")
        found, expected = getattr(other, method)(X), getattr(net, method)(X)
        if method == "predict" and y is not LABELS:
            expected = np.searchsorted(net.classes_, expected)
        assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert not make(kind, **params, **sizes).initialize().forward(X).requires_grad


class Brier(nn.MSELoss):
    """The user's own, although its class is of torch's losses of a regression."""

    def forward(self, p, y):
        return super().forward(p, nn.functional.one_hot(y, p.shape[1]).to(p))


def test_each_net_of_a_fleet_knows_that_its_module_returns_probabilities():
    params = {"module": Softmax, "criterion": Brier, "flatness_weight": 0}
    nets = [make(Classifier, **params, random_state=seed) for seed in range(3)]
    for net, alone in zip(FleetTrainer(nets, fleet=3).fit(X, NAMES).estimators_, nets, strict=True):
        with torch.no_grad():
            assert_allclose(net.predict_proba(X), net.module_(torch.tensor(X)), rtol=FLOAT32)
        assert_allclose(net.predict_proba(X), alone.fit(X, NAMES).predict_proba(X), **rounding(9))


def test_a_sigmoid_for_each_class_gives_shares():
    params = {"criterion": criterion_of(_nll_of_probabilities), "module": Sigmoid}
    net = make(Classifier, **params, flatness_weight=0).fit(X, NAMES)
    assert_allclose(net.predict_proba(X).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("y", [INDEX > 0, LABELS], ids=["binary", "labels"])
def test_labels_are_those_of_the_criterion_where_outputs_are_returned_as_they_are(y, own):
    criterion = criterion_of(nn.functional.binary_cross_entropy_with_logits)
    params = {"criterion": criterion} if own else {}
    net = make(Binary, predict_nonlinearity=None, flatness_weight=0, **params).fit(X, y)
    logits = net.predict_proba(X)
    logits = logits[:, 1:] if y is not LABELS else logits
    assert ((logits > 0) & (logits < 0.5)).any()
    assert_array_equal(net.predict(X).reshape(len(X), -1), logits > 0)


@pytest.mark.parametrize("task", ["classes", "binary", "labels"])
def test_no_logarithm_of_zero(task):
    kind, y = TASKS[task]
    net = make(kind, module__hidden_layer_sizes=()).fit(X, y)
    far = 1000 * X
    (logits,) = (z.double().numpy() for z in [torch.cat(list(net.forward_iter(far)))])
    assert (net.predict_proba(far) == 0).any()
    expected = log_softmax(logits, axis=1) if task == "classes" else log_expit(logits)
    if task == "binary":
        expected = np.hstack([log_expit(-logits), expected])
    assert_allclose(net.predict_log_proba(far), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("data", [dataset, Stream])
def test_classes_are_those_of_the_outputs(data):
    # one class more than there are labels
    net = make(module__n_features=4, module__n_outputs=4)
    assert not hasattr(net, "classes_")
    net.fit(data())
    assert net.predict_proba(X).shape == (42, 4)
    assert net.predict(X).dtype.kind == "i"
    for again in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_array_equal(again.classes_, np.arange(4))
        assert relative_flatness(again, X, INDEX) == pytest.approx(net.relative_flatness_, rel=1e-5)
    assert not hasattr(clone(net), "classes_")


def test_classes_of_other_tasks():
    positive = (INDEX > 0).astype("f4")[:, None]
    net = make(Binary, module__n_features=4, module__n_outputs=1).fit(dataset(positive))
    assert_array_equal(net.classes_, [0, 1])
    assert net.predict(X).shape == (42,)
    assert relative_flatness(net, X, positive) > 0  # targets as they were
    net = make(Binary, **SIZES).fit(dataset(LABELS.astype("f4")))
    assert_array_equal(net.classes_, [0, 1, 2])
    assert net.predict(X).shape == (42, 3)
    net = make(Regressor, module__n_features=4, module__n_outputs=1).fit(dataset(X[:, :1]))
    assert not hasattr(net, "classes_")
    assert net.predict(X).shape == (42, 1)

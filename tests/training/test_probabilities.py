"""Logarithms of probabilities, and the classes of nets that are trained on a data set."""

import copy
import pickle

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from scipy.special import log_expit, log_softmax
from sklearn.base import clone
from sklearn.metrics import get_scorer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from relflat_sk import (
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
    relative_flatness,
)

N = 60
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 3)).astype(np.float32)
Y = X.argmax(axis=1)
NAMES = np.array(["a", "b", "c"])[Y]
SETTINGS = {"max_epochs": 3, "verbose": 0, "random_state": 0}
SIZES = {"module__n_features": 3, "module__n_outputs": 3}
Classifier = RelativeFlatnessRegularizedClassifier
Binary = RelativeFlatnessRegularizedBinaryClassifier


class Softmax(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, n_outputs), nn.Softmax(dim=1))


class Sigmoid(nn.Sequential):
    def __init__(self, n_features, n_outputs):
        super().__init__(nn.Linear(n_features, n_outputs), nn.Sigmoid())


class WithLogits(nn.Module):
    def __init__(self, n_features, n_outputs):
        super().__init__()
        self.layer = nn.Linear(n_features, n_outputs)

    def forward(self, x):
        return {"logits": self.layer(x)}


class WithHidden(WithLogits):
    def forward(self, x):
        return self.layer(x), x


# -- logarithms of probabilities -----------------------------------------------------------


@pytest.mark.parametrize(
    ("net", "y"),
    [
        (Classifier(**SETTINGS), NAMES),
        (Classifier(WithLogits, **SETTINGS), NAMES),
        (Classifier(WithHidden, **SETTINGS), NAMES),
        (Classifier(Softmax, criterion=nn.NLLLoss, **SETTINGS), NAMES),
        (Classifier(predict_nonlinearity=torch.sigmoid, **SETTINGS), NAMES),
        (Binary(**SETTINGS), Y > 0),
        (Binary(**SETTINGS), np.eye(3, dtype=int)[Y]),
        (Binary(Sigmoid, criterion=nn.BCELoss, **SETTINGS), Y > 0),
        (RelativeFlatnessRegularizedNet(criterion=nn.BCEWithLogitsLoss, **SETTINGS), Y > 0),
    ],
    ids=lambda value: getattr(getattr(value, "criterion", None), "__name__", ""),
)
def test_logarithm_of_the_probabilities(net, y):
    net.fit(X, y)
    found, expected = net.predict_log_proba(X), net.predict_proba(X)
    assert found.dtype == expected.dtype
    assert_allclose(found, np.log(expected), rtol=1e-4, atol=1e-6)
    assert expected.shape == (N, len(net.classes_))
    assert len(net.predict(X)) == N


class OwnCrossEntropy(nn.Module):
    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target)


class OwnBinaryCrossEntropy(nn.Module):
    def forward(self, output, target):
        return nn.functional.binary_cross_entropy_with_logits(output, target)


@pytest.mark.parametrize(
    ("kind", "criterion", "y"),
    [(Classifier, OwnCrossEntropy, NAMES), (Binary, OwnBinaryCrossEntropy, Y > 0)],
    ids=["classes", "binary"],
)
def test_criteria_of_ones_own_predict_as_those_of_torch(kind, criterion, y):
    settings = SETTINGS | {"flatness_weight": 0}
    expected, net = (kind(**settings, **own).fit(X, y) for own in ({}, {"criterion": criterion}))
    assert_allclose(net.predict_proba(X), expected.predict_proba(X), rtol=1e-4)
    assert_array_equal(net.predict(X), expected.predict(X))
    assert_allclose(net.predict_log_proba(X), expected.predict_log_proba(X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["classes", "binary", "labels"])
def test_no_logarithm_of_zero(kind):
    estimator, y = {
        "classes": (Classifier, NAMES),
        "binary": (Binary, Y > 0),
        "labels": (Binary, np.eye(3, dtype=int)[Y]),
    }[kind]
    net = estimator(module__hidden_layer_sizes=(), **SETTINGS).fit(X, y)
    far = 1000 * X
    (logits,) = (z.double().numpy() for z in [torch.cat(list(net.forward_iter(far)))])
    probabilities = net.predict_proba(far)
    assert (probabilities == 0).any()
    expected = log_softmax(logits, axis=1) if kind == "classes" else log_expit(logits)
    if kind == "binary":
        expected = np.hstack([log_expit(-logits), expected])
    assert_allclose(net.predict_log_proba(far), expected, rtol=1e-5, atol=1e-6)


def test_zero_from_the_module_itself():
    net = Classifier(Softmax, criterion=nn.NLLLoss, **SETTINGS).fit(X, NAMES)
    assert net.predict_log_proba(1000 * X).min() == -np.inf


def test_in_a_pipeline():
    pipeline = make_pipeline(StandardScaler(), Classifier(**SETTINGS)).fit(X, NAMES)
    assert pipeline.predict_log_proba(X).shape == (N, 3)


def test_only_classifiers_have_logarithms():
    with pytest.raises(AttributeError, match="predict_log_proba"):
        RelativeFlatnessRegularizedRegressor().predict_log_proba(X)


# -- classes of data sets ------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return zip(torch.tensor(X), torch.tensor(Y), strict=True)


def make_dataset(y=Y):
    return TensorDataset(torch.tensor(X), torch.tensor(y))


@pytest.mark.parametrize("make", [make_dataset, Stream])
def test_classes_are_those_of_the_outputs(make):
    few = {"module__n_features": 3, "module__n_outputs": 4}  # one class more than there are labels
    net = Classifier(**few, **SETTINGS)
    assert not hasattr(net, "classes_")
    net.fit(make())
    assert_array_equal(net.classes_, np.arange(4))
    assert net.predict_proba(X).shape == (N, 4)
    assert net.predict(X).dtype.kind == "i"
    for again in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert_array_equal(again.classes_, np.arange(4))
        assert relative_flatness(again, X, Y) == pytest.approx(net.relative_flatness_, rel=1e-5)
    assert not hasattr(clone(net), "classes_")


def test_scorers_of_scikit_learn_take_the_classes():
    net = Classifier(**SIZES, **SETTINGS).fit(make_dataset())
    assert get_scorer("roc_auc_ovr")(net, X, Y) > 0.5
    assert get_scorer("neg_log_loss")(net, X, Y) < 0


def test_classes_of_binary_and_multilabel_tasks():
    net = Binary(module__n_features=3, module__n_outputs=1, **SETTINGS)
    net.fit(make_dataset((Y > 0).astype("f4")[:, None]))
    assert_array_equal(net.classes_, [0, 1])
    assert net.predict(X).shape == (N,)
    assert relative_flatness(net, X, (Y > 0).astype("f4")[:, None]) > 0  # targets as they were
    net = Binary(**SIZES, **SETTINGS).fit(make_dataset(np.eye(3, dtype="f4")[Y]))
    assert_array_equal(net.classes_, [0, 1, 2])
    assert net.predict(X).shape == (N, 3)


def test_labels_of_arrays_replace_those_of_data_sets():
    net = Classifier(**SIZES, **SETTINGS).fit(make_dataset())
    net.partial_fit(make_dataset())
    assert_array_equal(net.classes_, [0, 1, 2])
    net.fit(X, NAMES)
    assert_array_equal(net.classes_, ["a", "b", "c"])
    assert set(net.predict(X)) <= set("abc")
    net.fit(make_dataset())
    assert_array_equal(net.classes_, [0, 1, 2])


class Failing(Stream):
    def __iter__(self):
        raise OSError("the stream has ended")


def test_a_failed_training_on_a_data_set_leaves_the_classes():
    net = Classifier(**SIZES, **SETTINGS).fit(make_dataset())
    with pytest.raises(OSError, match="ended"):
        net.partial_fit(Failing())
    assert_array_equal(net.classes_, [0, 1, 2])


def test_labels_of_arrays_after_a_data_set():
    net = Classifier(**SIZES, **SETTINGS).partial_fit(make_dataset())
    assert_array_equal(net.partial_fit(X, NAMES).classes_, ["a", "b", "c"])
    assert net.n_features_in_ == 3


def test_outputs_of_several_axes_tell_no_classes():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 4)

        def forward(self, x):
            return self.layer(x[:, :, None]).transpose(1, 2)

    targets = RNG.integers(0, 4, size=(N, 3))
    net = Classifier(Tokens, **SETTINGS).fit(make_dataset(targets))
    assert not hasattr(net, "classes_")
    assert net.predict(X).shape == (N, 3)
    assert relative_flatness(net, X, targets) > 0


def test_a_data_set_of_numbers_tells_no_outputs():
    net = RelativeFlatnessRegularizedRegressor(
        module__n_features=3, module__n_outputs=1, **SETTINGS
    ).fit(make_dataset(X[:, :1]))
    assert not hasattr(net, "classes_")
    assert net.predict(X).shape == (N, 1)

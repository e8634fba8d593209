"""What nets refuse to be trained on or with: one table of data, parameters, errors and texts."""

import numpy as np
import pytest
import torch
from skorch.dataset import ValidSplit
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from relflat_sk import (
    LayerNotFoundError,
    RelativeFlatnessRegularizedBinaryClassifier,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedNet,
    RelativeFlatnessRegularizedRegressor,
    StopAtLoss,
)

Net = RelativeFlatnessRegularizedNet
Classifier = RelativeFlatnessRegularizedClassifier
Binary = RelativeFlatnessRegularizedBinaryClassifier
Regressor = RelativeFlatnessRegularizedRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(42, 4)).astype(np.float32)
INDEX = X[:, :3].argmax(axis=1)
NAMES = np.array(["x", "y", "z"])[INDEX]
VALUES = (X @ np.array([1.0, -2.0, 0.5, 0.0])).astype(np.float32)
SIZES = {"module__n_features": 4, "module__n_outputs": 3}


def spoilt(value):
    bad = X.copy()
    bad[3, 2] = value
    return bad


def samples(labels):
    return TensorDataset(torch.tensor(X), torch.tensor(labels))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(INDEX))


LOADER = DataLoader(samples(INDEX), batch_size=30)
DATA = [
    (Classifier, spoilt(np.nan), NAMES, "contains NaN"),
    (Classifier, spoilt(np.inf), NAMES, "contains infinity"),
    (Classifier, torch.tensor(spoilt(np.nan)), NAMES, "contains NaN or infinity"),
    (Classifier, {"x": spoilt(np.nan)}, NAMES, "X contains NaN"),
    (Classifier, X, NAMES[:-1], "X has 42 samples, y has 41 labels"),
    (Classifier, X[:0], NAMES[:0], r"0 sample\(s\)"),
    (Classifier, torch.tensor(X[:0]), NAMES[:0], "nothing to learn from"),
    (Classifier, X[:, 0], NAMES, "Expected 2D array, got 1D"),
    (Classifier, torch.tensor(X[:, 0]), NAMES, r"X must have shape \(n_samples, n_features"),
    (Classifier, X, ["x"] * 42, r"at least two classes in y, got one class: \['x'\]"),
    (Classifier, X, None, "requires y to be passed, but the target y is None"),
    (Classifier, X, VALUES, "Unknown label type: continuous"),
    (Classifier, X, np.where(INDEX == 0, np.nan, INDEX), "Input y contains NaN"),
    (Classifier, X, X[:, :2], "y should be a 1d array"),
    (Classifier, np.array([["a", "b"]] * 42), NAMES, "not compatible with arrays of"),
    (Classifier, samples(INDEX), None, "n_features and n_outputs, .* no data yet, and a Dataset"),
    (Binary, X, NAMES, "Only binary classification is supported"),
    (Regressor, X, np.where(INDEX == 0, np.nan, VALUES), "Input y contains NaN"),
    (Regressor, X, np.where(INDEX == 0, np.inf, VALUES), "Input y contains infinity"),
    (Regressor, X, VALUES[:-1], "X has 42 samples, y has 41 labels"),
    (Regressor, X, NAMES, "could not convert string to float"),
    (Regressor, X, None, "requires y to be passed"),
]


@pytest.mark.parametrize(("kind", "inputs", "y", "message"), DATA, ids=[row[-1] for row in DATA])
def test_data(kind, inputs, y, message):
    with pytest.raises(ValueError, match=message):
        kind(verbose=0, batch_size=16).fit(inputs, y)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"flatness_weight": np.nan}, ValueError, "must be a finite number, got nan"),
        ({"flatness_weight": np.inf}, ValueError, "flatness_weight must be a finite"),
        ({"flatness_weight": np.nan}, ValueError, "flatness_weight must be a finite"),
        ({"flatness_weight": "1"}, ValueError, "flatness_weight must be a finite"),
        ({"flatness_warmup": -1}, ValueError, "flatness_warmup must be a finite"),
        ({"flatness_warmup": True}, ValueError, "flatness_warmup must be a finite"),
        ({"flatness_probes": 0}, ValueError, "flatness_probes must be a positive integer, got 0"),
        ({"flatness_layer": "nope"}, LayerNotFoundError, "no layer 'nope'. Layers with a weight"),
        ({"flatness_layer": 2}, LayerNotFoundError, "there is no layer 2"),
        ({"flatness_layer": "activation0"}, LayerNotFoundError, "is a ReLU, which has no weight"),
        ({"flatness_layer": []}, ValueError, "at least one layer"),
        ({"flatness_layer": None}, TypeError, "layer must be an int"),
        ({"flatness_layer": nn.Linear(2, 2)}, TypeError, "or a dotted name, got a module"),
        ({"module__n_outputs": 2}, ValueError, r"y has .* takes 3 output.*\(16, 2\) for a batch"),
        ({"module__n_outputs": 5}, ValueError, r"y has .* takes 3 output.*\(16, 5\) for a batch"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a class, such as .*, got 'adam'"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, TypeError, "be a class, such"),
        ({"criterion": "cross_entropy"}, TypeError, "CrossEntropyLoss, got 'cross_entropy'"),
        (
            {"criterion": nn.functional.cross_entropy},
            TypeError,
            "got the function cross_entropy. A net makes",
        ),
        ({"criterion": nn.MSELoss}, ValueError, "MSELoss is a regression loss. Use Relative"),
        ({"criterion__weight": "balanced"}, TypeError, "order of classes_, got 'balanced'"),
        ({"criterion__weight": {0: 1.0, 1: 2.0}}, TypeError, "criterion__weight must be .*got {0"),
        ({"criterion__weight": [1.0, 2.0]}, ValueError, r"weight has 2 .* classes \['x', 'y', 'z"),
        ({"callbacks": StopAtLoss(0.1)}, TypeError, "must be a list, such as .* got StopAtLoss"),
        (
            {"iterator_train__collate_fn": default_collate},
            ValueError,
            "which iterator_train__collate_fn may not expect",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_parameters(params, error, message):
    net = Classifier(verbose=0, batch_size=16, **params)  # nothing happens before fit
    with pytest.raises(error, match=message):
        net.fit(X, NAMES, sample_weight=np.ones(42) if "iterator" in str(params) else None)


@pytest.mark.parametrize(
    ("kind", "y", "params", "message"),
    [
        (Binary, INDEX > 0, {"criterion": nn.CrossEntropyLoss}, "is a classification loss. Use"),
        (Binary, INDEX > 0, {"module__n_outputs": 2}, r"takes 1 output.*\(16, 2\)"),
        (Regressor, VALUES, {"criterion": nn.BCEWithLogitsLoss}, "is a binary loss. Use Relative"),
        (Regressor, VALUES, {"module__n_outputs": 2}, r"takes 1 output.*\(16, 2\)"),
        (Regressor, X[:, :2], {"module__n_outputs": 1}, r"takes 2 output.*\(16, 1\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parameters_of_other_tasks(kind, y, params, message):
    net = kind(verbose=0, batch_size=16, max_epochs=1, **params)
    with pytest.raises(ValueError, match=message):
        net.fit(X, y)


@pytest.mark.parametrize(
    ("data", "params", "weights", "message"),
    [
        (Stream(), {"batch_size": -1}, None, "stands for all samples, but the Stream is a stream"),
        (Stream(), {"train_split": ValidSplit(3)}, None, "holds out a share .*predefined_split"),
        (Stream(), {}, np.ones(42), "one weight for each sample, but the Stream is a stream"),
        (LOADER, {"batch_size": 10}, None, "batch_size=30, which makes the .* has batch_size=10"),
        (
            LOADER,
            {"iterator_train__num_workers": 2},
            None,
            "__num_workers of the net has",
        ),
        (LOADER, {"train_split": ValidSplit(3)}, None, "holds out a share"),
        (samples(INDEX + 1), {}, None, "y must hold class indices from 0 to 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_sets_and_loaders(data, params, weights, message):
    net = Classifier(verbose=0, **SIZES, **params)
    with pytest.raises(ValueError, match=message):
        net.fit(data, sample_weight=weights)
    assert not net.history or "train_loss" not in net.history[-1]


def test_sizes_before_there_are_data():
    with pytest.raises(ValueError, match="Pass module__n_features=..., module__n_outputs=..."):
        Net().initialize()

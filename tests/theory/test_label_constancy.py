"""Constancy of labels against distances of all pairs."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.utils.data import TensorDataset

from relflat_sk import label_constancy
from tests.theory.problems import CE, network, regression

EACH = nn.CrossEntropyLoss(reduction="none")


def nearest(features, k):
    distances = cdist(features, features)
    np.fill_diagonal(distances, np.inf)
    return np.argsort(distances, axis=1)[:, :k]


@pytest.mark.parametrize("layer", [-1, 0])
@pytest.mark.parametrize("batch_size", [40, 7])
def test_neighbours_by_brute_force(layer, batch_size):
    net, X, y = network()
    near = nearest(X if layer == 0 else net[:-1](X).detach(), 3)
    options = {"layer": layer, "n_neighbors": 3, "batch_size": batch_size}
    expected = (y.numpy()[near] == y.numpy()[:, None]).mean()
    assert label_constancy(net, X, y, **options) == pytest.approx(expected, rel=1e-12)
    output = net(X).detach()
    rises = [EACH(output[at], y) - EACH(output[at], y[at]) for at in near.T]
    found = label_constancy(net, X, y, by="loss", **options, **CE)
    assert found == pytest.approx(float(torch.stack(rises).mean()), rel=1e-9)


def test_by_loss_with_class_weights_it_is_the_difference_of_two_means():
    net, X, y = network(n=30)
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 8.0, 2.0, 0.5]).double())
    output, near = net(X).detach(), nearest(net[:-1](X).detach(), 1)[:, 0]
    expected = criterion(output[near], y) - criterion(output[near], y[near])
    found = label_constancy(net, X, y, n_neighbors=1, by="loss", criterion=criterion)
    assert found == pytest.approx(float(expected), rel=1e-9)


def test_by_loss_of_a_regression():
    model, X, y = regression()
    predicted, near = model.predict(X), nearest(X, 2)
    expected = np.mean((predicted[near] - y[:, None]) ** 2 - (predicted[near] - y[near]) ** 2)
    assert label_constancy(model, X, y, n_neighbors=2, by="loss") == pytest.approx(expected)


def test_labels_of_any_kind():
    X, y = load_iris(return_X_y=True)
    names = load_iris().target_names[y]
    expected = label_constancy(LogisticRegression(max_iter=1000).fit(X, y), X, y)
    assert label_constancy(LogisticRegression(max_iter=1000).fit(X, names), X, names) == expected
    net = nn.Linear(4, 3).double()
    assert label_constancy(net, X, np.eye(3)[y]) == expected
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
    assert label_constancy(net, data, None) == expected


@pytest.mark.parametrize("by", ["labels", "loss"])
@pytest.mark.parametrize(("batch_size", "ignored"), [(1024, -100), (3, -1)])
def test_samples_whose_labels_are_ignored_are_left_out(by, batch_size, ignored):
    net, X, y = network()
    missing = torch.where(torch.arange(len(y)) % 3 == 0, ignored, y)
    known = missing >= 0
    criterion = nn.CrossEntropyLoss(ignore_index=ignored)
    options = {"by": by, "n_neighbors": 3, "criterion": criterion}
    expected = label_constancy(net, X[known], y[known], **options)
    found = label_constancy(net, X, missing, batch_size=batch_size, **options)
    assert found == pytest.approx(expected)
    assert label_constancy(net, X, y, **options) != pytest.approx(expected)

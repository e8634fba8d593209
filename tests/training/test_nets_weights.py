"""Sample weights in training: repeated samples, by hand, and through scikit-learn's ways."""

import copy

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn import config_context
from sklearn.model_selection import cross_validate
from skorch.dataset import ValidSplit
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from relflat_sk import relative_flatness
from tests.training import common
from tests.training.common import (
    INDEX,
    LABELS,
    NAMES,
    ROWS,
    SIZES,
    VALUES,
    WEIGHTS,
    Binary,
    Classifier,
    Double,
    Net,
    Regressor,
    same,
)

X = common.X.astype(np.float64)
PLAIN = {"flatness_weight": 0}


def make(kind=Classifier, **params):
    """Make a net in float64."""
    defaults = {"module": Double, "flatness_weight": 1.0, "optimizer": torch.optim.SGD}
    return common.make(kind, **{**defaults, "batch_size": 32, **params})


class Fourth(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, output, target):
        losses = (output - target).pow(4)
        return losses.mean() if self.reduction == "mean" else losses


REPEATED = {
    "classes": (Classifier, NAMES, {}),
    "class weights": (Classifier, NAMES, {"criterion__weight": [1.0, 5.0, 0.2]}),
    "smoothing": (Classifier, NAMES, {"criterion__label_smoothing": 0.2}),
    "sum of classes": (Classifier, NAMES, {"criterion__reduction": "sum", "lr": 1e-3}),
    "binary": (Binary, INDEX > 0, {"criterion__pos_weight": torch.tensor([3.0]).double()}),
    "multi-label": (Binary, LABELS, {}),
    "regression": (Regressor, VALUES, {}),
    "sum of outputs": (Regressor, X[:, :2], {"criterion__reduction": "sum", "lr": 1e-3}),
    "counts": (Net, INDEX, {"criterion": nn.PoissonNLLLoss}),
    "L1": (Regressor, VALUES, {"criterion": nn.L1Loss, **PLAIN}),
    "unknown": (Regressor, VALUES, {"criterion": Fourth, "lr": 1e-3, **PLAIN}),
}


@pytest.mark.parametrize("name", REPEATED)
def test_weights_are_repetitions_where_a_batch_holds_all_data(name):
    kind, y, params = REPEATED[name]
    params = {"batch_size": -1, "lr": 0.1, "max_epochs": 5, **params}
    weighted = make(kind, **params).fit(X, y, sample_weight=WEIGHTS)
    repeated = make(kind, **params).fit(X[ROWS], y[ROWS])
    same(weighted, repeated, rtol=1e-10, atol=1e-12)
    assert weighted.relative_flatness_ == pytest.approx(repeated.relative_flatness_, rel=1e-9)
    history, other = weighted.history[-1], repeated.history[-1]
    assert history["train_loss"] == pytest.approx(other["train_loss"], rel=1e-9)
    assert history["flatness_penalty"] == pytest.approx(other["flatness_penalty"], rel=1e-9)
    with pytest.raises(AssertionError):  # and they make a difference
        same(weighted, make(kind, **params).fit(X, y), rtol=1e-6, atol=1e-6)


def test_a_batch_without_weight_teaches_nothing():
    weights = np.r_[np.ones(10), np.zeros(32)]
    params = {"batch_size": 10, "max_epochs": 4, "iterator_train__shuffle": False}
    net = make(**params).fit(X, NAMES, sample_weight=weights)
    same(net, make(**params).fit(X[:10], NAMES[:10]), rtol=1e-10, atol=1e-12)


def weighted_terms(module, weight, x, y):
    """The loss, and kappa by the curvature diag(p) - p p^T of a softmax, at the last layer."""
    features, shares = module.activation0(module.hidden0(x)), weight[y] / weight[y].sum()
    logits, W = module[-1](features), module[-1].weight
    p = logits.softmax(1)
    curvature = p @ W.square().sum(1) - (p @ W).square().sum(1)
    kappa = shares @ (features.square().sum(1) * curvature)
    return shares @ nn.functional.cross_entropy(logits, y, reduction="none"), kappa


class ByAutograd(Classifier):
    def infer(self, x, **fit_params):
        return super().infer(x, **fit_params)


@pytest.mark.parametrize("kind", [Classifier, ByAutograd])
@pytest.mark.parametrize("penalty", [0, 1.0])
@pytest.mark.parametrize("absent", [0, 2])
def test_classes_of_weight_zero_teach_nothing(kind, penalty, absent):
    """Rows are in the order of the classes, so that some batches have no weight at all."""
    order, weight = np.argsort(INDEX, kind="stable"), torch.tensor([1.0, 3.0, 2.0]).double()
    weight[absent] = 0
    criterion = nn.CrossEntropyLoss(weight=weight)
    options = {"iterator_train__shuffle": False, "flatness_weight": penalty, "flatness_clip": None}
    net = make(kind, criterion=criterion, batch_size=7, max_epochs=0, **options)
    net.fit(X[order], INDEX[order])
    module, data = copy.deepcopy(net.module_), torch.as_tensor(X[order])
    net.set_params(max_epochs=2).partial_fit(X[order], INDEX[order])
    optimizer, labels = torch.optim.SGD(module.parameters(), net.lr), torch.as_tensor(INDEX[order])
    for x, y in [*zip(data.split(7), labels.split(7), strict=True)] * 2:
        if (y == absent).all():
            continue
        optimizer.zero_grad()
        loss, kappa = weighted_terms(module, weight, x, y)
        (loss + penalty * kappa / (2 * 6)).backward()
        optimizer.step()
    torch.testing.assert_close(net.module_.state_dict(), module.state_dict(), rtol=1e-9, atol=1e-11)
    assert np.isfinite(net.history[:, "train_loss"]).all()
    loss, kappa = weighted_terms(module, weight, data, labels)
    shares = torch.bincount(labels, weight[labels]) / weight[labels].sum()
    assert relative_flatness(net, X[order], INDEX[order], batch_size=7) == pytest.approx(
        kappa.item(), rel=1e-9
    )
    comparison = net.constant_comparison_
    assert comparison.loss == pytest.approx(loss.item(), rel=1e-6)
    assert comparison.constant_loss == pytest.approx(torch.special.entr(shares).sum().item())


def test_an_unknown_criterion_must_tell_samples_apart():
    with pytest.raises(ValueError, match="expected one for each sample"):
        make(Regressor, criterion=common.Quartic).fit(X, VALUES, sample_weight=WEIGHTS)


class Own(Dataset):
    """A data set of which nobody knows how it makes samples."""

    def __len__(self):
        return 42

    def __getitem__(self, i):
        return X[i], INDEX[i]


TENSORS = TensorDataset(torch.tensor(X), torch.tensor(INDEX))
EACH, DRAWN = np.arange(42), np.arange(42) // 2
# arguments of fit, and the rows that the samples are
KINDS = {
    "mapping": (({"input": X}, INDEX), EACH),
    "tensors": ((TENSORS, None), EACH),
    "own": ((Own(), None), EACH),
    "drawn subset": ((Subset(TENSORS, DRAWN), None), DRAWN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_of_any_data(kind):
    data, rows = KINDS[kind]
    params = {**SIZES, "batch_size": 8}
    expected = make(**params).fit(X[rows], INDEX[rows], sample_weight=WEIGHTS)
    net = make(**params).fit(*data, sample_weight=WEIGHTS)
    same(net, expected, rtol=1e-10, atol=1e-12)
    assert net.relative_flatness_ == pytest.approx(expected.relative_flatness_, rel=1e-9)


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_are_split_and_shuffled_along(workers):
    weights = WEIGHTS + 1  # none of the batches is empty
    split = ValidSplit(3, stratified=True)
    params = {"train_split": split, "iterator_train__shuffle": True, "batch_size": 7}
    net = make(**params, iterator_train__num_workers=workers)
    net.fit(X, NAMES, sample_weight=weights)
    train, valid = split(net.get_dataset(X, INDEX), INDEX)
    rows = np.repeat(train.indices, weights[train.indices])
    truth = relative_flatness(net, X[rows], NAMES[rows])
    assert net.relative_flatness_ == pytest.approx(truth, rel=1e-9)

    rows = [valid.indices[:7], valid.indices[7:]]  # two batches
    losses = []
    for part in rows:
        log_p = np.log(net.predict_proba(X[part]))[np.arange(len(part)), INDEX[part]]
        losses.append(-np.average(log_p, weights=weights[part]))
    mean = np.average(losses, weights=[len(part) for part in rows])
    assert net.history[-1, "valid_loss"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("convert", [
    np.ndarray.tolist, torch.tensor, lambda weights: pd.Series(weights, index=range(100, 142)),
], ids=["list", "tensor", "series"])  # fmt: skip
def test_weights_of_any_kind(convert):
    net = make().fit(X, NAMES, sample_weight=convert(WEIGHTS))
    same(net, make().fit(X, NAMES, sample_weight=WEIGHTS.astype(float)))


def test_training_goes_on_with_other_weights():
    net = make(batch_size=-1).partial_fit(X, NAMES, sample_weight=WEIGHTS)
    net.partial_fit(X, NAMES).partial_fit(X, NAMES, sample_weight=WEIGHTS)
    by_hand = make(batch_size=-1).fit(X[ROWS], NAMES[ROWS])
    by_hand.partial_fit(X, NAMES).partial_fit(X[ROWS], NAMES[ROWS])
    same(net, by_hand, rtol=1e-10, atol=1e-12)
    warm = make(batch_size=-1, warm_start=True)
    for weights in (WEIGHTS, None, WEIGHTS):
        warm.fit(X, NAMES, sample_weight=weights)
    same(warm, net)


def test_metadata_routing():
    def first_fitted(net, **params):
        found = cross_validate(net, X, NAMES, cv=2, return_estimator=True, **params)
        return found["estimator"][0]

    weighted = {"params": {"sample_weight": WEIGHTS}}
    with config_context(enable_metadata_routing=True):
        with pytest.raises(ValueError, match="sample_weight.* but are not explicitly set"):
            first_fitted(make(), **weighted)
        asking, other = (
            make().set_fit_request(sample_weight=asks).set_score_request(sample_weight=not asks)
            for asks in (True, False)
        )
        asking, other = first_fitted(asking, **weighted), first_fitted(other, **weighted)
        requests = make().set_partial_fit_request(sample_weight=True).get_metadata_routing()
        assert "sample_weight" in str(requests)
    same(asking, first_fitted(make(), **weighted))
    same(other, first_fitted(make()))

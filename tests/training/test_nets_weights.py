"""Sample weights in training: repeated samples, by hand, and through scikit-learn's ways."""

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.model_selection import cross_validate
from skorch.dataset import ValidSplit
from torch import nn
from torch.testing import assert_close
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
    results_of,
    same,
)

X = common.X.astype(np.float64)
PLAIN = {"flatness_weight": 0}


def make(kind=Classifier, **params):
    defaults = {"module": Double, "flatness_weight": 1.0, "optimizer": torch.optim.SGD}
    return common.make(kind, **{**defaults, "batch_size": 32, **params})


class Fourth(nn.MSELoss):
    def forward(self, output, target):
        return super().forward((output - target).square(), torch.zeros_like(output))


REPEATED = {
    "classes": (Classifier, NAMES, {}),
    "class weights": (Classifier, NAMES, {"criterion__weight": np.array([0.2, 5.0, 1.0])[::-1]}),
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
    backwards = np.array(WEIGHTS[::-1], dtype=float)  # torch takes no reversed views
    weighted = make(kind, **params).fit(X, y, sample_weight=backwards[::-1])
    repeated = make(kind, **params).fit(X[ROWS], y[ROWS])
    same(weighted, repeated, rtol=1e-10, atol=1e-12)
    assert_close(results_of(weighted, X), results_of(repeated, X), rtol=1e-9, atol=1e-12)
    with pytest.raises(AssertionError):  # and they make a difference
        same(weighted, make(kind, **params).fit(X, y), rtol=1e-6, atol=1e-6)


def test_a_batch_without_weight_teaches_nothing():
    weights = np.r_[np.ones(10), np.zeros(32)]
    params = {"batch_size": 10, "max_epochs": 4, "iterator_train__shuffle": False}
    net = make(**params).fit(X, NAMES, sample_weight=weights)
    same(net, make(**params).fit(X[:10], NAMES[:10]), rtol=1e-10, atol=1e-12)


class ByAutograd(Classifier):
    def infer(self, x, **fit_params):
        return super().infer(x, **fit_params)


@pytest.mark.parametrize("kind", [Classifier, ByAutograd])
@pytest.mark.parametrize("penalty", [0, 1.0])
@pytest.mark.parametrize("absent", [0, 2])
def test_classes_of_weight_zero_teach_nothing(kind, penalty, absent):
    y = np.repeat(np.arange(3), 14)  # each batch has samples of one class
    weight, kept = torch.tensor([1.0, 3.0, 2.0]).double(), y != absent
    weight[absent] = 0
    params = {"criterion__weight": weight, "flatness_weight": penalty, "flatness_clip": None}
    params |= {"batch_size": 7, "classes": [0, 1, 2], "iterator_train__shuffle": False}
    net, expected = make(kind, **params).fit(X, y), make(kind, **params).fit(X[kept], y[kept])
    same(net, expected, rtol=1e-9, atol=1e-11)
    assert np.isfinite(net.history[:, "train_loss"]).all()
    assert net.relative_flatness_ == pytest.approx(expected.relative_flatness_, rel=1e-9)
    assert relative_flatness(net, X, y, batch_size=7) == pytest.approx(
        relative_flatness(expected, X[kept], y[kept]), rel=1e-9
    )
    for name in ("loss", "constant_loss"):
        values = [getattr(fitted.constant_comparison_, name) for fitted in (net, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-6)


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

    losses, sizes = [], []
    for part in (valid.indices[:7], valid.indices[7:]):  # two batches
        log_p = np.log(net.predict_proba(X[part]))[np.arange(len(part)), INDEX[part]]
        losses.append(-np.average(log_p, weights=weights[part]))
        sizes.append(len(part))
    mean = np.average(losses, weights=sizes)
    assert net.history[-1, "valid_loss"] == pytest.approx(mean, rel=1e-9)


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

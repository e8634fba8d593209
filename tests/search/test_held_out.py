"""Tests of candidates that hold out validation data, as their user asked for."""

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_iris
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EarlyStopping, EpochScoring, LRScheduler
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from skorch.helper import predefined_split
from torch import nn

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    relative_flatness,
)

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
SIZES = {"module__n_features": 4, "module__n_outputs": 3}


def our_net(*callbacks, split=None, **parameters):
    return RelativeFlatnessRegularizedClassifier(
        max_epochs=20,
        verbose=0,
        flatness_weight=0,
        train_split=split,
        callbacks=list(callbacks),
        **parameters,
    )


def plain_net(*callbacks, **parameters):
    return NeuralNetClassifier(
        MLP,
        criterion=nn.CrossEntropyLoss,
        max_epochs=20,
        lr=0.1,
        verbose=0,
        callbacks=list(callbacks),
        **SIZES,
        **parameters,
    )


def run(estimator, X=X, y=Y, space=None, **parameters):
    space = {"lr": [0.1]} if space is None else space
    objective = MinimaObjective(estimator, X, y, space, random_state=0, goal=None, **parameters)
    trial = optuna.create_study().ask()
    fitted = objective.run(trial)[1]
    return trial.user_attrs, fitted


def rows_of(split, X=X, y=Y):
    return np.sort(split(SkorchDataset(X, y), y)[0].indices)


SPLITS = [
    ValidSplit(5),
    ValidSplit(0.3, stratified=True, random_state=1),
]


@pytest.mark.parametrize("make", [our_net, plain_net])
@pytest.mark.parametrize("split", SPLITS, ids=["fifth", "share"])
def test_a_split_that_was_chosen_stays_and_its_training_part_is_measured(make, split):
    if make is plain_net:
        net = plain_net(EarlyStopping(patience=30), train_split=split)
    else:
        net = our_net(EarlyStopping(patience=30), split=split)
    attrs, fitted = run(net)
    rows = rows_of(split)
    assert 0 < len(rows) < len(X)
    assert_array_equal(fitted.trained_rows_, rows)
    assert "valid_loss" in fitted.history[-1]
    expected = log_loss(Y[rows], fitted.predict_proba(X[rows]), labels=[0, 1, 2])
    if make is our_net:  # skorch's own classifier gives no probabilities for this criterion
        assert_allclose(attrs["train_loss"], expected, rtol=1e-5)
    assert_allclose(attrs["relative_flatness"], relative_flatness(fitted, X[rows], Y[rows]))
    assert attrs["train_score"] == fitted.score(X[rows], Y[rows])
    # the user's own function is in its place, in the estimator and in the trained net
    assert vars(fitted.train_split) == vars(split)
    assert net.train_split is split


class Reads(Callback):
    """Reads a loss that is there only with validation data, without a word about it."""

    def on_epoch_end(self, net, **kwargs):
        return net.history[-1, "valid_loss"]


@pytest.mark.parametrize(
    ("callbacks", "kept"),
    [
        ([], False),
        ([EarlyStopping(monitor="train_loss", patience=30)], False),
        ([("scheduler", LRScheduler("StepLR", step_size=10))], False),
        ([EpochScoring("accuracy", name="acc", on_train=True)], False),
        ([EarlyStopping(patience=30)], True),
        ([EarlyStopping], True),
        ([("early", EarlyStopping(monitor="valid_acc", lower_is_better=False))], True),
    ],
)
def test_the_default_of_skorch_stays_if_a_callback_monitors_validation(callbacks, kept):
    fitted = run(plain_net(*callbacks))[1]
    assert ("valid_loss" in fitted.history[-1]) == kept
    assert hasattr(fitted, "trained_rows_") == kept
    assert (fitted.train_split is not None) == kept


def test_explains_a_callback_that_finds_no_validation_loss():
    with pytest.raises(ValueError, match="'valid_loss' is missing: a callback reads it, but the "):
        run(plain_net(Reads()))
    assert run(plain_net(Reads(), train_split=ValidSplit(4)))[0]["train_loss"] > 0


class FailsOtherwise(Callback):
    def on_epoch_end(self, net, **kwargs):
        raise KeyError("something else")


def test_other_errors_are_not_explained():
    with pytest.raises(KeyError, match="something else"):
        run(plain_net(FailsOtherwise()))


def test_data_of_another_set_are_held_out_of_nothing():
    split = predefined_split(SkorchDataset(X[::2], Y[::2]))
    attrs, fitted = run(our_net(EarlyStopping(patience=30), split=split))
    assert "valid_loss" in fitted.history[-1]
    assert attrs["relative_flatness"] == relative_flatness(fitted, X, Y)


def test_split_of_a_net_that_is_copied():
    split = ValidSplit(5)
    net = RelativeFlatnessRegularizedRegressor(
        MLP, max_epochs=20, verbose=0, train_split=split, callbacks=[EarlyStopping(patience=30)]
    )
    target = X[:, 3] * 10
    estimator = TransformedTargetRegressor(net, transformer=StandardScaler())
    attrs, fitted = run(estimator, X[:, :3], target, {"regressor__lr": [0.05]})
    rows = rows_of(split)
    found = relative_flatness(fitted, X[rows, :3], target[rows])
    assert_allclose(attrs["relative_flatness"], found)
    assert isinstance(fitted.regressor_.train_split, ValidSplit)
    assert isinstance(fitted.regressor.train_split, ValidSplit)


def test_samples_that_a_confusion_set_adds_are_not_measured():
    split = ValidSplit(5, stratified=True)
    space = {"data__train_size": [60], "data__confusion_size": [30], "lr": [0.05]}
    objective = MinimaObjective(
        our_net(EarlyStopping(patience=30), split=split), X, Y, space, random_state=0, goal=None
    )
    trial = optuna.create_study().ask()
    fitted = objective.run(trial)[1]
    data = objective.data(trial.params)
    rows = rows_of(split, data.X_fit, data.y_fit)
    rows = rows[rows < 60]
    found = relative_flatness(fitted, data.X[rows], data.y[rows])
    assert_allclose(trial.user_attrs["relative_flatness"], found)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


def test_split_of_a_data_set():
    net = our_net(EarlyStopping(patience=30), split=ValidSplit(5), **SIZES)
    attrs, fitted = run(net, Pairs(), None, {"lr": [0.05]})
    rows = rows_of(ValidSplit(5))
    assert_allclose(attrs["relative_flatness"], relative_flatness(fitted, X[rows], Y[rows]))


def test_minima_are_restored_and_measured_again_on_their_training_part(tmp_path):
    net = our_net(EarlyStopping(patience=30), split=ValidSplit(5, stratified=True))
    search = FlatMinimaSearch(
        net, {"lr": [0.02, 0.05]}, random_state=0, artifact_store=tmp_path, n_jobs=2, goal=0.3
    ).fit(X, Y)
    rows = rows_of(ValidSplit(5, stratified=True))
    minimum = search.best_estimator_
    found = relative_flatness(minimum, X[rows], Y[rows])
    assert_allclose(search.minima_["relative_flatness"].iloc[0], found)
    again = search.remeasure(["trace_flatness", "relative_flatness"])
    assert again["trace_flatness"].notna().all()
    trial = search.study_.trials[int(search.minima_["trial"].iloc[0])]
    restored = search._objective.restore(search.best_params_, trial)
    assert_array_equal(restored.trained_rows_, rows)
    assert_array_equal(restored.predict_proba(X), minimum.predict_proba(X))

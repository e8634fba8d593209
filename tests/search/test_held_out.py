"""Tests of candidates that hold out validation data, as their user asked for."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from optuna.trial import FixedTrial
from sklearn.compose import TransformedTargetRegressor
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from skorch.callbacks import Callback, EarlyStopping, EpochScoring, LRScheduler
from skorch.dataset import Dataset as SkorchDataset
from skorch.dataset import ValidSplit
from skorch.helper import predefined_split

from relflat_sk import MinimaObjective, relative_flatness
from tests.search.examples import (
    TARGET,
    X,
    Y,
    make_net,
    make_regressor,
    make_search,
    plain_net,
)
from tests.search.examples import record as record_trial

SIZES = {"module__n_features": 4, "module__n_outputs": 3}
SPLIT = ValidSplit(5)
PATIENT = EarlyStopping(patience=30)


def our_net(split=SPLIT, **parameters):
    return make_net(max_epochs=20, callbacks=[PATIENT], train_split=split, **parameters)


def skorch_net(*callbacks, **parameters):
    return plain_net(max_epochs=20, lr=0.1, callbacks=list(callbacks), **parameters)


def record(*arguments, **parameters):
    return record_trial(*arguments, **{"goal": None, **parameters})


def rows_of(split, X=X, y=Y):
    return np.sort(split(SkorchDataset(X, y), y)[0].indices)


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "skorch"])
@pytest.mark.parametrize(
    "split", [SPLIT, ValidSplit(0.3, stratified=True, random_state=1)], ids=["fifth", "share"]
)
def test_a_split_that_was_chosen_stays_and_its_training_part_is_measured(ours, split):
    net = our_net(split) if ours else skorch_net(PATIENT, train_split=split)
    attrs, fitted = record(net)
    rows = rows_of(split)
    assert 0 < len(rows) < len(X)
    assert_array_equal(fitted.trained_rows_, rows)
    assert "valid_loss" in fitted.history[-1]
    expected = log_loss(Y[rows], fitted.predict_proba(X[rows]), labels=[0, 1, 2])
    if ours:  # skorch's own classifier gives no probabilities for this criterion
        assert_allclose(attrs["train_loss"], expected, rtol=1e-5)
    assert_allclose(attrs["relative_flatness"], relative_flatness(fitted, X[rows], Y[rows]))
    assert attrs["train_score"] == fitted.score(X[rows], Y[rows])
    # the user's own function is in its place, in the estimator and in the trained net
    assert vars(fitted.train_split) == vars(split)
    assert net.train_split is split


@pytest.mark.parametrize(
    ("callbacks", "kept"),
    [
        ([], False),
        ([EarlyStopping(monitor="train_loss", patience=30)], False),
        ([("scheduler", LRScheduler("StepLR", step_size=10))], False),
        ([EpochScoring("accuracy", name="acc", on_train=True)], False),
        ([PATIENT], True),
        ([EarlyStopping], True),
        ([("early", EarlyStopping(monitor="valid_acc", lower_is_better=False))], True),
    ],
)
def test_the_default_of_skorch_stays_if_a_callback_monitors_validation(callbacks, kept):
    fitted = record(skorch_net(*callbacks))[1]
    assert ("valid_loss" in fitted.history[-1]) == kept
    assert hasattr(fitted, "trained_rows_") == kept
    assert (fitted.train_split is not None) == kept


class Reads(Callback):
    """Reads what is there only with validation data, or never, without a word about it."""

    def __init__(self, name="valid_loss"):
        self.name = name

    def on_epoch_end(self, net, **kwargs):
        return net.history[-1, self.name]


def test_explains_a_callback_that_finds_no_validation_loss():
    with pytest.raises(ValueError, match="'valid_loss' is missing: a callback reads it, but the "):
        record(skorch_net(Reads()))
    with pytest.raises(KeyError, match="something else"):
        record(skorch_net(Reads("something else")))
    assert record(skorch_net(Reads(), train_split=ValidSplit(4)))[0]["train_loss"] > 0


def test_data_of_another_set_are_held_out_of_nothing():
    attrs, fitted = record(our_net(predefined_split(SkorchDataset(X[::2], Y[::2]))))
    assert "valid_loss" in fitted.history[-1]
    assert attrs["relative_flatness"] == relative_flatness(fitted, X, Y)


def test_split_of_a_net_that_is_copied():
    net = make_regressor(max_epochs=20, train_split=SPLIT, callbacks=[PATIENT])
    estimator = TransformedTargetRegressor(net, transformer=StandardScaler())
    attrs, fitted = record(estimator, y=TARGET, space={"regressor__lr": [0.05]})
    rows = rows_of(SPLIT)
    found = relative_flatness(fitted, X[rows], TARGET[rows])
    assert_allclose(attrs["relative_flatness"], found)
    assert isinstance(fitted.regressor_.train_split, ValidSplit)
    assert isinstance(fitted.regressor.train_split, ValidSplit)


def test_samples_that_a_confusion_set_adds_are_not_measured():
    split = ValidSplit(5, stratified=True)
    params = {"data__train_size": 40, "data__confusion_size": 20, "lr": 0.05}
    space = {name: [value] for name, value in params.items()}
    objective = MinimaObjective(our_net(split), X, Y, space, random_state=0, goal=None)
    trial = FixedTrial(params)
    fitted = objective._run(trial)[1]
    data = objective._data(params)
    rows = rows_of(split, data.X_fit, data.y_fit)
    rows = rows[rows < 40]
    found = relative_flatness(fitted, data.X[rows], data.y[rows])
    assert_allclose(trial.user_attrs["relative_flatness"], found)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


def test_split_of_a_data_set():
    attrs, fitted = record(our_net(**SIZES), Pairs(), None)
    rows = rows_of(SPLIT)
    assert_allclose(attrs["relative_flatness"], relative_flatness(fitted, X[rows], Y[rows]))


def test_held_out_data_set_has_its_labels_inside():
    attrs, _ = record(make_net(**SIZES), Pairs(), None, X_test=Pairs())
    assert_allclose(attrs["test_loss"], attrs["train_loss"], rtol=1e-5)
    search = make_search(make_net(**SIZES), {"lr": [0.05]}).fit(Pairs(), None, Pairs())
    assert search.minima_["generalization_gap"].abs().item() < 1e-5


def test_minima_are_restored_and_measured_again_on_their_training_part(tmp_path):
    split = ValidSplit(5, stratified=True)
    search = make_search(
        our_net(split), {"lr": [0.02, 0.05]}, artifact_store=tmp_path, n_jobs=2, goal=0.5
    ).fit(X, Y)
    rows = rows_of(split)
    minimum = search.best_estimator_
    found = relative_flatness(minimum, X[rows], Y[rows])
    assert_allclose(search.minima_["relative_flatness"].iloc[0], found)
    again = search.remeasure(["trace_flatness", "relative_flatness"])
    assert again["trace_flatness"].notna().all()
    trial = search.study_.trials[int(search.minima_["trial"].iloc[0])]
    restored = search._objective._restore(search.best_params_, trial)
    assert_array_equal(restored.trained_rows_, rows)
    assert_array_equal(restored.predict_proba(X), minimum.predict_proba(X))

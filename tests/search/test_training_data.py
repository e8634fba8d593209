"""Training data: varied, with scaled learning rates, and held out as their user asked for."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier
from skorch.callbacks import Callback, EarlyStopping
from skorch.dataset import ValidSplit

from relflat_sk import relative_flatness
from relflat_sk.search._data import scale_lr, vary_data
from tests.data_kinds import Pairs
from tests.search.examples import X, Y, logistic, make_net, make_search, piped, plain_net

N = 40
ROWS = np.arange(N)
LEFT_OUT = pytest.mark.filterwarnings("ignore:1 of . minima are left out of the ranking")


@settings(deadline=None)
@given(
    size=st.one_of(st.none(), st.integers(1, N - 1), st.floats(0.05, 0.95)),
    share=st.floats(0, 1),
    confusion=st.integers(0, N),
    seed=st.integers(0, 3),
)
def test_what_is_chosen(size, share, confusion, seed):
    left = 0 if size is None else N - (size if isinstance(size, int) else int(size * N))
    confusion = min(confusion, left)
    sizes = {"train_size": size, "confusion_size": confusion}
    data, again = (
        vary_data(ROWS, ROWS, **sizes, random_labels=share, random_state=seed) for _ in range(2)
    )
    n = len(data.X)
    assert n == N - left
    # the confusion set comes last, of samples that are not in the other part
    assert_array_equal(data.X_fit[:n], data.X)
    assert_array_equal(data.y_fit[:n], data.y)
    assert len(data.X_fit) == n + confusion
    assert len(set(data.X_fit)) == len(data.X_fit)
    # labels are shuffled within each part, and no more than the share of them
    assert sorted(data.y) == sorted(data.X)
    assert sorted(data.y_fit[n:]) == sorted(data.X_fit[n:])
    assert (data.y != data.X).sum() <= round(share * n)
    assert_array_equal(again.X_fit, data.X_fit)
    assert_array_equal(again.y_fit, data.y_fit)


def test_a_share_of_one_leaves_labels_by_chance_alone():
    kept = [
        (vary_data(ROWS, ROWS, random_labels=1.0, random_state=seed).y == ROWS).sum()
        for seed in range(200)
    ]
    assert abs(np.mean(kept) - 1) < 0.3  # a random permutation keeps one, in the mean


def test_classes_keep_their_shares():
    y = np.repeat(["a", "b"], [30, 10])
    data = vary_data(ROWS, y, train_size=8, stratify=True)
    assert sorted(data.y) == ["a"] * 6 + ["b"] * 2


@pytest.mark.parametrize("make", [torch.from_numpy, csr_matrix, pd.DataFrame, np.ndarray.tolist])
def test_containers(make):
    arguments = {"train_size": 50, "random_labels": 0.2, "confusion_size": 10}
    expected = vary_data(X, Y, **arguments)
    found = vary_data(make(X), Y.tolist() if make is np.ndarray.tolist else Y, **arguments)
    assert type(found.X_fit) is type(make(X))
    rows = found.X_fit.toarray() if make is csr_matrix else np.asarray(found.X_fit)
    assert_array_equal(rows, expected.X_fit)
    assert_array_equal(found.y_fit, expected.y_fit)


@LEFT_OUT
def test_random_labels_in_a_search():
    space = {"data__random_labels": [0.0, 0.5, 1.0], "C": [1.0]}
    search = logistic(space).fit(X, Y, X, Y)
    table = search.minima_.set_index("param_data__random_labels").sort_index()
    assert table["train_loss"].is_monotonic_increasing
    assert table["test_loss"].is_monotonic_increasing
    # by hand, for one of them
    labels = vary_data(X, Y, random_labels=0.5, stratify=True).y
    fitted = LogisticRegression(max_iter=1000, C=1.0).fit(X, labels)
    expected = {
        "train_loss": log_loss(labels, fitted.predict_proba(X)),
        "relative_flatness": relative_flatness(fitted, X, labels),
        "train_score": fitted.score(X, labels),
    }
    assert table.loc[0.5, list(expected)].to_dict() == pytest.approx(expected)
    assert "random_labels" not in search.best_estimator_.get_params()


@LEFT_OUT
def test_a_confusion_set_is_trained_on_but_not_measured():
    space = {"data__train_size": [40], "data__confusion_size": [0, 30]}
    table = logistic(space).fit(X, Y).minima_.set_index("param_data__confusion_size")
    data = vary_data(X, Y, train_size=40, confusion_size=30, stratify=True)
    fitted = LogisticRegression(max_iter=1000).fit(data.X_fit, data.y_fit)
    expected = log_loss(data.y, fitted.predict_proba(data.X))
    assert_allclose(table["train_loss"][30], expected, rtol=1e-6)
    assert table["train_loss"][30] > table["train_loss"][0]


def net(**parameters):
    settings = {"lr": 0.01, "batch_size": 16, "max_epochs": 2, "callbacks": None}
    return make_net(**{**settings, **parameters})


PERCEPTRON = MLPClassifier(batch_size=10, learning_rate_init=0.1)


@pytest.mark.parametrize(
    ("estimator", "params", "factor", "expected"),
    [
        (net(), {"batch_size": 64}, 4, {"lr": 0.01}),
        (net(), {"batch_size": 8, "lr": 0.1}, 1 / 2, {"lr": 0.1}),
        (net(), {"lr": 0.1}, 1, {}),
        (piped(net()), {"net__batch_size": 32}, 2, {"net__lr": 0.01}),
        (PERCEPTRON, {"batch_size": 5}, 1 / 2, {"learning_rate_init": 0.1}),
        (net(), {"my_batch_size": 32, "batch_size_": 8}, 1, {}),
    ],
)
@pytest.mark.parametrize(("rule", "power"), [("linear", 1), ("sqrt", 0.5)])
def test_the_learning_rate_follows_the_batch_size(estimator, params, factor, expected, rule, power):
    scaled = scale_lr(estimator, {**params, "lr_scaling": rule})
    assert scaled == pytest.approx({name: lr * factor**power for name, lr in expected.items()})
    assert scale_lr(estimator, params) == {}


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_scaling_in_a_search():
    space = {"batch_size": [8, 32], "module__init": ["xavier_uniform", "kaiming_normal"]}
    search = make_search(net(), {**space, "lr_scaling": ["linear"]}).fit(X, Y)
    table = search.minima_
    assert_allclose(table["param_scaled_lr"], 0.01 / 16 * table["param_batch_size"])
    assert search.best_estimator_.lr == table["param_scaled_lr"][0]
    assert net().lr == 0.01


@pytest.mark.parametrize(
    ("net", "space"),
    [
        (make_net(train_split=ValidSplit(4)), {"lr": [0.05]}),
        (plain_net(train_split=ValidSplit(4)), {"lr": [0.05]}),
        (plain_net(), {"train_split": [ValidSplit(4)]}),
    ],
)
def test_a_split_that_was_chosen_is_refused(net, space):
    with pytest.raises(ValueError, match="train_split=None"):
        make_search(net, space).fit(X, Y)


@pytest.mark.filterwarnings("ignore:no candidate converged")
def test_the_default_of_skorch_is_dropped():
    fitted = make_search(plain_net(), {"lr": [0.05]}, refit=True).fit(X, Y).best_estimator_
    assert fitted.train_split is None
    assert "valid_loss" not in fitted.history[-1]


class Reads(Callback):
    """Reads what is there only with validation data, or never, without a word about it."""

    def __init__(self, name="valid_loss"):
        self.name = name

    def on_epoch_end(self, net, **kwargs):
        return net.history[-1, self.name]


MISSING = "'valid_\\w*' is missing: .*EarlyStopping"


@pytest.mark.parametrize(
    ("callback", "match"),
    [
        (Reads(), MISSING),
        (EarlyStopping(), MISSING),
        (Reads("something else"), "KeyError: .*something else"),
    ],
)
def test_explains_a_callback_that_finds_no_validation_loss(callback, match):
    with pytest.raises(ValueError, match=match):
        make_search(plain_net(callbacks=[callback]), {"lr": [0.05]}).fit(X, Y)


def test_held_out_data_set_has_its_labels_inside():
    net, pairs = make_net(module__n_features=4, module__n_outputs=3), Pairs(X, Y)
    search = make_search(net, {"lr": [0.05]}).fit(pairs, None, pairs)
    assert search.minima_["generalization_gap"].abs().item() < 1e-5

"""Tests of what counts as a minimum: goals, plateaus, and depths that can be compared."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import load_wine
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import PredefinedSplit
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale
from skorch import NeuralNet
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessWarning,
    RelativeFlatnessRegularizedClassifier,
    StopAtGradientNorm,
    StopAtLoss,
    rank_minima,
    relative_flatness,
)
from relflat_sk.training._callbacks import StopAtDepth
from tests.search.examples import (
    TARGET,
    X,
    Y,
    logistic,
    make_net,
    make_regressor,
    make_search,
    record,
)


def net(**parameters):
    """A net without a goal of its own."""
    return make_net(**{"callbacks": None, "lr": 0.01, **parameters})


def entropy(y):
    shares = np.bincount(y) / len(y)
    return float(-(shares * np.log(shares)).sum())


def test_half_trained_nets_are_no_minima():
    X, y = load_wine(return_X_y=True)
    search = make_search(net(max_epochs=1), {"batch_size": [16, 64], "lr": [0.001, 0.01]})
    goal = f"{entropy(y) / 20:.3g}"
    match = rf"no candidate converged[\s\S]*before a training loss of {goal} or a plateau"
    with pytest.warns(FlatnessWarning, match=match):
        search.fit(scale(X).astype(np.float32), y)
    assert not search.minima_["converged"].any()
    # the deepest is first, and not the flattest
    complete = search.minima_[search.minima_["state"] == "complete"]
    assert complete["depth"].is_monotonic_decreasing


def test_without_a_goal_of_their_own_nets_stop_at_the_same_depth():
    X, y = load_wine(return_X_y=True)
    search = make_search(net(max_epochs=200), {"batch_size": [16, 64], "lr": [0.01, 0.02]})
    minima = search.fit(scale(X).astype(np.float32), y).minima_
    assert minima["comparable"].all()
    assert (minima["ended_by"] == "goal").all()
    assert_allclose(minima["depth"], entropy(y) / minima["train_loss"], rtol=1e-6)
    assert minima["depth"].between(20, 60).all()
    assert (minima["train_score"] > 0.95).all()
    assert minima["relative_flatness"].is_monotonic_increasing


class Accumulating(RelativeFlatnessRegularizedClassifier):
    """Divides its loss, as for gradients of several batches that are added."""

    def __init__(self, *args, acc_steps=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.acc_steps = acc_steps

    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / self.acc_steps


def test_a_parameter_that_scales_the_loss_is_compared_by_the_loss_itself():
    X, y = load_wine(return_X_y=True)
    X = scale(X).astype(np.float32)
    divided = Accumulating(max_epochs=60, lr=0.01, flatness_weight=0, verbose=0)
    search = make_search(divided, {"acc_steps": [1, 8]}).fit(X, y)
    assert (search.minima_["ended_by"] == "goal").all()
    for _, minimum in search.minima_.iterrows():
        module = search.get_estimator(minimum["trial"], X, y).module_
        loss = nn.functional.cross_entropy(module(torch.tensor(X)), torch.tensor(y)).item()
        assert_allclose(minimum["train_loss"], loss, rtol=1e-5)
        assert loss <= entropy(y) / 20
        flatness = relative_flatness(module, X, y, criterion=nn.CrossEntropyLoss())
        assert_allclose(minimum["relative_flatness"], flatness, rtol=1e-5)


def test_regressors_train_to_their_plateau():
    attrs, fitted = record(make_regressor(max_epochs=300), y=3 * TARGET, space={"lr": [0.01]})
    assert attrs["ended_by"] == "plateau"
    assert len(fitted.history) == 300
    assert attrs["train_loss"] < (3 * TARGET).var() / 100
    assert_allclose(attrs["depth"], (3 * TARGET).var() / attrs["train_loss"], rtol=1e-4)
    # the criterion tells, where a net of skorch does not
    stock = NeuralNet(
        MLP, criterion=nn.MSELoss, module__n_features=X.shape[1], module__n_outputs=1,
        train_split=None, max_epochs=60, lr=0.01, optimizer=torch.optim.Adam, verbose=0,
    )  # fmt: skip
    attrs, fitted = record(stock, y=TARGET[:, None].astype("float32"), space={"lr": [0.01]})
    assert len(fitted.history) == 60


def test_a_loss_as_goal_ends_the_training():
    attrs, fitted = record(make_regressor(max_epochs=300), y=TARGET, goal=TARGET.var() / 20)
    assert attrs["ended_by"] == "goal"
    assert len(fitted.history) < 300


def test_the_automatic_goal_counts_weights_and_the_training_part_only():
    fold = PredefinedSplit(np.where(np.arange(len(Y)) < 20, 0, -1))  # of the first class
    classifier = net(callbacks=[("goal", StopAtDepth(10))], train_split=ValidSplit(fold))
    goal = dict(classifier.fit(X, Y).callbacks_)["goal"].goal_
    assert_allclose(goal, entropy(Y[20:]) / 10, rtol=1e-6)
    classifier.set_params(train_split=None).fit(X, Y, sample_weight=np.where(Y == 0, 1.0, 0.1))
    shares = np.array([10, 1, 1]) / 12
    goal = dict(classifier.callbacks_)["goal"].goal_
    assert_allclose(goal, -(shares * np.log(shares)).sum() / 10, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]], ids=["", "weighted"])
def test_smoothed_losses_are_counted_from_the_lowest(smoothing, weights):
    X, y = load_wine(return_X_y=True)
    weight = None if weights is None else torch.tensor(weights)
    smoothed = net(max_epochs=200, criterion=nn.CrossEntropyLoss(weight, label_smoothing=smoothing))
    attrs, fitted = record(smoothed, scale(X).astype(np.float32), y, space={"lr": [0.02]})
    # what each class gets of each sample's label
    shares = np.ones(3) if weights is None else np.array(weights)
    totals = ((1 - smoothing) * np.eye(3)[y] + smoothing / 3) * shares
    divisor = shares[y].sum()
    lowest, constant = (
        -(part * np.log(part / part.sum(1, keepdims=True))).sum() / divisor
        for part in (totals, totals.sum(0, keepdims=True))
    )
    goal = dict(fitted.callbacks_)["StopAtDepth"].goal_
    assert_allclose(goal, lowest + (constant - lowest) / 20, rtol=1e-6)
    assert attrs["ended_by"] == "goal"
    assert len(fitted.history) < 200
    assert attrs["train_score"] > 0.98
    depth = (constant - lowest) / (attrs["train_loss"] - lowest)
    assert_allclose(attrs["depth"], depth, rtol=1e-4)
    assert attrs["depth"] > 20


@pytest.mark.parametrize("one", [StopAtLoss(0.6), ("stop", StopAtLoss(0.6)), StopAtGradientNorm(1)])
def test_a_goal_of_ones_own_stays(one):
    attrs, fitted = record(net(max_epochs=100, callbacks=[one]), space={"lr": [0.01]})
    assert (attrs["ended_by"], attrs["reason"]) == ("goal", "")
    assert len(fitted.callbacks) == 1
    assert attrs["depth"] < 20


@pytest.mark.filterwarnings("ignore:.* candidates are no minima")
def test_a_loss_as_goal_holds_for_scikit_learn_too():
    minima = logistic({"C": [0.001, 1.0]}, goal=0.3).fit(X, Y).minima_.set_index("param_C")
    assert minima["ended_by"].to_dict() == {1.0: "goal", 0.001: ""}
    assert minima["reason"][0.001] == "the training loss did not reach the goal of 0.3"


def test_solvers_tell_whether_they_ended():
    assert record(Ridge(), y=TARGET, space={"alpha": [1.0]})[0]["ended_by"] == "solver"
    with pytest.warns(UserWarning, match="Maximum iterations"):
        attrs, _ = record(MLPClassifier(max_iter=20), space={"alpha": [0.1]})
    reason = "the solver stopped at max_iter=20, before its tolerance was reached"
    assert (attrs["ended_by"], attrs["reason"]) == ("", reason)


def density_net():
    """Of a loss whose best constant is negative, so that there is no automatic goal."""

    def density(output, y):
        return 0.5 * ((output[:, 0] - y) ** 2).mean() - 5

    sizes = {"module__n_features": 4, "module__n_outputs": 1}
    return NeuralNet(MLP, lambda: density, **sizes, max_epochs=60, lr=0.1, verbose=0)


BEFORE = "training stopped before"
NO_PLATEAU = f"{BEFORE} a plateau was reached, after 15 epochs"
NO_GOAL = f"{BEFORE} its goal was reached, after 20 epochs"
ENDINGS = {  # the net, the search's goal, epochs, what ended the training, why it is no minimum
    "without a goal": (net(max_epochs=60, lr=0.05), None, 60, "plateau", ""),
    "too few epochs": (net(max_epochs=15), None, 15, "", NO_PLATEAU),
    # at a learning rate of almost zero nothing moves, which is no minimum
    "no plateau": (net(max_epochs=20, lr=0.001, callbacks=[StopAtLoss]), "auto", 20, "", NO_GOAL),
    "by its batches": (net(max_epochs=60, lr=0.05, callbacks="disable"), "auto", 60, "plateau", ""),
    "no positive constant": (density_net(), "auto", 60, "plateau", ""),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_ends_a_training_that_reaches_no_goal(name):
    estimator, goal, n_epochs, *expected = ENDINGS[name]
    y = TARGET if name == "no positive constant" else Y
    attrs, fitted = record(estimator, y=y, goal=goal, space={"lr": [estimator.lr]})
    assert len(fitted.history) == n_epochs
    assert [attrs["ended_by"], attrs["reason"]] == expected
    assert attrs["converged"] == (not expected[1])
    assert ("depth" in attrs) == (name != "no positive constant")


def minima_of(depths, **columns):
    n = len(depths)
    table = {"trial": range(n), "relative_flatness": np.arange(n, 0.0, -1), "depth": depths}
    return pd.DataFrame({**table, "converged": True, "reason": "", **columns})


@pytest.mark.parametrize(
    ("depths", "ended_by", "compared"),
    [
        ([2.0, 20, 21, 30, 500], "", [20, 21, 30]),
        ([2.0, 20, 500], "", [500]),
        # those that reached their goal decide
        ([2.0, 2, 2, 20, 25], ["plateau"] * 3 + ["goal"] * 2, [20, 25]),
        ([math.nan, math.nan], "", [math.nan, math.nan]),
    ],
)
def test_most_minima_decide_and_of_equally_many_the_deepest(depths, ended_by, compared):
    ranked = rank_minima(minima_of(depths, ended_by=ended_by))
    assert_allclose(np.sort(ranked["depth"][ranked["comparable"]]), compared)


def test_minima_of_other_depths_rank_behind():
    table = minima_of([500.0, 25, 2, math.nan, 20, 30], converged=[True] * 5 + [False])
    ranked = rank_minima(table)
    assert ranked["depth"].fillna(-1).tolist() == [20, -1, 25, 500, 2, 30]
    assert ranked["comparable"].tolist() == [True] * 3 + [False] * 3
    assert ranked["reason"][3] == (
        "its depth of 500 cannot be compared: 2 of 5 minima have 20 to 25"
    )
    assert ranked["reason"][:3].tolist() == [""] * 3
    # ranked again, nothing changes
    pd.testing.assert_frame_equal(rank_minima(ranked), ranked)
    every = rank_minima(ranked, depth_band=None)
    assert every["comparable"].tolist() == [True] * 5 + [False]
    assert every["relative_flatness"][:5].is_monotonic_increasing
    assert rank_minima(table, depth_band=100)["comparable"].sum() == 4


def test_the_search_warns_of_other_depths_and_leaves_them_out():
    goals = [[StopAtLoss(loss)] for loss in (0.9, 0.1, 0.09)]
    search = make_search(net(max_epochs=200, lr=0.01), {"callbacks": goals})
    match = r"1 of 3 minima are left out of the ranking, because their training losses \(0\.[78]"
    with pytest.warns(FlatnessWarning, match=match):
        search.fit(X, Y)
    last = search.minima_.iloc[2]
    assert (last["converged"], last["comparable"]) == (True, False)
    assert last["reason"].startswith("its depth of 1.")
    assert np.isnan(search.cv_results_["mean_test_score"]).sum() == 1


def test_the_depth_is_relative_to_the_candidates_own_labels():
    """Labels that are all shuffled are as deep a minimum at the same loss."""
    attrs, _ = record(LogisticRegression(max_iter=1000), X[:50], Y[:50], {"data__train_size": [30]})
    assert_allclose(attrs["depth"], np.log(2) / attrs["train_loss"])

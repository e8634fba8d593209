"""Tests of what counts as a minimum: goals, plateaus, and depths that can be compared."""

import numpy as np
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
    relative_flatness,
)
from relflat_sk.training._callbacks import StopAtDepth
from tests.search.examples import TARGET, X, Y, make_net, make_regressor, make_search, record

WINE, OF_WINE = load_wine(return_X_y=True)
WINE = scale(WINE).astype(np.float32)


def net(**parameters):
    return make_net(**{"callbacks": None, "lr": 0.01, **parameters})


def entropy(y, weights=None):
    shares = np.bincount(y, weights) / np.bincount(y, weights).sum()
    return float(-(shares * np.log(shares)).sum())


def test_without_a_goal_of_their_own_nets_stop_at_the_same_depth():
    search = make_search(net(max_epochs=200), {"batch_size": [16, 64], "lr": [0.01, 0.02]})
    minima = search.fit(WINE, OF_WINE).minima_
    assert minima["comparable"].all()
    assert (minima["ended_by"] == "goal").all()
    assert_allclose(minima["depth"], entropy(OF_WINE) / minima["train_loss"], rtol=1e-6)
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
    divided = Accumulating(max_epochs=60, lr=0.01, flatness_weight=0, verbose=0)
    search = make_search(divided, {"acc_steps": [1, 8]}).fit(WINE, OF_WINE)
    criterion = nn.CrossEntropyLoss()
    for minimum in search.minima_.to_dict("records"):
        module = search.get_estimator(minimum["trial"], WINE, OF_WINE).module_
        loss = criterion(module(torch.tensor(WINE)), torch.tensor(OF_WINE)).item()
        flatness = relative_flatness(module, WINE, OF_WINE, criterion=criterion)
        assert minimum["ended_by"] == "goal"
        assert loss <= entropy(OF_WINE) / 20
        recorded = [minimum["train_loss"], minimum["relative_flatness"]]
        assert_allclose(recorded, [loss, flatness], rtol=1e-5)


def test_the_automatic_goal_counts_weights_and_the_training_part_only():
    fold = PredefinedSplit(np.where(np.arange(len(Y)) < 20, 0, -1))  # of the first class
    classifier = net(callbacks=[("goal", StopAtDepth(10))], train_split=ValidSplit(fold))
    goal = dict(classifier.fit(X, Y).callbacks_)["goal"].goal_
    assert_allclose(goal, entropy(Y[20:]) / 10, rtol=1e-6)
    weights = np.where(Y == 0, 1.0, 0.1)
    classifier.set_params(train_split=None).fit(X, Y, sample_weight=weights)
    assert_allclose(dict(classifier.callbacks_)["goal"].goal_, entropy(Y, weights) / 10, rtol=1e-6)


@pytest.mark.parametrize("smoothing", [0.1, 0.3])
@pytest.mark.parametrize("weights", [None, [1.0, 2.0, 0.5]], ids=["", "weighted"])
def test_smoothed_losses_are_counted_from_the_lowest(smoothing, weights):
    weight = None if weights is None else torch.tensor(weights)
    smoothed = net(max_epochs=200, criterion=nn.CrossEntropyLoss(weight, label_smoothing=smoothing))
    attrs, fitted = record(smoothed, WINE, OF_WINE, space={"lr": [0.02]})
    # what each class gets of each sample's label
    shares = np.ones(3) if weights is None else np.array(weights)
    totals = ((1 - smoothing) * np.eye(3)[OF_WINE] + smoothing / 3) * shares
    lowest, constant = (
        -(part * np.log(part / part.sum(1, keepdims=True))).sum() / shares[OF_WINE].sum()
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


def density(output, y):
    """A loss whose best constant is negative, so that there is no automatic goal."""
    return 0.5 * ((output[:, 0] - y) ** 2).mean() - 5


def of_skorch(criterion, **parameters):
    sizes = {"module__n_features": 4, "module__n_outputs": 1}
    return NeuralNet(MLP, criterion, **sizes, max_epochs=60, verbose=0, **parameters)


PLAIN = of_skorch(nn.MSELoss, train_split=None, lr=0.01, optimizer=torch.optim.Adam)
MODEL = LogisticRegression(max_iter=1000)
EARLY, MAX_ITER = "training stopped before", MLPClassifier(max_iter=20, alpha=0.1)
ENDINGS = {  # the estimator, targets, the search's goal, what ended it, why it is no minimum
    "plateau": (make_regressor(max_epochs=300, lr=0.01), 3 * TARGET, "auto", "plateau", ""),
    "of skorch": (PLAIN, TARGET[:, None], "auto", "plateau", ""),
    "a loss": (make_regressor(max_epochs=300), TARGET, TARGET.var() / 20, "goal", ""),
    "its loss": (net(max_epochs=99, callbacks=[StopAtLoss(0.6)]), Y, "auto", "goal", ""),
    "named": (net(max_epochs=99, callbacks=[("a", StopAtLoss(0.6))]), Y, "auto", "goal", ""),
    "gradient": (net(max_epochs=99, callbacks=[StopAtGradientNorm(1)]), Y, "auto", "goal", ""),
    "without a goal": (net(max_epochs=60, lr=0.05), Y, None, "plateau", ""),
    "few epochs": (
        net(max_epochs=15), Y, None, "", f"{EARLY} a plateau was reached, after 15 epochs",
    ),
    # at a learning rate of almost zero nothing moves, which is no minimum
    "no progress": (
        net(max_epochs=20, lr=1e-7, random_state=0), Y, "auto", "",
        "its training made no progress after 20 epochs: its loss is about that of the first",
    ),
    "no plateau": (
        net(max_epochs=20, lr=0.001, callbacks=[StopAtLoss]), Y, "auto", "",
        f"{EARLY} its goal was reached, after 20 epochs",
    ),
    "by batches": (
        net(max_epochs=60, lr=0.05, callbacks="disable"), Y, "auto", "plateau", "",
    ),
    "no constant": (of_skorch(lambda: density, lr=0.1), TARGET, "auto", "plateau", ""),
    "loss of a solver": (MODEL, Y, 0.6, "goal", ""),
    "loss not reached": (MODEL, Y, 0.1, "", "the training loss did not reach the goal of 0.1"),
    "solver": (Ridge(), TARGET, "auto", "solver", ""),
    "max_iter": (
        MAX_ITER, Y, "auto", "",
        "the solver stopped at max_iter=20, before its tolerance was reached",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Stochastic Optimizer. Maximum iterations")
@pytest.mark.parametrize("name", ENDINGS)
def test_what_ends_a_training(name):
    estimator, y, goal, *expected = ENDINGS[name]
    parameter = next(name for name in ("lr", "alpha", "C") if hasattr(estimator, name))
    space = {parameter: [getattr(estimator, parameter)]}
    attrs, fitted = record(estimator, y=y, goal=goal, space=space)
    assert [attrs["ended_by"], attrs["reason"]] == expected
    assert attrs["converged"] == (not expected[1])
    if hasattr(fitted, "history"):
        assert (len(fitted.history) < estimator.max_epochs) == (expected[0] == "goal")
    if name == "no constant":
        assert "depth" not in attrs
    if y.dtype.kind == "f" and name != "no constant":
        assert_allclose(attrs["depth"], y.var() / attrs["train_loss"], rtol=1e-4)
    if name in {"its loss", "named", "gradient"}:  # a goal of one's own stays
        assert len(fitted.callbacks) == 1
        assert attrs["depth"] < 20


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
    attrs, _ = record(MODEL, X[:50], Y[:50], {"data__train_size": [30]})
    assert_allclose(attrs["depth"], np.log(2) / attrs["train_loss"])

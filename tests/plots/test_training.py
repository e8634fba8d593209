"""Displays of trainings: what of a history or a search is drawn."""

import numpy as np
import optuna
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessHistoryDisplay,
    FlatnessScorer,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    TrainingCurvesDisplay,
    relative_flatness,
)
from tests.plots.drawings import legend, lines

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")
X, y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
SCORER = FlatnessScorer(non_minimum="accept")
ON_TRAIN = {"on_train": True, "use_caching": False}


def regularized(**arguments):
    return RelativeFlatnessRegularizedClassifier(verbose=0, random_state=0, **arguments)


def plain_net(**arguments):
    torch.manual_seed(0)
    return NeuralNetClassifier(
        MLP(4, 3, (8,)), criterion=nn.CrossEntropyLoss, verbose=0, train_split=None, **arguments
    )


@pytest.fixture(scope="module")
def net():
    scoring = EpochScoring(SCORER, name="kappa", lower_is_better=False)
    return regularized(max_epochs=4, train_split=ValidSplit(5), callbacks=[scoring]).fit(X, y)


def test_losses_are_above_and_flatness_below_with_its_own_sign(net):
    display = FlatnessHistoryDisplay.from_estimator(net)
    upper, lower = display.ax_, display.flatness_ax_
    for line, name in zip(upper.lines, ["train_loss", "valid_loss"], strict=True):
        assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
        assert_allclose(line.get_ydata(), net.history[:, name])
    drawn = {line.get_label(): line.get_ydata() for line in lower.lines}
    assert_allclose(drawn["flatness penalty"], net.history[:, "flatness_penalty"])
    assert_allclose(drawn["kappa"], -np.array(net.history[:, "kappa"]))
    assert [legend(upper), legend(lower)] == [["training loss", "validation loss"], list(drawn)]
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("loss (nats)", "flatness (nats)")
    assert (lower.get_yscale(), lower.get_xlabel()) == ("log", "epoch")
    assert len({line.get_color() for ax in (upper, lower) for line in ax.lines}) == 4
    lower = display.plot(loss_unit="", marker="*").flatness_ax_
    assert (lower.get_ylabel(), lower.lines[0].get_marker()) == ("flatness", "*")


@pytest.mark.parametrize(("scoring", "sign"), [(SCORER, -1), (relative_flatness, 1)])
def test_any_skorch_net_may_record_flatness_from_some_epoch_on(scoring, sign):
    net = plain_net(max_epochs=2).fit(X, y)
    net.set_params(callbacks=[EpochScoring(scoring, name="kappa", **ON_TRAIN)], warm_start=True)
    net.initialize_callbacks().partial_fit(X, y)
    display = FlatnessHistoryDisplay.from_estimator(net)
    assert list(display.losses) == ["train_loss"]
    kappa = display.flatness["kappa"]
    assert np.isfinite(kappa).tolist() == [False, False, True, True]
    assert_allclose(kappa[2:], sign * np.array(net.history[2:, "kappa"]))


@pytest.mark.parametrize(("n", "marker"), [(1, "o"), (500, ".")])
def test_few_epochs_have_markers_and_many_small_dots(n, marker):
    epochs = np.arange(1.0, n + 1)
    losses = {"train_loss": 1 / epochs}
    display = FlatnessHistoryDisplay(epochs=epochs, losses=losses, flatness={"k": epochs}).plot()
    assert display.ax_.lines[0].get_marker() == marker
    assert all(tick.is_integer() for tick in display.flatness_ax_.get_xticks())


@pytest.mark.parametrize(
    ("estimator", "error", "message"),
    [
        (LogisticRegression(), TypeError, "Only a skorch net has a history, got LogisticRegr"),
        (regularized(), NotFittedError, "has no epoch in its history: call fit first"),
        (plain_net(max_epochs=1).fit(X, y), ValueError, "no column of flatness.*to the callbacks"),
    ],
    ids=["no net", "not fitted", "no flatness"],
)
def test_refuses_estimators_without_a_history_of_flatness(estimator, error, message):
    with pytest.raises(error, match=message):
        FlatnessHistoryDisplay.from_estimator(estimator)


@pytest.fixture(scope="module")
def search():
    """Two minima, and two nets that are far from the goal."""
    scoring = EpochScoring(SCORER, name="relative_flatness", on_train=True)
    net = regularized(module__hidden_layer_sizes=(6,), max_epochs=15, callbacks=[scoring])
    space = {"lr": [0.05, 5e-4], "batch_size": [16, 32]}
    return FlatMinimaSearch(net, space, goal=0.2, random_state=0).fit(X, y)


def test_a_curve_for_every_candidate(search):
    display = TrainingCurvesDisplay.from_minima(search)
    ax, best = display.ax_, int(search.minima_["trial"][0])
    losses = np.array(search.best_estimator_.history[:, "train_loss"])
    assert sorted(display.curves) == [0, 1, 2, 3]
    epochs, values = display.curves[best]
    assert_allclose(values, losses, rtol=1e-5)
    assert epochs.tolist() == list(range(1, len(losses) + 1))
    drawn = lines(ax)
    assert_allclose(drawn[0].get_ydata(), values)
    assert drawn[0].get_color() == "black"
    assert [line.get_linestyle() for line in drawn] == ["-", "-", ":", ":"]
    assert sorted(legend(ax)) == ["not ranked (2)", f"rank 1 (trial {best})"]
    assert ax.lines[1].get_xdata().tolist() == [epochs[-1]]  # a dot where each training ended
    assert (len(ax.lines), ax.get_xlabel(), ax.get_ylabel()) == (8, "epoch", "training loss (nats)")


def test_flatness_along_training(search):
    display = TrainingCurvesDisplay.from_minima(search, "relative_flatness", color_by="param_lr")
    recorded = -np.array(search.best_estimator_.history[:, "relative_flatness"])
    values = display.curves[int(search.minima_["trial"][0])][1]
    assert_allclose(values, recorded, rtol=1e-5)
    assert_allclose(values[-1], search.minima_["relative_flatness"][0], rtol=1e-4)
    assert display.ax_.get_ylabel() == "relative flatness κ (nats)"
    assert "lr" in [ax.get_ylabel() for ax in display.figure_.axes]


def test_scikit_learns_networks_and_studies_have_curves():
    space = {"alpha": [0.1, 1.0]}
    objective = MinimaObjective(MLPClassifier((4,), max_iter=3000, tol=1e-3), X, y, space)
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(space, seed=0))
    study.optimize(objective)
    ax = TrainingCurvesDisplay.from_minima(study).ax_
    assert len(lines(ax)) == 2
    assert ax.get_legend() is None or "rank 1" not in " ".join(legend(ax))


def test_long_trainings_are_thinned_out():
    settings = {"module__hidden_layer_sizes": (), "flatness_weight": 0, "batch_size": 150}
    model = regularized(max_epochs=450, **settings)
    search = FlatMinimaSearch(model, {"lr": [0.05]}, goal=None, refit=False).fit(X, y)
    epochs, values = TrainingCurvesDisplay.from_minima(search).curves[0]
    assert (len(epochs), len(values), epochs[0], epochs[-1]) == (200, 200, 1, 450)


@pytest.mark.parametrize("converged", [True, False])
def test_a_candidate_that_diverged_leaves_the_picture(converged):
    """Also if no candidate is ranked; one that is far from its goal stays in the picture."""
    study = optuna.create_study()
    curves = {(2.0, 1.0, 0.1): converged, (2.5, 2.4, 2.3): False, (3.0, 1e29, None): False}
    for curve, reached in curves.items():
        attrs = {"curves": {"epoch": [1, 2, 3], "train_loss": list(curve)}, "converged": reached}
        attrs |= {"relative_flatness": 1.0, "train_loss": 0.5}
        study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=attrs))
    ax = TrainingCurvesDisplay.from_minima(study, color_by=None).ax_
    low, high = ax.get_ylim()
    assert 0 < low < 0.1
    assert 3 < high < 30
    (out,) = [line for line in ax.lines if line.get_marker() == "^"]
    assert out.get_xdata().tolist() == [2.0]
    assert legend(ax) == [f"not ranked ({3 - converged}, ▴ 1 diverged)"]


def test_curves_that_there_are_not(search):
    with pytest.raises(ValueError, match=r"no candidate has a curve of 'acc'; there are \['flatn"):
        TrainingCurvesDisplay.from_minima(search, "acc")
    with pytest.raises(TypeError, match="A table has no curves: pass the search itself"):
        TrainingCurvesDisplay.from_minima(search.minima_)

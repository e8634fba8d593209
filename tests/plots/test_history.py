"""Tests for `_history`: what of a history is drawn."""

import sys

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    MLP,
    FlatnessHistoryDisplay,
    FlatnessScorer,
    RelativeFlatnessRegularizedClassifier,
    relative_flatness,
)

X, y = load_iris(return_X_y=True)
X = X.astype(np.float32)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def flatness_of_epochs(name="kappa", **arguments):
    scorer = FlatnessScorer(at_minimum="ignore")
    return EpochScoring(scorer, name=name, lower_is_better=False, **arguments)


def plain_net(**arguments):
    torch.manual_seed(0)
    return NeuralNetClassifier(
        MLP(4, 3, (8,)), criterion=nn.CrossEntropyLoss, verbose=0, train_split=None, **arguments
    )


@pytest.fixture(scope="module")
def net():
    return RelativeFlatnessRegularizedClassifier(
        max_epochs=4,
        verbose=0,
        random_state=0,
        train_split=ValidSplit(5),
        callbacks=[flatness_of_epochs()],
    ).fit(X, y)


def test_follows_the_convention_of_displays(net):
    made = FlatnessHistoryDisplay.from_estimator(net)
    assert isinstance(made, FlatnessHistoryDisplay)
    figure, axes = plt.subplots(1, 2)
    assert made.plot(ax=axes[1]) is made
    assert made.ax_ is axes[1]
    assert made.flatness_ax_ in figure.axes
    assert made.figure_ is figure
    assert not axes[0].lines


def test_losses_are_above_and_flatness_below_with_its_own_sign(net):
    display = FlatnessHistoryDisplay.from_estimator(net)
    history = net.history
    for line, name in zip(display.ax_.lines, ["train_loss", "valid_loss"], strict=True):
        assert_array_equal(line.get_xdata(), [1, 2, 3, 4])
        assert_allclose(line.get_ydata(), history[:, name])
    lines = {line.get_label(): line.get_ydata() for line in display.flatness_ax_.lines}
    assert_allclose(lines["flatness penalty"], history[:, "flatness_penalty"])
    assert_allclose(lines["kappa"], -np.array(history[:, "kappa"]))
    assert (lines["kappa"] > 0).all()
    legends = [ax.get_legend() for ax in (display.ax_, display.flatness_ax_)]
    assert [[text.get_text() for text in legend.texts] for legend in legends] == [
        ["training loss", "validation loss"],
        list(lines),
    ]
    assert display.ax_.get_ylabel() == "loss (nats)"
    assert display.flatness_ax_.get_ylabel() == "flatness (nats)"
    assert display.flatness_ax_.get_yscale() == "log"
    assert display.flatness_ax_.get_xlabel() == "epoch"
    colors = [line.get_color() for ax in (display.ax_, display.flatness_ax_) for line in ax.lines]
    assert len(set(colors)) == 4


def test_accepts_any_skorch_net_that_recorded_flatness():
    net = plain_net(max_epochs=3, callbacks=[flatness_of_epochs(on_train=True, use_caching=False)])
    display = FlatnessHistoryDisplay.from_estimator(net.fit(X, y))
    assert list(display.losses) == ["train_loss"]
    assert list(display.flatness) == ["kappa"]
    assert (display.flatness["kappa"] > 0).all()


def test_named_columns_are_drawn_unchanged(net):
    display = FlatnessHistoryDisplay.from_estimator(net, columns="dur", loss_unit="", marker="*")
    assert_allclose(display.flatness["dur"], net.history[:, "dur"])
    assert display.flatness_ax_.get_ylabel() == "flatness"
    assert display.flatness_ax_.lines[0].get_marker() == "*"


def test_accepts_pipelines_and_searches(net):
    small = RelativeFlatnessRegularizedClassifier(max_epochs=2, verbose=0, random_state=0)
    search = GridSearchCV(small, {"flatness_weight": [0.1]}, cv=2)
    pipeline = make_pipeline(StandardScaler(), search).fit(X, y)
    assert FlatnessHistoryDisplay.from_estimator(pipeline).epochs.tolist() == [1, 2]


def test_a_single_epoch_is_a_point_at_a_whole_number():
    net = RelativeFlatnessRegularizedClassifier(max_epochs=1, verbose=0, random_state=0)
    display = FlatnessHistoryDisplay.from_estimator(net.fit(X, y))
    display.figure_.canvas.draw()
    assert display.ax_.lines[0].get_marker() not in {"", "None", None}
    low, high = display.flatness_ax_.get_xlim()
    ticks = [t for t in display.flatness_ax_.get_xticks() if low <= t <= high]
    assert ticks == [1]


def test_many_epochs_are_small_dots_and_missing_values_gaps():
    epochs = np.arange(1.0, 501)
    kappa = np.where(epochs % 3 == 0, np.nan, epochs)
    display = FlatnessHistoryDisplay(
        epochs=epochs, losses={"train_loss": 1 / epochs}, flatness={"kappa": kappa}
    ).plot()
    (line,) = display.flatness_ax_.lines
    assert line.get_marker() == "."
    assert_allclose(line.get_ydata(), kappa)
    assert display.flatness_ax_.get_yscale() == "log"


def test_epochs_before_a_column_was_recorded_are_gaps(net):
    net = plain_net(max_epochs=2).fit(X, y)
    net.callbacks = [flatness_of_epochs(on_train=True, use_caching=False)]
    net.warm_start = True
    net.initialize_callbacks()
    net.partial_fit(X, y)
    display = FlatnessHistoryDisplay.from_estimator(net)
    assert np.isnan(display.flatness["kappa"][:2]).all()
    assert np.isfinite(display.flatness["kappa"][2:]).all()


def test_refuses_estimators_without_a_history_of_flatness(net):
    with pytest.raises(TypeError, match="Only a skorch net has a history, got LogisticRegression"):
        FlatnessHistoryDisplay.from_estimator(LogisticRegression(max_iter=5000).fit(X, y))
    with pytest.raises(NotFittedError, match="has no epoch in its history: call fit first"):
        FlatnessHistoryDisplay.from_estimator(RelativeFlatnessRegularizedClassifier())
    with pytest.raises(
        ValueError, match=r"no column of flatness.*there are \['dur', 'train_loss'\]"
    ):
        FlatnessHistoryDisplay.from_estimator(plain_net(max_epochs=1).fit(X, y))
    with pytest.raises(ValueError, match=r"columns: 'rho' is not in the history; there are \["):
        FlatnessHistoryDisplay.from_estimator(net, columns=["rho"])


def test_says_how_to_install_matplotlib(net, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        FlatnessHistoryDisplay.from_estimator(net)


def test_flatness_recorded_by_the_measure_keeps_its_sign():
    scoring = EpochScoring(relative_flatness, name="kappa", on_train=True)
    net = plain_net(max_epochs=2, callbacks=[scoring]).fit(X, y)
    display = FlatnessHistoryDisplay.from_estimator(net)
    assert_allclose(display.flatness["kappa"], net.history[:, "kappa"])
    assert (display.flatness["kappa"] > 0).all()

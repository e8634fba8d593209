"""Tests for `_curves` and `_hyperparameter`: what is drawn, and what is refused."""

import sys

import numpy as np
import optuna
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import scale
from skorch.callbacks import EpochScoring

from relflat_sk import (
    FlatMinimaSearch,
    FlatnessGapDisplay,
    FlatnessHistoryDisplay,
    FlatnessScorer,
    HyperparameterDisplay,
    LayerFlatnessDisplay,
    MeasurePanelsDisplay,
    MinimaObjective,
    MinimaRankingDisplay,
    RelativeFlatnessRegularizedClassifier,
    RelativeFlatnessRegularizedRegressor,
    SharpnessKLDisplay,
    TrainingCurvesDisplay,
    rank_minima,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")

X, Y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
SCORING = EpochScoring(FlatnessScorer(at_minimum="ignore"), name="relative_flatness", on_train=True)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def search():
    """Two minima, and two nets that are far from the goal."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    net = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(6,), verbose=0, max_epochs=30, callbacks=[SCORING]
    )
    space = {"lr": [0.02, 5e-4], "batch_size": [16, 32]}
    return FlatMinimaSearch(net, space, goal=0.2, random_state=0).fit(X, Y)


def lines(display, epochs=2):
    """The curves, without the dots at their ends."""
    return [line for line in display.ax_.lines if len(line.get_xdata()) >= epochs]


def legend(display):
    return [text.get_text() for text in display.ax_.get_legend().texts]


# -- curves ------------------------------------------------------------------------------------


def test_a_curve_for_every_candidate(search):
    display = TrainingCurvesDisplay.from_minima(search)
    assert sorted(display.curves) == [0, 1, 2, 3]
    best = int(search.minima_["trial"][0])
    losses = np.array(search.best_estimator_.history[:, "train_loss"])
    epochs, values = display.curves[best]
    assert_allclose(values, losses, rtol=1e-5)
    assert epochs.tolist() == list(range(1, len(losses) + 1))
    drawn = lines(display)
    assert len(drawn) == 4
    assert_allclose(drawn[0].get_ydata(), values)
    assert drawn[0].get_color() == "black"
    assert [line.get_linestyle() for line in drawn] == ["-", "-", ":", ":"]
    assert sorted(legend(display)) == ["not ranked (2)", f"rank 1 (trial {best})"]
    # a dot where each training ended
    assert len(display.ax_.lines) == 8
    assert display.ax_.lines[1].get_xdata().tolist() == [epochs[-1]]
    assert (display.ax_.get_xlabel(), display.ax_.get_ylabel()) == ("epoch", "training loss (nats)")


def test_flatness_along_training(search):
    display = TrainingCurvesDisplay.from_minima(search, "relative_flatness", color_by="param_lr")
    net = search.best_estimator_
    recorded = -np.array(net.history[:, "relative_flatness"])
    values = display.curves[int(search.minima_["trial"][0])][1]
    assert_allclose(values, recorded, rtol=1e-5)
    assert_allclose(values[-1], search.minima_["relative_flatness"][0], rtol=1e-4)
    assert display.ax_.get_ylabel() == "relative flatness κ (nats)"
    assert "lr" in [ax.get_ylabel() for ax in display.figure_.axes]
    penalty = TrainingCurvesDisplay.from_minima(search, "flatness_penalty", color_by=None)
    assert min(values.min() for _, values in penalty.curves.values()) >= 0


def test_long_trainings_are_thinned_out():
    model = RelativeFlatnessRegularizedClassifier(
        module__hidden_layer_sizes=(), flatness_weight=0, verbose=0, max_epochs=450, batch_size=150
    )
    search = FlatMinimaSearch(model, {"lr": [0.05]}, goal=None, refit=False).fit(X, Y)
    epochs, values = TrainingCurvesDisplay.from_minima(search).curves[0]
    assert len(epochs) == len(values) == 200
    assert (epochs[0], epochs[-1]) == (1, 450)


def test_scikit_learns_networks_and_studies_have_curves():
    objective = MinimaObjective(
        MLPClassifier((4,), max_iter=3000, tol=1e-3), X, Y, {"alpha": [0.1, 1.0]}
    )
    study = optuna.create_study(sampler=optuna.samplers.GridSampler({"alpha": [0.1, 1.0]}, seed=0))
    study.optimize(objective)
    display = TrainingCurvesDisplay.from_minima(study)
    assert len(lines(display)) == 2
    assert display.ax_.get_legend() is None or "rank 1" not in " ".join(legend(display))


def test_values_that_are_not_finite_are_gaps():
    study = optuna.create_study()
    curves = {"epoch": [1.0, 2.0, 3.0], "train_loss": [1.0, 0.5, None]}
    attrs = {"relative_flatness": 1.0, "train_loss": 0.5, "curves": curves}
    study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs=attrs))
    display = TrainingCurvesDisplay.from_minima(study)
    assert display.ax_.lines[1].get_xdata().tolist() == [2.0]


def test_curves_that_there_are_not(search):
    with pytest.raises(ValueError, match=r"no candidate has a curve of 'acc'; there are \['flatn"):
        TrainingCurvesDisplay.from_minima(search, "acc")
    with pytest.raises(TypeError, match="A table has no curves: pass the search itself"):
        TrainingCurvesDisplay.from_minima(search.minima_)
    regression = FlatMinimaSearch(LogisticRegression(max_iter=500), {"C": [1.0]}).fit(X, Y)
    with pytest.raises(ValueError, match=r"no candidate has a curve of 'train_loss'; there are \["):
        TrainingCurvesDisplay.from_minima(regression)


# -- a measure against a hyper-parameter -------------------------------------------------------


def table(n=12, **columns):
    rng = np.random.default_rng(0)
    minima = {
        "trial": np.arange(n),
        "param_batch_size": np.resize([8, 32, 128], n),
        "param_activation": np.repeat(["relu", "tanh"], n // 2),
        "relative_flatness": rng.uniform(1, 9, n),
        "depth": 20.0,
        "converged": True,
        "state": "complete",
        "reason": "",
    }
    return pd.DataFrame({**minima, **columns})


def test_a_measure_against_a_number():
    minima = table()
    display = HyperparameterDisplay.from_minima(minima)
    assert display.axis == "param_batch_size"
    assert display.color_by == "param_activation"
    points = np.asarray(display.ax_.collections[0].get_offsets())
    assert_allclose(points, minima[["param_batch_size", "relative_flatness"]])
    medians = minima.groupby("param_batch_size")["relative_flatness"].median()
    assert_allclose(lines(display)[0].get_ydata(), medians)
    assert display.ax_.get_xscale() == "log"
    assert [label.get_text() for label in display.ax_.get_xticklabels()] == ["8", "32", "128"]
    assert legend(display) == ["median of the minima"]


def test_a_measure_against_names():
    display = HyperparameterDisplay.from_minima(table(), "activation", "depth", color_by=None)
    assert [label.get_text() for label in display.ax_.get_xticklabels()] == ["relu", "tanh"]
    assert display.ax_.get_xlabel() == "activation"
    assert display.ax_.get_ylabel() == "depth"


def test_names_without_minima_have_their_places():
    """Such as an optimizer that never converged."""
    names = ["sgd", "adam", "adamw"]
    minima = table(param_optimizer=np.resize(names, 12))
    minima["converged"] = minima["param_optimizer"] != "adam"
    ax = HyperparameterDisplay.from_minima(minima, "optimizer", color_by=None).ax_
    assert [label.get_text() for label in ax.get_xticklabels()] == names
    dots, crosses = (np.asarray(points.get_offsets())[:, 0] for points in ax.collections)
    assert dots.tolist() == [0, 2] * 4
    assert crosses.tolist() == [1] * 4


@pytest.mark.parametrize("n", [1, 20])
def test_one_name_and_many_names_are_written(n):
    names = [f"name {i:02d}" for i in range(n)]
    ax = HyperparameterDisplay.from_minima(table(40, param_name=np.resize(names, 40)), "name").ax_
    assert [label.get_text() for label in ax.get_xticklabels()] == names


def test_a_candidate_that_failed_before_it_had_a_name_has_no_place():
    minima = table()
    minima.loc[0, ["param_activation", "relative_flatness", "state"]] = [np.nan, np.nan, "failed"]
    ax = HyperparameterDisplay.from_minima(minima, "activation", color_by=None).ax_
    assert [label.get_text() for label in ax.get_xticklabels()] == ["relu", "tanh"]
    assert np.asarray(ax.collections[0].get_offsets())[:, 0].tolist() == [0] * 5 + [1] * 6


def test_many_values_have_no_medians():
    minima = table(20, param_batch_size=np.arange(20) + 1.0)
    display = HyperparameterDisplay.from_minima(minima, "batch_size", color_by=None)
    assert not lines(display)


def test_candidates_that_are_no_minima_are_crosses():
    minima = table(converged=[False] * 2 + [True] * 10, depth=[20.0] * 9 + [500.0] * 3)
    display = HyperparameterDisplay.from_minima(rank_minima(minima))
    assert "not converged (2), at another depth (3)" in legend(display)
    panels = MeasurePanelsDisplay.from_minima(
        rank_minima(minima.assign(generalization_gap=np.arange(12.0))), random_state=0
    )
    assert "not converged, at another depth" in {
        label for ax in panels.axes_ for label in ax.get_legend_handles_labels()[1]
    }
    gap = FlatnessGapDisplay.from_minima(
        rank_minima(minima.assign(generalization_gap=0.1)), random_state=0
    )
    assert "not converged (2), at another depth (3)" in legend(gap)


def test_hyperparameters_that_there_are_not():
    with pytest.raises(ValueError, match=r"axis: 'width' is no parameter of these minima"):
        HyperparameterDisplay.from_minima(table(), "width")
    with pytest.raises(ValueError, match="No hyper-parameter was varied"):
        HyperparameterDisplay.from_minima(
            table().drop(columns=["param_batch_size", "param_activation"])
        )
    with pytest.raises(ValueError, match="there is nothing to draw"):
        HyperparameterDisplay.from_minima(table(converged=False))


def test_losses_of_regressors_have_no_unit():
    net = RelativeFlatnessRegularizedRegressor(max_epochs=12, verbose=0, random_state=0)
    search = FlatMinimaSearch(net, {"batch_size": [16, 32, 64]}, goal=10.0, depth_band=None)
    search.fit(X, Y.astype(np.float32), X, Y.astype(np.float32))
    displays = [
        FlatnessGapDisplay.from_minima(search),
        HyperparameterDisplay.from_minima(search),
        MeasurePanelsDisplay.from_minima(search),
        MinimaRankingDisplay.from_minima(search),
        TrainingCurvesDisplay.from_minima(search),
        FlatnessHistoryDisplay.from_estimator(search),
        LayerFlatnessDisplay.from_estimator(search, X, Y),
        SharpnessKLDisplay.from_estimator(search, X, Y, alphas=[0.1, 0.2], n_draws=2),
    ]
    for display in displays:
        for ax in display.figure_.axes:
            assert "nats" not in (ax.get_xlabel() + ax.get_ylabel()).replace(
                "KL divergence (nats", ""
            )
    for source in (search.minima_, search.study_, search.minima_.query("converged")):
        display = HyperparameterDisplay.from_minima(source)
        assert display.ax_.get_ylabel() == "relative flatness κ"
        assert "nats" not in FlatnessGapDisplay.from_minima(source).ax_.get_ylabel()
    display = HyperparameterDisplay.from_minima(search, loss_unit="m²")
    assert display.ax_.get_ylabel() == "relative flatness κ (m²)"


# -- both --------------------------------------------------------------------------------------


def test_they_draw_into_given_axes_and_again(search):
    _, (left, right) = plt.subplots(1, 2)
    curves = TrainingCurvesDisplay.from_minima(search, ax=left)
    against = HyperparameterDisplay.from_minima(search, ax=right, s=10)
    assert curves.ax_ is left
    assert against.ax_ is right
    assert curves.plot(loss_unit="").ax_.get_ylabel() == "training loss"


def test_say_how_to_install_matplotlib(search, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        TrainingCurvesDisplay.from_minima(search)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        HyperparameterDisplay.from_minima(table())

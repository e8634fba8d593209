"""Displays of trained models and of their trainings: what is drawn, and where."""

from functools import partial

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, scale
from skorch import NeuralNetClassifier
from skorch.callbacks import EpochScoring
from skorch.dataset import ValidSplit
from torch import nn

from relflat_sk import (
    MLP,
    FlatMinimaSearch,
    FlatnessHistoryDisplay,
    FlatnessScorer,
    LayerFlatnessDisplay,
    LayerSensitivityDisplay,
    MinimaObjective,
    RelativeFlatnessRegularizedClassifier,
    SharpnessKLDisplay,
    TrainingCurvesDisplay,
    flatness_report,
    layer_sensitivity,
    measure,
    relative_flatness,
)
from tests.plots.drawings import legend, lines, ticks

pytestmark = pytest.mark.filterwarnings("ignore:.* candidates are no minima")
X, y = load_iris(return_X_y=True)
X = scale(X).astype(np.float32)
CE = nn.CrossEntropyLoss()
SCORER = FlatnessScorer(non_minimum="accept")


def plain_net(**arguments):
    settings = {"criterion": nn.CrossEntropyLoss, "verbose": 0, "train_split": None}
    return NeuralNetClassifier(MLP(4, 3, (8,)), **settings, **arguments)


regularized = partial(RelativeFlatnessRegularizedClassifier, verbose=0, random_state=0)


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
    scoring = EpochScoring(scoring, name="kappa", on_train=True, use_caching=False)
    net.set_params(callbacks=[scoring], warm_start=True)
    net.initialize_callbacks().partial_fit(X, y)
    display = FlatnessHistoryDisplay.from_estimator(net)
    assert list(display.losses) == ["train_loss"]
    kappa = display.flatness["kappa"]
    assert np.isfinite(kappa).tolist() == [False, False, True, True]
    assert_allclose(kappa[2:], sign * np.array(net.history[2:, "kappa"]))
    assert all(tick.is_integer() for tick in display.flatness_ax_.get_xticks())


@pytest.mark.parametrize(
    ("estimator", "error", "message"),
    [
        (LogisticRegression(), TypeError, "Only a skorch net has a history, got LogisticRegr"),
        (regularized(), NotFittedError, "has no epoch in its history: call fit first"),
        (plain_net(max_epochs=1).fit(X, y), ValueError, "no column of flatness.*to the callbacks"),
    ],
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


@pytest.fixture(scope="module")
def model():
    net = MLPClassifier((8, 6), max_iter=3000, random_state=0)
    return make_pipeline(StandardScaler(), net).fit(X, y)


def small_module(*layers):
    return nn.Sequential(*layers), torch.tensor(X, dtype=torch.float32), torch.tensor(y)


def values(ax):
    return ax.containers[0].lines[0].get_xdata(orig=False)


def test_layers_are_drawn_in_forward_order_as_reported(model):
    measures = ["hessian_trace", "l2_norm", "relative_flatness"]  # the report has another order
    display = LayerFlatnessDisplay.from_estimator(model, X, y, measures=measures)
    report = flatness_report(model, X, y, measures=measures)
    assert list(dict.fromkeys(display.report["measure"])) == measures
    for name, panel in zip(measures, display.axes_, strict=True):
        rows = report[report["measure"] == name]["value"].tolist()
        # a value of the whole network has its own row
        expected = [np.nan] * 3 + rows if name == "l2_norm" else [*rows, np.nan]
        assert_allclose(values(panel), expected)
    first, _, last = display.axes_
    assert ticks(first.yaxis) == ["0: hidden0", "1: hidden1", "2: output", "whole network"]
    assert first.yaxis_inverted()  # the first layer is above
    assert (first.get_xlabel(), first.get_ylabel()) == ("Hessian trace", "layer")
    assert last.get_xlabel() == "relative flatness κ (nats)"


def test_rises_under_rounding_are_drawn_for_each_number_of_bits(model):
    options, seed = {"bits": [6, 3], "measured": True}, {"random_state": 0}
    draw = LayerSensitivityDisplay.from_estimator
    display = draw(model, X, y, sensitivity_params=seed, **options)
    table = layer_sensitivity(model, X, y, **options, **seed)
    crosses = [line for line in display.ax_.lines if line.get_marker() == "x"]
    drawn = zip([6, 3], display.ax_.containers, crosses, strict=True)
    for bits, container, cross in drawn:
        rows = table[table["bits"] == bits]
        assert_allclose(container.lines[0].get_xdata(orig=False), rows["predicted"])
        ends = np.array([segment[:, 0] for segment in container.lines[2][0].get_segments()])
        assert_allclose(np.diff(ends, axis=1)[:, 0] / 2, rows["stderr"])
        assert_allclose(cross.get_xdata(), rows["measured"])
    assert ticks(display.ax_.yaxis) == ["hidden0", "hidden1", "output"]
    assert display.ax_.get_xlabel() == "rise of the loss (nats)"


def test_arguments_reach_the_measures_and_matplotlib():
    params = {"criterion": CE, "method": "hutchinson", "n_probes": 3, "random_state": 0}
    options = {"measures": "relative_flatness", "layers": ["0"], "measure_params": params}
    display = LayerFlatnessDisplay.from_estimator(
        *small_module(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), **options, loss_unit="",
        markersize=9,
    )  # fmt: skip
    (row,) = display.report.itertuples()
    ((low, _), (high, _)) = display.ax_.collections[0].get_segments()[0]
    assert row.stderr > 0
    assert_allclose([low, high], [row.value - row.stderr, row.value + row.stderr], rtol=1e-6)
    assert display.ax_.get_xlabel() == "relative flatness κ (small is flat)"
    assert display.ax_.containers[0].lines[0].get_markersize() == 9


@pytest.mark.parametrize(
    ("display", "params"),
    [(LayerFlatnessDisplay, "measure_params"), (LayerSensitivityDisplay, "sensitivity_params")],
)
def test_arguments_of_the_measures_have_their_place(display, params):
    data = small_module(nn.Linear(4, 3))
    with pytest.raises(TypeError, match=f"no argument 'criterion': pass it in {params}, as"):
        display.from_estimator(*data, criterion=CE)
    display = display.from_estimator(*data, **{params: {"criterion": CE}})
    assert ticks(display.ax_.yaxis)[0].endswith("0")


def test_long_names_are_shortened_and_missing_values_leave_a_gap():
    names = ["encoder." + "block." * 12 + "weight", "head"]
    columns = {"measure": "kappa", "layer": names, "value": [np.nan, 2.0], "stderr": np.nan}
    ax = LayerFlatnessDisplay(report=pd.DataFrame({**columns, "position": [0, 1]})).plot().ax_
    label = ticks(ax.yaxis)[0]
    assert len(label) < 48
    assert label.startswith("0: encoder.block")
    assert label.endswith("block.weight")
    assert_allclose(values(ax), [np.nan, 2.0])


def test_long_error_bars_leave_labels_at_powers_of_ten_only():
    columns = {"layer": ["a", "b"], "bits": 4, "predicted": [1e-3, 2e-2], "stderr": [9.99e-4, 0]}
    ax = LayerSensitivityDisplay(table=pd.DataFrame(columns)).plot().ax_
    ax.figure.canvas.draw()
    labels = ax.xaxis.get_ticklabels(which="both")
    exponents = np.log10([label.get_position()[0] for label in labels if label.get_text()])
    assert_allclose(exponents, exponents.round())


def test_curves_trade_sharpness_for_the_divergence_of_weights_with_noise():
    models = {f"C = {C}": LogisticRegression(C=C, max_iter=5000).fit(X, y) for C in (0.1, 10)}
    alphas, options = [0.001, 0.1, 0.01], {"n_draws": 3, "random_state": 0}
    display = SharpnessKLDisplay.from_estimator(models, X, y, alphas=alphas, **options)
    for (name, model), container in zip(models.items(), display.ax_.containers, strict=True):
        curve, w = display.curves[name], np.hstack([model.coef_, model.intercept_[:, None]])
        assert curve["alpha"].tolist() == alphas
        for row in curve.itertuples():
            # between normal distributions of deviation alpha (10 |w| + 1) around w and around 0
            assert row.kl == pytest.approx((w**2 / (10 * abs(w) + 1) ** 2).sum() / row.alpha**2 / 2)
            found = measure("expected_sharpness", model, X, y, alpha=row.alpha, **options)
            assert row.expected_sharpness == pytest.approx(found, rel=1e-9)
        line, _, (bars,) = container.lines
        assert_allclose(line.get_xydata(), curve[["kl", "expected_sharpness"]])
        ends = np.array(bars.get_segments())[:, :, 1]
        assert_allclose(np.diff(ends).ravel(), 2 * curve["stderr"])
    ax = display.ax_
    assert legend(ax) == list(models)
    assert ax.get_ylabel() == "expected sharpness (nats)"
    assert "KL divergence (nats)" in ax.get_xlabel()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_one_model_needs_no_legend_and_a_module_its_criterion():
    data, from_estimator = small_module(nn.Linear(4, 3)), SharpnessKLDisplay.from_estimator
    ax = from_estimator(*data, alphas=[0.1], criterion=CE, random_state=0, loss_unit="").ax_
    assert ax.get_legend() is None
    assert (ax.get_ylabel(), ax.get_xscale()) == ("expected sharpness", "linear")  # one point
    with pytest.raises(ValueError, match="criterion is needed for a bare module"):
        from_estimator(*data)
    with pytest.raises(ValueError, match="estimator is an empty dict"):
        from_estimator({}, X, y)


def test_many_curves_all_look_different():
    columns = {"alpha": [0.1, 0.2], "kl": [2.0, 1.0], "expected_sharpness": [-1.0, 1.0]}
    curve = pd.DataFrame({**columns, "stderr": 0.1})
    ax = SharpnessKLDisplay(curves={str(i): curve for i in range(20)}).plot().ax_
    drawn = [container.lines[0] for container in ax.containers]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in drawn}
    assert len(looks) == 20
    assert ax.get_yscale() == "linear"

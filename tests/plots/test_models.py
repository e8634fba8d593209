"""Displays of trained models: which numbers are drawn, and where."""

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from relflat_sk import (
    LayerFlatnessDisplay,
    LayerSensitivityDisplay,
    SharpnessKLDisplay,
    flatness_report,
    layer_sensitivity,
)
from relflat_sk._models.network_of import DataOptions, to_network
from relflat_sk.measures._sharpness import sharpness_curve
from tests.plots.drawings import legend, ticks

X, y = load_iris(return_X_y=True)
CE = nn.CrossEntropyLoss()


@pytest.fixture(scope="module")
def model():
    net = MLPClassifier((8, 6), max_iter=3000, random_state=0)
    return make_pipeline(StandardScaler(), net).fit(X, y)


def small_module(*layers):
    torch.manual_seed(0)
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
    first = display.ax_
    assert ticks(first.yaxis) == ["0: hidden0", "1: hidden1", "2: output", "whole network"]
    bottom, top = first.get_ylim()
    assert bottom > top  # the first layer is above
    assert (first.get_xlabel(), first.get_ylabel()) == ("Hessian trace", "layer")
    assert display.axes_[2].get_xlabel() == "relative flatness κ (nats)"


def test_rises_under_rounding_are_drawn_for_each_number_of_bits(model):
    options = {"bits": [6, 3], "measured": True}
    seed = {"random_state": 0}
    display = LayerSensitivityDisplay.from_estimator(
        model, X, y, sensitivity_params=seed, **options
    )
    table = layer_sensitivity(model, X, y, **options, **seed)
    for bits, drawn in zip([6, 3], display.ax_.containers, strict=True):
        rows = table[table["bits"] == bits]
        assert_allclose(drawn.lines[0].get_xdata(orig=False), rows["predicted"])
        ends = np.array([one[:, 0] for one in drawn.lines[2][0].get_segments()])
        assert_allclose(np.diff(ends, axis=1)[:, 0] / 2, rows["stderr"])
    crosses = [line for line in display.ax_.lines if line.get_marker() == "x"]
    for bits, line in zip([6, 3], crosses, strict=True):
        assert_allclose(line.get_xdata(), table.loc[table["bits"] == bits, "measured"])
    assert ticks(display.ax_.yaxis) == ["hidden0", "hidden1", "output"]
    assert display.ax_.get_xlabel() == "rise of the loss (nats)"


def test_arguments_reach_the_measures_and_matplotlib():
    module, *data = small_module(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    params = {"criterion": CE, "method": "hutchinson", "n_probes": 3, "random_state": 0}
    display = LayerFlatnessDisplay.from_estimator(
        module, *data, measures="relative_flatness", layers=["0"], measure_params=params,
        loss_unit="", markersize=9,
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
    module, *data = small_module(nn.Linear(4, 3))
    with pytest.raises(TypeError, match=f"no argument 'criterion': pass it in {params}, as"):
        display.from_estimator(module, *data, criterion=CE)
    display = display.from_estimator(module, *data, **{params: {"criterion": CE}})
    assert ticks(display.ax_.yaxis)[0].endswith("0")


def test_long_names_are_shortened_and_missing_values_leave_a_gap():
    names = ["encoder." + "block." * 12 + "weight", "head"]
    columns = {"measure": "kappa", "layer": names, "value": [np.nan, 2.0], "stderr": np.nan}
    columns["position"] = [0, 1]
    ax = LayerFlatnessDisplay(report=pd.DataFrame(columns)).plot().ax_
    label = ticks(ax.yaxis)[0]
    assert len(label) < 48
    assert label.startswith("0: encoder.block")
    assert label.endswith("block.weight")
    assert_allclose(values(ax), [np.nan, 2.0])


def test_curves_are_those_of_sharpness_curve():
    alphas = [0.001, 0.01, 0.1]
    models = {f"C = {C}": LogisticRegression(C=C, max_iter=5000).fit(X, y) for C in (0.1, 10)}
    options = {"n_draws": 3, "random_state": 0}
    display = SharpnessKLDisplay.from_estimator(models, X, y, alphas=alphas, **options)
    for (name, model), container in zip(models.items(), display.ax_.containers, strict=True):
        expected = sharpness_curve(to_network(model, X, y, DataOptions()), alphas, **options)
        pd.testing.assert_frame_equal(display.curves[name], expected)
        line, _, (bars,) = container.lines
        assert_allclose(line.get_xdata(orig=False), expected["kl"])
        assert_allclose(line.get_ydata(orig=False), expected["expected_sharpness"])
        ends = np.array(bars.get_segments())[:, :, 1]
        assert_allclose(np.diff(ends).ravel(), 2 * expected["stderr"])
    ax = display.ax_
    assert legend(ax) == list(models)
    assert ax.get_ylabel() == "expected sharpness (nats)"
    assert "KL divergence (nats)" in ax.get_xlabel()
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")


def test_one_model_needs_no_legend_and_a_module_its_criterion():
    module, *data = small_module(nn.Linear(4, 3))
    options = {"alphas": [0.1], "criterion": CE, "random_state": 0, "loss_unit": ""}
    ax = SharpnessKLDisplay.from_estimator(module, *data, **options).ax_
    assert ax.get_legend() is None
    assert (ax.get_ylabel(), ax.get_xscale()) == ("expected sharpness", "linear")  # one point
    with pytest.raises(ValueError, match="criterion is needed for a bare module"):
        SharpnessKLDisplay.from_estimator(module, *data)
    with pytest.raises(ValueError, match="estimator is an empty dict"):
        SharpnessKLDisplay.from_estimator({}, X, y)


def test_many_curves_all_look_different():
    curve = pd.DataFrame({"alpha": [0.1, 0.2], "kl": [2.0, 1.0], "stderr": 0.1})
    curve["expected_sharpness"] = [-1.0, 1.0]
    display = SharpnessKLDisplay(curves={str(i): curve for i in range(20)}).plot()
    lines = [container.lines[0] for container in display.ax_.containers]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == 20
    assert display.ax_.get_yscale() == "linear"

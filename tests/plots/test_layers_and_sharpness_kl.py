"""Tests for `_layers` and `_sharpness_kl`: which numbers are drawn, and where."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from relflat_sk import LayerFlatnessDisplay, SharpnessKLDisplay, flatness_report
from relflat_sk._models import DataOptions, to_network
from relflat_sk.measures._sharpness import sharpness_curve

X, y = load_iris(return_X_y=True)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    net = MLPClassifier((8, 6), max_iter=3000, random_state=0)
    return make_pipeline(StandardScaler(), net).fit(X, y)


def drawn(ax):
    return ax.containers[0].lines[0]


def make_report(values, stderr=0.0, layers=None):
    layers = [f"layer{i}" for i in range(len(values))] if layers is None else layers
    return pd.DataFrame({
        "measure": "relative_flatness",
        "layer": layers,
        "value": values,
        "stderr": stderr,
    })


@pytest.mark.parametrize("display", [LayerFlatnessDisplay, SharpnessKLDisplay])
def test_follows_the_convention_of_displays(display, model):
    made = display.from_estimator(model, X, y)
    assert isinstance(made, display)
    figure, axes = plt.subplots(1, 2, figsize=(14, 5))
    assert made.plot(ax=axes[1]) is made
    assert made.ax_ is axes[1]
    assert made.figure_ is figure
    assert not axes[0].containers


def test_layers_are_drawn_in_forward_order_as_reported(model):
    measures = ["relative_flatness", "hessian_trace"]
    display = LayerFlatnessDisplay.from_estimator(model, X, y, measures=measures)
    report = flatness_report(model, X, y, measures=measures)
    assert display.report["measure"].tolist() == ["relative_flatness"] * 3 + ["hessian_trace"] * 3
    for name, panel in zip(measures, display.axes_, strict=True):
        rows = report[report["measure"] == name]
        assert_allclose(drawn(panel).get_xdata(orig=False), rows["value"])
        assert_allclose(drawn(panel).get_ydata(orig=False), range(3))
    first = display.ax_
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "0: hidden0", "1: hidden1", "2: output",
    ]  # fmt: skip
    bottom, top = first.get_ylim()
    assert bottom > top  # the first layer is above
    assert first.get_xlabel() == "relative flatness κ (nats)"
    assert first.get_ylabel() == "layer"


def test_a_choice_of_layers_and_arguments_of_the_measures():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    display = LayerFlatnessDisplay.from_estimator(
        module,
        torch.tensor(X, dtype=torch.float32),
        torch.tensor(y),
        measures="relative_flatness",
        layers=["0"],
        measure_params={
            "criterion": nn.CrossEntropyLoss(),
            "method": "hutchinson",
            "n_probes": 3,
            "random_state": 0,
        },
        loss_unit="",
        markersize=9,
    )
    (row,) = display.report.itertuples()
    ((low, _), (high, _)) = display.ax_.collections[0].get_segments()[0]
    assert row.stderr > 0
    assert_allclose([low, high], [row.value - row.stderr, row.value + row.stderr], rtol=1e-6)
    assert display.ax_.get_xlabel() == "relative flatness κ"
    assert drawn(display.ax_).get_markersize() == 9


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"measure_params": {"layer": 0}},
            ValueError,
            "measure_params={'layer': 0} must not contain 'layer': .* itself, as layers=...",
        ),
        ({"measure_params": {"measures": []}}, ValueError, "contain 'measures': .* as measures="),
        ({"measure_params": [0]}, TypeError, r"measure_params=\[0\], expected None or a dict"),
        (
            {"criterion": nn.CrossEntropyLoss()},
            TypeError,
            "no argument 'criterion': pass it in measure_params, as .*\"criterion\": ",
        ),
        ({"layers": []}, ValueError, "layers must name at least one layer"),
        ({"measures": []}, ValueError, "measures must name at least one measure"),
        ({"measures": 1}, TypeError, "measures must be a name or a list of names"),
    ],
    ids=str,
)
def test_bad_choices_of_layers_and_measures(model, arguments, error, message):
    with pytest.raises(error, match=message):
        LayerFlatnessDisplay.from_estimator(model, X, y, **arguments)


def test_one_layer_counts_as_a_list_of_one(model):
    display = LayerFlatnessDisplay.from_estimator(model, X, y, layers=1)
    assert display.report["layer"].tolist() == ["hidden1"]


def test_a_measure_of_the_whole_network_has_its_own_row(model):
    measures = ["l2_norm", "relative_flatness"]
    display = LayerFlatnessDisplay.from_estimator(model, X, y, measures=measures)
    labels = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert labels[-1] == "whole network"
    assert len(labels) == 4
    norm, flatness = (drawn(panel).get_xdata(orig=False) for panel in display.axes_)
    assert np.isnan(norm[:3]).all()
    assert norm[3] > 0
    assert np.isnan(flatness[3])


def test_layers_have_their_position_also_if_some_are_left_out_and_in_saved_reports(model):
    display = LayerFlatnessDisplay.from_estimator(model, X, y, layers=["hidden1", -1])
    labels = [label.get_text() for label in display.ax_.get_yticklabels()]
    assert labels == ["1: hidden1", "2: output"]
    saved = display.report.astype({"position": float})  # as pandas reads missing values
    display = LayerFlatnessDisplay(report=saved).plot()
    assert [label.get_text() for label in display.ax_.get_yticklabels()] == labels


@pytest.mark.parametrize(
    ("values", "scale"),
    [([1.0, 100.0], "log"), ([1.0, 5.0], "linear"), ([-1.0, 100.0], "linear")],
    ids=["wide", "narrow", "negative"],
)
def test_the_scale_is_logarithmic_for_positive_values_over_a_decade(values, scale):
    assert LayerFlatnessDisplay(report=make_report(values)).plot().ax_.get_xscale() == scale


def test_long_names_are_shortened_and_missing_values_leave_a_gap():
    names = ["encoder." + "block." * 12 + "weight", "head"]
    report = make_report([np.nan, 2.0], stderr=np.nan, layers=names)
    display = LayerFlatnessDisplay(report=report).plot()
    label = display.ax_.get_yticklabels()[0].get_text()
    assert len(label) < 45
    assert label.startswith("encoder.block")
    assert label.endswith("block.weight")
    assert_allclose(drawn(display.ax_).get_xdata(orig=False), [np.nan, 2.0])


def test_curves_are_those_of_sharpness_curve():
    alphas = [0.001, 0.01, 0.1]
    models = {f"C = {C}": LogisticRegression(C=C, max_iter=5000).fit(X, y) for C in (0.1, 10)}
    display = SharpnessKLDisplay.from_estimator(
        models, X, y, alphas=alphas, n_draws=3, random_state=0
    )
    for (name, model), container in zip(models.items(), display.ax_.containers, strict=True):
        network = to_network(model, X, y, DataOptions())
        expected = sharpness_curve(network, alphas, n_draws=3, random_state=0)
        pd.testing.assert_frame_equal(display.curves[name], expected)
        line, _, (bars,) = container.lines
        assert_allclose(line.get_xdata(orig=False), expected["kl"])
        assert_allclose(line.get_ydata(orig=False), expected["expected_sharpness"])
        ends = np.array(bars.get_segments())[:, :, 1]
        assert_allclose(np.diff(ends).ravel(), 2 * expected["stderr"])
    assert [text.get_text() for text in display.ax_.get_legend().texts] == list(models)
    assert display.ax_.get_ylabel() == "expected sharpness (nats)"
    assert "KL divergence (nats)" in display.ax_.get_xlabel()
    assert (display.ax_.get_xscale(), display.ax_.get_yscale()) == ("log", "log")


def test_one_model_needs_no_legend_and_a_module_its_criterion():
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    data = torch.tensor(X, dtype=torch.float32), torch.tensor(y)
    before = [p.clone() for p in module.parameters()]
    display = SharpnessKLDisplay.from_estimator(
        module, *data, alphas=[0.1], criterion=nn.CrossEntropyLoss(), random_state=0, loss_unit=""
    )
    assert display.ax_.get_legend() is None
    assert display.ax_.get_ylabel() == "expected sharpness"
    assert display.ax_.get_xscale() == "linear"  # one point
    for p, q in zip(module.parameters(), before, strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match="criterion is needed for a bare module"):
        SharpnessKLDisplay.from_estimator(module, *data)


def test_many_curves_all_look_different():
    curve = pd.DataFrame({
        "alpha": [0.1, 0.2],
        "kl": [2.0, 1.0],
        "expected_sharpness": [-1.0, 1.0],
        "stderr": 0.1,
    })
    display = SharpnessKLDisplay(curves={str(i): curve for i in range(20)}).plot()
    lines = [container.lines[0] for container in display.ax_.containers]
    looks = {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}
    assert len(looks) == 20
    assert display.ax_.get_yscale() == "linear"


def test_refuses_an_empty_dict_of_models():
    with pytest.raises(ValueError, match="estimator is an empty dict"):
        SharpnessKLDisplay.from_estimator({}, X, y)


@pytest.mark.parametrize("display", [LayerFlatnessDisplay, SharpnessKLDisplay])
def test_says_how_to_install_matplotlib(display, model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        display.from_estimator(model, X, y)

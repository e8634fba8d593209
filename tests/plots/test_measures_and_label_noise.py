"""Tests for `_measures` and `_label_noise`: which numbers are drawn, and where."""

import sys

import numpy as np
import optuna
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose

from relflat_sk import LabelNoiseDisplay, MeasurePanelsDisplay, correlate

MEASURES = ["relative_flatness", "hessian_trace", "l2_norm"]


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def make_minima(n=24, measures=MEASURES, **columns):
    rng = np.random.default_rng(0)
    minima = {
        "param_batch_size": np.resize([8, 32, 128], n),
        "param_random_labels": np.repeat([0.0, 0.25, 0.5], n // 3),
        **{name: rng.random(n) + 1 for name in measures},
        "train_loss": 0.01,
        "generalization_gap": rng.random(n),
        "converged": True,
        "state": "complete",
    }
    return pd.DataFrame({**minima, **columns})


def points(ax):
    return np.asarray(ax.collections[0].get_offsets())


def all_texts(figure):
    return {text.get_text() for text in figure.findobj(plt.Text)}


@pytest.mark.parametrize("display", [MeasurePanelsDisplay, LabelNoiseDisplay])
def test_follows_the_convention_of_displays(display):
    minima = make_minima()
    before = minima.copy(deep=True)
    made = display.from_minima(minima, random_state=0)
    assert isinstance(made, display)
    assert made.ax_ is made.axes_[0]
    assert len(made.axes_) == len(MEASURES)
    figure, axes = plt.subplots(1, 2, figsize=(20, 8), layout="constrained")
    assert made.plot(ax=axes[1]) is made
    assert made.ax_ is axes[1]
    assert made.figure_ is figure
    figure.canvas.draw()
    left, right = axes[0].get_position(), [panel.get_position() for panel in made.axes_]
    assert all(panel.x0 > left.x1 for panel in right)
    pd.testing.assert_frame_equal(minima, before)


def test_every_measure_has_a_panel_with_its_minima_and_its_tau():
    minima = make_minima()
    display = MeasurePanelsDisplay.from_minima(minima, random_state=0)
    expected = correlate(minima, random_state=0).set_index("measure")
    for name, panel in zip(MEASURES, display.axes_, strict=True):
        assert_allclose(points(panel), minima[[name, "generalization_gap"]])
        row = expected.loc[name]
        tau = f"{row['kendall']:z.2f} [{row['kendall_low']:z.2f}, {row['kendall_high']:z.2f}]"
        assert tau in panel.get_title()
        assert "= 24" in panel.get_title()
        assert panel.get_ylim() == display.ax_.get_ylim()
    labels = [panel.get_xlabel() for panel in display.axes_]
    assert labels == ["relative flatness κ (nats)", "Hessian trace", "L2 norm"]
    bar = display.figure_.axes[-1]
    assert bar.get_ylabel() == "batch size"


def test_a_choice_of_measures_and_another_target():
    minima = make_minima(test_score=np.linspace(0.8, 0.9, 24))
    display = MeasurePanelsDisplay.from_minima(
        minima, ["l2_norm", "train_loss"], "test_score", color_by=None, random_state=0
    )
    assert display.measures == ["l2_norm", "train_loss"]
    assert display.ax_.get_ylabel() == "held-out score"
    assert len(display.figure_.axes) == 2
    one = MeasurePanelsDisplay.from_minima(minima, "l2_norm", random_state=0, s=77, loss_unit="")
    assert_allclose(one.ax_.collections[0].get_sizes(), 77)
    assert one.ax_.get_ylabel().endswith("training loss")


def test_a_measure_over_several_decades_has_a_logarithmic_axis():
    minima = make_minima(l2_norm=np.geomspace(1, 1e4, 24))
    display = MeasurePanelsDisplay.from_minima(minima, random_state=0)
    assert [panel.get_xscale() for panel in display.axes_] == ["linear", "linear", "log"]


def test_candidates_that_did_not_converge_are_crosses_and_missing_values_are_not_drawn():
    minima = make_minima(hessian_trace=np.nan)
    minima.loc[1, "converged"] = False
    minima.loc[1, "generalization_gap"] = 1e6
    minima.loc[2, "relative_flatness"] = np.nan
    display = MeasurePanelsDisplay.from_minima(minima, random_state=0)
    first, empty, last = display.axes_
    assert len(points(first)) == 22
    assert len(points(last)) == 23
    assert len(last.collections[1].get_offsets()) == 1
    assert last.get_ylim()[1] < 2
    assert not empty.collections
    assert "not finite" in {text.get_text() for text in empty.texts}
    assert "not converged" in {text.get_text() for text in last.get_legend().texts}


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), (4, (2, 2)), (6, (2, 3)), (20, (5, 4))])
def test_panels_fill_their_rows(n, shape):
    minima = make_minima(measures=[f"measure_{i}" for i in range(n)])
    display = MeasurePanelsDisplay.from_minima(minima, random_state=0)
    grid = display.ax_.get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == shape
    assert len(display.axes_) == n
    assert sum(panel.get_ylabel() != "" for panel in display.axes_) == shape[0]


def test_panels_in_narrow_axes_stand_below_each_other():
    _, ax = plt.subplots(figsize=(4, 6))
    display = MeasurePanelsDisplay.from_minima(make_minima(), random_state=0, ax=ax)
    grid = display.ax_.get_subplotspec().get_gridspec()
    assert (grid.nrows, grid.ncols) == (3, 1)
    assert [panel.get_ylabel() != "" for panel in display.axes_] == [False, True, False]


def test_the_correlation_at_each_share_of_random_labels_is_that_among_its_minima():
    minima = make_minima()
    display = LabelNoiseDisplay.from_minima(minima, random_state=0)
    for name, panel in zip(MEASURES, display.axes_, strict=True):
        line, *_ = [line for line in panel.lines if len(line.get_xdata(orig=False)) == 3]
        assert_allclose(line.get_xdata(orig=False), [0.0, 0.25, 0.5])
        for share, tau in zip(*line.get_data(orig=False), strict=True):
            some = minima[minima["param_random_labels"] == share]
            expected = correlate(some, random_state=0).set_index("measure").loc[name]
            assert_allclose(tau, expected["kendall"])
        assert panel.get_xlabel() == "share of random labels"
    rows = display.correlations.query("measure == 'l2_norm' and share == 0.5").iloc[0]
    some = minima[minima["param_random_labels"] == 0.5]
    expected = correlate(some, random_state=0).set_index("measure").loc["l2_norm"]
    assert rows["kendall_low"] == expected["kendall_low"]
    low, high = display.axes_[2].collections[0].get_segments()[2][:, 1]
    assert_allclose([low, high], [expected["kendall_low"], expected["kendall_high"]])


def test_other_coefficients_and_other_columns():
    minima = make_minima().rename(columns={"param_random_labels": "depth"})
    display = LabelNoiseDisplay.from_minima(
        minima, "l2_norm", by="depth", coefficient="pearson", random_state=0, n_bootstrap=10
    )
    assert "Pearson" in display.ax_.get_ylabel()
    assert display.ax_.get_xlabel() == "depth"
    every = LabelNoiseDisplay.from_minima(minima, by="depth", random_state=0)
    assert "depth" not in set(every.correlations["measure"])


def test_finds_the_shares_that_a_search_records():
    minima = make_minima().rename(columns={"param_random_labels": "param_data__random_labels"})
    display = LabelNoiseDisplay.from_minima(minima, random_state=0)
    assert display.by == "param_data__random_labels"
    assert display.ax_.get_xlabel() == "share of random labels"


def test_shares_with_too_few_minima_are_left_out():
    minima = make_minima(l2_norm=np.nan)
    minima.loc[minima.index[:6], "converged"] = False
    display = LabelNoiseDisplay.from_minima(minima, random_state=0)
    assert set(display.correlations["share"]) == {0.25, 0.5}
    assert "not defined" in {text.get_text() for text in display.axes_[2].texts}


def test_a_study_is_accepted():
    study = optuna.create_study()
    for kappa in (1.0, 2.0, 3.0):
        attributes = {"relative_flatness": kappa, "generalization_gap": kappa, "random_labels": 0.1}
        study.add_trial(optuna.trial.create_trial(value=kappa, user_attrs=attributes))
    panels = MeasurePanelsDisplay.from_minima(study, "relative_flatness", random_state=0)
    assert len(points(panels.ax_)) == 3
    noise = LabelNoiseDisplay.from_minima(study, random_state=0)
    assert noise.correlations[["share", "kendall"]].to_numpy().tolist() == [[0.1, 1.0]]


@pytest.mark.parametrize(
    ("display", "minima", "arguments", "error", "message"),
    [
        (
            MeasurePanelsDisplay,
            make_minima(),
            {"measures": ["sharpness"]},
            ValueError,
            "measures='sharpness' is not a column",
        ),
        (
            MeasurePanelsDisplay,
            make_minima(measures=[]),
            {},
            ValueError,
            "There are no measures to draw",
        ),
        (
            MeasurePanelsDisplay,
            make_minima(converged=False),
            {},
            ValueError,
            "None of the 24 candidates is a minimum, so",
        ),
        (MeasurePanelsDisplay, [1], {}, TypeError, "minima must be a pandas.DataFrame"),
        (
            LabelNoiseDisplay,
            make_minima(),
            {"by": "noise"},
            ValueError,
            r"by: 'noise' is no parameter of these minima; there are \['batch_size', 'rand",
        ),
        (
            LabelNoiseDisplay,
            make_minima(),
            {"by": "state"},
            ValueError,
            "by='state' is not numeric",
        ),
        (
            LabelNoiseDisplay,
            make_minima(param_random_labels=np.arange(24)),
            {},
            ValueError,
            "No value of 'param_random_labels' has 3 converged minima.*there are {0.0: 1, 1.0: 1",
        ),
        (
            LabelNoiseDisplay,
            make_minima(),
            {"coefficient": "tau"},
            ValueError,
            "coefficient='tau', expected one of pearson, spearman, kendall",
        ),
    ],
)
def test_refuses(display, minima, arguments, error, message):
    with pytest.raises(error, match=message):
        display.from_minima(minima, random_state=0, **arguments)


@pytest.mark.parametrize("display", [MeasurePanelsDisplay, LabelNoiseDisplay])
def test_says_how_to_install_matplotlib(display, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        display.from_minima(make_minima(), random_state=0)


def test_draws_into_a_part_of_a_figure():
    figure = plt.figure(layout="constrained", figsize=(16, 8))
    for part, display in zip(
        figure.subfigures(1, 2), [MeasurePanelsDisplay, LabelNoiseDisplay], strict=True
    ):
        made = display.from_minima(make_minima(), random_state=0, ax=part.subplots())
        assert made.figure_ is figure
        assert {panel.figure for panel in made.axes_} == {part}
    figure.canvas.draw()

"""Displays of many minima: which of them are drawn, where, and in which color."""

import pickle

import numpy as np
import pytest
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose

from relflat_sk import (
    FlatnessGapDisplay,
    HyperparameterDisplay,
    LabelNoiseDisplay,
    MeasurePanelsDisplay,
    MinimaRankingDisplay,
    correlate_measures,
    rank_minima,
)
from tests.plots.drawings import MEASURES, legend, lines, noisy_table, points, table, ticks

GAP, RANKING, PANELS = FlatnessGapDisplay, MinimaRankingDisplay, MeasurePanelsDisplay
AXIS, NOISE = HyperparameterDisplay, LabelNoiseDisplay
CONSTANT = table().drop(columns="param_batch_size")


def interval(row, name):
    return f"{row[name]:z.2f} [{row[f'{name}_low']:z.2f}, {row[f'{name}_high']:z.2f}]"


def test_the_gap_is_drawn_against_the_measure():
    minima = table()
    ax = GAP.from_minima(minima, random_state=0).ax_
    assert_allclose(points(ax), minima[["relative_flatness", "generalization_gap"]])
    assert ax.get_xlabel() == "relative flatness κ (nats, small is flat)"
    names, title = ax.get_title().split("\n")
    assert names == "relative flatness κ and test loss − training loss"  # noqa: RUF001
    expected = correlate_measures(minima, random_state=0).query("measure == 'relative_flatness'")
    for name in ("pearson", "kendall"):
        assert f"= {interval(expected.iloc[0], name)}" in title
    assert "$n$ = 12" in title
    assert GAP.from_minima(table(2)).ax_.get_title() == ""


def test_the_ranking_is_that_of_rank_minima():
    minima = table()
    display = RANKING.from_minima(minima, random_state=0)
    ranked = rank_minima(minima)
    assert_allclose(points(display.ax_), ranked[["rank", "relative_flatness"]])
    assert_allclose(points(display.target_ax_), ranked[["rank", "test_loss"]])
    (mean,) = display.target_ax_.lines
    assert_allclose(mean.get_ydata(), ranked["test_loss"].mean())
    assert display.ax_.get_title().startswith("relative flatness κ and test loss\n")
    assert display.target_ax_.get_xlabel().endswith("1 is flattest")
    by_loss = RANKING.from_minima(minima, "train_loss", "test_loss", random_state=0)
    assert by_loss.target_ax_.get_xlabel().endswith("1 is best")
    without_test = RANKING.from_minima(table(test_loss=np.nan), random_state=0)
    assert without_test.target == "train_loss"


def test_a_wide_range_gets_a_logarithmic_axis_with_plain_numbers():
    wide = table(spread=100.0)
    display = GAP.from_minima(wide, random_state=0)
    display.figure_.canvas.draw()
    assert display.ax_.get_xscale() == "log"
    labels = {tick.get_text() for tick in display.ax_.xaxis.get_ticklabels(which="both")}
    assert {"1", "2", "5", "10", "20", "50", "100"} <= labels
    pickle.dumps(display.figure_)
    wide.loc[0, "relative_flatness"] = -1.0
    assert GAP.from_minima(wide, random_state=0).ax_.get_xscale() == "linear"


@pytest.mark.parametrize("display", [GAP, RANKING])
def test_every_batch_size_has_a_color_and_otherwise_there_is_one(display):
    made = display.from_minima(table(), random_state=0)
    made.figure_.canvas.draw()
    bar = made.figure_.axes[-1]
    assert (bar.get_ylabel(), ticks(bar.yaxis)) == ("batch size", ["8", "32", "128"])
    assert len({tuple(color) for color in made.ax_.collections[0].get_facecolors()}) == 3
    unknown = table(param_seen=None)
    for color_by in (None, "seen"):
        plain = display.from_minima(unknown, color_by=color_by, random_state=0)
        assert len(plain.figure_.axes) == len(plain.axes_)
    assert display.from_minima(CONSTANT, random_state=0).color_by is None


def test_many_numbers_get_a_color_scale_and_names_a_label_each():
    columns = {"param_lr": np.geomspace(1e-3, 1, 20), "param_init": np.resize(["a", "b"], 20)}
    minima = table(20, **columns).drop(columns="param_batch_size")
    scale = GAP.from_minima(minima, random_state=0)
    bar = scale.figure_.axes[-1]
    assert (scale.color_by, bar.get_ylabel(), bar.get_yscale()) == ("param_lr", "lr", "log")
    names = GAP.from_minima(minima, color_by="init", random_state=0)
    assert ticks(names.figure_.axes[-1].yaxis) == ["a", "b"]


@pytest.mark.parametrize("display", [GAP, RANKING, AXIS, PANELS])
def test_lists_are_drawn_as_text_and_numbers_of_any_size(display, recwarn):
    minima = table(3, relative_flatness=[1e-300, 1.0, 1e300])
    minima["param_batch_size"] = [[8], {"of": 1}, (1, [2])]
    made = display.from_minima(minima)
    made.figure_.canvas.draw()
    # an old matplotlib has deprecated calls
    assert not [each for each in recwarn if not issubclass(each.category, DeprecationWarning)]
    assert len(points(made.ax_)) == 3
    named = made.ax_.xaxis if display is AXIS else made.figure_.axes[-1].yaxis
    assert set(ticks(named)) == {"[8]", "{'of': 1}", "(1, [2])"}


@pytest.mark.parametrize("display", [GAP, RANKING])
@pytest.mark.parametrize("layout", ["constrained", None])
def test_candidates_that_did_not_converge_are_crosses_and_failed_ones_are_counted(display, layout):
    minima = table()
    minima.loc[[1, 2], "converged"] = False
    minima.loc[1, ["test_loss", "generalization_gap"]] = 1e6  # must not squeeze the others
    minima.loc[3, "state"] = "failed"
    minima.loc[4, ["test_loss", "relative_flatness", "generalization_gap"]] = np.nan
    made = display.from_minima(minima, random_state=0, ax=plt.subplots(layout=layout)[1])
    panel = made.axes_[-1]
    assert (len(points(panel)), len(points(panel, 1))) == (8, 2)
    assert points(panel, 1)[:, 1].max() <= panel.get_ylim()[1] < 10
    assert {"not converged (2)", "failed or not finite, not drawn (2)"} <= set(legend(panel))
    # the legend stands below the axes, or inside without a layout engine
    made.figure_.canvas.draw()
    place, axes = panel.get_legend().get_window_extent(), panel.get_window_extent()
    assert axes.y0 < place.y0 if layout is None else 0 <= place.y0 < place.y1 < axes.y0


def test_candidates_of_another_depth_are_crosses_too():
    minima = table(converged=[False] * 2 + [True] * 10, depth=[20.0] * 9 + [500.0] * 3)
    ranked = rank_minima(minima)
    for display in (GAP, AXIS):
        assert "not converged (2), at another depth (3)" in legend(display.from_minima(ranked).ax_)
    panels = PANELS.from_minima(ranked, random_state=0).axes_
    labels = {label for ax in panels for label in ax.get_legend_handles_labels()[1]}
    assert "not converged, at another depth" in labels


def test_arguments_reach_matplotlib():
    minima = table(hessian_trace=np.arange(12.0), test_score=np.linspace(0.8, 0.9, 12))
    columns = ("hessian_trace", "test_score")
    made = GAP.from_minima(minima, *columns, s=99, cmap="cividis", random_state=0)
    assert_allclose(made.ax_.collections[0].get_sizes(), 99)
    lightest = plt.get_cmap("cividis")(1.0)
    assert lightest in {tuple(color) for color in made.ax_.collections[0].get_facecolors()}
    assert (made.ax_.get_xlabel(), made.ax_.get_ylabel()) == ("Hessian trace", "held-out score")


def test_every_measure_has_a_panel_with_its_minima_and_its_tau():
    minima = noisy_table(l2_norm=np.geomspace(1, 1e4, 24))
    display = PANELS.from_minima(minima, random_state=0)
    expected = correlate_measures(minima, random_state=0).set_index("measure")
    for name, panel in zip(MEASURES, display.axes_, strict=True):
        assert_allclose(points(panel), minima[[name, "generalization_gap"]])
        assert interval(expected.loc[name], "kendall") in panel.get_title()
        assert panel.get_ylim() == display.ax_.get_ylim()
    labels = [panel.get_xlabel() for panel in display.axes_]
    assert labels == ["relative flatness κ (nats)", "Hessian trace", "L2 norm"]
    assert [panel.get_xscale() for panel in display.axes_] == ["linear", "linear", "log"]


def test_panels_have_crosses_for_others_and_may_be_empty():
    minima = noisy_table(hessian_trace=np.nan)
    minima.loc[1, ["converged", "generalization_gap"]] = [False, 1e6]
    minima.loc[2, "relative_flatness"] = np.nan
    minima.loc[3, ["generalization_gap", "l2_norm"]] = [3.0, np.nan]
    first, empty, last = PANELS.from_minima(minima, random_state=0).axes_
    assert (len(points(first)), len(points(last)), len(points(last, 1))) == (22, 22, 1)
    assert points(last, 1)[0, 1] == last.get_ylim()[1] < 4
    assert not empty.collections
    assert "not finite" in {text.get_text() for text in empty.texts}
    assert "not converged" in legend(last)


@pytest.mark.parametrize(("n", "shape"), [(1, (1, 1)), (4, (2, 2)), (6, (2, 3)), (17, (5, 4))])
def test_panels_fill_their_rows_also_in_axes_of_no_grid(n, shape):
    minima = table(measures=[f"measure_{i}" for i in range(n)]).drop(columns="relative_flatness")
    display = PANELS.from_minima(minima, random_state=0)
    for ax in (None, plt.figure().add_axes((0.2, 0.1, 0.75, 0.8))):
        display.plot(ax=ax)
        grid = display.ax_.get_subplotspec().get_gridspec()
        assert (grid.nrows, grid.ncols, len(display.axes_)) == (*shape, n)
        assert sum(panel.get_ylabel() != "" for panel in display.axes_) == shape[0]
    assert min(panel.get_position().x0 for panel in display.axes_) > 0.19


def test_a_measure_against_a_number():
    minima = table(param_activation=np.repeat(["relu", "tanh"], 6))
    display = AXIS.from_minima(minima)
    assert (display.axis, display.color_by) == ("param_batch_size", "param_activation")
    assert_allclose(points(display.ax_), minima[["param_batch_size", "relative_flatness"]])
    medians = minima.groupby("param_batch_size")["relative_flatness"].median()
    assert_allclose(lines(display.ax_)[0].get_ydata(), medians)
    assert display.ax_.get_xscale() == "log"
    assert ticks(display.ax_.xaxis) == ["8", "32", "128"]
    assert legend(display.ax_) == ["median of the minima"]
    many = table(20, param_batch_size=np.arange(20) + 1.0)
    assert not lines(AXIS.from_minima(many, "batch_size", color_by=None).ax_)


@pytest.mark.parametrize("names", [["sgd", "adam", "adamw"], ["(128,)", "(8,)", "(32,)"]])
def test_a_measure_against_names(names):
    # failed before it had a name; and an optimizer that never converged has its place, too
    minima = table(param_optimizer=names * 4, depth=20.0)
    minima["converged"] = minima["param_optimizer"] != names[2]
    minima.loc[0, ["param_optimizer", "depth", "state"]] = [np.nan, np.nan, "failed"]
    ax = AXIS.from_minima(minima, "optimizer", "depth", color_by=None).ax_
    assert ticks(ax.xaxis) == [*names[1:], names[0]]
    assert points(ax)[:, 0].tolist() == [0, 2, 0, 2, 0, 2, 0]
    assert points(ax, 1)[:, 0].tolist() == [1] * 4
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("optimizer", "depth")


def test_the_correlation_at_each_share_of_random_labels_is_that_among_its_minima():
    minima = noisy_table()
    display = NOISE.from_minima(minima, random_state=0)
    parts = minima.groupby("param_random_labels")
    expected = [correlate_measures(p, random_state=0).set_index("measure") for _, p in parts]
    for name, panel in zip(MEASURES, display.axes_, strict=True):
        line, *_ = lines(panel, epochs=3)
        assert_allclose(line.get_xdata(orig=False), [0.0, 0.25, 0.5])
        taus = [rows.loc[name, "kendall"] for rows in expected]
        assert_allclose(line.get_ydata(orig=False), taus)
        assert panel.get_xlabel() == "share of random labels"
    ends = display.axes_[2].collections[0].get_segments()[2][:, 1]
    assert_allclose(ends, expected[2].loc["l2_norm", ["kendall_low", "kendall_high"]].tolist())


def test_shares_with_too_few_minima_are_left_out():
    minima = noisy_table(l2_norm=np.nan)
    minima.loc[minima.index[:6], "converged"] = False
    display = NOISE.from_minima(minima, random_state=0)
    assert set(display.correlations["share"]) == {0.25, 0.5}
    assert "not defined" in {text.get_text() for text in display.axes_[2].texts}


NO_TEST = table(test_loss=np.nan)
NO_MEASURE, SPREAD = NO_TEST[["train_loss"]], noisy_table(param_random_labels=np.arange(24))


@pytest.mark.parametrize(
    ("display", "minima", "arguments", "message"),
    [
        (GAP, table(), {"measure": "sharpness"}, "measure='sharpness' is not a column"),
        (GAP, table(), {"target": "reason"}, "target='reason' is not numeric"),
        (GAP, table(), {"color_by": "seed"}, "color_by: 'seed' is no parameter of these"),
        (RANKING, table(converged=False), {}, "None of the 12 candidates is a minimum with"),
        (GAP, NO_TEST, {}, r"'generalization_gap', .*need held-out data: fit\(X, y, X_test, y_t"),
        (PANELS, table(), {"measures": "sharpness"}, "measures='sharpness' is not a column"),
        (PANELS, NO_MEASURE, {"target": "train_loss"}, "There are no measures to"),
        (AXIS, table(), {"axis": "width"}, "axis: 'width' is no parameter of these minima"),
        (AXIS, CONSTANT, {}, "No hyper-parameter was varied"),
        (NOISE, noisy_table(), {"by": "noise"}, r"by: 'noise' is no parameter .* there are \['bat"),
        (NOISE, SPREAD, {}, "No value of 'param_random_labels' has 3 .*there are {0.0: 1, 1.0: 1"),
    ],
)
def test_refuses_and_leaves_no_empty_figure(display, minima, arguments, message):
    with pytest.raises(ValueError, match=message):
        display.from_minima(minima, **arguments)
    assert plt.get_fignums() == []

"""Tests for `_gap` and `_ranking`: the convention of displays, and what is drawn."""

import pickle
import subprocess
import sys

import numpy as np
import optuna
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from numpy.testing import assert_allclose

from relflat_sk import FlatnessGapDisplay, MinimaRankingDisplay, correlate, rank_minima

DISPLAYS = [FlatnessGapDisplay, MinimaRankingDisplay]


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def table(n=12, spread=2.0, **columns):
    rng = np.random.default_rng(0)
    kappa = np.linspace(1, spread, n)
    minima = {
        "trial": np.arange(n),
        "param_batch_size": np.resize([8, 32, 128], n),
        "relative_flatness": rng.permutation(kappa),
        "train_loss": 0.01,
        "test_loss": 0.1 + rng.random(n),
        "converged": True,
        "state": "complete",
        "reason": "",
    }
    frame = pd.DataFrame({**minima, **columns})
    frame["generalization_gap"] = frame["test_loss"] - frame["train_loss"]
    return frame


def points(ax):
    """Positions of the converged minima."""
    return np.asarray(ax.collections[0].get_offsets())


def texts(figure):
    return " ".join(
        [
            text.get_text()
            for ax in figure.axes
            for text in (ax.title, ax.xaxis.label, ax.yaxis.label)
        ]
        + [
            text.get_text()
            for ax in figure.axes
            if ax.get_legend()
            for text in ax.get_legend().texts
        ]
    )


@pytest.mark.parametrize("display", DISPLAYS)
def test_follows_the_convention_of_displays(display):
    minima = table()
    before = minima.copy(deep=True)
    made = display.from_minima(minima, random_state=0)
    assert isinstance(made, display)
    assert made.ax_ in made.figure_.axes
    figure, axes = plt.subplots(1, 2)
    assert made.plot(ax=axes[1]) is made
    assert made.ax_ is axes[1]
    assert made.figure_ is figure
    assert len(points(made.ax_)) == len(minima)
    assert not axes[0].collections
    pd.testing.assert_frame_equal(minima, before)


def test_the_gap_is_drawn_against_the_measure():
    minima = table()
    display = FlatnessGapDisplay.from_minima(minima, random_state=0)
    assert_allclose(points(display.ax_), minima[["relative_flatness", "generalization_gap"]])
    assert display.ax_.get_xlabel() == "relative flatness κ (nats)"
    assert display.ax_.get_ylabel().startswith("test loss")
    assert display.ax_.get_xscale() == "linear"
    expected = correlate(minima, random_state=0).set_index("measure").loc["relative_flatness"]
    title = display.ax_.get_title()
    assert f"= {expected['pearson']:z.2f} [" in title
    assert f"{expected['kendall']:z.2f} [{expected['kendall_low']:z.2f}" in title
    assert "= 12" in title
    assert title.startswith("relative flatness κ and test loss − training loss\n")  # noqa: RUF001
    ranking = MinimaRankingDisplay.from_minima(minima, random_state=0)
    assert ranking.ax_.get_title().startswith("relative flatness κ and test loss\n")


def test_the_ranking_is_that_of_rank_minima():
    minima = table()
    display = MinimaRankingDisplay.from_minima(minima, random_state=0)
    ranked = rank_minima(minima)
    assert_allclose(points(display.ax_), ranked[["rank", "relative_flatness"]])
    assert_allclose(points(display.target_ax_), ranked[["rank", "test_loss"]])
    assert "1 is flattest" in display.target_ax_.get_xlabel()
    (mean,) = display.target_ax_.lines
    assert_allclose(mean.get_ydata(), ranked["test_loss"].mean())
    without_test = table(test_loss=np.nan)
    display = MinimaRankingDisplay.from_minima(without_test, random_state=0)
    assert display.target == "train_loss"


def test_a_wide_range_gets_a_logarithmic_axis():
    display = FlatnessGapDisplay.from_minima(table(spread=100.0), random_state=0)
    assert display.ax_.get_xscale() == "log"
    negative = table(spread=100.0)
    negative.loc[0, "relative_flatness"] = -1.0
    assert FlatnessGapDisplay.from_minima(negative, random_state=0).ax_.get_xscale() == "linear"
    ranking = MinimaRankingDisplay.from_minima(table(spread=100.0), random_state=0)
    assert ranking.ax_.get_yscale() == "log"


@pytest.mark.parametrize("display", DISPLAYS)
def test_every_batch_size_has_a_color(display):
    made = display.from_minima(table(), random_state=0)
    bar = made.figure_.axes[-1]
    assert bar.get_ylabel() == "batch size"
    assert [label.get_text() for label in bar.get_yticklabels()] == ["8", "32", "128"]
    colors = {tuple(color) for color in made.ax_.collections[0].get_facecolors()}
    made.figure_.canvas.draw()
    colors = {tuple(color) for color in made.ax_.collections[0].get_facecolors()}
    assert len(colors) == 3


def test_many_numbers_get_a_color_scale_and_names_a_label_each():
    lr = np.geomspace(1e-3, 1, 20)
    minima = table(20, param_lr=lr, param_init=np.resize(["a", "b"], 20)).drop(
        columns="param_batch_size"
    )
    scale = FlatnessGapDisplay.from_minima(minima, random_state=0)
    assert scale.color_by == "param_lr"
    assert scale.figure_.axes[-1].get_ylabel() == "lr"
    assert scale.figure_.axes[-1].get_yscale() == "log"
    names = FlatnessGapDisplay.from_minima(minima, color_by="param_init", random_state=0)
    assert [text.get_text() for text in names.figure_.axes[-1].get_yticklabels()] == ["a", "b"]


@pytest.mark.parametrize("display", DISPLAYS)
def test_one_color_if_no_parameter_varied(display):
    made = display.from_minima(table().drop(columns="param_batch_size"), random_state=0)
    n_panels = 1 if display is FlatnessGapDisplay else 2
    assert len(made.figure_.axes) == n_panels
    assert display.from_minima(table(), color_by=None, random_state=0).color_by is None


@pytest.mark.parametrize("display", DISPLAYS)
def test_candidates_that_did_not_converge_are_crosses_and_failed_ones_are_counted(display):
    minima = table()
    minima.loc[[1, 2], "converged"] = False
    minima.loc[1, "test_loss"] = 1e6  # diverged: must not squeeze the others into a corner
    minima.loc[3, "state"] = "failed"
    minima.loc[4, ["test_loss", "relative_flatness"]] = np.nan
    minima["generalization_gap"] = minima["test_loss"] - minima["train_loss"]
    made = display.from_minima(minima, random_state=0)
    panel = made.ax_ if display is FlatnessGapDisplay else made.target_ax_
    assert len(points(panel)) == 8
    assert len(panel.collections[1].get_offsets()) == 2
    assert panel.get_ylim()[1] < 10
    assert "not converged (2)" in texts(made.figure_)
    assert "not drawn (2)" in texts(made.figure_)


def test_arguments_reach_matplotlib():
    made = FlatnessGapDisplay.from_minima(
        table(), random_state=0, s=99, loss_unit="", cmap="cividis"
    )
    assert_allclose(made.ax_.collections[0].get_sizes(), 99)
    assert made.ax_.collections[0].get_cmap().name == "cividis"
    assert made.ax_.get_xlabel() == "relative flatness κ"


def test_other_measures_and_targets():
    minima = table(hessian_trace=np.arange(12.0), test_score=np.linspace(0.8, 0.9, 12))
    made = FlatnessGapDisplay.from_minima(minima, "hessian_trace", "test_score", random_state=0)
    assert made.ax_.get_xlabel() == "Hessian trace"
    assert made.ax_.get_ylabel() == "held-out score"


def test_too_few_minima_have_no_correlation():
    assert FlatnessGapDisplay.from_minima(table(2)).ax_.get_title() == ""


def test_a_study_is_accepted():
    study = optuna.create_study()
    for kappa in (1.0, 2.0, 3.0):
        attributes = {"relative_flatness": kappa, "generalization_gap": kappa, "test_loss": kappa}
        study.add_trial(optuna.trial.create_trial(value=kappa, user_attrs=attributes))
    for display in DISPLAYS:
        assert len(points(display.from_minima(study, random_state=0).ax_)) == 3


@pytest.mark.parametrize(
    ("minima", "arguments", "error", "message"),
    [
        (table(), {"measure": "sharpness"}, ValueError, "measure='sharpness' is not a column"),
        (table(), {"target": "reason"}, ValueError, "target='reason' is not numeric"),
        (table(), {"color_by": "seed"}, ValueError, "color_by='seed' is not a column of these"),
        (table(), {"color_by": "batch_size"}, ValueError, "Did you mean 'param_batch_size'"),
        (table(converged=False), {}, ValueError, "None of the 12 candidates is a minimum, so"),
        (
            table(test_loss=np.nan),
            {},
            ValueError,
            "None of the 12 minima has a finite 'relative_flatness' and 'generalization_gap', .*"
            r"Held-out data are needed: fit\(X, y, X_test, y_test\)",
        ),
        (
            table(relative_flatness=np.nan),
            {"target": "train_loss"},
            ValueError,
            "None of the 12 minima has a finite 'relative_flatness' and 'train_loss', so there is "
            r"nothing to draw\.$",
        ),
        ([1, 2], {}, TypeError, "minima must be a pandas.DataFrame, an optuna.Study"),
    ],
)
def test_refuses(minima, arguments, error, message):
    with pytest.raises(error, match=message):
        FlatnessGapDisplay.from_minima(minima, random_state=0, **arguments)


@pytest.mark.parametrize("display", DISPLAYS)
def test_says_how_to_install_matplotlib(display, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "relflat_sk\[plot\]"'):
        display.from_minima(table(), random_state=0)


def test_drawing_imports_matplotlib_and_importing_does_not():
    code = (
        "import sys, relflat_sk, pandas as pd\n"
        "assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; matplotlib.use('Agg')\n"
        "d = pd.DataFrame({'relative_flatness': [1., 2.], 'generalization_gap': [1., 2.]})\n"
        "relflat_sk.FlatnessGapDisplay.from_minima(d)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_draws_into_a_part_of_a_figure():
    figure = plt.figure(layout="constrained")
    left, right = figure.subfigures(1, 2)
    for display, part in [(FlatnessGapDisplay, left), (MinimaRankingDisplay, right)]:
        made = display.from_minima(table(), random_state=0, ax=part.subplots())
        assert made.figure_ is figure
    figure.canvas.draw()


@pytest.mark.parametrize("display", DISPLAYS)
def test_the_legend_stands_below_the_axes(display):
    minima = table()
    minima.loc[1, "converged"] = False
    made = display.from_minima(minima, random_state=0)
    made.figure_.canvas.draw()
    panel = made.ax_ if display is FlatnessGapDisplay else made.target_ax_
    legend, axes = panel.get_legend().get_window_extent(), panel.get_window_extent()
    assert legend.y1 < axes.y0
    assert legend.y0 >= 0
    labels = [*panel.get_xticklabels(), panel.xaxis.label]
    assert legend.y1 < min(label.get_window_extent().y0 for label in labels if label.get_text())


@pytest.mark.parametrize("display", DISPLAYS)
def test_the_legend_is_inside_where_there_is_no_room_below(display):
    _, ax = plt.subplots()  # without a layout engine
    minima = table()
    minima.loc[1, "converged"] = False
    made = display.from_minima(minima, random_state=0, ax=ax)
    made.figure_.canvas.draw()
    panel = made.ax_ if display is FlatnessGapDisplay else made.target_ax_
    legend, axes = panel.get_legend().get_window_extent(), panel.get_window_extent()
    assert axes.y0 < legend.y0 < legend.y1 < axes.y1


@pytest.mark.parametrize(
    ("by", "ending"),
    [("relative_flatness", "1 is flattest"), ("train_loss", "1 is best"), ("test_loss", "best")],
)
def test_the_label_says_what_rank_one_means(by, ending):
    panel = MinimaRankingDisplay.from_minima(table(), by, random_state=0).target_ax_
    assert panel.get_xlabel().endswith(ending)


@pytest.mark.parametrize("display", DISPLAYS)
def test_an_error_leaves_no_empty_figure(display):
    for minima, color_by in [(table(), "seed"), (table(converged=False), None)]:
        with pytest.raises(ValueError, match=r"color_by='seed'|None of the 12 candidates"):
            display.from_minima(minima, color_by=color_by, random_state=0)
    assert plt.get_fignums() == []


def test_ranks_are_whole_numbers():
    panel = MinimaRankingDisplay.from_minima(table(3), random_state=0).target_ax_
    assert all(float(tick).is_integer() for tick in panel.get_xticks())


def test_logarithmic_axes_have_plain_numbers():
    table = pd.DataFrame({
        "relative_flatness": [4.0, 7.0, 20.0, 50.0],
        "generalization_gap": [0.1, 0.2, 0.3, 0.4],
    })
    display = FlatnessGapDisplay.from_minima(table)
    display.figure_.canvas.draw()
    axis = display.ax_.xaxis
    labels = [tick.get_text() for tick in axis.get_ticklabels(which="both") if tick.get_text()]
    assert display.ax_.get_xscale() == "log"
    assert "10" in labels
    assert all(float(label) > 0 for label in labels)
    pickle.dumps(display.figure_)

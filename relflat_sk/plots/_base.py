"""What displays share: axes, scales, labels, minima as points, and what `plot` takes and draws.

Matplotlib is optional, and imported where something is drawn.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log10
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import is_regressor

from relflat_sk.minima._table import (
    find_axis,
    is_comparable,
    is_complete,
    is_minimum,
    numeric_column,
    parameter_columns,
    plain_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

MAX_COLUMNS = 4
PANEL_WIDTH = 3.3  # inches
LOG_RATIO = 10.0  # largest over smallest value
LABELLED_DECADES = 2.5  # with more of them, only powers of ten have labels
MAX_LETTERS = 44  # of a name on an axis

# colors of Okabe and Ito, which also people who confuse red and green can tell apart
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "--", ":", "-."]

# places of a legend; it is 4.8 letters away from the axes, below tick labels and axis label
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.8, "ncols": 2}
ON_THE_RIGHT = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}

# columns in the unit of the loss; others have another unit, or none
IN_LOSS_UNITS = {
    "relative_flatness", "normalized_relative_flatness", "trace_flatness", "eigenvalue_flatness",
    "network_flatness", "neuron_flatness_max", "neuron_flatness_sum", "expected_sharpness",
    "fisher_rao_norm", "generalization_gap", "test_loss", "train_loss", "valid_loss",
}  # fmt: skip
# labels of columns whose label is not their name
LABELS = {
    "relative_flatness": "relative flatness κ",
    "normalized_relative_flatness": "normalized relative flatness κ",
    "neuron_flatness_max": "neuron flatness, max",
    "neuron_flatness_sum": "neuron flatness, sum",
    "fisher_rao_norm": "Fisher-Rao norm",
    "generalization_gap": "test loss − training loss",  # noqa: RUF001 (a minus sign)
    "train_loss": "training loss",
    "valid_loss": "validation loss",
    "test_score": "held-out score",
    "train_score": "training score",
    "random_labels": "share of random labels",
    "hessian_max_eigenvalue": "largest Hessian eigenvalue",
    "log_robustness": "log of robustness K",
    "pac_bayes_flatness": "PAC-Bayes flatness",
    "pac_bayes_magnitude_flatness": "PAC-Bayes magnitude flatness",
}
# words in the names of others
WORDS = {
    "frobenius": "Frobenius", "hessian": "Hessian", "keskar": "Keskar", "l1": "L1", "l2": "L2",
    "linf": "L∞", "lipschitz": "Lipschitz",
}  # fmt: skip

MAX_LEVELS = 12  # a numeric column with more values gets a continuous color scale
MARGIN = 0.06  # of the axis, around the minima
DOT: dict[str, Any] = {"s": 42, "edgecolors": "black", "linewidths": 0.6}
LARGEST = 1e150  # a number that is drawn; ticks beyond larger ones would overflow
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}

# -- axes and panels ---------------------------------------------------------------------


def require_matplotlib() -> None:
    """Check that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, with which displays are drawn: pip install "
            '"relflat_sk[plot]", or in a copy of the repository pip install ".[plot]"'
        ) from error


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    require_matplotlib()
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def has_layout(ax: "Axes") -> bool:
    """Return whether the figure has a layout engine, which makes room around axes."""
    return ax.figure.figure.get_layout_engine() is not None


def divide(
    ax: "Axes", n_rows: int, n_columns: int, n: int | None = None, **share: str
) -> "list[Axes]":
    """Divide the space of some axes into panels."""
    figure, spec = ax.figure, ax.get_subplotspec()
    if spec is None:
        box = ax.get_position()
        whole = figure.add_gridspec(1, 1, left=box.x0, right=box.x1, bottom=box.y0, top=box.y1)
        spec = whole[0]
    grid = spec.subgridspec(n_rows, n_columns, hspace=None if has_layout(ax) else 0.5)
    ax.set_subplotspec(grid[0, 0])
    shared = dict.fromkeys(share, ax)
    places = [divmod(number, n_columns) for number in range(1, n or n_rows * n_columns)]
    return [ax, *(figure.add_subplot(grid[place], **shared) for place in places)]


def make_panels(
    ax: "Axes | None", n: int, label: str, *, height: float = 2.8, margin: float = 0.6, **share: str
) -> "list[Axes]":
    """Make panels with a common y axis, labelled at the first of every row; sizes in inches."""
    n_columns = -(-n // -(-n // (3 if n <= 9 else MAX_COLUMNS)))  # nearly fills the last row
    n_rows = -(-n // n_columns)
    ax = make_axes(ax, (n_columns * PANEL_WIDTH + margin, max(n_rows * height, 2.2)))
    panels = divide(ax, n_rows, n_columns, n, sharey="all", **share)
    for number, panel in enumerate(panels):
        is_first = number % n_columns == 0
        panel.tick_params(labelleft=is_first)
        panel.set_ylabel(label if is_first else "", fontsize="small")
    return panels


# -- scales and styles -------------------------------------------------------------------


def curve_style(number: int) -> dict[str, Any]:
    """Return the color, marker and line of one of several curves."""
    turn, place = divmod(number, len(COLORS))
    line = LINES[turn % len(LINES)]
    return {"color": COLORS[place], "marker": MARKERS[place], "linestyle": line}


def draw_grid(ax: "Axes") -> None:
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)


def write_note(ax: "Axes", text: str) -> None:
    """Write into empty axes why they are empty."""
    ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center", color="0.35")


def draw_legend(panels: "Sequence[Axes]", place: Mapping[str, Any]) -> None:
    """Put a legend of all panels beside the last, or inside it without a layout engine."""
    handles_by_label: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    if handles_by_label:
        style = {"frameon": False, **place} if has_layout(panels[-1]) else {}
        handles, labels = list(handles_by_label.values()), list(handles_by_label)
        panels[-1].legend(handles, labels, fontsize="small", **style)


def choose_scale(axis: "XAxis | YAxis", values: Floats) -> None:
    """Make an axis logarithmic with plain numbers if the values, (n,), drawn along it need it."""
    if not needs_log_scale(values):
        return
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")
    low, high = axis.get_view_interval()  # error bars reach further than values
    if log10(high) - log10(low) < LABELLED_DECADES:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def needs_log_scale(values: Floats) -> bool:
    """Return whether finite values, (n,), are positive and span more than a decade."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > LOG_RATIO * finite.min())


# -- labels ------------------------------------------------------------------------------


def label_of(name: str, loss_unit: str) -> str:
    """Return the axis label of a column, with its unit."""
    # the names of measures are those of no parameter
    parameter = name if name in IN_LOSS_UNITS else plain_name(name).rpartition("__")[2]
    words = " ".join(WORDS.get(word, word) for word in parameter.split("_"))
    label = LABELS.get(parameter, words)
    return f"{label} ({loss_unit})" if loss_unit and name in IN_LOSS_UNITS else label


def measure_label(name: str, loss_unit: str) -> str:
    """Return the axis label of a measure, with its unit, and which values of flatness are flat."""
    label = label_of(name, loss_unit)
    if "flatness" not in name:
        return label
    return f"{label[:-1]}, small is flat)" if label.endswith(")") else f"{label} (small is flat)"


def shorten(name: str) -> str:
    """Return a name that fits beside an axis."""
    half = (MAX_LETTERS - 1) // 2
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"


# -- displays ----------------------------------------------------------------------------


def with_unit(arguments: Mapping[str, Any], estimators: Iterable[Any]) -> dict[str, Any]:
    """Leave the unit of the loss out of the labels if a regressor is shown."""
    has_none = any(hasattr(model, "fit") and is_regressor(model) for model in estimators)
    return {"loss_unit": "" if has_none else "nats", **arguments}


class Display(ABC):
    """Base class of displays: what they have once they are drawn."""

    axes_: "list[Axes]"

    @property
    def ax_(self) -> "Axes":
        """The axes, or the first of several panels."""
        return self.axes_[0]

    @property
    def figure_(self) -> "Figure":
        """The figure of the axes."""
        return self.ax_.figure.figure  # get_figure(root=True) does not exist in matplotlib 3.8


class EstimatorDisplay(Display):
    """Base class of displays of trained models."""

    def plot(self, ax: "Axes | None" = None, *, loss_unit: str = "nats", **kwargs: Any) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; a display with several panels divides their space. None makes
            a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none, which is
            the default of `from_estimator` for regressors.
        **kwargs
            Passed on to the method of `matplotlib.axes.Axes` that draws the values: `plot` in
            `FlatnessHistoryDisplay`, `errorbar` in the others.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        self.axes_ = self._draw(ax, loss_unit, kwargs)
        return self

    @abstractmethod
    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        """Draw into the axes, and return the panels."""


# -- colors ------------------------------------------------------------------------------


def color_column(minima: pd.DataFrame, color_by: str | None) -> str | None:
    """Return the column that colors the minima."""
    if color_by is None:
        return None
    if color_by != "auto":
        return find_axis(minima, color_by, argument="color_by")
    varied = [name for name in parameter_columns(minima) if _plain(minima[name]).nunique() > 1]
    batch_sizes = [name for name in varied if name.endswith("batch_size")]
    return next(iter([*batch_sizes, *varied]), None)


def _plain(values: "pd.Series[Any]") -> "pd.Series[Any]":
    """Return values that can be compared: lists and dicts as text."""
    if values.dtype != object:
        return values
    return values.map(lambda value: value if pd.api.types.is_scalar(value) else str(value))


class Colors:
    """Colors of minima: one per value, or a continuous scale for many numbers."""

    def __init__(self, minima: pd.DataFrame, column: str | None, cmap: str) -> None:
        from matplotlib import colormaps, colors  # noqa: PLC0415
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415

        is_known = column is not None and minima[column].notna().any()
        self.column, self.names = column if is_known else None, list[str]()
        self.of_rows: NDArray[Any] = np.full(len(minima), COLORS[0])
        if column is None or not is_known:
            return
        values = _plain(minima[column])
        codes, levels = pd.factorize(values, sort=True)  # numbers by size, before texts
        if pd.api.types.is_numeric_dtype(values) and len(levels) > MAX_LEVELS:
            places = numeric_column(minima, column, argument="color_by")
            scale = colors.LogNorm if needs_log_scale(places) else colors.Normalize
            norm = scale(np.nanmin(places), np.nanmax(places))
        else:
            places = np.where(codes < 0, np.nan, codes)  # of missing values
            norm = colors.BoundaryNorm(np.arange(len(levels) + 1) - 0.5, 256)
            self.names = [f"{x:g}" if isinstance(x, float) else shorten(str(x)) for x in levels]
        self.scale = ScalarMappable(norm, colormaps[cmap].with_extremes(bad="0.8"))
        self.of_rows = self.scale.to_rgba(np.ma.masked_invalid(places))

    def draw_bar(self, axes: "list[Axes]") -> None:
        """Draw the color bar beside some axes, unless there is only one color."""
        if self.column is None:
            return
        bar = axes[0].figure.colorbar(self.scale, ax=axes, aspect=20 if len(axes) < 4 else 40)
        if self.names:
            bar.set_ticks(range(len(self.names)), labels=self.names)
            bar.ax.minorticks_off()
        bar.set_label(label_of(self.column, ""))


@dataclass(frozen=True)
class Style:
    """How minima are drawn: with which colors and arguments of `scatter`, in which unit."""

    colors: Colors
    loss_unit: str
    kwargs: dict[str, Any]


# -- points ------------------------------------------------------------------------------


class Points:
    """Minima as points in a plane, of which those that can be compared are drawn as dots."""

    def __init__(
        self,
        minima: pd.DataFrame,
        x: Floats,  # (n,)
        y: Floats,  # (n,)
    ) -> None:
        self.x, self.y = (np.sign(v) * np.clip(abs(v), 1 / LARGEST, LARGEST) for v in (x, y))
        finite = np.isfinite(x) & np.isfinite(y) & is_complete(minima)
        self.comparable = finite & is_comparable(minima)
        self.crossed = finite & ~self.comparable
        counts = {
            "not converged": (finite & ~is_minimum(minima)).sum(),
            "at another depth": (self.crossed & is_minimum(minima)).sum(),
        }
        self.n_crossed = {kind: n for kind, n in counts.items() if n}
        self.n_not_drawn = (~finite).sum()

    @classmethod
    def of(cls, minima: pd.DataFrame, **columns: str) -> Self:
        """Place minima by two columns, which are arguments of these names."""
        x, y = (numeric_column(minima, name, argument=key) for key, name in columns.items())
        return cls(minima, x, y)

    def require_minima(self, *columns: str) -> None:
        """Refuse to draw nothing."""
        if not self.comparable.any():
            raise ValueError(
                f"None of the {len(self.x)} candidates is a minimum with a finite "
                f"{' and '.join(map(repr, columns))}, as 'converged' and 'reason' tell. "
                "Test loss, gap and test score need held-out data: fit(X, y, X_test, y_test)."
            )

    def draw(self, ax: "Axes", style: Style, scaled: str) -> None:
        """Draw all points, with the numbers of the other candidates for the legend."""
        self.draw_dots(ax, style, scaled)
        self.draw_crosses(ax, ", ".join(f"{kind} ({n})" for kind, n in self.n_crossed.items()))
        if self.n_not_drawn:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_not_drawn})")

    def draw_dots(self, ax: "Axes", style: Style, scaled: str, **dot: Any) -> None:
        """Draw the minima that are compared, which decide limits and scales of the axes."""
        draw_grid(ax)
        ax.margins(MARGIN)
        x, y = self.x[self.comparable], self.y[self.comparable]
        dot["c"] = style.colors.of_rows[self.comparable]
        ax.scatter(x, y, **(DOT | dot | style.kwargs))
        for name, values in (("x", x), ("y", y)):
            if name in scaled:
                choose_scale(getattr(ax, f"{name}axis"), values)

    def draw_crosses(self, ax: "Axes", label: str) -> None:
        """Draw the other candidates, at most as far out as the limits."""
        # a diverged run may lie anywhere; with it in view, the minima would fill a corner
        x_limits, y_limits = ax.get_xlim(), ax.get_ylim()
        ax.set(xlim=x_limits, ylim=y_limits)
        if self.crossed.any():
            x = np.clip(self.x[self.crossed], *x_limits)
            y = np.clip(self.y[self.crossed], *y_limits)
            ax.scatter(x, y, **CROSS, clip_on=False, label=label)


# -- displays of minima ------------------------------------------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class MinimaDisplay(Display):
    """Base class of displays that show minima, colored by one column."""

    minima: pd.DataFrame
    color_by: str | None = None

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        loss_unit: str | None = None,
        cmap: str = "viridis",
        **kwargs: Any,
    ) -> Self:
        """Draw the minima.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; a display with several panels divides their space. None makes
            a new figure.
        loss_unit : str or None, default=None
            Unit of the loss, for the axis labels, such as "nats" for cross-entropy; "" for none.
            None takes no unit for the minima of regressors, and nats for others.
        cmap : str, default="viridis"
            Color map for the column `color_by`, preferably with increasing lightness.
        **kwargs
            Passed on to `matplotlib.axes.Axes.scatter` for the converged minima.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a column is missing or not numeric, or no converged minimum has finite values.
        """
        require_matplotlib()
        colors = Colors(self.minima, self.color_by, cmap)
        unit = self.minima.attrs.get("loss_unit", "nats") if loss_unit is None else loss_unit
        self.axes_ = self._draw(ax, Style(colors, unit, kwargs))
        draw_legend(self.axes_, BELOW)
        colors.draw_bar(self.axes_)
        return self

    @abstractmethod
    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        """Draw all but the legend and the color bar, and return the panels."""

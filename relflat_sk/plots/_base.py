"""What displays share: axes and panels, minima as points, and what `plot` takes and draws.

Matplotlib is optional, and imported where something is drawn.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.base import is_regressor

from relflat_sk.minima import correlate_measures
from relflat_sk.minima._correlation import FEWEST_MINIMA
from relflat_sk.minima._table import (
    column_of,
    find_axis,
    is_complete,
    is_converged,
    measure_columns,
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
MAX_LETTERS = 44  # of a name on an axis

# colors of Okabe and Ito, which also people who confuse red and green can tell apart
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "--", ":", "-."]

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
    "hessian_trace": "Hessian trace",
    "hessian_max_eigenvalue": "largest Hessian eigenvalue",
    "frobenius_product": "Frobenius product",
    "keskar_sharpness": "Keskar sharpness",
    "l1_path_norm": "L1 path norm",
    "l2_lipschitz_product": "L2 Lipschitz product",
    "l2_norm": "L2 norm",
    "l2_path_norm": "L2 path norm",
    "linf_lipschitz_product": "L∞ Lipschitz product",
    "log_robustness": "log of robustness K",
    "pac_bayes_flatness": "PAC-Bayes flatness",
    "pac_bayes_magnitude_flatness": "PAC-Bayes magnitude flatness",
}

# -- axes and panels ---------------------------------------------------------------------


def require_matplotlib() -> None:
    """Check that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            "The displays of relflat_sk draw with matplotlib, which is not installed. "
            'Install it with: pip install "relflat_sk[plot]"'
        ) from error


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    require_matplotlib()
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def figure_of(ax: "Axes") -> "Figure":
    # get_figure(root=True) does not exist in matplotlib 3.8
    return ax.figure.figure


def has_layout(ax: "Axes") -> bool:
    """Return whether the figure has a layout engine, which makes room around axes."""
    return figure_of(ax).get_layout_engine() is not None


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
    """Make panels with a common y axis, labelled at the first panel of every row.

    `height` of a panel, and the `margin` for labels on the left, are in inches.
    """
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


def draw_legend(ax: "Axes", others: "Sequence[Axes]" = (), *, on_the_right: bool = False) -> None:
    """Put a legend of all axes below or beside the first, or inside it without a layout engine."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    labeled: dict[str, Any] = {}
    for each in [ax, *others]:
        handles, labels = each.get_legend_handles_labels()
        labeled |= dict(zip(labels, handles, strict=True))
    # below the tick labels and the axis label, whatever the size of the figure
    below = ax.transAxes + ScaledTranslation(0, -40 / 72, figure_of(ax).dpi_scale_trans)
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": 2}
    place |= {"bbox_transform": below}
    if on_the_right:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    place = place | {"frameon": False, "borderaxespad": 0.0} if has_layout(ax) else {}
    if labeled:
        ax.legend(list(labeled.values()), list(labeled), fontsize="small", **place)


def choose_scale(axis: "XAxis | YAxis", values: Floats) -> None:
    """Make an axis logarithmic if its values, (n,), need it, with plain numbers if they can be."""
    from relflat_sk.plots._log_labels import PlainLogFormatter  # noqa: PLC0415

    if needs_log_scale(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_formatter(PlainLogFormatter())
        axis.set_minor_formatter(PlainLogFormatter())


def needs_log_scale(values: Floats) -> bool:
    """Return whether finite values, (n,), are positive and span more than a decade."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > LOG_RATIO * finite.min())


# -- labels ------------------------------------------------------------------------------


def label_of(name: str, loss_unit: str) -> str:
    """Return the axis label of a column, with its unit."""
    # the names of measures are those of no parameter
    parameter = name if name in IN_LOSS_UNITS else plain_name(name).rpartition("__")[2]
    label = LABELS.get(parameter, parameter.replace("_", " "))
    return f"{label} ({loss_unit})" if loss_unit and name in IN_LOSS_UNITS else label


def shorten(name: str) -> str:
    """Return a name that fits beside an axis."""
    half = (MAX_LETTERS - 1) // 2
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"


# -- minima as points -----------------------------------------------------------------------------


SYMBOLS = {
    "pearson": "Pearson $r$",
    "spearman": "Spearman $\\rho$",
    "kendall": "Kendall $\\tau$",
}
ONE_COLOR = "#0072B2"
MAX_LEVELS = 12  # a numeric column with more values gets a continuous color scale
HELD_OUT = {"test_loss", "generalization_gap", "test_score"}  # columns that need held-out data
MARGIN = 0.06  # of the axis, around the minima
DOT: dict[str, Any] = {"s": 42, "edgecolors": "black", "linewidths": 0.6}
LARGEST = 1e150  # a number that is drawn; ticks beyond larger ones would overflow
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}


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
    return values.map(lambda one: one if pd.api.types.is_scalar(one) else str(one))


class Colors:
    """Colors of minima: one per value, or a continuous scale for many numbers."""

    def __init__(self, minima: pd.DataFrame, column: str | None, cmap: str) -> None:
        from matplotlib import colormaps, colors  # noqa: PLC0415

        self.column = column
        if column is None:
            return
        self.cmap = colormaps[cmap].with_extremes(bad="0.8")
        values = _plain(minima[column])
        self.levels = sorted(values.dropna().unique(), key=_order)
        self.is_scale = pd.api.types.is_numeric_dtype(values) and len(self.levels) > MAX_LEVELS
        if self.is_scale:
            numbers = numeric_column(minima, column, argument="color_by")
            scale = colors.LogNorm if needs_log_scale(numbers) else colors.Normalize
            self.codes = np.ma.masked_invalid(numbers)
            self.norm = scale(np.nanmin(numbers), np.nanmax(numbers))
        else:
            codes = values.map({level: code for code, level in enumerate(self.levels)})
            self.codes = np.ma.masked_invalid(codes.to_numpy(dtype=np.float64))
            self.norm = colors.BoundaryNorm(np.arange(len(self.levels) + 1) - 0.5, 256)

    def arguments(self, rows: NDArray[np.bool_]) -> dict[str, Any]:
        """Return the arguments of `matplotlib.axes.Axes.scatter` that color some minima.

        Shapes: `rows` (n_minima,).
        """
        if self.column is None:
            return {}
        codes = self.codes[rows]
        return {"c": codes, "norm": self.norm, "cmap": self.cmap, "plotnonfinite": True}

    def of_row(self, row: int) -> Any:
        return ONE_COLOR if self.column is None else self.cmap(self.norm(self.codes[row]))

    def draw_bar(self, axes: "list[Axes]") -> None:
        """Draw the color bar beside some axes, unless there is only one color."""
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415

        if self.column is None:
            return
        colors = ScalarMappable(self.norm, self.cmap)
        bar = axes[0].figure.colorbar(colors, ax=axes, aspect=20 if len(axes) < 4 else 40)
        if not self.is_scale:
            bar.set_ticks(range(len(self.levels)), labels=[_text(it) for it in self.levels])
            bar.ax.minorticks_off()
        bar.set_label(label_of(self.column, ""))


def _order(level: Any) -> tuple[bool, Any]:
    """Return a sort key: numbers by size, then everything else by name."""
    is_text = not isinstance(level, int | float | np.number)
    return (is_text, str(level) if is_text else level)


def _text(level: Any) -> str:
    """Return a level as short text."""
    return f"{level:g}" if isinstance(level, float) else shorten(str(level))


# -- points ------------------------------------------------------------------------------


class Points:
    """Minima as points in a plane. Shapes: `x, y` (n,)."""

    def __init__(self, minima: pd.DataFrame, x: Floats, y: Floats) -> None:
        self.x, self.y = (np.sign(v) * np.clip(abs(v), 1 / LARGEST, LARGEST) for v in (x, y))
        finite = np.isfinite(x) & np.isfinite(y) & is_complete(minima)
        self.converged = finite & is_converged(minima)
        self.unconverged = finite & ~self.converged
        of_any_depth = is_converged(minima, any_depth=True)
        counts = {
            "not converged": (finite & ~of_any_depth).sum(),
            "at another depth": (self.unconverged & of_any_depth).sum(),
        }
        self.kinds = {name: n for name, n in counts.items() if n}
        self.n_not_drawn = (~finite).sum()
        self.n_minima = (is_complete(minima) & is_converged(minima)).sum()

    def require_minima(self, *columns: str) -> None:
        """Check that there is a minimum to draw."""
        if self.converged.any():
            return
        if self.n_minima:
            names = " and ".join(repr(name) for name in columns)
            advice = ""
            if HELD_OUT.intersection(columns):
                advice = " Held-out data are needed: fit(X, y, X_test, y_test)."
            raise ValueError(
                f"None of the {self.n_minima} minima has a finite {names}, so there is nothing to "
                f"draw.{advice}"
            )
        raise ValueError(
            f"None of the {len(self.x)} candidates is a minimum, so there is nothing to draw. The "
            "columns 'converged' and 'reason' of the table say why."
        )

    def draw(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw all points, with the numbers of the other candidates for the legend."""
        self.draw_minima(ax, colors, **kwargs)
        self.draw_crosses(ax, ", ".join(f"{name} ({n})" for name, n in self.kinds.items()))
        if self.n_not_drawn:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_not_drawn})")

    def draw_minima(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw the minima, which decide the limits of the axes."""
        draw_grid(ax)
        ax.margins(MARGIN)
        x, y = self.x[self.converged], self.y[self.converged]
        ax.scatter(x, y, **(DOT | colors.arguments(self.converged) | kwargs))

    def draw_crosses(self, ax: "Axes", label: str) -> None:
        """Draw the candidates that did not converge, at most as far out as the limits."""
        # a diverged run may lie anywhere; with it in view, the minima would fill a corner
        x_limits, y_limits = ax.get_xlim(), ax.get_ylim()
        ax.set(xlim=x_limits, ylim=y_limits)
        if self.unconverged.any():
            x = np.clip(self.x[self.unconverged], *x_limits)
            y = np.clip(self.y[self.unconverged], *y_limits)
            ax.scatter(x, y, **CROSS, clip_on=False, label=label)


# -- correlations ------------------------------------------------------------------------


def choose_measures(
    minima: pd.DataFrame,
    measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None,
    target: str,
) -> list[str]:
    if measures is None:
        names = [name for name in measure_columns(minima) if name != target]
    else:
        given = [measures] if isinstance(measures, str) or callable(measures) else measures
        names = [column_of(measure) for measure in given]
    for name in names:
        numeric_column(minima, name, argument="measures")
    if not names:
        raise ValueError(
            "There are no measures to draw: name numeric columns as measures, or run a search "
            "that records measures."
        )
    return names


def correlation_of(
    minima: pd.DataFrame, measure: str, target: str, random_state: Any
) -> "pd.Series[Any] | None":
    """Return the row of `correlate_measures` for one measure."""
    x = numeric_column(minima, measure, argument="measure")
    y = numeric_column(minima, target, argument="target")
    used = Points(minima, x, y).converged
    if used.sum() < FEWEST_MINIMA:
        return None
    pairs = pd.DataFrame({"measure": x[used], "target": y[used]})
    return correlate_measures(pairs, "target", random_state=random_state).iloc[0]


def show_correlation(
    ax: "Axes",
    correlation: "pd.Series[Any] | None",
    names: Sequence[str] = ("pearson", "kendall"),
    fontsize: str = "medium",
    between: tuple[str, str] | None = None,
) -> None:
    """Write coefficients with their intervals above the axes."""
    if correlation is None:
        return
    parts = []
    for name in names:
        value, low, high = (correlation[name + end] for end in ("", "_low", "_high"))
        parts.append(f"{SYMBOLS[name]} = {value:z.2f} [{low:z.2f}, {high:z.2f}]")
    text = ",  ".join([*parts, f"$n$ = {correlation['n']}"])
    if between is not None:
        text = " and ".join(label_of(name, "") for name in between) + f"\n{text}"
    ax.set_title(text, fontsize=fontsize, pad=9)


# -- displays -------------------------------------------------------------------------------------


def with_unit(arguments: Mapping[str, Any], estimators: Iterable[Any]) -> dict[str, Any]:
    """Leave the unit of the loss out of the labels if a regressor is shown."""
    has_none = any(hasattr(one, "fit") and is_regressor(one) for one in estimators)
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
        return figure_of(self.axes_[0])


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
        self.axes_ = self._draw(ax, colors, unit, kwargs)
        draw_legend(self.axes_[-1], self.axes_)
        colors.draw_bar(self.axes_)
        return self

    @abstractmethod
    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> "list[Axes]":
        """Draw all but the legend and the color bar, and return the panels."""


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
        require_matplotlib()
        self.axes_ = self._draw(ax, loss_unit, kwargs)
        return self

    @abstractmethod
    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        """Draw into the axes, and return the panels."""

"""Minima as points: which of them are drawn, in which color, and how two columns correlate."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima import correlate_measures
from relflat_sk.minima._correlation import FEWEST_MINIMA
from relflat_sk.minima._table import (
    column_of,
    find_axis,
    is_comparable,
    is_complete,
    is_minimum,
    measure_columns,
    numeric_column,
    parameter_columns,
)
from relflat_sk.plots._base import (
    BELOW,
    COLORS,
    Display,
    Floats,
    draw_grid,
    draw_legend,
    label_of,
    needs_log_scale,
    require_matplotlib,
    shorten,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SYMBOLS = {
    "pearson": "Pearson $r$",
    "spearman": "Spearman $\\rho$",
    "kendall": "Kendall $\\tau$",
}
MAX_LEVELS = 12  # a numeric column with more values gets a continuous color scale
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
    return values.map(lambda value: value if pd.api.types.is_scalar(value) else str(value))


class Colors:
    """Colors of minima: one per value, or a continuous scale for many numbers."""

    def __init__(self, minima: pd.DataFrame, column: str | None, cmap: str) -> None:
        from matplotlib import colormaps, colors  # noqa: PLC0415
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415

        self.column = column
        self.of_rows: NDArray[Any] = np.full(len(minima), COLORS[0])
        if column is None:
            return
        values = _plain(minima[column])
        codes: Any
        codes, self.levels = pd.factorize(values, sort=True)  # numbers by size, before texts
        self.is_scale = pd.api.types.is_numeric_dtype(values) and len(self.levels) > MAX_LEVELS
        if self.is_scale:
            codes = numeric_column(minima, column, argument="color_by")
            scale = colors.LogNorm if needs_log_scale(codes) else colors.Normalize
            norm = scale(np.nanmin(codes), np.nanmax(codes))
        else:
            codes = np.where(codes < 0, np.nan, codes)  # of missing values
            norm = colors.BoundaryNorm(np.arange(len(self.levels) + 1) - 0.5, 256)
        self.scale = ScalarMappable(norm, colormaps[cmap].with_extremes(bad="0.8"))
        self.of_rows = self.scale.to_rgba(np.ma.masked_invalid(codes))

    def draw_bar(self, axes: "list[Axes]") -> None:
        """Draw the color bar beside some axes, unless there is only one color."""
        if self.column is None:
            return
        bar = axes[0].figure.colorbar(self.scale, ax=axes, aspect=20 if len(axes) < 4 else 40)
        if not self.is_scale:
            names = [f"{x:g}" if isinstance(x, float) else shorten(str(x)) for x in self.levels]
            bar.set_ticks(range(len(names)), labels=names)
            bar.ax.minorticks_off()
        bar.set_label(label_of(self.column, ""))


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

    def require_minima(self, *columns: str) -> None:
        """Refuse to draw nothing."""
        if not self.comparable.any():
            raise ValueError(
                f"None of the {len(self.x)} candidates is a minimum with a finite "
                f"{' and '.join(map(repr, columns))}, so there is nothing to draw. The columns "
                "'converged' and 'reason' of the table say why. The test loss, the gap and the "
                "test score need held-out data: fit(X, y, X_test, y_test)."
            )

    def draw(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw all points, with the numbers of the other candidates for the legend."""
        self.draw_dots(ax, colors, **kwargs)
        self.draw_crosses(ax, ", ".join(f"{kind} ({n})" for kind, n in self.n_crossed.items()))
        if self.n_not_drawn:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_not_drawn})")

    def draw_dots(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw the minima that are compared, which decide the limits of the axes."""
        draw_grid(ax)
        ax.margins(MARGIN)
        x, y = self.x[self.comparable], self.y[self.comparable]
        ax.scatter(x, y, **(DOT | {"c": colors.of_rows[self.comparable]} | kwargs))

    def draw_crosses(self, ax: "Axes", label: str) -> None:
        """Draw the other candidates, at most as far out as the limits."""
        # a diverged run may lie anywhere; with it in view, the minima would fill a corner
        x_limits, y_limits = ax.get_xlim(), ax.get_ylim()
        ax.set(xlim=x_limits, ylim=y_limits)
        if self.crossed.any():
            x = np.clip(self.x[self.crossed], *x_limits)
            y = np.clip(self.y[self.crossed], *y_limits)
            ax.scatter(x, y, **CROSS, clip_on=False, label=label)


# -- correlations ------------------------------------------------------------------------


def choose_measures(
    minima: pd.DataFrame,
    measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None,
    target: str,
) -> list[str]:
    if measures is None:
        measures = [name for name in measure_columns(minima) if name != target]
    elif isinstance(measures, str) or callable(measures):
        measures = [measures]
    names = [column_of(measure) for measure in measures]
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
    drawn = Points(minima, x, y).comparable
    if drawn.sum() < FEWEST_MINIMA:
        return None
    pairs = pd.DataFrame({"measure": x[drawn], "target": y[drawn]})
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
        draw_legend(self.axes_, BELOW)
        colors.draw_bar(self.axes_)
        return self

    @abstractmethod
    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> "list[Axes]":
        """Draw all but the legend and the color bar, and return the panels."""

"""Minima as points: which are drawn, their colors, and the correlation of their two columns."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima import correlate_measures
from relflat_sk.minima._columns import (
    column_of,
    find_axis,
    is_complete,
    is_converged,
    measure_columns,
    numeric_column,
    parameter_columns,
)
from relflat_sk.minima._resampling import FEWEST_MINIMA
from relflat_sk.plots._axes import Floats, draw_grid, label_of, needs_log_scale, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}


# -- colors ------------------------------------------------------------------------------


def color_column(minima: pd.DataFrame, color_by: str | None) -> str | None:
    """Return the column that colors the minima."""
    if color_by is None:
        return None
    if color_by != "auto":
        return find_axis(minima, color_by, argument="color_by")
    varied = [name for name in parameter_columns(minima) if minima[name].nunique() > 1]
    batch_sizes = [name for name in varied if name.endswith("batch_size")]
    return next(iter([*batch_sizes, *varied]), None)


class Colors:
    """Colors of minima: one per value, or a continuous scale for many numbers."""

    def __init__(self, minima: pd.DataFrame, column: str | None, cmap: str) -> None:
        from matplotlib import colormaps, colors  # noqa: PLC0415

        self.column = column
        if column is None:
            return
        self.cmap = colormaps[cmap].with_extremes(bad="0.8")
        values = minima[column]
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
        """Return the color of one minimum."""
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
        self.x, self.y = x, y
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
    """Return the measures to draw."""
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

"""Many minima as points of a picture: which are drawn, in which colors, and their correlation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk._minima_table import (
    is_complete,
    is_converged,
    measure_columns,
    numeric_column,
    parameter_columns,
)
from relflat_sk.minima import FEWEST_MINIMA, correlate
from relflat_sk.plots._style import Floats, is_wide, label_of, prepare, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "SYMBOLS",
    "Cloud",
    "Colors",
    "color_column",
    "correlation_of",
    "describe",
    "measures_to_draw",
]

MOST_LEVELS = 12  # more values than this get a continuous color scale
SYMBOLS = {
    "pearson": "Pearson $r$",
    "spearman": "Spearman $\\rho$",
    "kendall": "Kendall $\\tau$",
}
MARGIN = 0.06  # of the axis, around the minima
MARKER: dict[str, Any] = {"s": 42, "edgecolors": "black", "linewidths": 0.6}
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}


class Cloud:
    """Minima as points: which are drawn, which are crosses, and how many are neither."""

    def __init__(self, minima: pd.DataFrame, x: Floats, y: Floats) -> None:
        self.x, self.y = x, y
        finite = np.isfinite(x) & np.isfinite(y) & is_complete(minima)
        self.converged = finite & is_converged(minima)
        self.unconverged = finite & ~self.converged
        self.n_lost = int((~finite).sum())

    def require_minima(self) -> None:
        """Raise a ValueError if there is nothing to draw."""
        if not self.converged.any():
            raise ValueError(
                f"None of the {len(self.x)} minima converged with finite values, so there is "
                "nothing to draw. See the columns 'converged' and 'reason' of the table."
            )

    def frame(self) -> tuple[float, float]:
        """Return the limits of a linear y axis around the minima."""
        return _frame(self.y[self.converged], "linear")

    def draw(self, ax: "Axes", colors: "Colors", **kwargs: Any) -> None:
        """Draw the minima, the others as crosses, and say how many others there are."""
        self.draw_minima(ax, colors, **kwargs)
        self.draw_crosses(ax, f"not converged ({self.unconverged.sum()})")
        if self.n_lost:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_lost})")

    def draw_minima(self, ax: "Axes", colors: "Colors", **kwargs: Any) -> None:
        """Draw the minima in their frame."""
        prepare(ax)
        x, y = self.x[self.converged], self.y[self.converged]
        ax.scatter(x, y, **(MARKER | colors.of(self.converged) | kwargs))
        ax.set(xlim=_frame(x, ax.get_xscale()), ylim=_frame(y, ax.get_yscale()))

    def draw_crosses(self, ax: "Axes", label: str) -> None:
        """Draw what is no minimum, no further out than the frame."""
        if self.unconverged.any():
            # a run that diverged lies anywhere, and would squeeze the minima into a corner
            x = np.clip(self.x[self.unconverged], *ax.get_xlim())
            y = np.clip(self.y[self.unconverged], *ax.get_ylim())
            ax.scatter(x, y, **CROSS, clip_on=False, label=label)


class Colors:
    """The colors of minima by one of their columns: levels, or a scale if there are many."""

    def __init__(self, minima: pd.DataFrame, column: str | None, cmap: str) -> None:
        from matplotlib import colormaps, colors  # noqa: PLC0415

        self.column = column
        if column is None:
            return
        if column not in minima.columns:
            raise ValueError(
                f"color_by={column!r} is not a column of these minima; there are: "
                f"{list(minima.columns)}."
            )
        self.cmap = colormaps[cmap].with_extremes(bad="0.8")
        values = minima[column]
        self.levels = sorted(values.dropna().unique(), key=_order)
        self.is_scale = pd.api.types.is_numeric_dtype(values) and len(self.levels) > MOST_LEVELS
        if self.is_scale:
            numbers = numeric_column(minima, column, argument="color_by")
            scale = colors.LogNorm if is_wide(numbers) else colors.Normalize
            self.codes = np.ma.masked_invalid(numbers)
            self.norm = scale(np.nanmin(numbers), np.nanmax(numbers))
        else:
            codes = values.map({level: code for code, level in enumerate(self.levels)})
            self.codes = np.ma.masked_invalid(codes.to_numpy(dtype=np.float64))
            self.norm = colors.BoundaryNorm(np.arange(len(self.levels) + 1) - 0.5, 256)

    def of(self, rows: NDArray[np.bool_]) -> dict[str, Any]:
        """Return the arguments of ``scatter`` that color these rows."""
        if self.column is None:
            return {}
        codes = self.codes[rows]
        return {"c": codes, "norm": self.norm, "cmap": self.cmap, "plotnonfinite": True}

    def draw_bar(self, axes: "list[Axes]", n_rows: int = 1) -> None:
        """Draw the color scale beside the rows of axes, with every level named."""
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415

        if self.column is None:
            return
        bar = axes[0].figure.colorbar(
            ScalarMappable(self.norm, self.cmap), ax=axes, aspect=20 * n_rows
        )
        if not self.is_scale:
            bar.set_ticks(range(len(self.levels)), labels=[_text(it) for it in self.levels])
            bar.ax.minorticks_off()
        bar.set_label(label_of(self.column, ""))


def _frame(values: Floats, scale: str) -> tuple[float, float]:
    """Return axis limits around values on a linear or logarithmic axis."""
    forth, back = (np.log10, lambda v: 10.0**v) if scale == "log" else (np.array, float)
    low, high = forth(values.min()), forth(values.max())
    margin = MARGIN * (high - low) or MARGIN * max(abs(high), 1.0)
    return float(back(low - margin)), float(back(high + margin))


def _order(level: Any) -> tuple[bool, Any]:
    """Return a sort key: numbers by size, then everything else by name."""
    is_text = not isinstance(level, int | float | np.number)
    return (is_text, str(level) if is_text else level)


def _text(level: Any) -> str:
    """Return a level as short text."""
    return f"{level:g}" if isinstance(level, float) else shorten(str(level))


def color_column(table: pd.DataFrame) -> str | None:
    """Return the column of the batch size, or else the first parameter that varies."""
    varied = [name for name in parameter_columns(table) if table[name].nunique() > 1]
    batch_sizes = [name for name in varied if name.endswith("batch_size")]
    return next(iter([*batch_sizes, *varied]), None)


def measures_to_draw(table: pd.DataFrame, measures: Sequence[str] | None, target: str) -> list[str]:
    """Return the measures asked for, or all there are, each a numeric column."""
    if measures is None:
        names = [name for name in measure_columns(table) if name != target]
    else:
        names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        numeric_column(table, name, argument="measures")
    if not names:
        raise ValueError(
            "There are no measures to draw: name numeric columns as measures, or have the "
            "search record some."
        )
    return names


def correlation_of(
    table: pd.DataFrame, measure: str, target: str, random_state: Any
) -> pd.Series | None:
    """Return the row of `correlate` for one measure, None if there are too few minima."""
    x = numeric_column(table, measure, argument="measure")
    y = numeric_column(table, target, argument="target")
    used = Cloud(table, x, y).converged
    if used.sum() < FEWEST_MINIMA:
        return None
    pairs = pd.DataFrame({"measure": x[used], "target": y[used]})
    return correlate(pairs, "target", random_state=random_state).iloc[0]


def describe(correlation: pd.Series, names: Sequence[str] = ("pearson", "kendall")) -> str:
    """Return coefficients with their intervals as one line."""
    parts = []
    for name in names:
        value, low, high = (correlation[name + end] for end in ("", "_low", "_high"))
        parts.append(f"{SYMBOLS[name]} = {value:z.2f} [{low:z.2f}, {high:z.2f}]")
    return ",  ".join([*parts, f"$n$ = {correlation['n']}"])

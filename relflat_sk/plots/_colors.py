"""Colors of minima by one column of their table."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima import numeric_column, parameter_columns
from relflat_sk.plots._labels import label_of, shorten
from relflat_sk.plots._style import needs_log_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Colors", "color_column"]

ONE_COLOR = "#0072B2"
MAX_LEVELS = 12  # a numeric column with more values gets a continuous color scale


def color_column(minima: pd.DataFrame, color_by: str | None) -> str | None:
    """Return the column that colors the minima."""
    if color_by != "auto":
        return color_by
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
        if column not in minima.columns:
            parameter = f"param_{column}"
            hint = f" Did you mean {parameter!r}?" if parameter in minima.columns else ""
            raise ValueError(
                f"color_by={column!r} is not a column of these minima; there are: "
                f"{list(minima.columns)}.{hint}"
            )
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

    def draw_bar(self, axes: "list[Axes]", n_rows: int = 1) -> None:
        """Draw the color bar beside some axes, unless there is only one color."""
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


def _order(level: Any) -> tuple[bool, Any]:
    """Return a sort key: numbers by size, then everything else by name."""
    is_text = not isinstance(level, int | float | np.number)
    return (is_text, str(level) if is_text else level)


def _text(level: Any) -> str:
    """Return a level as short text."""
    return f"{level:g}" if isinstance(level, float) else shorten(str(level))

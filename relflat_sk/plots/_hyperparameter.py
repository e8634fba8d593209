"""A measure against one hyper-parameter."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima import column_of, find_axes, find_axis, minima_table, numeric_column
from relflat_sk.plots._colors import Colors, color_column
from relflat_sk.plots._display import MinimaDisplay, with_unit
from relflat_sk.plots._labels import label_of, shorten
from relflat_sk.plots._panels import figure_of, make_axes
from relflat_sk.plots._points import Points
from relflat_sk.plots._style import Floats, choose_scale, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["HyperparameterDisplay"]

MEDIAN: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 1.2, "zorder": 1}
MAX_DISTINCT = 12  # of more values, each is likely to be of one minimum: no medians


class HyperparameterDisplay(MinimaDisplay):
    """Display of a measure of many minima against one hyper-parameter of their training.

    Make one with `from_minima`. A dashed line joins the medians of the minima with the same
    value of the hyper-parameter.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; `relflat_sk.minima` describes its columns.
    axis : str
        The column of the hyper-parameter, on the x axis.
    measure : str
        The column on the y axis.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The axes with the minima.
    figure_ : matplotlib.figure.Figure
        The figure of the axes.

    See Also
    --------
    granulated_kendall : Whether a measure predicts the gap along each hyper-parameter.
    FlatnessGapDisplay : Draw the gap against the measure.
    """

    def __init__(
        self, *, minima: pd.DataFrame, axis: str, measure: str, color_by: str | None = None
    ) -> None:
        self.minima = minima
        self.axis = axis
        self.measure = measure
        self.color_by = color_by

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        axis: str | None = None,
        measure: str | Callable[..., Any] = "relative_flatness",
        *,
        color_by: str | None = "auto",
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "HyperparameterDisplay":
        """Draw the measure of every minimum against a hyper-parameter.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima; `relflat_sk.minima` describes the columns of a table.
        axis : str or None, default=None
            The hyper-parameter, such as ``"batch_size"``. None takes the batch size if it was
            varied, or else the first parameter that was.
        measure : str or callable, default="relative_flatness"
            The numeric column on the y axis, or the function of which it is the measure. The
            axis is logarithmic if it spans more than a decade.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes another varied parameter, if there is
            one; None uses one color.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        HyperparameterDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `minima` is neither a table nor a study nor a fitted search.
        ValueError
            If a column is missing or not numeric, no parameter was varied, or no converged
            minimum has finite values.

        Examples
        --------
        >>> import pandas as pd
        >>> minima = pd.DataFrame(
        ...     {"param_batch_size": [8, 64, 512], "relative_flatness": [1.0, 2.0, 30.0]}
        ... )
        >>> display = HyperparameterDisplay.from_minima(minima)
        >>> display.ax_.get_xlabel(), display.ax_.get_xscale()
        ('batch size', 'log')
        """
        table = minima_table(minima)
        if axis is None:
            column = color_column(table, "auto") or find_axes(table, None)[0]
        else:
            column = find_axis(table, axis, argument="axis")
        if color_by == "auto":
            color_by = color_column(table.drop(columns=column), "auto")
        display = cls(minima=table, axis=column, measure=column_of(measure), color_by=color_by)
        return display.plot(ax=ax, **with_unit(kwargs, minima, table))

    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> None:
        """Draw the minima, the medians, the legend and the color bar."""
        y = numeric_column(self.minima, self.measure, argument="measure")
        x, names = self._positions(np.isfinite(y))
        points = Points(self.minima, x, y)
        points.require_minima(self.axis, self.measure)
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        good = points.converged
        if names:
            points.x_limits = -0.5, len(names) - 0.5  # names without minima count, too
        else:
            choose_scale(self.ax_.xaxis, x[good])
        choose_scale(self.ax_.yaxis, y[good])
        points.draw(self.ax_, colors, **kwargs)
        levels = np.unique(x[good])
        few = 1 < len(levels) <= MAX_DISTINCT
        if few:
            medians = [np.median(y[good & (x == level)]) for level in levels]
            self.ax_.plot(levels, medians, label="median of the minima", **MEDIAN)
        if names:
            turned = 90 if len(names) > MAX_DISTINCT else 0
            self.ax_.set_xticks(range(len(names)), names, rotation=turned)
        elif few:
            self.ax_.set_xticks(levels, [f"{level:g}" for level in levels])
            self.ax_.minorticks_off()
        legend_below(self.ax_)
        colors.draw_bar([self.ax_])
        self.ax_.set_xlabel(label_of(self.axis, ""))
        self.ax_.set_ylabel(label_of(self.measure, loss_unit))

    def _positions(self, drawn: NDArray[np.bool_]) -> tuple[Floats, list[str]]:
        """Return the minima's places on the x axis, and the names of the places if not numbers."""
        values = self.minima[self.axis]
        numeric = pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values)
        if numeric:
            return numeric_column(self.minima, self.axis, argument="axis"), []
        texts = values.map(str)
        names = list(dict.fromkeys(texts[drawn]))
        places = texts.map({name: place for place, name in enumerate(names)})
        return np.array(places, dtype=np.float64), [shorten(name) for name in names]

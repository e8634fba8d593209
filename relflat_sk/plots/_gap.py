"""The generalization gap of many minima against one measure."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pandas as pd

from relflat_sk.minima import column_of, minima_table, numeric_column
from relflat_sk.plots._coefficients import correlation_of, show_correlation
from relflat_sk.plots._colors import Colors, color_column
from relflat_sk.plots._display import MinimaDisplay, with_unit
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._panels import figure_of, make_axes
from relflat_sk.plots._points import Points
from relflat_sk.plots._style import choose_scale, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FlatnessGapDisplay"]


class FlatnessGapDisplay(MinimaDisplay):
    """Display of the generalization gap of many minima against their flatness.

    Make one with `from_minima`. The title shows the correlation coefficients of the two axes, with
    95% intervals.
    Candidates that did not converge are crosses, drawn on the frame if they lie outside it, and
    are left out of the correlations.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; `relflat_sk.minima` describes its columns.
    measure : str
        The column on the x axis.
    target : str
        The column on the y axis.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    correlation : pandas.Series or None, default=None
        The row of `correlate` for `measure`; None for no title.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The axes with the minima.
    figure_ : matplotlib.figure.Figure
        The figure of the axes.

    See Also
    --------
    correlate : Compute the coefficients of the title, for every measure.
    MinimaRankingDisplay : Draw the minima in order of flatness.
    MeasurePanelsDisplay : Draw the gap against every measure.
    """

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        measure: str,
        target: str,
        color_by: str | None = None,
        correlation: "pd.Series[Any] | None" = None,
    ) -> None:
        self.minima = minima
        self.measure = measure
        self.target = target
        self.color_by = color_by
        self.correlation = correlation

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        measure: str | Callable[..., Any] = "relative_flatness",
        target: str | Callable[..., Any] = "generalization_gap",
        *,
        color_by: str | None = "auto",
        random_state: Any = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "FlatnessGapDisplay":
        """Draw the target of every minimum against a measure.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima; `relflat_sk.minima` describes the columns of a table.
        measure : str or callable, default="relative_flatness"
            The numeric column on the x axis, or the function of which it is the measure. The
            axis is logarithmic if it spans more than a decade.
        target : str or callable, default="generalization_gap"
            The numeric column on the y axis, in the same way.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if it was varied, or
            else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        FlatnessGapDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `minima` is neither a table nor a study nor a fitted search.
        ValueError
            If a column is missing or not numeric, or no converged minimum has finite values.

        Examples
        --------
        >>> import pandas as pd
        >>> minima = pd.DataFrame(
        ...     {
        ...         "param_batch_size": [8, 64, 512],
        ...         "relative_flatness": [1.0, 2.0, 30.0],
        ...         "generalization_gap": [0.1, 0.15, 0.4],
        ...     }
        ... )
        >>> display = FlatnessGapDisplay.from_minima(minima, random_state=0)
        >>> display.ax_.get_xlabel()
        'relative flatness κ (nats)'
        """
        table = minima_table(minima)
        measure, target = column_of(measure), column_of(target)
        display = cls(
            minima=table,
            measure=measure,
            target=target,
            color_by=color_column(table, color_by),
            correlation=correlation_of(table, measure, target, random_state),
        )
        return display.plot(ax=ax, **with_unit(kwargs, minima, table))

    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> None:
        """Draw the minima, the legend, the color bar and the title."""
        x = numeric_column(self.minima, self.measure, argument="measure")
        y = numeric_column(self.minima, self.target, argument="target")
        points = Points(self.minima, x, y)
        points.require_minima(self.measure, self.target)
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        choose_scale(self.ax_.xaxis, x[points.converged])
        points.draw(self.ax_, colors, **kwargs)
        legend_below(self.ax_)
        colors.draw_bar([self.ax_])
        self.ax_.set_xlabel(label_of(self.measure, loss_unit))
        self.ax_.set_ylabel(label_of(self.target, loss_unit))
        show_correlation(self.ax_, self.correlation, between=(self.measure, self.target))

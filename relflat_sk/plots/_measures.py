"""The generalization gap of many minima against every measure, to compare the measures."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from relflat_sk.minima import column_of, minima_table, numeric_column
from relflat_sk.plots._coefficients import choose_measures, correlation_of, show_correlation
from relflat_sk.plots._colors import Colors, color_column
from relflat_sk.plots._display import MinimaDisplay, with_unit
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._panels import figure_of, label_rows, make_panels
from relflat_sk.plots._points import Points
from relflat_sk.plots._style import choose_scale, legend_below, write_note

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MeasurePanelsDisplay"]


class MeasurePanelsDisplay(MinimaDisplay):
    """Display of the generalization gap of many minima, with a panel for every measure.

    Make one with `from_minima`. All panels share the y axis. The title of a panel shows
    Kendall's tau with its 95% interval, and the number of minima with finite values.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; `relflat_sk.minima` describes its columns.
    measures : list of str
        The columns on the x axes.
    target : str
        The column on the y axis.
    correlations : dict of str to pandas.Series or None
        The row of `correlate` for each measure; None for a measure with finite values at fewer
        than 3 minima.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The first panel.
    axes_ : list of matplotlib.axes.Axes
        All panels, in the order of the measures.
    figure_ : matplotlib.figure.Figure
        The figure of the panels.

    See Also
    --------
    correlate : Compute the coefficients as a table.
    FlatnessGapDisplay : Draw the gap against one measure.
    """

    axes_: "list[Axes]"

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        measures: list[str],
        target: str,
        correlations: "dict[str, pd.Series[Any] | None]",
        color_by: str | None = None,
    ) -> None:
        self.minima = minima
        self.measures = measures
        self.target = target
        self.correlations = correlations
        self.color_by = color_by

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        target: str | Callable[..., Any] = "generalization_gap",
        *,
        color_by: str | None = "auto",
        random_state: Any = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "MeasurePanelsDisplay":
        """Draw the target of every minimum against each measure.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima; `relflat_sk.minima` describes the columns of a table.
        measures : str, callable, sequence of these or None, default=None
            The numeric columns on the x axes, or the functions of which they are the measures.
            Each axis is logarithmic if it spans more than a decade. None takes every measure of
            the table.
        target : str or callable, default="generalization_gap"
            The numeric column on the y axis, in the same way.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if it was varied, or
            else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into panels; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        MeasurePanelsDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `minima` is neither a table nor a study nor a fitted search.
        ValueError
            If a column is missing or not numeric, there is no measure, or no converged minimum
            has a finite target.

        Examples
        --------
        >>> import pandas as pd
        >>> minima = pd.DataFrame(
        ...     {
        ...         "relative_flatness": [1.0, 2.0, 30.0],
        ...         "hessian_trace": [7.0, 9.0, 8.0],
        ...         "generalization_gap": [0.1, 0.15, 0.4],
        ...     }
        ... )
        >>> display = MeasurePanelsDisplay.from_minima(minima, random_state=0)
        >>> [panel.get_xlabel() for panel in display.axes_]
        ['relative flatness κ (nats)', 'Hessian trace']
        """
        table, target = minima_table(minima), column_of(target)
        names = choose_measures(table, measures, target)
        display = cls(
            minima=table,
            measures=names,
            target=target,
            correlations={
                name: correlation_of(table, name, target, random_state) for name in names
            },
            color_by=color_column(table, color_by),
        )
        return display.plot(ax=ax, **with_unit(kwargs, minima, table))

    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> None:
        """Draw a panel for each measure, the legend and the color bar."""
        y = numeric_column(self.minima, self.target, argument="target")
        with_target = Points(self.minima, y, y)
        with_target.require_minima(self.target)
        self.axes_, n_columns = make_panels(ax, len(self.measures))
        self.ax_, self.figure_ = self.axes_[0], figure_of(self.axes_[0])
        for name, panel in zip(self.measures, self.axes_, strict=True):
            x = numeric_column(self.minima, name, argument="measures")
            points = Points(self.minima, x, y)
            panel.set_xlabel(label_of(name, loss_unit))
            if not points.converged.any():
                write_note(panel, "not finite")
                continue
            choose_scale(panel.xaxis, x[points.converged])
            points.draw_minima(panel, colors, **({"s": 22} | kwargs))
            # the same limits in all panels, whichever minima have the measure
            panel.set_ylim(with_target.y_limits())
            points.draw_crosses(panel, ", ".join(with_target.kinds))
            show_correlation(panel, self.correlations[name], ["kendall"], fontsize="small")
        label_rows(self.axes_, n_columns, label_of(self.target, loss_unit))
        legend_below(self.axes_[-1], self.axes_)
        colors.draw_bar(self.axes_, -(-len(self.axes_) // n_columns))

"""A picture that compares measures: the generalization gap against each of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from relflat_sk._minima_table import minima_table, numeric_column
from relflat_sk.plots._scatter import (
    Cloud,
    Colors,
    color_column,
    correlation_of,
    describe,
    measures_to_draw,
)
from relflat_sk.plots._style import (
    draw_panels,
    figure_of,
    is_wide,
    label_of,
    legend_below,
    name_rows,
    say,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MeasurePanelsDisplay"]


class MeasurePanelsDisplay:
    """The generalization gap of many minima against every measure, a panel for each.

    Use `from_minima` to make one. All panels show the same minima over the same gap; in the
    title of each stand Kendall's tau with its 95% interval and the number of minima.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; see `relflat_sk.minima` for its columns.
    measures : list of str
        The columns on the x axes.
    target : str
        The column on the y axis.
    correlations : dict of str to pandas.Series or None
        The row of `correlate` for each measure, None where there are too few minima.
    color_by : str or None
        The column that colors the minima, None for one color.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The first panel.
    axes_ : list of matplotlib.axes.Axes
        All panels, in the order of the measures.
    figure_ : matplotlib.figure.Figure
        Their figure.

    See Also
    --------
    correlate : The coefficients as a table.
    FlatnessGapDisplay : One measure, larger.
    """

    ax_: "Axes"
    axes_: "list[Axes]"
    figure_: "Figure"

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        measures: list[str],
        target: str,
        correlations: "dict[str, pd.Series | None]",
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
        measures: Sequence[str] | None = None,
        target: str = "generalization_gap",
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
            The minima.
        measures : sequence of str or None, default=None
            The numeric columns on the x axes, each logarithmic if it spans more than a
            decade. None takes every measure recorded.
        target : str, default="generalization_gap"
            The numeric column on the y axis.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if that was varied,
            or else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, divided into panels; None makes a new figure.
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
            If `minima` is neither a table nor a study.
        ValueError
            If a column is missing or not numeric, or there are no measures.

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
        table = minima_table(minima)
        names = measures_to_draw(table, measures, target)
        display = cls(
            minima=table,
            measures=names,
            target=target,
            correlations={
                name: correlation_of(table, name, target, random_state) for name in names
            },
            color_by=color_column(table) if color_by == "auto" else color_by,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        loss_unit: str = "nats",
        cmap: str = "viridis",
        **kwargs: Any,
    ) -> "MeasurePanelsDisplay":
        """Draw the panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, divided into panels; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none.
        cmap : str, default="viridis"
            Color map of the parameter in `color_by`; best one of increasing lightness.
        **kwargs
            Passed on to `matplotlib.axes.Axes.scatter` for the converged minima.

        Returns
        -------
        MeasurePanelsDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a column is missing or not numeric, or no minimum converged.
        """
        self.axes_, n_columns = draw_panels(ax, len(self.measures))
        self.ax_, self.figure_ = self.axes_[0], figure_of(self.axes_[0])
        colors = Colors(self.minima, self.color_by, cmap)
        y = numeric_column(self.minima, self.target, argument="target")
        whole = Cloud(self.minima, y, y)
        whole.require_minima()
        for name, panel in zip(self.measures, self.axes_, strict=True):
            cloud = Cloud(self.minima, numeric_column(self.minima, name, argument="measure"), y)
            panel.set_xlabel(label_of(name, loss_unit))
            if not cloud.converged.any():
                say(panel, "not finite")
                continue
            if is_wide(cloud.x[cloud.converged]):
                panel.set_xscale("log")
            cloud.draw_minima(panel, colors, **({"s": 22} | kwargs))
            panel.set_ylim(whole.frame())  # the same in all, whatever is known where
            cloud.draw_crosses(panel, "not converged")
            correlation = self.correlations[name]
            if correlation is not None:
                panel.set_title(describe(correlation, ["kendall"]), fontsize="small", pad=9)
        name_rows(self.axes_, n_columns, label_of(self.target, loss_unit))
        legend_below(self.axes_[-1], self.axes_)
        colors.draw_bar(self.axes_, -(-len(self.axes_) // n_columns))
        return self

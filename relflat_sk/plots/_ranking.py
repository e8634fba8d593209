"""Minima in order of flatness, with their loss on held-out data."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk.minima import column_of, measure_columns, numeric_column, rank_minima
from relflat_sk.plots._coefficients import correlation_of, show_correlation
from relflat_sk.plots._colors import Colors, color_column
from relflat_sk.plots._display import MinimaDisplay, with_unit
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._panels import divide, figure_of, make_axes
from relflat_sk.plots._points import Points
from relflat_sk.plots._style import choose_scale, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["MinimaRankingDisplay"]


class MinimaRankingDisplay(MinimaDisplay):
    """Display of minima in order of flatness, with their held-out loss below.

    Make one with `from_minima`. If flat minima generalize well, the loss in the lower panel
    rises from left to right (a score falls), and the flattest minimum is better than the
    dashed mean of the minima.

    Parameters
    ----------
    minima : pandas.DataFrame
        The ranked table of minima, as `rank_minima` returns it.
    by : str
        The column that ranks them, in the upper panel.
    target : str
        The column in the lower panel.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    correlation : pandas.Series or None, default=None
        The row of `correlate` for `by` with `target`; None for no title.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The upper panel, with the measure.
    target_ax_ : matplotlib.axes.Axes
        The lower panel, with the target.
    figure_ : matplotlib.figure.Figure
        The figure of the panels.

    See Also
    --------
    rank_minima : Rank the minima as a table.
    FlatnessGapDisplay : Draw the gap against the measure.
    """

    target_ax_: "Axes"

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        by: str,
        target: str,
        color_by: str | None = None,
        correlation: "pd.Series[Any] | None" = None,
    ) -> None:
        self.minima = minima
        self.by = by
        self.target = target
        self.color_by = color_by
        self.correlation = correlation

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        by: str | Callable[..., Any] = "relative_flatness",
        target: str | Callable[..., Any] | None = None,
        *,
        color_by: str | None = "auto",
        random_state: Any = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "MinimaRankingDisplay":
        """Draw the minima in rank order.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima, in any order; `relflat_sk.minima` describes the columns of a table.
        by : str or callable, default="relative_flatness"
            The numeric column to rank by, flattest first, or the function of which it is the
            measure.
        target : str, callable or None, default=None
            The numeric column in the lower panel, in the same way. None takes the test loss or,
            if no minimum has one, the training loss.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if it was varied, or
            else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into two panels; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        MinimaRankingDisplay
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
        ...         "param_batch_size": [512, 64, 8],
        ...         "relative_flatness": [30.0, 2.0, 1.0],
        ...         "test_loss": [0.5, 0.25, 0.2],
        ...     }
        ... )
        >>> display = MinimaRankingDisplay.from_minima(minima, random_state=0)
        >>> display.minima["rank"].tolist(), display.minima["param_batch_size"].tolist()
        ([1, 2, 3], [8, 64, 512])
        """
        by = column_of(by)
        table = rank_minima(minima, by=by)
        if target is None:
            target = "test_loss" if _any_finite(table, "test_loss") else "train_loss"
        target = column_of(target)
        display = cls(
            minima=table,
            by=by,
            target=target,
            color_by=color_column(table, color_by),
            correlation=correlation_of(table, by, target, random_state),
        )
        return display.plot(ax=ax, **with_unit(kwargs, minima, table))

    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> None:
        """Draw the two panels, the legend, the color bar and the title."""
        upper, lower = self._points("by", self.by), self._points("target", self.target)
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        _, self.target_ax_ = divide(self.ax_, 2, 1, sharex="all")
        for panel, points in [(self.ax_, upper), (self.target_ax_, lower)]:
            choose_scale(panel.yaxis, points.y[points.converged])
            points.draw(panel, colors, **kwargs)
        mean = lower.y[lower.converged].mean()
        self.target_ax_.axhline(
            mean, color="0.35", linestyle="--", linewidth=1, label="mean of the minima"
        )
        legend_below(self.target_ax_, [self.ax_])
        colors.draw_bar([self.ax_, self.target_ax_])
        self.ax_.tick_params(labelbottom=False)
        self.target_ax_.locator_params(axis="x", integer=True)
        self.ax_.set_ylabel(label_of(self.by, loss_unit))
        self.target_ax_.set_ylabel(label_of(self.target, loss_unit))
        best = "flattest" if self.by in measure_columns(self.minima) else "best"
        self.target_ax_.set_xlabel(f"rank by {label_of(self.by, '')}, 1 is {best}")
        show_correlation(self.ax_, self.correlation, between=(self.by, self.target))

    def _points(self, argument: str, column: str) -> Points:
        """Return the minima with their rank on the x axis and a column on the y axis."""
        rank = self.minima["rank"].to_numpy(dtype=np.float64)
        points = Points(self.minima, rank, numeric_column(self.minima, column, argument=argument))
        points.require_minima(column)
        return points


def _any_finite(table: pd.DataFrame, name: str) -> bool:
    """Return whether a column exists and has a finite value."""
    return name in table.columns and bool(np.isfinite(table[name]).any())

"""Pictures of a sweep: does flatness predict the generalization gap, does it rank minima.

The displays follow scikit-learn: ``from_...`` class methods compute and draw, ``__init__``
only stores, ``plot(ax=None)`` draws (again) and returns the display, whose ``ax_`` and
``figure_`` can be changed further.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk._minima_table import minima_table, numeric_column
from relflat_sk.minima import rank_minima
from relflat_sk.plots._scatter import Cloud, Colors, color_column, correlation_of, describe
from relflat_sk.plots._style import figure_of, is_wide, label_of, legend_below, make_axes, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FlatnessGapDisplay", "MinimaRankingDisplay"]


class FlatnessGapDisplay:
    """The generalization gap of many minima against their flatness.

    Use `from_minima` to make one. Candidates that did not converge are crosses, placed on the
    frame where they lie beyond it, and take no part in the correlations of the title.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; see `relflat_sk.minima` for its columns.
    measure : str
        The column on the x axis.
    target : str
        The column on the y axis.
    color_by : str or None
        The column that colors the minima, None for one color.
    correlation : pandas.Series or None
        The row of `correlate` for `measure`, None for no title.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The axes drawn into.
    figure_ : matplotlib.figure.Figure
        Its figure.

    See Also
    --------
    correlate : The numbers in the title, for every measure.
    MinimaRankingDisplay : The minima in order of flatness.
    """

    ax_: "Axes"
    figure_: "Figure"

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        measure: str,
        target: str,
        color_by: str | None = None,
        correlation: pd.Series | None = None,
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
        measure: str = "relative_flatness",
        target: str = "generalization_gap",
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
            The minima.
        measure : str, default="relative_flatness"
            The numeric column on the x axis, logarithmic if it spans more than a decade.
        target : str, default="generalization_gap"
            The numeric column on the y axis.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if that was varied,
            or else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw; None makes a new figure.
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
            If `minima` is neither a table nor a study.
        ValueError
            If a column is missing or not numeric.

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
        display = cls(
            minima=table,
            measure=measure,
            target=target,
            color_by=color_column(table) if color_by == "auto" else color_by,
            correlation=correlation_of(table, measure, target, random_state),
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        loss_unit: str = "nats",
        cmap: str = "viridis",
        **kwargs: Any,
    ) -> "FlatnessGapDisplay":
        """Draw the minima.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none.
        cmap : str, default="viridis"
            Color map of the parameter in `color_by`; best one of increasing lightness.
        **kwargs
            Passed on to `matplotlib.axes.Axes.scatter` for the converged minima.

        Returns
        -------
        FlatnessGapDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a column is missing or not numeric, or no converged minimum is finite in both.
        """
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        x = numeric_column(self.minima, self.measure, argument="measure")
        y = numeric_column(self.minima, self.target, argument="target")
        cloud = Cloud(self.minima, x, y)
        cloud.require_minima()
        colors = Colors(self.minima, self.color_by, cmap)
        if is_wide(x[cloud.converged]):
            self.ax_.set_xscale("log")
        cloud.draw(self.ax_, colors, **kwargs)
        legend_below(self.ax_)
        colors.draw_bar([self.ax_])
        self.ax_.set_xlabel(label_of(self.measure, loss_unit))
        self.ax_.set_ylabel(label_of(self.target, loss_unit))
        if self.correlation is not None:
            self.ax_.set_title(describe(self.correlation), fontsize="medium", pad=9)
        return self


class MinimaRankingDisplay:
    """Minima in order of flatness, with what they are worth on held-out data below.

    Use `from_minima` to make one. If flatness orders the minima well, the lower panel falls
    (or, for a score, rises) to the left, and the flattest is better than the dashed mean.

    Parameters
    ----------
    minima : pandas.DataFrame
        The ranked table of minima, as `rank_minima` returns it.
    by : str
        The column they are ranked by, in the upper panel.
    target : str
        The column of the lower panel.
    color_by : str or None
        The column that colors the minima, None for one color.
    correlation : pandas.Series or None
        The row of `correlate` for `by` with `target`, None for no title.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The upper panel, which shows the measure.
    target_ax_ : matplotlib.axes.Axes
        The lower panel.
    figure_ : matplotlib.figure.Figure
        Their figure.

    See Also
    --------
    rank_minima : The ranking as a table.
    FlatnessGapDisplay : The gap against the measure.
    """

    ax_: "Axes"
    target_ax_: "Axes"
    figure_: "Figure"

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        by: str,
        target: str,
        color_by: str | None = None,
        correlation: pd.Series | None = None,
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
        by: str = "relative_flatness",
        target: str | None = None,
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
            The minima, in any order.
        by : str, default="relative_flatness"
            The numeric column to rank by, flattest first.
        target : str or None, default=None
            The numeric column of the lower panel. None takes the test loss or, if no minimum
            has one, the training loss.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes the batch size if that was varied,
            or else the first parameter that was; None uses one color.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the interval.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, split in two; None makes a new figure.
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
            If `minima` is neither a table nor a study.
        ValueError
            If a column is missing or not numeric.

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
        table = rank_minima(minima, by=by)
        if target is None:
            target = "test_loss" if _any_finite(table, "test_loss") else "train_loss"
        display = cls(
            minima=table,
            by=by,
            target=target,
            color_by=color_column(table) if color_by == "auto" else color_by,
            correlation=correlation_of(table, by, target, random_state),
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        loss_unit: str = "nats",
        cmap: str = "viridis",
        **kwargs: Any,
    ) -> "MinimaRankingDisplay":
        """Draw the two panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, split in two; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none.
        cmap : str, default="viridis"
            Color map of the parameter in `color_by`; best one of increasing lightness.
        **kwargs
            Passed on to `matplotlib.axes.Axes.scatter` for the converged minima.

        Returns
        -------
        MinimaRankingDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a column is missing or not numeric, or no converged minimum is finite in both.
        """
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        _, self.target_ax_ = panels(self.ax_, 2, 1, sharex="all")
        colors = Colors(self.minima, self.color_by, cmap)
        rank = self.minima["rank"].to_numpy(dtype=np.float64)
        clouds = [
            Cloud(self.minima, rank, numeric_column(self.minima, name, argument=argument))
            for argument, name in [("by", self.by), ("target", self.target)]
        ]
        for panel, cloud in zip((self.ax_, self.target_ax_), clouds, strict=True):
            cloud.require_minima()
            if is_wide(cloud.y[cloud.converged]):
                panel.set_yscale("log")
            cloud.draw(panel, colors, **kwargs)
        mean = clouds[1].y[clouds[1].converged].mean()
        self.target_ax_.axhline(
            mean, color="0.35", linestyle="--", linewidth=1, label="mean of the minima"
        )
        legend_below(self.target_ax_, [self.ax_])
        colors.draw_bar([self.ax_, self.target_ax_])
        self.ax_.tick_params(labelbottom=False)
        self.target_ax_.locator_params(axis="x", integer=True)
        self.ax_.set_ylabel(label_of(self.by, loss_unit))
        self.target_ax_.set_ylabel(label_of(self.target, loss_unit))
        self.target_ax_.set_xlabel(f"rank by {label_of(self.by, '')}, 1 is flattest")
        if self.correlation is not None:
            self.ax_.set_title(describe(self.correlation), fontsize="medium", pad=9)
        return self


def _any_finite(table: pd.DataFrame, name: str) -> bool:
    """Return whether a column is there and holds any number."""
    return name in table.columns and bool(np.isfinite(table[name]).any())

"""Pictures of a sweep: does flatness predict the generalization gap, does it rank minima.

The displays follow scikit-learn: ``from_...`` class methods compute and draw, ``__init__``
only stores, ``plot(ax=None)`` draws (again) and returns the display, whose ``ax_`` and
``figure_`` can be changed further. Matplotlib is imported when something is drawn.
"""

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.correlation import FEWEST, correlate
from relflat_sk.minima import (
    PARAM_PREFIX,
    is_complete,
    is_converged,
    minima_table,
    numeric_column,
    rank_minima,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FlatnessGapDisplay", "MinimaRankingDisplay"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# what is in the unit of the loss, and how it is called; other names are read as words
IN_LOSS_UNITS = {
    "relative_flatness": "relative flatness κ",
    "normalized_relative_flatness": "normalized relative flatness κ",
    "generalization_gap": "test loss − training loss",  # noqa: RUF001 (a minus sign)
    "test_loss": "test loss",
    "train_loss": "training loss",
}
WORDS = {"test_score": "held-out score", "train_score": "training score"}

MOST_LEVELS = 12  # more values than this get a continuous color scale
WIDE = 10.0  # a ratio of largest to smallest that asks for a logarithmic axis
MARGIN = 0.06  # of the axis, around the minima
MARKER: dict[str, Any] = {"s": 42, "edgecolors": "black", "linewidths": 0.6}
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}


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
            color_by=_color_column(table) if color_by == "auto" else color_by,
            correlation=_correlation(table, measure, target, random_state),
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
        self.ax_ = _axes(ax)
        self.figure_ = _figure(self.ax_)
        x = numeric_column(self.minima, self.measure, argument="measure")
        y = numeric_column(self.minima, self.target, argument="target")
        cloud = _Cloud(self.minima, x, y)
        colors = _Colors(self.minima, self.color_by, cmap)
        if _is_wide(x[cloud.converged]):
            self.ax_.set_xscale("log")
        cloud.draw(self.ax_, colors, **kwargs)
        if self.ax_.get_legend_handles_labels()[0]:
            self.ax_.legend(fontsize="small")
        colors.draw_bar([self.ax_])
        self.ax_.set_xlabel(_label(self.measure, loss_unit))
        self.ax_.set_ylabel(_label(self.target, loss_unit))
        if self.correlation is not None:
            self.ax_.set_title(_describe(self.correlation), fontsize="medium")
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
            color_by=_color_column(table) if color_by == "auto" else color_by,
            correlation=_correlation(table, by, target, random_state),
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
        self.ax_ = _axes(ax)
        self.figure_ = _figure(self.ax_)
        self.target_ax_ = _split(self.ax_)
        colors = _Colors(self.minima, self.color_by, cmap)
        rank = self.minima["rank"].to_numpy(dtype=np.float64)
        clouds = [
            _Cloud(self.minima, rank, numeric_column(self.minima, name, argument=argument))
            for argument, name in [("by", self.by), ("target", self.target)]
        ]
        for panel, cloud in zip((self.ax_, self.target_ax_), clouds, strict=True):
            if _is_wide(cloud.y[cloud.converged]):
                panel.set_yscale("log")
            cloud.draw(panel, colors, **kwargs)
        mean = clouds[1].y[clouds[1].converged].mean()
        self.target_ax_.axhline(
            mean, color="0.35", linestyle="--", linewidth=1, label="mean of the minima"
        )
        self.target_ax_.legend(fontsize="small")
        colors.draw_bar([self.ax_, self.target_ax_])
        self.ax_.tick_params(labelbottom=False)
        self.ax_.set_ylabel(_label(self.by, loss_unit))
        self.target_ax_.set_ylabel(_label(self.target, loss_unit))
        self.target_ax_.set_xlabel(f"rank by {_label(self.by, '')}, 1 is flattest")
        if self.correlation is not None:
            self.ax_.set_title(_describe(self.correlation), fontsize="medium")
        return self


class _Cloud:
    """Minima as points: which are drawn, which are crosses, and how many are neither."""

    def __init__(self, minima: pd.DataFrame, x: Floats, y: Floats) -> None:
        self.x, self.y = x, y
        finite = np.isfinite(x) & np.isfinite(y) & is_complete(minima)
        self.converged = finite & is_converged(minima)
        self.unconverged = finite & ~self.converged
        self.n_lost = int((~finite).sum())
        if not self.converged.any():
            raise ValueError(
                f"None of the {len(minima)} minima converged with finite values, so there is "
                "nothing to draw. See the columns 'converged' and 'reason' of the table."
            )

    def draw(self, ax: "Axes", colors: "_Colors", **kwargs: Any) -> None:
        """Draw the minima, and the others as crosses no further out than their frame."""
        ax.grid(color="0.9", linewidth=0.8)
        ax.set_axisbelow(True)
        x, y = self.x[self.converged], self.y[self.converged]
        ax.scatter(x, y, **(MARKER | colors.of(self.converged) | kwargs))
        ax.set(xlim=_frame(x, ax.get_xscale()), ylim=_frame(y, ax.get_yscale()))
        if self.unconverged.any():
            # a run that diverged lies anywhere, and would squeeze the minima into a corner
            crosses_x = np.clip(self.x[self.unconverged], *ax.get_xlim())
            crosses_y = np.clip(self.y[self.unconverged], *ax.get_ylim())
            label = f"not converged ({self.unconverged.sum()})"
            ax.scatter(crosses_x, crosses_y, **CROSS, clip_on=False, label=label)
        if self.n_lost:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_lost})")


class _Colors:
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
            scale = colors.LogNorm if _is_wide(numbers) else colors.Normalize
            self.codes = np.ma.masked_invalid(numbers)
            self.norm = scale(np.nanmin(numbers), np.nanmax(numbers))
        else:
            codes = values.map({level: code for code, level in enumerate(self.levels)})
            self.codes = np.ma.masked_invalid(codes.to_numpy(dtype=np.float64))
            self.norm = colors.BoundaryNorm(np.arange(len(self.levels) + 1) - 0.5, 256)

    def of(self, rows: Bools) -> dict[str, Any]:
        """Return the arguments of ``scatter`` that color these rows."""
        if self.column is None:
            return {}
        codes = self.codes[rows]
        return {"c": codes, "norm": self.norm, "cmap": self.cmap, "plotnonfinite": True}

    def draw_bar(self, axes: "list[Axes]") -> None:
        """Draw the color scale beside the axes, with every level named."""
        from matplotlib.cm import ScalarMappable  # noqa: PLC0415

        if self.column is None:
            return
        figure = _figure(axes[0])
        bar = figure.colorbar(ScalarMappable(self.norm, self.cmap), ax=axes)
        if not self.is_scale:
            bar.set_ticks(range(len(self.levels)), labels=[_text(it) for it in self.levels])
            bar.ax.minorticks_off()
        bar.set_label(_label(self.column, ""))


def _axes(ax: "Axes | None") -> "Axes":
    """Return the axes to draw into, new ones if there are none."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "The displays of relflat_sk draw with matplotlib, which is not installed. "
            'Install it with: pip install "relflat_sk[plot]"'
        ) from error
    return pyplot.subplots(layout="constrained")[1] if ax is None else ax


def _figure(ax: "Axes") -> "Figure":
    """Return the figure that holds the axes, itself not part of another one."""
    return cast("Figure", ax.get_figure(root=True))


def _split(ax: "Axes") -> "Axes":
    """Make room below the axes for a second panel of equal size, and return it."""
    spec = ax.get_subplotspec()
    if spec is None:
        box = ax.get_position()
        whole = _figure(ax).add_gridspec(1, 1, left=box.x0, right=box.x1, bottom=box.y0, top=box.y1)
        spec = whole[0]
    halves = spec.subgridspec(2, 1)
    ax.set_subplotspec(halves[0])
    return _figure(ax).add_subplot(halves[1], sharex=ax)


def _frame(values: Floats, scale: str) -> tuple[float, float]:
    """Return axis limits around values on a linear or logarithmic axis."""
    forth, back = (np.log10, lambda v: 10.0**v) if scale == "log" else (np.array, float)
    low, high = forth(values.min()), forth(values.max())
    margin = MARGIN * (high - low) or MARGIN * max(abs(high), 1.0)
    return float(back(low - margin)), float(back(high + margin))


def _is_wide(values: Floats) -> bool:
    """Return whether values are positive and span more than a decade."""
    return bool(values.min() > 0 and values.max() > WIDE * values.min())


def _any_finite(table: pd.DataFrame, name: str) -> bool:
    """Return whether a column is there and holds any number."""
    return name in table.columns and bool(np.isfinite(table[name]).any())


def _color_column(table: pd.DataFrame) -> str | None:
    """Return the column of the batch size, or else the first parameter that varies."""
    params = [str(name) for name in table.columns if str(name).startswith(PARAM_PREFIX)]
    varied = [name for name in params if table[name].nunique() > 1]
    batch_sizes = [name for name in varied if name.endswith("batch_size")]
    return next(iter([*batch_sizes, *varied]), None)


def _correlation(
    table: pd.DataFrame, measure: str, target: str, random_state: Any
) -> pd.Series | None:
    """Return the row of `correlate` for one measure, None if there are too few minima."""
    x = numeric_column(table, measure, argument="measure")
    y = numeric_column(table, target, argument="target")
    used = _Cloud(table, x, y).converged
    if used.sum() < FEWEST:
        return None
    pairs = pd.DataFrame({"measure": x[used], "target": y[used]})
    return correlate(pairs, "target", random_state=random_state).iloc[0]


def _describe(correlation: pd.Series) -> str:
    """Return coefficients with their intervals as one line."""
    parts = []
    for name, symbol in [("pearson", "Pearson $r$"), ("kendall", "Kendall $\\tau$")]:
        value, low, high = (correlation[name + end] for end in ("", "_low", "_high"))
        parts.append(f"{symbol} = {value:.2f} [{low:.2f}, {high:.2f}]")
    return ",  ".join([*parts, f"$n$ = {correlation['n']}"])


def _label(name: str, loss_unit: str) -> str:
    """Return how a column is called on an axis, with its unit."""
    if name in IN_LOSS_UNITS:
        return f"{IN_LOSS_UNITS[name]} ({loss_unit})" if loss_unit else IN_LOSS_UNITS[name]
    plain = name.removeprefix(PARAM_PREFIX).rpartition("__")[2]
    return WORDS.get(name, plain.replace("_", " "))


def _order(level: Any) -> tuple[bool, Any]:
    """Return a sort key: numbers by size, then everything else by name."""
    is_text = not isinstance(level, int | float | np.number)
    return (is_text, str(level) if is_text else level)


def _text(level: Any) -> str:
    """Return a level as short text."""
    return f"{level:g}" if isinstance(level, float) else str(level)

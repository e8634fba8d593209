"""Displays of many minima: gap, rank, hyper-parameters, correlations under label noise."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk.minima import correlate_measures, rank_minima
from relflat_sk.minima._correlation import FEWEST_MINIMA
from relflat_sk.minima._table import (
    column_of,
    find_axes,
    find_axis,
    is_numeric,
    measure_column,
    measure_columns,
    minima_table,
    numeric_column,
)
from relflat_sk.plots._base import (
    Display,
    MinimaDisplay,
    Points,
    Style,
    color_column,
    curve_style,
    divide,
    draw_grid,
    label_of,
    make_axes,
    make_panels,
    measure_label,
    shorten,
    write_note,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DASHED: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 1.2}
MAX_DISTINCT = 12  # of more values, each is likely to be of one minimum: no medians
SYMBOLS = {"pearson": "Pearson $r$", "kendall": "Kendall $\\tau$"}

# -- correlations ------------------------------------------------------------------------


def choose_measures(
    minima: pd.DataFrame,
    measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None,
    target: str,
) -> list[str]:
    if measures is None:
        measures = [name for name in measure_columns(minima) if name != target]
    elif isinstance(measures, str) or callable(measures):
        measures = [measures]
    names = [column_of(measure) for measure in measures]
    for name in names:
        numeric_column(minima, name, argument="measures")
    if not names:
        raise ValueError("There are no measures to draw: name numeric columns as measures.")
    return names


def correlation_of(
    minima: pd.DataFrame, measure: str, target: str, random_state: Any
) -> "pd.Series[Any] | None":
    """Return the row of `correlate_measures` for one measure."""
    x = numeric_column(minima, measure, argument="measure")
    y = numeric_column(minima, target, argument="target")
    drawn = Points(minima, x, y).comparable
    if drawn.sum() < FEWEST_MINIMA:
        return None
    pairs = pd.DataFrame({"measure": x[drawn], "target": y[drawn]})
    return correlate_measures(pairs, "target", random_state=random_state).iloc[0]


def show_correlation(
    ax: "Axes", correlation: "pd.Series[Any] | None", between: tuple[str, str] | None = None
) -> None:
    """Write coefficients with their intervals above the axes, or Kendall's tau above a panel."""
    if correlation is None:
        return
    parts = []
    for name in SYMBOLS if between else ["kendall"]:
        value, low, high = (correlation[name + end] for end in ("", "_low", "_high"))
        parts.append(f"{SYMBOLS[name]} = {value:z.2f} [{low:z.2f}, {high:z.2f}]")
    text = ",  ".join([*parts, f"$n$ = {correlation['n']}"])
    if between:
        text = " and ".join(label_of(name, "") for name in between) + f"\n{text}"
    ax.set_title(text, fontsize="medium" if between else "small", pad=9)


@dataclass(kw_only=True, eq=False, repr=False)
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
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    measure : str
        The column on the x axis.
    target : str
        The column on the y axis.
    correlation : pandas.Series or None, default=None
        The row of `correlate_measures` for `measure`; None for no title.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes with the minima, and their figure.

    See Also
    --------
    correlate_measures : The correlations as a table.
    MeasurePanelsDisplay : The same for several measures.
    MinimaRankingDisplay : The order of the minima.
    """

    measure: str
    target: str
    correlation: "pd.Series[Any] | None" = None

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        measure: str | Callable[..., Any] | None = None,
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
            The minima, see `relflat_sk.minima`.
        measure : str or callable, optional
            The numeric column on the x axis, or the measure function that produced it. The axis is
            logarithmic if it spans more than a decade.
        target : str or callable, default="generalization_gap"
            The numeric column on the y axis, in the same way.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes a varied parameter, first of all the
            batch size; None uses one color.
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
        'relative flatness κ (nats, small is flat)'
        """
        table = minima_table(minima)
        measure, target = measure_column(minima, table, measure), column_of(target)
        return cls(
            minima=table,
            measure=measure,
            target=target,
            color_by=color_column(table, color_by),
            correlation=correlation_of(table, measure, target, random_state),
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        points = Points.of(self.minima, measure=self.measure, target=self.target)
        points.require_minima(self.measure, self.target)
        ax = make_axes(ax)
        points.draw(ax, style, "x")
        ax.set_xlabel(measure_label(self.measure, style.loss_unit))
        ax.set_ylabel(label_of(self.target, style.loss_unit))
        show_correlation(ax, self.correlation, (self.measure, self.target))
        return [ax]


@dataclass(kw_only=True, eq=False, repr=False)
class MeasurePanelsDisplay(MinimaDisplay):
    """Display of the generalization gap of many minima, with a panel for every measure.

    Make one with `from_minima`. All panels share the y axis. The title of a panel shows
    Kendall's tau with its 95% interval, and the number of minima with finite values.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; `relflat_sk.minima` describes its columns.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    measures : list of str
        The columns on the x axes.
    target : str
        The column on the y axis.
    correlations : dict of str to pandas.Series or None
        The row of `correlate_measures` for each measure; None for a measure with finite values at
        fewer than 3 minima.

    Attributes
    ----------
    axes_ : list of matplotlib.axes.Axes
        All panels, in the order of the measures.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The first panel, and its figure.

    See Also
    --------
    FlatnessGapDisplay : One measure, larger.
    correlate_measures : The correlations as a table.
    """

    measures: list[str]
    target: str
    correlations: "dict[str, pd.Series[Any] | None]"

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
            The minima, see `relflat_sk.minima`.
        measures : str, callable, sequence of these or None, default=None
            The numeric columns on the x axes, or the measure functions that produced them. Each
            axis is logarithmic if it spans more than a decade. None takes every measure of the
            table.
        target : str or callable, default="generalization_gap"
            The numeric column on the y axis, in the same way.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes a varied parameter, first of all the
            batch size; None uses one color.
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
        return cls(
            minima=table,
            measures=names,
            target=target,
            correlations={
                name: correlation_of(table, name, target, random_state) for name in names
            },
            color_by=color_column(table, color_by),
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        with_target = Points.of(self.minima, target=self.target, measures=self.target)
        with_target.require_minima(self.target)
        panels = make_panels(ax, len(self.measures), label_of(self.target, style.loss_unit))
        drawn = []
        for name, panel in zip(self.measures, panels, strict=True):
            points = Points.of(self.minima, measures=name, target=self.target)
            panel.set_xlabel(label_of(name, style.loss_unit))
            if not points.comparable.any():
                write_note(panel, "not finite")
                continue
            points.draw_dots(panel, style, "x", s=22)
            show_correlation(panel, self.correlations[name])
            drawn.append((points, panel))
        for points, panel in drawn:  # now that all panels have their common limits
            points.draw_crosses(panel, ", ".join(with_target.n_crossed))
        return panels


@dataclass(kw_only=True, eq=False, repr=False)
class MinimaRankingDisplay(MinimaDisplay):
    """Display of minima in order of flatness, with their held-out loss below.

    Make one with `from_minima`. If flat minima generalize well, the loss in the lower panel
    rises from left to right (a score falls), and the flattest minimum is better than the
    dashed mean of the minima.

    Parameters
    ----------
    minima : pandas.DataFrame
        The ranked table of minima, as `rank_minima` returns it.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    by : str
        The column that ranks them, in the upper panel.
    target : str
        The column in the lower panel.
    correlation : pandas.Series or None, default=None
        The row of `correlate_measures` for `by` with `target`; None for no title.

    Attributes
    ----------
    target_ax_ : matplotlib.axes.Axes
        The lower panel, with the target.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The upper panel, with the measure, and its figure.

    See Also
    --------
    rank_minima : The ranking as a table.
    FlatnessGapDisplay : A measure and the generalisation gap.
    """

    by: str
    target: str
    correlation: "pd.Series[Any] | None" = None

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        by: str | Callable[..., Any] | None = None,
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
        by : str or callable, optional
            The numeric column to rank by, flattest first, or the measure function that produced it.
        target : str, callable or None, default=None
            The numeric column in the lower panel, in the same way. None takes the test loss or,
            if no minimum has one, the training loss.
        color_by : str or None, default="auto"
            The column that colors the minima. "auto" takes a varied parameter, first of all the
            batch size; None uses one color.
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
        by = measure_column(minima, minima_table(minima), by)
        table = rank_minima(minima, by=by)
        if target is None:
            is_tested = "test_loss" in table.columns and np.isfinite(table["test_loss"]).any()
            target = "test_loss" if is_tested else "train_loss"
        target = column_of(target)
        return cls(
            minima=table,
            by=by,
            target=target,
            color_by=color_column(table, color_by),
            correlation=correlation_of(table, by, target, random_state),
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        upper = Points.of(self.minima, x="rank", by=self.by)
        lower = Points.of(self.minima, x="rank", target=self.target)
        upper.require_minima(self.by)
        lower.require_minima(self.target)
        panels = divide(make_axes(ax), 2, 1, sharex="all")
        columns = self.by, self.target
        for panel, points, column in zip(panels, (upper, lower), columns, strict=True):
            points.draw(panel, style, "y")
            panel.set_ylabel(label_of(column, style.loss_unit))
        _, self.target_ax_ = panels
        mean = lower.y[lower.comparable].mean()
        self.target_ax_.axhline(mean, label="mean of the minima", **(DASHED | {"linewidth": 1}))
        panels[0].tick_params(labelbottom=False)
        self.target_ax_.locator_params(axis="x", integer=True)
        best = "flattest" if self.by in measure_columns(self.minima) else "best"
        self.target_ax_.set_xlabel(f"rank by {label_of(self.by, '')}, 1 is {best}")
        show_correlation(panels[0], self.correlation, columns)
        return panels


@dataclass(kw_only=True, eq=False, repr=False)
class HyperparameterDisplay(MinimaDisplay):
    """Display of a measure of many minima against one hyper-parameter of their training.

    Make one with `from_minima`. A dashed line joins the medians of the minima with the same
    value of the hyper-parameter.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima; `relflat_sk.minima` describes its columns.
    color_by : str or None, default=None
        The column that colors the minima; None for one color.
    axis : str
        The column of the hyper-parameter, on the x axis.
    measure : str
        The column on the y axis.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes with the minima, and their figure.

    See Also
    --------
    MinimaRankingDisplay : The order of the minima.
    granulated_kendall : Rank correlation along each hyper-parameter.
    """

    axis: str
    measure: str

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        axis: str | None = None,
        measure: str | Callable[..., Any] | None = None,
        *,
        color_by: str | None = "auto",
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "HyperparameterDisplay":
        """Draw the measure of every minimum against a hyper-parameter.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima, see `relflat_sk.minima`.
        axis : str or None, default=None
            The hyper-parameter, such as ``"batch_size"``. None takes the batch size if it was
            varied, or else the first parameter that was.
        measure : str or callable, optional
            The numeric column on the y axis, or the measure function that produced it. The axis is
            logarithmic if it spans more than a decade.
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
        measure = measure_column(minima, table, measure)
        display = cls(minima=table, axis=column, measure=measure, color_by=color_by)
        return display.plot(ax=ax, **kwargs)

    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        y = numeric_column(self.minima, self.measure, argument="measure")
        x: Any
        values, names = self.minima[self.axis], list[str]()
        if is_numeric(values):
            x = numeric_column(self.minima, self.axis, argument="axis")
        else:
            texts = values.map(str).where(np.isfinite(y))
            kinds = sorted(texts.dropna().unique(), key=_natural)
            x, names = pd.Categorical(texts, kinds).codes, list(map(shorten, kinds))
        points = Points(self.minima, x, y)
        points.require_minima(self.axis, self.measure)
        x, y, ax, good = points.x, points.y, make_axes(ax), points.comparable
        levels = np.unique(x[good])
        has_medians = 1 < len(levels) <= MAX_DISTINCT
        if names:
            ax.set_xlim(-0.5, len(names) - 0.5)  # names without minima count, too
        points.draw(ax, style, "y" if names else "xy")
        if has_medians:
            medians = [np.median(y[good & (x == level)]) for level in levels]
            ax.plot(levels, medians, label="median of the minima", zorder=1, **DASHED)
        if names:
            turned = 90 if len(names) > MAX_DISTINCT else 0
            ax.set_xticks(range(len(names)), names, rotation=turned)
        elif has_medians:
            ax.set_xticks(levels, [f"{level:g}" for level in levels])
            ax.set_xticks([], minor=True)
        ax.set(xlabel=label_of(self.axis, ""), ylabel=measure_label(self.measure, style.loss_unit))
        return [ax]


def _natural(text: str) -> list[Any]:
    """Return a key that sorts texts by the numbers in them, such as widths of layers."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


# -- correlations against the share of random labels -----------------------------------


@dataclass(kw_only=True, eq=False, repr=False)
class LabelNoiseDisplay(Display):
    """Display of the correlation of measures with the gap, against label noise.

    Make one with `from_minima`. The noise is the share of training labels that are random. A
    measure that predicts generalization also for networks that memorize random labels has a
    high correlation at every share. The bars are 95% intervals over resampled minima.

    Parameters
    ----------
    correlations : pandas.DataFrame
        One row per measure and share of random labels, with the columns of `correlate_measures` and
        ``share``.
    by : str
        The column of the minima with the shares.
    target : str
        The column of the minima to predict.

    Attributes
    ----------
    axes_ : list of matplotlib.axes.Axes
        All panels, one for each measure.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The first panel, and its figure.

    See Also
    --------
    FlatMinimaSearch : ``data__random_labels`` in its space varies the labels.
    FlatnessGapDisplay : A measure and the generalisation gap.
    """

    correlations: pd.DataFrame
    by: str
    target: str

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        measures: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        target: str | Callable[..., Any] = "generalization_gap",
        *,
        by: str = "random_labels",
        n_bootstrap: int = 1000,
        random_state: Any = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "LabelNoiseDisplay":
        """Draw the correlation over minima with equal label noise, against the noise.

        Parameters
        ----------
        minima : pandas.DataFrame, optuna.Study or fitted FlatMinimaSearch
            The minima, several for every share of random labels; `relflat_sk.minima` describes
            the columns of a table.
        measures : str, callable, sequence of these or None, default=None
            The measures, or their functions, with a panel for each. None takes every measure of
            the table.
        target : str or callable, default="generalization_gap"
            The numeric column to predict, in the same way.
        by : str, default="random_labels"
            The numeric column with the share of random labels, such as
            ``param_data__random_labels``, with or without its prefixes; or any other numeric
            parameter that was varied.
        n_bootstrap : int, default=1000
            Number of bootstrap resamples behind each interval.
        random_state : int, RandomState, Generator or None, default=None
            Seed of the bootstrap behind the intervals.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into panels; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        LabelNoiseDisplay
            The display.

        Raises
        ------
        TypeError
            If `minima` is neither a table nor a study nor a fitted search.
        ValueError
            If a column is missing or not numeric, or no share of random labels has 3 converged
            minima.

        Examples
        --------
        >>> import pandas as pd
        >>> minima = pd.DataFrame(
        ...     {
        ...         "param_random_labels": [0.0, 0.0, 0.0, 0.5, 0.5, 0.5],
        ...         "relative_flatness": [1.0, 2.0, 3.0, 5.0, 7.0, 6.0],
        ...         "generalization_gap": [0.1, 0.2, 0.3, 1.1, 1.2, 1.3],
        ...     }
        ... )
        >>> display = LabelNoiseDisplay.from_minima(minima, random_state=0)
        >>> display.correlations[["share", "measure", "kendall", "n"]].round(2)
           share            measure  kendall  n
        0    0.0  relative_flatness     1.00  3
        1    0.5  relative_flatness     0.33  3
        """
        table, target = minima_table(minima), column_of(target)
        by = find_axis(table, by, argument="by")
        numeric_column(table, by, argument="by")
        names = [name for name in choose_measures(table, measures, target) if name != by]
        rows = correlate_measures(
            table, target, strata=by, n_bootstrap=n_bootstrap, random_state=random_state
        )
        rows = rows[~rows["stratum"].isin(["pooled", "within"])]
        rows = rows.assign(share=rows["stratum"].astype(float)).drop(columns="stratum")
        counts = rows.groupby("share")["n"].max()
        if counts.max() < FEWEST_MINIMA:
            raise ValueError(
                f"No value of {by!r} has {FEWEST_MINIMA} converged minima with a finite "
                f"{target!r}, as a correlation needs; there are {counts.to_dict()}. Train more."
            )
        rows = rows[rows["share"].map(counts) >= FEWEST_MINIMA].sort_values("share")
        parts = [rows[rows["measure"] == name] for name in names]
        display = cls(correlations=pd.concat(parts, ignore_index=True), by=by, target=target)
        return display.plot(ax=ax, **kwargs)

    def plot(self, ax: "Axes | None" = None, **kwargs: Any) -> "LabelNoiseDisplay":
        """Draw the panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into panels; None makes a new figure.
        **kwargs
            Passed on to `matplotlib.axes.Axes.errorbar`.

        Returns
        -------
        LabelNoiseDisplay
            The display itself.
        """
        # the gap by its name, not as a difference of losses
        is_gap = self.target == "generalization_gap"
        target = "generalization gap" if is_gap else label_of(self.target, "")
        label = f"{SYMBOLS['kendall']} with the\n{target}"
        names = list(dict.fromkeys(self.correlations["measure"]))
        self.axes_ = make_panels(ax, len(names), label, sharex="all")
        style = curve_style(0) | {"markersize": 5, "capsize": 3, "linewidth": 1.2} | kwargs
        for name, panel in zip(names, self.axes_, strict=True):
            rows = self.correlations[self.correlations["measure"] == name]
            value, low, high = (
                rows[f"kendall{end}"].to_numpy(dtype=np.float64) for end in ("", "_low", "_high")
            )
            draw_grid(panel)
            if not np.isfinite(value).any():
                write_note(panel, "not defined")
            panel.axhline(0.0, color="0.35", linewidth=1)
            # a percentile interval need not contain the coefficient itself
            bars = np.maximum([value - low, high - value], 0.0)
            panel.errorbar(rows["share"], value, yerr=bars, **style)
            panel.set(ylim=(-1.08, 1.08), xlabel=label_of(self.by, ""))
            panel.set_title(label_of(name, ""), fontsize="small")
        return self

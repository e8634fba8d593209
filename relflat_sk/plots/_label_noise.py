"""Correlation of measures with the generalization gap, against the share of random labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk.minima import correlate_measures
from relflat_sk.minima._correlation import FEWEST_MINIMA, select_minima
from relflat_sk.minima._table import column_of, find_axis, minima_table, numeric_column
from relflat_sk.plots._base import (
    SYMBOLS,
    Display,
    choose_measures,
    curve_style,
    draw_grid,
    label_of,
    make_panels,
    write_note,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        shares = numeric_column(table, by, argument="by")
        names = [name for name in choose_measures(table, measures, target) if name != by]
        usable = select_minima(table, target, n_bootstrap).usable
        found = [
            correlate_measures(
                table[rows], target, n_bootstrap=n_bootstrap, random_state=random_state
            ).assign(share=share)
            for share in np.unique(shares[np.isfinite(shares)])
            if (usable & (rows := shares == share)).sum() >= FEWEST_MINIMA
        ]
        if not found:
            known, counts = np.unique(shares[usable & np.isfinite(shares)], return_counts=True)
            raise ValueError(
                f"No value of {by!r} has {FEWEST_MINIMA} converged minima with a finite "
                f"{target!r}, as a correlation needs; there are "
                f"{dict(zip(known.tolist(), counts.tolist(), strict=True))}. Train more minima at "
                "each value."
            )
        every = pd.concat(found, ignore_index=True)
        display = cls(
            correlations=pd.concat(
                [every[every["measure"] == name] for name in names], ignore_index=True
            ),
            by=by,
            target=target,
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | None" = None, *, coefficient: str = "kendall", **kwargs: Any
    ) -> "LabelNoiseDisplay":
        """Draw the panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into panels; None makes a new figure.
        coefficient : {"kendall", "spearman", "pearson"}, default="kendall"
            The correlation coefficient on the y axis.
        **kwargs
            Passed on to `matplotlib.axes.Axes.errorbar`.

        Returns
        -------
        LabelNoiseDisplay
            The display itself.

        Raises
        ------
        ValueError
            If there is no such coefficient.
        """
        if coefficient not in SYMBOLS:
            raise ValueError(f"coefficient={coefficient!r}, expected one of {', '.join(SYMBOLS)}.")
        # the gap by its name, not as a difference of losses
        is_gap = self.target == "generalization_gap"
        target = "generalization gap" if is_gap else label_of(self.target, "")
        label = f"{SYMBOLS[coefficient]} with the\n{target}"
        names = list(dict.fromkeys(self.correlations["measure"]))
        self.axes_ = make_panels(ax, len(names), label, sharex="all")
        style = curve_style(0) | {"markersize": 5, "capsize": 3, "linewidth": 1.2} | kwargs
        for name, panel in zip(names, self.axes_, strict=True):
            rows = self.correlations[self.correlations["measure"] == name]
            value, low, high = (
                rows[coefficient + end].to_numpy(dtype=np.float64) for end in ("", "_low", "_high")
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

"""Loss or flatness of all candidates along their training."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from relflat_sk.minima import curves_of, is_converged, minima_table
from relflat_sk.plots._colors import Colors, color_column
from relflat_sk.plots._display import MinimaDisplay, with_unit
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._panels import figure_of, make_axes
from relflat_sk.plots._style import Floats, choose_scale, draw_grid, legend_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["TrainingCurvesDisplay"]

MINIMUM: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.9, "zorder": 2}
OTHER: dict[str, Any] = {"color": "0.6", "linewidth": 1.0, "linestyle": ":", "zorder": 1}
BEST: dict[str, Any] = {"color": "black", "linewidth": 2.2, "zorder": 3}


class TrainingCurvesDisplay(MinimaDisplay):
    """Display of the loss, or the flatness, of all candidates of a search along their training.

    Make one with `from_minima`. A dot marks where a training ended. The first in rank is black.
    Candidates that the ranking leaves out, because they did not converge or are of another
    depth, are dotted.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima, n rows.
    curves : dict of int to (ndarray, ndarray)
        Epochs and values, by the number of the trial.
    column : str
        The column of the history on the y axis.
    color_by : str or None, default=None
        The column of `minima` that colors the curves; None for one color.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The axes with the curves.
    figure_ : matplotlib.figure.Figure
        The figure of the axes.

    See Also
    --------
    FlatnessHistoryDisplay : Draw losses and flatness of one net.
    MinimaRankingDisplay : Draw the minima in order of flatness.
    """

    def __init__(
        self,
        *,
        minima: pd.DataFrame,
        curves: dict[int, tuple[Floats, Floats]],
        column: str,
        color_by: str | None = None,
    ) -> None:
        self.minima = minima
        self.curves = curves
        self.column = column
        self.color_by = color_by

    @classmethod
    def from_minima(
        cls,
        minima: Any,
        column: str = "train_loss",
        *,
        color_by: str | None = "auto",
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "TrainingCurvesDisplay":
        """Draw one curve for each candidate.

        Parameters
        ----------
        minima : optuna.Study or fitted FlatMinimaSearch
            The candidates; a table has no curves. Nets of skorch and multi-layer perceptrons of
            scikit-learn have curves.
        column : str, default="train_loss"
            What is drawn: ``"train_loss"`` or ``"valid_loss"``, ``"flatness_penalty"`` of the
            nets with a penalty, or the name of a callback
            ``EpochScoring(FlatnessScorer(at_minimum="ignore"), name=..., on_train=True)``, for the
            flatness along training. Such a callback records minus the flatness; the display
            reverses the sign, so that small is flat.
        color_by : str or None, default="auto"
            The column that colors the curves. "auto" takes the batch size if it was varied, or
            else the first parameter that was; None uses one color.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        TrainingCurvesDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If `minima` is neither a study nor a fitted search.
        ValueError
            If no candidate has a curve of this column.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from relflat_sk import FlatMinimaSearch, RelativeFlatnessRegularizedClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = RelativeFlatnessRegularizedClassifier(max_epochs=100, verbose=0)
        >>> search = FlatMinimaSearch(net, {"lr": [0.01, 0.02]}, goal=0.5, random_state=0)
        >>> display = TrainingCurvesDisplay.from_minima(search.fit(X, y))
        >>> sorted(display.curves)
        [0, 1]
        """
        found = curves_of(minima)
        table = minima_table(minima)
        numbers = [int(number) for number in table["trial"] if column in found.get(number, {})]
        if not numbers:
            known = sorted({name for one in found.values() for name in one} - {"epoch"})
            raise ValueError(
                f"column: no candidate has a curve of {column!r}; there are {known}. For flatness "
                "along training, add EpochScoring(FlatnessScorer(at_minimum='ignore'), "
                "name='relative_flatness', on_train=True) to the callbacks of the net, before it "
                "trains."
            )
        curves = {
            number: (_values(found[number]["epoch"]), _values(found[number][column]))
            for number in numbers
        }
        color_by = color_column(table, color_by)
        return cls(minima=table, curves=curves, column=column, color_by=color_by).plot(
            ax=ax, **with_unit(kwargs, minima, table)
        )

    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> None:
        """Draw the curves, the legend and the color bar."""
        self.ax_ = make_axes(ax)
        self.figure_ = figure_of(self.ax_)
        draw_grid(self.ax_)
        ranked = is_converged(self.minima)
        rows = [row for row, n in enumerate(self.minima["trial"]) if n in self.curves]
        left_out = sum(not ranked[row] for row in rows)
        for row in rows:
            number = int(self.minima["trial"].iloc[row])
            style = MINIMUM | {"color": colors.of_row(row)} if ranked[row] else dict(OTHER)
            if not ranked[row]:
                style["label"] = f"not ranked ({left_out})"
            elif "rank" in self.minima.columns and self.minima["rank"].iloc[row] == 1:
                style = BEST | {"label": f"rank 1 (trial {number})"}
            epochs, values = self.curves[number]
            (line,) = self.ax_.plot(epochs, values, **(style | kwargs))
            ends = np.flatnonzero(np.isfinite(values))[-1:]
            self.ax_.plot(epochs[ends], values[ends], "o", markersize=4, color=line.get_color())
        choose_scale(self.ax_.yaxis, np.concatenate([values for _, values in self.curves.values()]))
        self.ax_.locator_params(axis="x", integer=True, min_n_ticks=1)
        self.ax_.set_xlabel("epoch")
        self.ax_.set_ylabel(label_of(self.column, loss_unit))
        legend_below(self.ax_)
        colors.draw_bar([self.ax_])


def _values(values: list[float | None]) -> Floats:
    """Return recorded values as floats, nan for those that were not finite."""
    return np.array(values, dtype=np.float64)

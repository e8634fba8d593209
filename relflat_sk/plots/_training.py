"""Displays of trainings, epoch by epoch: of one net, and of all candidates of a search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from sklearn.exceptions import NotFittedError
from skorch import NeuralNet

from relflat_sk._models.network_of import final_estimator
from relflat_sk.measures._scorer import flatness_columns
from relflat_sk.minima._table import curves_of, is_comparable, minima_table
from relflat_sk.plots._base import (
    ON_THE_RIGHT,
    EstimatorDisplay,
    Floats,
    MinimaDisplay,
    Style,
    choose_scale,
    color_column,
    curve_style,
    divide,
    draw_grid,
    draw_legend,
    label_of,
    make_axes,
    with_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSSES = ("train_loss", "valid_loss")
# with more epochs the markers are small dots, so that a value between two gaps still shows
MAX_MARKED = 40
MINIMUM: dict[str, Any] = {"linewidth": 1.2, "alpha": 0.9, "zorder": 2}
OTHER: dict[str, Any] = {"color": "0.6", "linewidth": 1.0, "linestyle": ":", "zorder": 1}
# a curve that rises above so many times the others has diverged, and leaves the picture
DIVERGED = 10.0
BEST: dict[str, Any] = {"color": "black", "linewidth": 2.2, "zorder": 3}


@dataclass(kw_only=True, eq=False, repr=False)
class FlatnessHistoryDisplay(EstimatorDisplay):
    """Display of the losses of a net over its epochs, with its flatness below.

    Make one with `from_estimator`.

    Parameters
    ----------
    epochs : ndarray of shape (n_epochs,)
        Numbers of the epochs, from 1.
    losses : dict of str to ndarray of shape (n_epochs,)
        Curves of the upper panel, by the name of their column in the history.
    flatness : dict of str to ndarray of shape (n_epochs,)
        Curves of the lower panel, by the name of their column; small is flat.

    Attributes
    ----------
    flatness_ax_ : matplotlib.axes.Axes
        The lower panel, with the flatness.
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The upper panel, with the losses, and its figure.

    See Also
    --------
    TrainingCurvesDisplay : Losses of the minima of a search.
    RelativeFlatnessRegularizedNet : The nets whose history is drawn.
    """

    epochs: Floats
    losses: dict[str, Floats]
    flatness: dict[str, Floats]

    @classmethod
    def from_estimator(
        cls, estimator: Any, *, ax: "Axes | None" = None, **kwargs: Any
    ) -> "FlatnessHistoryDisplay":
        """Draw the losses and the flatness that a net recorded during training.

        Parameters
        ----------
        estimator : fitted skorch net
            The net, or a pipeline or search object around one. The losses are the columns
            ``train_loss`` and ``valid_loss`` of its history. The flatness are
            ``flatness_penalty`` and the columns of ``EpochScoring(relative_flatness, name=...)``
            and ``EpochScoring(FlatnessScorer(non_minimum="accept"), name=...)`` callbacks. A
            `FlatnessScorer` records minus the flatness; the display reverses the sign, so that
            small is flat.
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in, which are divided into two panels; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        FlatnessHistoryDisplay
            The display.

        Raises
        ------
        TypeError
            If the estimator is no skorch net.
        ValueError
            If the history has no column of flatness.
        NotFittedError
            If the net has no epoch in its history.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> from relflat_sk import RelativeFlatnessRegularizedNet
        >>> X, y = load_iris(return_X_y=True)
        >>> net = RelativeFlatnessRegularizedNet(max_epochs=3, random_state=0, verbose=0)
        >>> display = FlatnessHistoryDisplay.from_estimator(net.fit(X, y))
        >>> list(display.losses), list(display.flatness), display.epochs.tolist()
        (['train_loss'], ['flatness_penalty'], [1.0, 2.0, 3.0])
        """
        net = final_estimator(estimator)
        if not isinstance(net, NeuralNet):
            raise TypeError(f"Only a skorch net has a history, got {type(net).__name__}.")
        # a net that was never initialized has no history at all
        history = list(getattr(net, "history_", None) or [])
        if not history:
            raise NotFittedError(
                f"This {type(net).__name__} has no epoch in its history: call fit first."
            )
        table, signs = pd.DataFrame(history), flatness_columns(net)
        if not signs:
            raise ValueError(
                "The history has no column of flatness. Add EpochScoring(FlatnessScorer("
                "non_minimum='accept'), name='relative_flatness') to the callbacks."
            )
        losses = [name for name in LOSSES if name in table]
        # nan for epochs without a column
        values = {name: table[name].to_numpy(np.float64) for name in ["epoch", *losses, *signs]}
        return cls(
            epochs=values["epoch"],
            losses={name: values[name] for name in losses},
            flatness={name: sign * values[name] for name, sign in signs.items()},
        ).plot(ax=ax, **with_unit(kwargs, [net]))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        panels = divide(make_axes(ax, (8.0, 5.0)), 2, 1, sharex="all")
        unit, drawn = f" ({loss_unit})" if loss_unit else "", 0
        curves = {"loss": self.losses, "flatness": self.flatness}
        for panel, (quantity, columns) in zip(panels, curves.items(), strict=True):
            draw_grid(panel)
            for name, values in columns.items():
                few = len(values) <= MAX_MARKED
                marks = {"markersize": 4} if few else {"marker": ".", "markersize": 2.5}
                style = {"label": label_of(name, "")} | curve_style(drawn) | marks | kwargs
                panel.plot(self.epochs, values, **style)
                drawn += 1  # in both panels, so that every curve of the figure has its own style
            choose_scale(panel.yaxis, np.concatenate([*columns.values(), np.empty(0)]))
            draw_legend([panel], ON_THE_RIGHT)
            panel.set_ylabel(f"{quantity}{unit}")
        _, self.flatness_ax_ = panels
        panels[0].tick_params(labelbottom=False)
        self.flatness_ax_.set_xlabel("epoch")
        self.flatness_ax_.locator_params(axis="x", integer=True, min_n_ticks=1)
        return panels


@dataclass(kw_only=True, eq=False, repr=False)
class TrainingCurvesDisplay(MinimaDisplay):
    """Display of the loss, or the flatness, of all candidates of a search along their training.

    Make one with `from_minima`. A dot marks where a training ended. The first in rank is black.
    Candidates that the ranking leaves out, because they did not converge or are of another
    depth, are dotted. Those that rise to more than ten times the largest value of the ranked ones
    have diverged: a triangle marks where they leave the picture.

    Parameters
    ----------
    minima : pandas.DataFrame
        The table of minima, n rows.
    color_by : str or None, default=None
        The column of `minima` that colors the curves; None for one color.
    curves : dict of int to (ndarray, ndarray)
        Epochs and values, by the number of the trial.
    column : str
        The column of the history on the y axis.

    Attributes
    ----------
    ax_, figure_ : matplotlib.axes.Axes, matplotlib.figure.Figure
        The axes with the curves, and their figure.

    See Also
    --------
    FlatnessHistoryDisplay : The flatness of a net during its training.
    FlatMinimaSearch : The search whose minima are drawn.
    """

    curves: dict[int, tuple[Floats, Floats]]
    column: str

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
            ``EpochScoring(FlatnessScorer(non_minimum="accept"), name=..., on_train=True)``, for the
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
        recorded, table = curves_of(minima), minima_table(minima)
        numbers = [int(number) for number in table["trial"] if column in recorded.get(number, {})]
        if not numbers:
            names = sorted({name for curves in recorded.values() for name in curves} - {"epoch"})
            raise ValueError(
                f"column: no candidate has a curve of {column!r}; there are {names}. For flatness, "
                "train with a callback EpochScoring(FlatnessScorer(non_minimum='accept'), "
                "name='relative_flatness', on_train=True)."
            )
        # nan for values that were not finite
        epochs, values = (
            [np.array(recorded[number][name], np.float64) for number in numbers]
            for name in ("epoch", column)
        )
        return cls(
            minima=table,
            curves=dict(zip(numbers, zip(epochs, values, strict=True), strict=True)),
            column=column,
            color_by=color_column(table, color_by),
        ).plot(ax=ax, **kwargs)

    def _draw(self, ax: "Axes | None", style: Style) -> "list[Axes]":
        ax = make_axes(ax)
        draw_grid(ax)
        trials, ranked = self.minima["trial"].to_numpy(), is_comparable(self.minima)
        rows = [row for row, trial in enumerate(trials) if trial in self.curves]
        curves = {row: self.curves[int(trials[row])] for row in rows}
        highest = self._highest([curves[row][1] for row in rows if ranked[row]])
        diverged = [row for row in rows if np.any(curves[row][1] > highest)]
        left_out = f"not ranked ({sum(not ranked[row] for row in rows)}"
        left_out += f", ▴ {len(diverged)} diverged)" if diverged else ")"
        for row, (epochs, values) in curves.items():
            curve = MINIMUM | {"color": style.colors.of_rows[row]}
            if not ranked[row]:
                curve = OTHER | {"label": left_out}
            elif "rank" in self.minima.columns and self.minima["rank"].iloc[row] == 1:
                curve = BEST | {"label": f"rank 1 (trial {trials[row]})"}
            (line,) = ax.plot(epochs, values, **(curve | style.kwargs))
            end: dict[str, Any] = {"markersize": 4, "color": line.get_color()}
            if row in diverged:
                leaves = epochs[np.argmax(values > highest)]
                ax.plot(leaves, 0.98, "^", transform=ax.get_xaxis_transform(), **end)
            else:
                last = np.flatnonzero(np.isfinite(values))[-1:]
                ax.plot(epochs[last], values[last], "o", **end)
        inside = np.concatenate([values[values <= highest] for _, values in curves.values()])
        if diverged:
            ax.dataLim.update_from_data_y(inside, ignore=True)
            ax.autoscale_view(scalex=False)
        choose_scale(ax.yaxis, inside)
        ax.locator_params(axis="x", integer=True, min_n_ticks=1)
        ax.set(xlabel="epoch", ylabel=label_of(self.column, style.loss_unit))
        return [ax]

    def _highest(self, ranked: Sequence[Floats]) -> float:
        """Return the value above which a curve leaves the picture."""
        starts = [values[:1] for _, values in self.curves.values()]
        values = np.concatenate(ranked or starts)
        values = values[np.isfinite(values)]
        # without a positive value, there is no scale to compare with
        largest = np.quantile(values, 1.0 if ranked else 0.5) if len(values) else 0.0
        return DIVERGED * float(largest) if largest > 0 else np.inf

"""A picture of one training: the loss and the flatness, epoch by epoch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.exceptions import NotFittedError
from skorch import NeuralNet
from skorch.callbacks import EpochScoring

from relflat_sk._models import final_estimator
from relflat_sk.measures import FlatnessScorer
from relflat_sk.plots._style import (
    Floats,
    figure_of,
    is_wide,
    label_of,
    legend_right,
    make_axes,
    panels,
    prepare,
    style_of,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["FlatnessHistoryDisplay"]

LOSSES = ("train_loss", "valid_loss")
PENALTY = "flatness_penalty"
MOST_MARKED = 40  # epochs; more become small dots, so that a lone one between gaps still shows


class FlatnessHistoryDisplay:
    """The losses of a net over its epochs, and its flatness below.

    Use `from_estimator` to make one.

    Parameters
    ----------
    epochs : ndarray of shape (n_epochs,)
        The numbers of the epochs.
    losses : dict of str to ndarray of shape (n_epochs,)
        What the upper panel shows, by the name of its column in the history.
    flatness : dict of str to ndarray of shape (n_epochs,)
        What the lower panel shows, by its name; small is flat.

    Attributes
    ----------
    ax_ : matplotlib.axes.Axes
        The upper panel, with the losses.
    flatness_ax_ : matplotlib.axes.Axes
        The lower panel.
    figure_ : matplotlib.figure.Figure
        Their figure.

    See Also
    --------
    RelativeFlatnessRegularizedNet : Records its penalty.
    FlatnessScorer : Records flatness in any skorch net, with `skorch.callbacks.EpochScoring`.
    """

    ax_: "Axes"
    flatness_ax_: "Axes"
    figure_: "Figure"

    def __init__(
        self, *, epochs: Floats, losses: dict[str, Floats], flatness: dict[str, Floats]
    ) -> None:
        self.epochs = epochs
        self.losses = losses
        self.flatness = flatness

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        *,
        columns: Sequence[str] | None = None,
        ax: "Axes | None" = None,
        **kwargs: Any,
    ) -> "FlatnessHistoryDisplay":
        """Draw what a net recorded while it was trained.

        Parameters
        ----------
        estimator : fitted skorch net
            Or a pipeline or search object around one. The losses are the columns
            ``train_loss`` and ``valid_loss`` of its history.
        columns : sequence of str or None, default=None
            The columns of the history in the lower panel. None takes ``flatness_penalty``
            and what ``EpochScoring(FlatnessScorer(), name=...)`` callbacks recorded. The
            sign of what a `FlatnessScorer` recorded is turned back: small is flat.
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, split in two; None makes a new figure.
        **kwargs
            Passed on to `plot`.

        Returns
        -------
        FlatnessHistoryDisplay
            The display.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError
            If the estimator is no skorch net.
        ValueError
            If a column is missing, or nothing about flatness was recorded.
        sklearn.exceptions.NotFittedError
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
            raise TypeError(
                f"The history is that of a skorch net, and {type(net).__name__} is none. Pass "
                "a fitted RelativeFlatnessRegularizedNet or another skorch net."
            )
        # before skorch 1.0 and before fit there may be no history at all
        history = list(getattr(net, "history_", None) or [])
        if not history:
            raise NotFittedError(
                f"This {type(net).__name__} has no epoch in its history: call fit first."
            )
        scored = _scored_by_flatness(net)
        names = _columns(history, scored) if columns is None else _given(history, columns)
        display = cls(
            epochs=_values(history, "epoch"),
            losses={name: _values(history, name) for name in LOSSES if _is_recorded(history, name)},
            flatness={
                name: -_values(history, name) if name in scored else _values(history, name)
                for name in names
            },
        )
        return display.plot(ax=ax, **kwargs)

    def plot(
        self, ax: "Axes | None" = None, *, loss_unit: str = "nats", **kwargs: Any
    ) -> "FlatnessHistoryDisplay":
        """Draw the two panels.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            Where to draw, split in two; None makes a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none.
        **kwargs
            Passed on to `matplotlib.axes.Axes.plot`.

        Returns
        -------
        FlatnessHistoryDisplay
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        self.ax_, self.flatness_ax_ = panels(make_axes(ax, (8.0, 5.0)), 2, 1, sharex="all")
        self.figure_ = figure_of(self.ax_)
        unit = f" ({loss_unit})" if loss_unit else ""
        drawn = 0
        for panel, curves, label in [
            (self.ax_, self.losses, f"loss{unit}"),
            (self.flatness_ax_, self.flatness, f"flatness{unit}"),
        ]:
            prepare(panel)
            for name, values in curves.items():
                few = len(values) <= MOST_MARKED
                marks = {"markersize": 4} if few else {"marker": ".", "markersize": 2.5}
                style = {"label": label_of(name, "")} | style_of(drawn) | marks | kwargs
                panel.plot(self.epochs, values, **style)
                drawn += 1
            if is_wide(np.concatenate([*curves.values(), np.empty(0)])):
                panel.set_yscale("log")
            panel.set_ylabel(label)
            legend_right(panel)
        self.ax_.tick_params(labelbottom=False)
        self.flatness_ax_.set_xlabel("epoch")
        self.flatness_ax_.locator_params(axis="x", integer=True, min_n_ticks=1)
        return self


def _values(history: list[dict[str, Any]], name: str) -> Floats:
    """Return one column of a history, nan where an epoch lacks it."""
    return np.array([row.get(name, np.nan) for row in history], dtype=np.float64)


def _is_recorded(history: list[dict[str, Any]], name: str) -> bool:
    return any(name in row for row in history)


def _scored_by_flatness(net: NeuralNet) -> set[str]:
    """Return the columns that hold minus a flatness."""
    callbacks = [callback for _, callback in getattr(net, "callbacks_", [])]
    return {
        callback.name_
        for callback in callbacks
        if isinstance(callback, EpochScoring) and isinstance(callback.scoring, FlatnessScorer)
    }


def _columns(history: list[dict[str, Any]], scored: set[str]) -> list[str]:
    """Return what was recorded about flatness, in the order of the history."""
    names = [name for name in history[-1] if name == PENALTY or name in scored]
    if not names:
        raise ValueError(
            "The history has nothing about flatness. Train with "
            "EpochScoring(FlatnessScorer(), name='relative_flatness') among the callbacks, or "
            "with a RelativeFlatnessRegularizedNet, or name columns of the history: there are "
            f"{_numeric(history)}."
        )
    return names


def _given(history: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the columns asked for, which have to be there."""
    names = [columns] if isinstance(columns, str) else list(columns)
    for name in names:
        if not _is_recorded(history, name):
            raise ValueError(
                f"columns: {name!r} is not in the history; there are {_numeric(history)}."
            )
    return names


def _numeric(history: list[dict[str, Any]]) -> list[str]:
    """Return the columns that could be drawn, without skorch's counters."""
    return [name for name, value in history[-1].items() if isinstance(value, float | np.floating)]

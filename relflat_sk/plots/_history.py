"""Loss and flatness of one training, epoch by epoch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.exceptions import NotFittedError
from skorch import NeuralNet

from relflat_sk._models import final_estimator
from relflat_sk.measures import flatness_columns
from relflat_sk.plots._display import EstimatorDisplay, with_unit
from relflat_sk.plots._labels import label_of
from relflat_sk.plots._panels import divide, figure_of, make_axes
from relflat_sk.plots._style import Floats, choose_scale, curve_style, draw_grid, legend_right

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["FlatnessHistoryDisplay"]

LOSSES = ("train_loss", "valid_loss")
# with more epochs the markers are small dots, so that a value between two gaps still shows
MAX_MARKED = 40


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
    ax_ : matplotlib.axes.Axes
        The upper panel, with the losses.
    flatness_ax_ : matplotlib.axes.Axes
        The lower panel, with the flatness.
    figure_ : matplotlib.figure.Figure
        The figure of the panels.

    See Also
    --------
    RelativeFlatnessRegularizedNet : Train with a penalty, and record it.
    FlatnessScorer : Record flatness in any skorch net, with `skorch.callbacks.EpochScoring`.
    """

    flatness_ax_: "Axes"

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
        """Draw the losses and the flatness that a net recorded during training.

        Parameters
        ----------
        estimator : fitted skorch net
            The net, or a pipeline or search object around one. The losses are the columns
            ``train_loss`` and ``valid_loss`` of its history.
        columns : sequence of str or None, default=None
            The columns of the history in the lower panel. None takes ``flatness_penalty`` and
            the columns of ``EpochScoring(relative_flatness, name=...)`` and
            ``EpochScoring(FlatnessScorer(at_minimum="ignore"), name=...)`` callbacks. A
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
        ImportError
            If matplotlib is not installed.
        TypeError
            If the estimator is no skorch net.
        ValueError
            If a column is missing, or the history has no column of flatness.
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
            raise TypeError(
                f"Only a skorch net has a history, got {type(net).__name__}. Pass a fitted "
                "RelativeFlatnessRegularizedNet or another skorch net."
            )
        # a net that was never initialized has no history at all
        history = list(getattr(net, "history_", None) or [])
        if not history:
            raise NotFittedError(
                f"This {type(net).__name__} has no epoch in its history: call fit first."
            )
        signs = flatness_columns(net)
        names = _columns(history, list(signs)) if columns is None else _check(history, columns)
        display = cls(
            epochs=_values(history, "epoch"),
            losses={name: _values(history, name) for name in LOSSES if _is_recorded(history, name)},
            flatness={name: signs.get(name, 1.0) * _values(history, name) for name in names},
        )
        return display.plot(ax=ax, **with_unit(kwargs, net))

    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> None:
        """Draw the two panels."""
        self.ax_, self.flatness_ax_ = divide(make_axes(ax, (8.0, 5.0)), 2, 1, sharex="all")
        self.figure_ = figure_of(self.ax_)
        unit = f" ({loss_unit})" if loss_unit else ""
        # one numbering for both panels, so that every curve of the figure has its own style
        self._draw_curves(self.ax_, self.losses, 0, kwargs)
        self._draw_curves(self.flatness_ax_, self.flatness, len(self.losses), kwargs)
        self.ax_.set_ylabel(f"loss{unit}")
        self.flatness_ax_.set_ylabel(f"flatness{unit}")
        self.ax_.tick_params(labelbottom=False)
        self.flatness_ax_.set_xlabel("epoch")
        self.flatness_ax_.locator_params(axis="x", integer=True, min_n_ticks=1)

    def _draw_curves(
        self, panel: "Axes", curves: dict[str, Floats], first: int, kwargs: dict[str, Any]
    ) -> None:
        """Draw the curves of one panel, styled by their numbers from `first`."""
        draw_grid(panel)
        for number, (name, values) in enumerate(curves.items(), start=first):
            few = len(values) <= MAX_MARKED
            marks = {"markersize": 4} if few else {"marker": ".", "markersize": 2.5}
            style = {"label": label_of(name, "")} | curve_style(number) | marks | kwargs
            panel.plot(self.epochs, values, **style)
        choose_scale(panel.yaxis, np.concatenate([*curves.values(), np.empty(0)]))
        legend_right(panel)


def _values(history: list[dict[str, Any]], name: str) -> Floats:
    """Return one column of a history, with nan for epochs without it."""
    return np.array([row.get(name, np.nan) for row in history], dtype=np.float64)


def _is_recorded(history: list[dict[str, Any]], name: str) -> bool:
    """Return whether any epoch has a column."""
    return any(name in row for row in history)


def _columns(history: list[dict[str, Any]], names: list[str]) -> list[str]:
    """Return the columns of flatness, after checking that there are any."""
    if not names:
        raise ValueError(
            "The history has no column of flatness. Train a RelativeFlatnessRegularizedNet, or "
            "add EpochScoring(FlatnessScorer(at_minimum='ignore'), name='relative_flatness') to "
            f"the callbacks, or name columns of the history: there are {_numeric(history)}."
        )
    return names


def _check(history: list[dict[str, Any]], columns: Sequence[str]) -> list[str]:
    """Return the user's columns as a list, after checking that they exist."""
    names = [columns] if isinstance(columns, str) else list(columns)
    for name in names:
        if not _is_recorded(history, name):
            raise ValueError(
                f"columns: {name!r} is not in the history; there are {_numeric(history)}."
            )
    return names


def _numeric(history: list[dict[str, Any]]) -> list[str]:
    """Return the columns that can be drawn, without the counters of skorch."""
    return [name for name, value in history[-1].items() if isinstance(value, float | np.floating)]

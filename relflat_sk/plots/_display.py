"""Base classes of the displays: what `plot` takes, and in which order it draws."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
from sklearn.base import is_regressor

from relflat_sk.plots._axes import draw_legend, figure_of, require_matplotlib
from relflat_sk.plots._points import Colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def with_unit(arguments: Mapping[str, Any], estimators: Iterable[Any]) -> dict[str, Any]:
    """Leave the unit of the loss out of the labels if a regressor is shown."""
    has_none = any(hasattr(one, "fit") and is_regressor(one) for one in estimators)
    return {"loss_unit": "" if has_none else "nats", **arguments}


class Display(ABC):
    """Base class of displays: what they have once they are drawn."""

    axes_: "list[Axes]"

    @property
    def ax_(self) -> "Axes":
        """The axes, or the first of several panels."""
        return self.axes_[0]

    @property
    def figure_(self) -> "Figure":
        """The figure of the axes."""
        return figure_of(self.axes_[0])


@dataclass(kw_only=True, eq=False, repr=False)
class MinimaDisplay(Display):
    """Base class of displays that show minima, colored by one column."""

    minima: pd.DataFrame
    color_by: str | None = None

    def plot(
        self,
        ax: "Axes | None" = None,
        *,
        loss_unit: str | None = None,
        cmap: str = "viridis",
        **kwargs: Any,
    ) -> Self:
        """Draw the minima.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; a display with several panels divides their space. None makes
            a new figure.
        loss_unit : str or None, default=None
            Unit of the loss, for the axis labels, such as "nats" for cross-entropy; "" for none.
            None takes no unit for the minima of regressors, and nats for others.
        cmap : str, default="viridis"
            Color map for the column `color_by`, preferably with increasing lightness.
        **kwargs
            Passed on to `matplotlib.axes.Axes.scatter` for the converged minima.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        ValueError
            If a column is missing or not numeric, or no converged minimum has finite values.
        """
        require_matplotlib()
        colors = Colors(self.minima, self.color_by, cmap)
        unit = self.minima.attrs.get("loss_unit", "nats") if loss_unit is None else loss_unit
        self.axes_ = self._draw(ax, colors, unit, kwargs)
        draw_legend(self.axes_[-1], self.axes_)
        colors.draw_bar(self.axes_)
        return self

    @abstractmethod
    def _draw(
        self, ax: "Axes | None", colors: Colors, loss_unit: str, kwargs: dict[str, Any]
    ) -> "list[Axes]":
        """Draw all but the legend and the color bar, and return the panels."""


class EstimatorDisplay(Display):
    """Base class of displays of trained models."""

    def plot(self, ax: "Axes | None" = None, *, loss_unit: str = "nats", **kwargs: Any) -> Self:
        """Draw the display.

        Parameters
        ----------
        ax : matplotlib.axes.Axes or None, default=None
            The axes to draw in; a display with several panels divides their space. None makes
            a new figure.
        loss_unit : str, default="nats"
            Unit of the loss, for the axis labels: nats for cross-entropy; "" for none, which is
            the default of `from_estimator` for regressors.
        **kwargs
            Passed on to the method of `matplotlib.axes.Axes` that draws the values: `plot` in
            `FlatnessHistoryDisplay`, `errorbar` in the others.

        Returns
        -------
        Display
            The display itself.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        require_matplotlib()
        self.axes_ = self._draw(ax, loss_unit, kwargs)
        return self

    @abstractmethod
    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        """Draw into the axes, and return the panels."""

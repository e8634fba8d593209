"""Minima as points of a display: minima as dots, other candidates as crosses."""

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from relflat_sk.minima import is_complete, is_converged
from relflat_sk.plots._colors import Colors
from relflat_sk.plots._style import Floats, draw_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Points"]

HELD_OUT = {"test_loss", "generalization_gap", "test_score"}  # columns that need held-out data
MARGIN = 0.06  # of the axis, around the minima
DOT: dict[str, Any] = {"s": 42, "edgecolors": "black", "linewidths": 0.6}
CROSS: dict[str, Any] = {"marker": "x", "color": "0.35", "s": 42, "linewidths": 1.5}


class Points:
    """Minima as points in a plane. Shapes: `x, y` (n,)."""

    x_limits: tuple[float, float] | None = None

    def __init__(self, minima: pd.DataFrame, x: Floats, y: Floats) -> None:
        self.x, self.y = x, y
        finite = np.isfinite(x) & np.isfinite(y) & is_complete(minima)
        self.converged = finite & is_converged(minima)
        self.unconverged = finite & ~self.converged
        n_others = int((finite & _is_of_another_depth(minima)).sum())
        n_open = int(self.unconverged.sum()) - n_others
        counts = {"not converged": n_open, "at another depth": n_others}
        self.kinds = {name: n for name, n in counts.items() if n}
        self.n_not_drawn = int((~finite).sum())
        self.n_minima = int((is_complete(minima) & is_converged(minima)).sum())

    def require_minima(self, *columns: str) -> None:
        """Check that there is a minimum to draw."""
        if self.converged.any():
            return
        if self.n_minima:
            names = " and ".join(repr(name) for name in columns)
            advice = ""
            if HELD_OUT.intersection(columns):
                advice = " Held-out data are needed: fit(X, y, X_test, y_test)."
            raise ValueError(
                f"None of the {self.n_minima} minima has a finite {names}, so there is nothing to "
                f"draw.{advice}"
            )
        raise ValueError(
            f"None of the {len(self.x)} candidates is a minimum, so there is nothing to draw. The "
            "columns 'converged' and 'reason' of the table say why."
        )

    def y_limits(self) -> tuple[float, float]:
        """Return the limits of a linear y axis around the minima."""
        return _limits(self.y[self.converged], "linear")

    def draw(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw all points, with the numbers of the other candidates for the legend."""
        self.draw_minima(ax, colors, **kwargs)
        self.draw_crosses(ax, ", ".join(f"{name} ({n})" for name, n in self.kinds.items()))
        if self.n_not_drawn:
            ax.plot([], [], " ", label=f"failed or not finite, not drawn ({self.n_not_drawn})")

    def draw_minima(self, ax: "Axes", colors: Colors, **kwargs: Any) -> None:
        """Draw the minima, and set the limits of the axes around them."""
        draw_grid(ax)
        x, y = self.x[self.converged], self.y[self.converged]
        ax.scatter(x, y, **(DOT | colors.arguments(self.converged) | kwargs))
        ax.set(xlim=self.x_limits or _limits(x, ax.get_xscale()), ylim=_limits(y, ax.get_yscale()))

    def draw_crosses(self, ax: "Axes", label: str) -> None:
        """Draw the candidates that did not converge, at most as far out as the limits."""
        if self.unconverged.any():
            # a diverged run may lie anywhere; with it in view, the minima would fill a corner
            x = np.clip(self.x[self.unconverged], *ax.get_xlim())
            y = np.clip(self.y[self.unconverged], *ax.get_ylim())
            ax.scatter(x, y, **CROSS, clip_on=False, label=label)


def _is_of_another_depth(minima: pd.DataFrame) -> NDArray[np.bool_]:
    """Return which rows are minima of a depth that is not compared."""
    if "comparable" not in minima.columns:
        return np.zeros(len(minima), dtype=bool)
    return is_converged(minima.drop(columns="comparable")) & ~is_converged(minima)


def _limits(values: Floats, scale: str) -> tuple[float, float]:
    """Return axis limits around values on a linear or logarithmic axis."""
    to_axis, from_axis = (np.log10, lambda v: 10.0**v) if scale == "log" else (np.array, float)
    low, high = to_axis(values.min()), to_axis(values.max())
    margin = MARGIN * (high - low) or MARGIN * max(abs(high), 1.0)
    return float(from_axis(low - margin)), float(from_axis(high + margin))

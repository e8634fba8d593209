"""Styles that the displays share: curves, grids, scales, notes and legends."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relflat_sk.plots._panels import figure_of, has_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis

__all__ = [
    "Floats",
    "choose_scale",
    "curve_style",
    "draw_grid",
    "legend_below",
    "legend_right",
    "needs_log_scale",
    "write_note",
]

Floats = NDArray[np.float64]

LOG_RATIO = 10.0  # largest over smallest value
OUTSIDE: dict[str, Any] = {"frameon": False, "borderaxespad": 0.0}

# colors of Okabe and Ito, which also people who confuse red and green can tell apart
CURVES: list[dict[str, Any]] = [
    {"color": color, "marker": marker}
    for color, marker in zip(
        ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"],
        ["o", "s", "^", "D", "v", "P", "X"],
        strict=True,
    )
]
LINES = ["-", "--", ":", "-."]


def curve_style(number: int) -> dict[str, Any]:
    """Return the color, marker and line of one of several curves."""
    lines = number // len(CURVES) % len(LINES)
    return CURVES[number % len(CURVES)] | {"linestyle": LINES[lines]}


def draw_grid(ax: "Axes") -> None:
    """Draw a pale grid behind the data."""
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)


def write_note(ax: "Axes", text: str) -> None:
    """Write into empty axes why they are empty."""
    ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center", color="0.35")


def legend_below(ax: "Axes", others: "list[Axes] | None" = None) -> None:
    """Put a legend below the axes, or inside in a figure without a layout engine."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    labeled: dict[str, Any] = {}
    for each in [ax, *(others or [])]:
        handles, labels = each.get_legend_handles_labels()
        labeled |= dict(zip(labels, handles, strict=True))
    if not labeled:
        return
    place: dict[str, Any] = {}
    if has_layout(ax):
        # below the tick labels and the axis label, whatever the size of the figure
        below = ax.transAxes + ScaledTranslation(0, -40 / 72, figure_of(ax).dpi_scale_trans)
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": 2} | OUTSIDE
        place["bbox_transform"] = below
    ax.legend(list(labeled.values()), list(labeled), fontsize="small", **place)


def legend_right(ax: "Axes") -> None:
    """Put a legend to the right of the axes, or inside in a figure without a layout engine."""
    if ax.get_legend_handles_labels()[0]:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} | OUTSIDE
        ax.legend(fontsize="small", **(place if has_layout(ax) else {}))


def choose_scale(axis: "XAxis | YAxis", values: Floats) -> None:
    """Make an axis logarithmic if its values need it, with plain numbers of moderate size.

    Shapes: `values` (n,).
    """
    from relflat_sk.plots._log_labels import label_plainly  # noqa: PLC0415

    if needs_log_scale(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        label_plainly(axis)


def needs_log_scale(values: Floats) -> bool:
    """Return whether finite values are positive and span more than a decade.

    Shapes: `values` (n,).
    """
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > LOG_RATIO * finite.min())

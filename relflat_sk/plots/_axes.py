"""The figure, axes and panels that a display draws in, with their scales, styles and labels.

Matplotlib is optional, and imported where something is drawn.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relflat_sk.minima._columns import plain_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

MAX_COLUMNS = 4
PANEL_WIDTH = 3.3  # inches
LOG_RATIO = 10.0  # largest over smallest value
MAX_LETTERS = 44  # of a name on an axis

# colors of Okabe and Ito, which also people who confuse red and green can tell apart
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "--", ":", "-."]

# columns in the unit of the loss
IN_LOSS_UNITS = {
    "relative_flatness": "relative flatness κ",
    "normalized_relative_flatness": "normalized relative flatness κ",
    "trace_flatness": "trace flatness",
    "eigenvalue_flatness": "eigenvalue flatness",
    "network_flatness": "network flatness",
    "neuron_flatness_max": "neuron flatness, max",
    "neuron_flatness_sum": "neuron flatness, sum",
    "expected_sharpness": "expected sharpness",
    "fisher_rao_norm": "Fisher-Rao norm",
    "generalization_gap": "test loss − training loss",  # noqa: RUF001 (a minus sign)
    "test_loss": "test loss",
    "train_loss": "training loss",
    "valid_loss": "validation loss",
}
# columns with other units or none; the name of any other column becomes its label
WITHOUT_UNIT = {
    "test_score": "held-out score",
    "train_score": "training score",
    "random_labels": "share of random labels",
    "hessian_trace": "Hessian trace",
    "hessian_max_eigenvalue": "largest Hessian eigenvalue",
    "frobenius_product": "Frobenius product",
    "keskar_sharpness": "Keskar sharpness",
    "l1_path_norm": "L1 path norm",
    "l2_lipschitz_product": "L2 Lipschitz product",
    "l2_norm": "L2 norm",
    "l2_path_norm": "L2 path norm",
    "linf_lipschitz_product": "L∞ Lipschitz product",
    "log_robustness": "log of robustness K",
    "pac_bayes_flatness": "PAC-Bayes flatness",
    "pac_bayes_magnitude_flatness": "PAC-Bayes magnitude flatness",
}


# -- axes and panels ---------------------------------------------------------------------


def require_matplotlib() -> None:
    """Check that matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ImportError(
            "The displays of relflat_sk draw with matplotlib, which is not installed. "
            'Install it with: pip install "relflat_sk[plot]"'
        ) from error


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    """Return the axes to draw in."""
    require_matplotlib()
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def figure_of(ax: "Axes") -> "Figure":
    """Return the figure of some axes, also of axes in a subfigure."""
    # get_figure(root=True) does not exist in matplotlib 3.8
    return ax.figure.figure


def has_layout(ax: "Axes") -> bool:
    """Return whether the figure has a layout engine, which makes room around axes."""
    return figure_of(ax).get_layout_engine() is not None


def divide(
    ax: "Axes", n_rows: int, n_columns: int, n: int | None = None, **share: str
) -> "list[Axes]":
    """Divide the space of some axes into panels."""
    figure, spec = ax.figure, ax.get_subplotspec()
    if spec is None:
        box = ax.get_position()
        whole = figure.add_gridspec(1, 1, left=box.x0, right=box.x1, bottom=box.y0, top=box.y1)
        spec = whole[0]
    grid = spec.subgridspec(n_rows, n_columns, hspace=None if has_layout(ax) else 0.5)
    ax.set_subplotspec(grid[0, 0])
    shared = dict.fromkeys(share, ax)
    places = [divmod(number, n_columns) for number in range(1, n or n_rows * n_columns)]
    return [ax, *(figure.add_subplot(grid[place], **shared) for place in places)]


def make_panels(
    ax: "Axes | None", n: int, label: str, *, height: float = 2.8, margin: float = 0.6, **share: str
) -> "list[Axes]":
    """Make panels with a common y axis, labelled at the first panel of every row.

    `height` of a panel, and the `margin` for labels on the left, are in inches.
    """
    n_columns = -(-n // -(-n // (3 if n <= 9 else MAX_COLUMNS)))  # nearly fills the last row
    n_rows = -(-n // n_columns)
    ax = make_axes(ax, (n_columns * PANEL_WIDTH + margin, max(n_rows * height, 2.2)))
    panels = divide(ax, n_rows, n_columns, n, sharey="all", **share)
    for number, panel in enumerate(panels):
        is_first = number % n_columns == 0
        panel.tick_params(labelleft=is_first)
        panel.set_ylabel(label if is_first else "", fontsize="small")
    return panels


# -- scales and styles -------------------------------------------------------------------


def curve_style(number: int) -> dict[str, Any]:
    """Return the color, marker and line of one of several curves."""
    turn, place = divmod(number, len(COLORS))
    line = LINES[turn % len(LINES)]
    return {"color": COLORS[place], "marker": MARKERS[place], "linestyle": line}


def draw_grid(ax: "Axes") -> None:
    """Draw a pale grid behind the data."""
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)


def write_note(ax: "Axes", text: str) -> None:
    """Write into empty axes why they are empty."""
    ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center", color="0.35")


def draw_legend(ax: "Axes", others: "Sequence[Axes]" = (), *, on_the_right: bool = False) -> None:
    """Put a legend of all axes below or beside the first, or inside it without a layout engine."""
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    labeled: dict[str, Any] = {}
    for each in [ax, *others]:
        handles, labels = each.get_legend_handles_labels()
        labeled |= dict(zip(labels, handles, strict=True))
    # below the tick labels and the axis label, whatever the size of the figure
    below = ax.transAxes + ScaledTranslation(0, -40 / 72, figure_of(ax).dpi_scale_trans)
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": 2}
    place |= {"bbox_transform": below}
    if on_the_right:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)}
    place = place | {"frameon": False, "borderaxespad": 0.0} if has_layout(ax) else {}
    if labeled:
        ax.legend(list(labeled.values()), list(labeled), fontsize="small", **place)


def choose_scale(axis: "XAxis | YAxis", values: Floats) -> None:
    """Make an axis logarithmic if its values, (n,), need it, with plain numbers if they can be."""
    from relflat_sk.plots._log_labels import PlainLogFormatter  # noqa: PLC0415

    if needs_log_scale(values):
        axis.axes.set(**{f"{axis.axis_name}scale": "log"})
        axis.set_major_formatter(PlainLogFormatter())
        axis.set_minor_formatter(PlainLogFormatter())


def needs_log_scale(values: Floats) -> bool:
    """Return whether finite values, (n,), are positive and span more than a decade."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > LOG_RATIO * finite.min())


# -- labels ------------------------------------------------------------------------------


def label_of(name: str, loss_unit: str) -> str:
    """Return the axis label of a column, with its unit."""
    if name in IN_LOSS_UNITS:
        return f"{IN_LOSS_UNITS[name]} ({loss_unit})" if loss_unit else IN_LOSS_UNITS[name]
    parameter = plain_name(name).rpartition("__")[2]
    return WITHOUT_UNIT.get(parameter, parameter.replace("_", " "))


def shorten(name: str) -> str:
    """Return a name that fits beside an axis."""
    half = (MAX_LETTERS - 1) // 2
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"

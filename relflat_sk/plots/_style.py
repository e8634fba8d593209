"""What the displays share: places to draw, scales, legends, labels with units.

Matplotlib is imported when something is drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relflat_sk._minima_table import plain_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "Floats",
    "draw_panels",
    "figure_of",
    "is_wide",
    "label_of",
    "legend_below",
    "legend_right",
    "make_axes",
    "name_rows",
    "panels",
    "prepare",
    "say",
    "shorten",
    "spread",
    "style_of",
]

Floats = NDArray[np.float64]

# what is in the unit of the loss, and how it is called; other names are read as words
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
WORDS = {
    "test_score": "held-out score",
    "train_score": "training score",
    "random_labels": "share of random labels",
    "hessian_trace": "Hessian trace",
    "hessian_max_eigenvalue": "largest Hessian eigenvalue",
    "frobenius_product": "Frobenius product",
    "keskar_sharpness": "Keskar sharpness",
    "l1_path_norm": "L1 path norm",
    "l2_norm": "L2 norm",
    "l2_path_norm": "L2 path norm",
    "pac_bayes_flatness": "PAC-Bayes flatness",
    "pac_bayes_magnitude_flatness": "PAC-Bayes magnitude flatness",
}

MOST_COLUMNS = 4  # of panels, beside each other
PANEL = (3.3, 2.8)  # inches
NARROWEST = 2.6  # inches, of a panel whose labels can be read
LOWEST = 1.5  # inches, of a panel beside which a label has room
WIDE = 10.0  # a ratio of largest to smallest that asks for a logarithmic axis
LONGEST = 44  # characters of a name on an axis
OFF: dict[str, Any] = {"frameon": False, "borderaxespad": 0.0}  # of a legend off the data

# colors of Okabe and Ito that those who confuse red and green tell apart, and shapes for all
_CURVES: list[dict[str, Any]] = [
    {"color": color, "marker": marker}
    for color, marker in zip(
        ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"],
        ["o", "s", "^", "D", "v", "P", "X"],
        strict=True,
    )
]


def style_of(at: int) -> dict[str, Any]:
    """Return color, marker and line of one of several curves; beyond 7, lines differ too."""
    lines = ["-", "--", ":", "-."]
    return _CURVES[at % len(_CURVES)] | {"linestyle": lines[at // len(_CURVES) % len(lines)]}


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    """Return the axes to draw into, on a new figure of some size (inches) if there are none."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(
            "The displays of relflat_sk draw with matplotlib, which is not installed. "
            'Install it with: pip install "relflat_sk[plot]"'
        ) from error
    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def figure_of(ax: "Axes") -> "Figure":
    """Return the figure that holds the axes, itself not part of another one."""
    # of a subfigure too: get_figure(root=True) is younger than matplotlib 3.8
    return ax.figure.figure


def prepare(ax: "Axes") -> None:
    """Draw a pale grid behind what is to come."""
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)


def panels(
    ax: "Axes", n_rows: int, n_columns: int, n: int | None = None, **share: str
) -> "list[Axes]":
    """Divide the place of the axes into panels, row by row, the axes being the first.

    Parameters
    ----------
    ax : Axes
    n_rows, n_columns : int
        Panels below and beside each other.
    n : int or None, default=None
        How many of them there are, if not all.
    **share
        `sharex` or `sharey`: "all" to share the axis with the first panel.

    Returns
    -------
    list of Axes
        The panels.
    """
    figure, spec = ax.figure, ax.get_subplotspec()
    if spec is None:
        box = ax.get_position()
        whole = figure.add_gridspec(1, 1, left=box.x0, right=box.x1, bottom=box.y0, top=box.y1)
        spec = whole[0]
    gap = None if _makes_room(ax) else 0.5
    grid = spec.subgridspec(n_rows, n_columns, hspace=gap)
    ax.set_subplotspec(grid[0, 0])
    shared = dict.fromkeys(share, ax)
    count = n_rows * n_columns if n is None else n
    places = [divmod(at, n_columns) for at in range(1, count)]
    return [ax, *(figure.add_subplot(grid[place], **shared) for place in places)]


def spread(n: int, ax: "Axes | None" = None) -> tuple[int, int]:
    """Return the numbers of rows and columns for n panels, on the axes if there are some."""
    n_columns = -(-n // -(-n // (3 if n <= 9 else MOST_COLUMNS)))  # the last row nearly full
    if ax is not None:
        room = ax.bbox.width / figure_of(ax).dpi
        n_columns = max(1, min(n_columns, int(room / NARROWEST)))
    return -(-n // n_columns), n_columns


def draw_panels(ax: "Axes | None", n: int, **share: str) -> "tuple[list[Axes], int]":
    """Make n panels of equal height of scale, and say how many stand beside each other."""
    n_rows, n_columns = spread(n, ax)
    size = (n_columns * PANEL[0] + 0.6, n_rows * PANEL[1])
    return panels(make_axes(ax, size), n_rows, n_columns, n, sharey="all", **share), n_columns


def name_rows(axes: "list[Axes]", n_columns: int, label: str) -> None:
    """Name the y axis, which all panels share, at every row, or only the middle if they are low."""
    firsts = axes[::n_columns]
    for panel in axes:
        panel.tick_params(labelleft=panel in firsts)
    room = axes[0].bbox.height / figure_of(axes[0]).dpi
    for panel in firsts if room > LOWEST else firsts[len(firsts) // 2 :][:1]:
        panel.set_ylabel(label, fontsize="small")


def say(ax: "Axes", text: str) -> None:
    """Write into empty axes why they are empty."""
    ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center", color="0.35")


def legend_below(ax: "Axes", others: "list[Axes] | None" = None) -> None:
    """Put a legend of what has a name here (and elsewhere) below the axes, off the data.

    In a figure without a layout engine there is no room below, and it goes inside.
    """
    from matplotlib.transforms import ScaledTranslation  # noqa: PLC0415

    named: dict[str, Any] = {}
    for each in [ax, *(others or [])]:
        handles, labels = each.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    if not named:
        return
    # below the tick labels and the name of the axis, whatever the size of the figure
    lower = ScaledTranslation(0, -40 / 72, figure_of(ax).dpi_scale_trans)
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "ncols": 2}
    place |= {"bbox_transform": ax.transAxes + lower} | OFF
    ax.legend(
        list(named.values()), list(named), fontsize="small", **(place if _makes_room(ax) else {})
    )


def legend_right(ax: "Axes") -> None:
    """Put a legend to the right of the axes, off the data; inside where there is no room."""
    if ax.get_legend_handles_labels()[0]:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} | OFF
        ax.legend(fontsize="small", **(place if _makes_room(ax) else {}))


def _makes_room(ax: "Axes") -> bool:
    """Return whether the figure is laid out so that what stands around axes has room."""
    return figure_of(ax).get_layout_engine() is not None


def is_wide(values: Floats) -> bool:
    """Return whether finite values are positive and span more than a decade."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > WIDE * finite.min())


def label_of(name: str, loss_unit: str) -> str:
    """Return how a column is called on an axis, with its unit."""
    if name in IN_LOSS_UNITS:
        return f"{IN_LOSS_UNITS[name]} ({loss_unit})" if loss_unit else IN_LOSS_UNITS[name]
    plain = plain_name(name).rpartition("__")[2]
    return WORDS.get(plain, plain.replace("_", " "))


def shorten(name: str) -> str:
    """Return a name that fits beside an axis: of a long one, both ends."""
    half = (LONGEST - 1) // 2
    return name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}"

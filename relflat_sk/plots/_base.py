"""What displays share: axes and panels, scales and labels, and what `plot` takes and draws.

Matplotlib is optional, and imported where something is drawn.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import is_regressor

from relflat_sk.minima._table import plain_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

MAX_COLUMNS = 4
PANEL_WIDTH = 3.3  # inches
LOG_RATIO = 10.0  # largest over smallest value
LABELLED_DECADES = 2.5  # with more of them, only powers of ten have labels
MAX_LETTERS = 44  # of a name on an axis

# colors of Okabe and Ito, which also people who confuse red and green can tell apart
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LINES = ["-", "--", ":", "-."]

# places of a legend; it is 4.8 letters away from the axes, below tick labels and axis label
BELOW = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.8, "ncols": 2}
ON_THE_RIGHT = {"loc": "upper left", "bbox_to_anchor": (1.01, 1.0), "borderaxespad": 0.0}

# columns in the unit of the loss; others have another unit, or none
IN_LOSS_UNITS = {
    "relative_flatness", "normalized_relative_flatness", "trace_flatness", "eigenvalue_flatness",
    "network_flatness", "neuron_flatness_max", "neuron_flatness_sum", "expected_sharpness",
    "fisher_rao_norm", "generalization_gap", "test_loss", "train_loss", "valid_loss",
}  # fmt: skip
# labels of columns whose label is not their name
LABELS = {
    "relative_flatness": "relative flatness κ",
    "normalized_relative_flatness": "normalized relative flatness κ",
    "neuron_flatness_max": "neuron flatness, max",
    "neuron_flatness_sum": "neuron flatness, sum",
    "fisher_rao_norm": "Fisher-Rao norm",
    "generalization_gap": "test loss − training loss",  # noqa: RUF001 (a minus sign)
    "train_loss": "training loss",
    "valid_loss": "validation loss",
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
            'Install it with: pip install "relflat_sk[plot]", or in a copy of the repository: '
            'pip install ".[plot]"'
        ) from error


def make_axes(ax: "Axes | None", size: tuple[float, float] | None = None) -> "Axes":
    require_matplotlib()
    from matplotlib import pyplot  # noqa: PLC0415

    return pyplot.subplots(layout="constrained", figsize=size)[1] if ax is None else ax


def has_layout(ax: "Axes") -> bool:
    """Return whether the figure has a layout engine, which makes room around axes."""
    return ax.figure.figure.get_layout_engine() is not None


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
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)


def write_note(ax: "Axes", text: str) -> None:
    """Write into empty axes why they are empty."""
    ax.text(0.5, 0.75, text, transform=ax.transAxes, ha="center", va="center", color="0.35")


def draw_legend(panels: "Sequence[Axes]", place: Mapping[str, Any]) -> None:
    """Put a legend of all panels beside the last, or inside it without a layout engine."""
    handles_by_label: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        handles_by_label |= dict(zip(labels, handles, strict=True))
    if handles_by_label:
        style = {"frameon": False, **place} if has_layout(panels[-1]) else {}
        handles, labels = list(handles_by_label.values()), list(handles_by_label)
        panels[-1].legend(handles, labels, fontsize="small", **style)


def choose_scale(axis: "XAxis | YAxis", values: Floats) -> None:
    """Make an axis logarithmic with plain numbers if its values, (n,), need it."""
    if not needs_log_scale(values):
        return
    from matplotlib.ticker import LogLocator  # noqa: PLC0415

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_formatter("{x:g}")
    finite = values[np.isfinite(values)]
    if log10(finite.max()) - log10(finite.min()) < LABELLED_DECADES:
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_minor_formatter("{x:g}")
        # as far from the axis as labels behind the longer ticks of powers of ten
        axis.set_tick_params(which="minor", pad=5)


def needs_log_scale(values: Floats) -> bool:
    """Return whether finite values, (n,), are positive and span more than a decade."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() > LOG_RATIO * finite.min())


# -- labels ------------------------------------------------------------------------------


def label_of(name: str, loss_unit: str) -> str:
    """Return the axis label of a column, with its unit."""
    # the names of measures are those of no parameter
    parameter = name if name in IN_LOSS_UNITS else plain_name(name).rpartition("__")[2]
    label = LABELS.get(parameter, parameter.replace("_", " "))
    return f"{label} ({loss_unit})" if loss_unit and name in IN_LOSS_UNITS else label


def measure_label(name: str, loss_unit: str) -> str:
    """Return the axis label of a measure, with its unit, and which values of flatness are flat."""
    label = label_of(name, loss_unit)
    if "flatness" not in name:
        return label
    return f"{label[:-1]}, small is flat)" if label.endswith(")") else f"{label} (small is flat)"


def shorten(name: str) -> str:
    """Return a name that fits beside an axis."""
    half = (MAX_LETTERS - 1) // 2
    return name if len(name) <= MAX_LETTERS else f"{name[:half]}…{name[-half:]}"


# -- displays ----------------------------------------------------------------------------


def with_unit(arguments: Mapping[str, Any], estimators: Iterable[Any]) -> dict[str, Any]:
    """Leave the unit of the loss out of the labels if a regressor is shown."""
    has_none = any(hasattr(model, "fit") and is_regressor(model) for model in estimators)
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
        return self.ax_.figure.figure  # get_figure(root=True) does not exist in matplotlib 3.8


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
        self.axes_ = self._draw(ax, loss_unit, kwargs)
        return self

    @abstractmethod
    def _draw(self, ax: "Axes | None", loss_unit: str, kwargs: dict[str, Any]) -> "list[Axes]":
        """Draw into the axes, and return the panels."""
